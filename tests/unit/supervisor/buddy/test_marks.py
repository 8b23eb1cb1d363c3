"""Copies of end marks in another host's memory: hosts are directories here, the connections are real."""

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from open_files import open_below
from test_buddy import IDENTITY, HostHere, Make, begin, make, of
from waiting import wait_for

from checkpoints import manifest_of
from rollback.checkpoints.fast_tier import buddy_copies, end_marks, last_locks, last_snapshot_result, mark_copies, slots
from rollback.checkpoints.fast_tier.end_marks import EndMark, EndMarkPaths, Hold, StepEnd
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.fast_tier.mark_copies import CopiedMarks, LiveMarkCopies, MarkPiece, NewsOfMarks
from rollback.rundir import seal
from rollback.rundir.paths import shard_name
from rollback.supervisor.buddy import sender, server, wire
from rollback.supervisor.buddy.sender import BuddySender
from rollback.supervisor.buddy.wire import BuddyRequest, MarksHere, connect

__all__ = ["make"]
HOLD = Hold(1, 2, 3, 4)


def end(step: int, attempt: int = 1) -> StepEnd:
    return StepEnd(attempt, 0, step, step, 0, 0)


class Ranks:
    """What the ranks of a host leave there in an attempt."""

    def __init__(self, host: HostHere, *ranks: int, hosts: str = '{"keys": "first"}') -> None:
        self.paths = end_marks.marks_of(host.tier)
        end_marks.prepare(self.paths)
        self.marks = {rank: EndMark(self.paths, rank) for rank in ranks}
        self.paths.hosts.write_text(hosts)

    def end(self, step: int, body: bytes = b"body", stays: bytes = b"") -> None:
        for mark in self.marks.values():
            mark.write(end(step), body, stays)


def copied(host: HostHere, seat: int = 0) -> CopiedMarks:
    return CopiedMarks(host.tier, seat)


def ends(host: HostHere, rank: int, seat: int = 0) -> list[int]:
    return sorted(each.step for each in end_marks.read_ends(copied(host, seat).marks, rank))


@pytest.fixture
def both(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[HostHere, HostHere]:
    for name in ("_BEGIN", "_MARKS_AGAIN"):
        monkeypatch.setattr(sender, name, 0.02)
    return make("first", 0), make("second", 1)


# What arrives ------------------------------------------------------------------------------------------------------


def test_marks_are_on_another_host_as_they_are_on_their_own(both: tuple[HostHere, HostHere]) -> None:
    first, second = both
    ranks = Ranks(first, 4, 5)
    ranks.end(1)
    begin(first, second)
    wait_for(lambda: ends(second, 5) == [1])
    assert copied(second).marks.hosts.read_text() == '{"keys": "first"}'
    for step in (2, 3):
        ranks.end(step, f"of {step}".encode(), b"stays")
    ranks.marks[5].write_early(end(4), b"early", HOLD)
    wait_for(lambda: end(4) in end_marks.read_early(copied(second).marks, 5))
    own, there = ranks.paths, copied(second).marks
    for rank in (4, 5):
        assert end_marks.read_ends(there, rank) == end_marks.read_ends(own, rank)
        assert end_marks.read_early(there, rank) == end_marks.read_early(own, rank)
    assert end_marks.read_ends(there, 4)[end(3)] == b"of 3stays"
    assert not end_marks.has_left(there, 4)
    ranks.marks[4].leave()
    ranks.marks[5].tell_stopped("a reason")
    wait_for(lambda: end_marks.has_left(there, 4) and end_marks.read_stopped(there, 5) == "a reason")


def test_a_host_is_heard_until_its_attempt_is_over_and_its_clock_is_known(both: tuple[HostHere, HostHere]) -> None:
    first, second = both
    assert not copied(second).is_live()
    before = time.monotonic_ns()
    Ranks(first, 0).end(1)
    begin(first, second)
    wait_for(lambda: ends(second, 0) == [1])
    assert copied(second).is_live()
    first.buddy.rest()
    wait_for(lambda: not copied(second).is_live())
    alive = copied(second).last_alive()
    assert before < alive < time.monotonic_ns()
    assert copied(second).last_alive() == alive, "no longer than it was heard"
    assert ends(second, 0) == [1]


def test_a_host_that_only_says_that_it_lives_is_heard(
    both: tuple[HostHere, HostHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both
    monkeypatch.setattr(sender, "MARKS_EVERY", 0.01)
    Ranks(first, 0).end(1)
    begin(first, second)
    wait_for(lambda: ends(second, 0) == [1])
    word = (copied(second).marks.root / "fed").read_bytes()
    wait_for(lambda: (copied(second).marks.root / "fed").read_bytes() != word)


def test_a_host_that_is_silent_counts_as_gone_though_its_connection_stays(
    both: tuple[HostHere, HostHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = both
    monkeypatch.setattr(server, "MARKS_SILENCE", 0.1)
    second.buddy.get_ready(of(*both))
    with connect(second.buddy.address, of(*both).secret, lambda: False) as connection:
        connection.say(BuddyRequest(run=IDENTITY.run_id, seat=0, marks=MarksHere(ranks=(0,), hosts="{}")))
        connection.answer()
        connection.send_mark(MarkPiece(0, 0, b""))
        wait_for(lambda: not copied(second).is_live())


def test_a_new_attempt_s_marks_take_the_place_of_those_before(both: tuple[HostHere, HostHere]) -> None:
    first, second = both
    Ranks(first, 0, 1).end(7)
    begin(first, second)
    wait_for(lambda: ends(second, 1) == [7])
    again = Ranks(first, 0, hosts='{"keys": "second"}')
    again.end(2)
    wait_for(lambda: ends(second, 0) == [2])
    assert copied(second).marks.hosts.read_text() == '{"keys": "second"}'
    assert not copied(second).marks.mark(1).exists(), "that rank is on another host now"


def test_an_early_mark_that_is_withdrawn_does_not_hold_in_its_copy_either(both: tuple[HostHere, HostHere]) -> None:
    first, second = both
    ranks = Ranks(first, 0)
    ranks.marks[0].write_early(end(4), b"early", HOLD)
    begin(first, second)
    wait_for(lambda: end_marks.read_early(copied(second).marks, 0))
    ranks.marks[0].withdraw()
    wait_for(lambda: not end_marks.read_early(copied(second).marks, 0))


def test_a_connection_that_is_made_anew_leaves_what_was_told(both: tuple[HostHere, HostHere]) -> None:
    first, second = both
    Ranks(first, 0).end(1)
    begin(first, second)
    wait_for(lambda: ends(second, 0) == [1])
    first.buddy.rest()
    wait_for(lambda: not copied(second).is_live())
    LiveMarkCopies(second.tier, 0, [0], b'{"keys": "first"}').close()
    assert ends(second, 0) == [1]
    assert copied(second).last_alive() > 1 << 61, "not heard yet: nothing that was told early holds"
    LiveMarkCopies(second.tier, 0, [0], b"{}").close()
    assert ends(second, 0) == [], "of another attempt"


def test_marks_of_a_seat_that_is_no_neighbour_any_more_are_given_up(both: tuple[HostHere, HostHere]) -> None:
    _, second = both
    for seat in (3, 4):
        with_seat = LiveMarkCopies(second.tier, seat, [8], b"{}")
        with_seat.close()
    assert [each.slots.root.name for each in mark_copies.all_copied(second.tier)] == ["marks-00004"]


def test_while_somebody_speaks_by_the_copies_none_arrive(both: tuple[HostHere, HostHere]) -> None:
    first, second = both
    Ranks(first, 0).end(1)
    begin(first, second)
    wait_for(lambda: ends(second, 0) == [1])
    first.buddy.rest()
    wait_for(lambda: not copied(second).is_live())
    with last_locks.alone(copied(second).marks, time.monotonic()):
        Ranks(first, 0, hosts="{}").end(9)
        with pytest.raises(TimeoutError):
            LiveMarkCopies(second.tier, 0, [0], b"{}")
        assert ends(second, 0) == [1]
    begin(first, second)
    wait_for(lambda: ends(second, 0) == [9])


def test_one_connection_at_a_time_tells_of_a_seat(both: tuple[HostHere, HostHere]) -> None:
    fed = LiveMarkCopies(both[1].tier, 0, [0], b"{}")
    with pytest.raises(BlockingIOError):
        LiveMarkCopies(both[1].tier, 0, [0], b"{}")
    fed.close()
    LiveMarkCopies(both[1].tier, 0, [0], b"{}").close()


@pytest.mark.parametrize(
    "piece",
    [MarkPiece(1, 4096, b"x"), MarkPiece(0, end_marks.SIZE - 1, b"xx")],
    ids=["of a rank that is not there", "behind the end"],
)
def test_what_is_no_part_of_a_mark_is_refused(both: tuple[HostHere, HostHere], piece: MarkPiece) -> None:
    _, second = both
    second.buddy.get_ready(of(*both))
    with connect(second.buddy.address, of(*both).secret, lambda: False) as connection:
        connection.say(BuddyRequest(run=IDENTITY.run_id, seat=0, marks=MarksHere(ranks=(0,), hosts="{}")))
        connection.answer()
        connection.send_mark(piece)
        assert "no part of a mark" in str(connection.hear(wire.Answer).fault)
    wait_for(lambda: not copied(second).is_live())
    assert copied(second).marks.mark(0).stat().st_size == end_marks.SIZE
    assert not copied(second).marks.mark(1).exists()


def test_nobody_without_the_secret_tells_marks(both: tuple[HostHere, HostHere]) -> None:
    _, second = both
    second.buddy.get_ready(of(*both))
    with connect(second.buddy.address, secrets.token_hex(), lambda: False) as connection:
        connection.say(BuddyRequest(run=IDENTITY.run_id, seat=0, marks=MarksHere(ranks=(0,), hosts="{}")))
        with pytest.raises(OSError, match=r".*"):
            connection.answer()
    assert not copied(second).slots.root.exists()


def test_a_buddy_that_cannot_be_told_is_named_once(
    both: tuple[HostHere, HostHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both
    failing = threading.Event()

    def refuse(*given: object) -> None:
        failing.set()
        raise OSError("no room for it")

    monkeypatch.setattr(server, "LiveMarkCopies", refuse)
    Ranks(first, 0).end(1)
    begin(first, second)
    wait_for(lambda: first.said)
    assert failing.is_set()
    assert first.said == ["the end marks of this host are in no other host's memory: telling 127.0.0.1: no room for it"]


# What is told ------------------------------------------------------------------------------------------------------


def news(paths: EndMarkPaths, *ranks: int) -> NewsOfMarks:
    return NewsOfMarks(paths, ranks)


def told(pieces: Sequence[MarkPiece]) -> list[tuple[int, int]]:
    return [(piece.rank, piece.offset) for piece in pieces]


def test_only_what_is_new_and_whole_is_told(both: tuple[HostHere, HostHere]) -> None:
    ranks = Ranks(both[0], 0, 1)
    with closing(news(ranks.paths, 0, 1)) as look:
        assert look.new() == []
        ranks.marks[1].write(end(1), b"body")
        (piece,) = look.new()
        assert piece.rank == 1
        assert look.new() == []
        ranks.marks[1].write(end(2), b"body")
        (other,) = look.new()
        assert other.offset != piece.offset
        half = ranks.paths.mark(1)
        with half.open("r+b") as file:
            file.seek(piece.offset)
            file.write(os.urandom(8))
        assert look.new() == [], "half written"
        ranks.marks[1].write_early(end(4), b"early", HOLD)
        (early,) = look.new()
        ranks.marks[1].withdraw()
        (taken_back,) = look.new()
        assert taken_back == MarkPiece(1, early.offset, bytes(8))
        assert look.new() == []
        ranks.marks[1].write(end(3), b"body")
        assert told(look.new()) == [(1, piece.offset)]


def test_ranks_without_a_mark_are_an_error_and_leave_nothing_open(both: tuple[HostHere, HostHere]) -> None:
    ranks = Ranks(both[0], 0)
    before = open_below(ranks.paths.root)
    with pytest.raises(FileNotFoundError):
        news(ranks.paths, 0, 1)
    ranks.paths.mark(1).write_bytes(b"short")
    with pytest.raises(ValueError, match="mmap"):
        news(ranks.paths, 0, 1)
    assert open_below(ranks.paths.root) == before


# The part of a last snapshot ---------------------------------------------------------------------------------------


def keep_part(host: HostHere, seq: int, number: int = 90) -> None:
    """Somebody has spoken for seat 0 there, and its part of a last snapshot was kept."""
    there = copied(host).slots
    there.root.mkdir(0o700, exist_ok=True)
    _Part(there).save(number, seq)


class _Part(HostHere):
    def __init__(self, tier: slots.SlotPaths) -> None:
        self.seat, self._tier = 0, tier

    @property
    def tier(self) -> slots.SlotPaths:
        return self._tier


def test_the_part_of_a_lost_host_that_was_made_here_is_brought_back(make: Make) -> None:
    second = make("second", 1)
    keep_part(second, 3)
    spare = make("spare", 0, attached=False)
    brought, _ = begin(spare, second)
    assert brought is not None, spare.said
    assert brought.checkpoint == manifest_of(3, 3).name
    assert spare.slots == [(90, 3)]
    assert (spare.tier.slot(90) / shard_name(0)).exists()


def test_a_newer_copy_takes_its_place(both: tuple[HostHere, HostHere]) -> None:
    first, second = both
    keep_part(second, 3)
    assert second.has_copy_of(0) == 3
    begin(first, second)
    first.save(1, 4)
    wait_for(lambda: second.has_copy_of(0) == 4)
    wait_for(lambda: not copied(second).slots.numbers())


def test_a_part_that_was_not_committed_is_no_copy(make: Make) -> None:
    second = make("second", 1)
    keep_part(second, 3)
    assert slots.uncommit(copied(second).slots, 90)
    assert buddy_copies.copies_of(second.tier, 0) == []


@pytest.mark.parametrize("how", [slots.remove_copies, slots.remove], ids=["the copies", "the tier"])
def test_copies_of_marks_go_with_the_others(both: tuple[HostHere, HostHere], how: object) -> None:
    first, second = both
    Ranks(first, 0).end(1)
    begin(first, second)
    wait_for(lambda: ends(second, 0) == [1])
    last_snapshot_result.write_result(
        copied(second).marks, LastSnapshotResult(attempt=1, rank=0, reason="a rank is gone")
    )
    keep_part(second, 3)
    first.buddy.rest()
    second.buddy.rest()
    assert callable(how)
    how(second.tier)
    assert not list(second.tier.root.glob("marks-*"))
    assert second.tier.root.exists() == (how is slots.remove_copies)


def test_a_lock_of_a_process_that_is_gone_is_no_sign_of_life(both: tuple[HostHere, HostHere]) -> None:
    _, second = both
    LiveMarkCopies(second.tier, 0, [0], b"{}").close()
    path = Path(copied(second).marks.root / "fed")
    if (pid := os.fork()) == 0:
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
        os._exit(0)
    os.waitpid(pid, 0)
    assert not copied(second).is_live()


def test_a_run_with_a_seal_sends_no_marks_and_takes_none(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    monkeypatch.setenv(seal.ENV_SEAL, str(key))
    both = first, second = make("first", 0), make("second", 1)
    begin(first, second)
    assert [type(one) for one in first.buddy._senders] == [BuddySender]
    with connect(second.buddy.address, of(*both).secret, lambda: False) as connection:
        connection.say(BuddyRequest(run=IDENTITY.run_id, seat=0, marks=MarksHere(ranks=(0,), hosts="{}")))
        assert "no seal" in str(connection.hear(wire.Answer).fault)
    assert not copied(second).slots.root.exists()


def test_a_buddy_without_memory_is_named_and_what_it_has_stays(
    both: tuple[HostHere, HostHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = both
    Ranks(first, 0).end(1)
    begin(first, second)
    wait_for(lambda: ends(second, 0) == [1])
    first.buddy.rest()

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mark_copies.os, "posix_fallocate", full)
    begin(first, second)
    wait_for(lambda: first.said)
    assert "No space left on device" in first.said[-1]
    assert ends(second, 0) == [1]
