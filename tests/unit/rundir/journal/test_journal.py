"""Journals: what a crash tears is dropped, what is damaged otherwise is refused, nothing written is lost."""

import errno
import hashlib
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollback.errors import JournalDamaged, RunDirectoryError
from rollback.facts.training import Fact, Finished, PassedOver, Trouble
from rollback.rundir import seal
from rollback.rundir.journal import journal as journal_module
from rollback.rundir.journal.journal import (
    GENESIS,
    Damage,
    Journal,
    JournalTail,
    examine_journal,
    journal_line,
    last_fact,
    of_kind,
    read_journal,
    require_sealed,
)
from rollback.system import durable

FACTS: list[Fact] = [
    PassedOver(first=4, last=9, step=2, timeline=1),
    Trouble(doing='a "quoted" thing\nin two lines', error="text beyond ASCII: ü 火 \u202e"),
    PassedOver(first=30, last=31, step=10, timeline=1),
    Finished(step=50, batch=100),
]


def write(path: Path, facts: list[Fact], attempt: int = 1) -> None:
    journal = Journal(path, attempt)
    for fact in facts:
        journal.append(fact)
    journal.close()


def facts_of(path: Path) -> list[Fact]:
    return [record.fact for record in read_journal(path).records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "train.jsonl"


@pytest.fixture
def written(path: Path) -> bytes:
    write(path, FACTS)
    return path.read_bytes()


def test_what_was_appended_is_read(path: Path, written: bytes) -> None:
    reading = read_journal(path)
    assert [record.fact for record in reading.records] == FACTS
    assert [record.seq for record in reading.records] == [0, 1, 2, 3]
    assert (reading.sound_bytes, reading.torn_bytes) == (len(written), 0)


def test_an_absent_journal_is_an_empty_one(path: Path) -> None:
    reading = read_journal(path)
    assert (reading.records, reading.sound_bytes, reading.torn_bytes) == ([], 0, 0)


def test_facts_of_one_kind_are_found_in_order_with_their_lines(path: Path, written: bytes) -> None:
    records = read_journal(path).records
    assert of_kind(records, PassedOver) == [(records[0], FACTS[0]), (records[2], FACTS[2])]
    assert last_fact(records, PassedOver) == FACTS[2]
    assert last_fact(records, Finished) == FACTS[3]
    assert last_fact(records[:3], Finished) is None


def test_a_later_attempt_goes_on_with_the_sequence_and_the_chain(path: Path, written: bytes) -> None:
    write(path, FACTS, attempt=2)
    records = read_journal(path).records
    assert [record.seq for record in records] == list(range(8))
    assert [record.attempt for record in records] == [1] * 4 + [2] * 4
    assert path.read_bytes().startswith(written)


def test_every_byte_prefix_reads_as_its_whole_lines(path: Path, written: bytes) -> None:
    for length in range(len(written) + 1):
        path.write_bytes(written[:length])
        reading = read_journal(path)
        whole = written[:length].count(b"\n")
        assert [record.fact for record in reading.records] == FACTS[:whole]
        assert reading.sound_bytes + reading.torn_bytes == length
        assert (reading.torn_bytes == 0) == (length == 0 or written[length - 1 : length] == b"\n")


def test_a_writer_cuts_off_the_torn_tail_and_goes_on(path: Path, written: bytes) -> None:
    end_of_line_3 = len(b"\n".join(written.split(b"\n")[:3])) + 1
    for length in [end_of_line_3 + 1, end_of_line_3 + 40, len(written) - 1]:
        path.write_bytes(written[:length])
        journal = Journal(path, 2)
        assert path.stat().st_size == end_of_line_3
        journal.append(FACTS[0])
        journal.close()
        assert facts_of(path) == [*FACTS[:3], FACTS[0]]
        assert read_journal(path).torn_bytes == 0


def test_a_last_line_of_garbage_is_torn_too(path: Path, written: bytes) -> None:
    path.write_bytes(written + b"\0\0\0\0\n")
    assert facts_of(path) == FACTS
    assert read_journal(path).torn_bytes == 5


def test_every_flipped_bit_before_the_last_line_is_damage(path: Path, written: bytes) -> None:
    # The line end before the last line is left out: without it the two are one last line, and that is taken for torn.
    last_line_end = written[:-1].rindex(b"\n")
    for position in range(last_line_end):
        for bit in (0, position % 7 + 1):
            damaged = bytearray(written)
            damaged[position] ^= 1 << bit
            if same_json(bytes(damaged), written):
                continue
            path.write_bytes(damaged)
            with pytest.raises(JournalDamaged, match=r"train\.jsonl: line \d"):
                read_journal(path)


def same_json(one: bytes, other: bytes) -> bool:
    """Whether two texts differ in spelling only, as `\\u00fc` and `\\u00FC` do."""
    try:
        return [json.loads(line) for line in one.splitlines()] == [json.loads(line) for line in other.splitlines()]
    except ValueError:
        return False


def swap(lines: list[bytes]) -> list[bytes]:
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda lines: lines[1:], id="first line gone"),
        pytest.param(lambda lines: [lines[0], *lines[2:]], id="a line gone"),
        pytest.param(lambda lines: [lines[0], *lines], id="a line twice"),
        pytest.param(swap, id="two lines swapped"),
        pytest.param(lambda lines: [lines[0], b"", *lines[1:]], id="an empty line"),
        pytest.param(lambda lines: [b"", *lines], id="an empty line at the beginning"),
        pytest.param(lambda lines: [lines[0], b"7", *lines[1:]], id="a number"),
        pytest.param(lambda lines: [lines[0], b"[]", *lines[1:]], id="a list"),
        pytest.param(lambda lines: [lines[0], b"[" * 100_000, *lines[1:]], id="nested too deep"),
        pytest.param(lambda lines: [lines[0], b"7" * 10_000, *lines[1:]], id="a number of 10,000 digits"),
    ],
)
def test_lines_that_were_tampered_with_are_damage(path: Path, written: bytes, edit: Any) -> None:
    path.write_bytes(b"\n".join(edit(written.splitlines())) + b"\n")
    with pytest.raises(JournalDamaged):
        read_journal(path)
    before = path.read_bytes()
    with pytest.raises(JournalDamaged):
        Journal(path, 2)
    assert path.read_bytes() == before


def test_a_disk_that_fills_up_at_any_byte_loses_no_fact_and_leaves_no_torn_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, FACTS[:1])
    sound = path.read_bytes()
    really_write = os.write
    for room in [0, 1, 17, 100, 150]:
        path.write_bytes(sound)
        left = room

        def write_while_there_is_room(fd: int, data: Any) -> int:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = really_write(fd, data[:left])
            left -= count
            return count

        journal = Journal(path, 1)
        monkeypatch.setattr(durable.os, "write", write_while_there_is_room)
        for fact in FACTS[1:3]:
            with pytest.raises(OSError, match="No space"):
                journal.append(fact)
        assert path.read_bytes() == sound
        monkeypatch.setattr(durable.os, "write", really_write)
        journal.append(FACTS[3])
        journal.close()
        assert facts_of(path) == FACTS


@pytest.mark.parametrize("lost", [0, 20, None], ids=["nothing", "a part", "all"])
def test_lines_that_the_disk_refuses_to_sync_are_written_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, lost: int | None
) -> None:
    """As a shared disk over its quota does: it takes them, says later that it has no room, and has lost them then."""
    journal = Journal(path, 1)
    journal.append(FACTS[0])
    synced, tail = path.stat().st_size, JournalTail(path)

    def refuse(fd: int) -> None:
        tail.new()  # a reader in between
        size = os.fstat(fd).st_size
        os.truncate(path, synced if lost is None else size - lost)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as disk:
        disk.setattr(durable.os, "fsync", refuse)
        for fact in FACTS[1:3]:
            with pytest.raises(OSError, match="quota"):
                journal.append(fact)
            with pytest.raises(RunDirectoryError, match=f"it has {synced} bytes, and had") as told:
                tail.new()
            assert not isinstance(told.value, JournalDamaged)  # it passes
            tail = JournalTail(path)
    assert facts_of(path) == FACTS[:1]
    journal.append(FACTS[3])
    journal.close()
    assert facts_of(path) == FACTS


def test_a_part_of_a_line_that_the_disk_did_not_let_go_is_no_other_writer_s(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is away for a moment, after it has taken a part: it does not let itself be truncated either."""
    journal = Journal(path, 1)
    journal.append(FACTS[0])
    really_write, synced = os.write, path.stat().st_size

    def refuse(fd: int, *_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def take_a_part(fd: int, data: Any) -> int:
        return really_write(fd, data[:20]) if path.stat().st_size == synced else refuse(fd)  # type: ignore[func-returns-value, return-value]

    with monkeypatch.context() as disk:
        disk.setattr(durable.os, "write", take_a_part)
        disk.setattr(durable.os, "ftruncate", refuse)
        for fact in FACTS[1:3]:
            with pytest.raises(OSError, match="Input/output"):
                journal.append(fact)
    assert path.stat().st_size == synced + 20
    journal.append(FACTS[3])
    journal.close()
    assert facts_of(path) == FACTS


def test_what_another_writer_left_where_a_line_was_lost_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, FACTS[:1])
    synced, first, second = path.stat().st_size, Journal(path, 1), Journal(path, 2)
    really_sync = os.fsync

    def refuse(fd: int) -> None:
        monkeypatch.setattr(durable.os, "fsync", really_sync)
        os.truncate(path, synced)
        second.append(FACTS[3])
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durable.os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        first.append(FACTS[1])
    assert facts_of(path) == [FACTS[0], FACTS[3]]
    for journal in (first, second):
        journal.close()


def test_a_writer_whose_place_another_one_has_taken_breaks_nothing(path: Path) -> None:
    """Its host was cut off from the disk for a while, and with it the lock was lost."""
    write(path, [Finished(step=1, batch=1)])
    first, second = Journal(path, 1), Journal(path, 2)
    second.append(Finished(step=2, batch=2))
    for _ in range(2):
        with pytest.raises(OSError, match="another process has written to it"):
            first.append(Finished(step=3, batch=3))
    second.append(Finished(step=4, batch=4))
    assert facts_of(path) == [Finished(step=step, batch=step) for step in (1, 2, 4)]
    for journal in (first, second):
        journal.close()


def test_short_writes_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_write = os.write
    monkeypatch.setattr(durable.os, "write", lambda fd, data: really_write(fd, data[:7]))
    write(path, FACTS)
    assert facts_of(path) == FACTS


def test_an_appended_fact_is_synced_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, 1)
    synced: list[bytes] = []
    monkeypatch.setattr(durable.os, "fsync", lambda fd: synced.append(path.read_bytes()))
    journal.append(FACTS[0])
    journal.close()
    assert synced
    assert synced[-1] == path.read_bytes() != b""


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_not_a_regular_file_is_refused_at_once(path: Path, make: Any) -> None:
    path.parent.mkdir()
    make(path)
    with pytest.raises(RunDirectoryError, match=r"train\.jsonl"):
        read_journal(path)


def test_an_unreadable_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file where the directory should be")
    with pytest.raises(RunDirectoryError, match=r"journal.train\.jsonl"):
        Journal(tmp_path / "journal" / "train.jsonl", 1)


def test_a_line_is_plain_text_and_its_chain_can_be_reckoned_by_anybody(path: Path, written: bytes) -> None:
    assert written.isascii()
    chain = "0" * 32
    for line in written.splitlines():
        body = json.loads(line)
        stated = body.pop("chain")
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        chain = hashlib.sha256((chain + text).encode()).hexdigest()[:32]
        assert stated == chain


def test_damage_is_told_by_line_and_byte_with_all_that_is_sound_before_it(path: Path, written: bytes) -> None:
    lines = written.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[2:]]))
    reading = examine_journal(path)
    assert [record.fact for record in reading.records] == FACTS[:2]
    assert reading.damage == Damage(3, len(b"".join(lines[:2])), "sequence number None where 2 should stand")
    assert (reading.sound_bytes, reading.torn_bytes) == (len(b"".join(lines[:2])), 0)


def test_a_tail_that_is_cut_off_is_cut_off_for_good_before_anything_follows(
    path: Path, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(written + b"torn")
    synced: list[bytes] = []
    monkeypatch.setattr(durable.os, "fsync", lambda fd: synced.append(path.read_bytes()))
    Journal(path, 2).close()
    assert synced[0] == written


def test_a_journal_that_was_closed_holds_no_file_open(path: Path) -> None:
    for _ in range(3):
        Journal(path, 1).close()
    assert str(path.resolve()) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())


# --- read as it grows -------------------------------------------------------------------------------------------------


def test_a_journal_that_grows_is_read_line_by_line_and_each_line_once(path: Path, written: bytes) -> None:
    path.unlink()
    tail = JournalTail(path)
    assert tail.torn_bytes == 0
    assert tail.new() == []
    seen: list[Fact] = []
    for length in range(len(written) + 1):
        path.write_bytes(written[:length])
        seen += [record.fact for record in tail.new()]
        whole = written[:length].count(b"\n")
        assert seen == FACTS[:whole]
        assert tail.torn_bytes == length - len(b"\n".join(written.split(b"\n")[:whole])) - (whole > 0)
    write(path, FACTS, attempt=2)
    assert [record.seq for record in tail.new()] == [4, 5, 6, 7]
    assert tail.new() == []


def test_damage_in_what_has_grown_is_told_by_its_line(path: Path, written: bytes) -> None:
    tail = JournalTail(path)
    lines = written.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    assert len(tail.new()) == 2
    path.write_bytes(b"".join([*lines[:2], b"{}\n", lines[2]]))
    with pytest.raises(JournalDamaged, match=r"line 3 is not what was written"):
        tail.new()


def test_a_journal_that_vanishes_while_it_is_read_is_told(path: Path, written: bytes) -> None:
    tail = JournalTail(path)
    tail.new()
    path.unlink()
    with pytest.raises(RunDirectoryError, match="it is gone") as told:
        tail.new()
    assert str(told.value.hint).endswith(f"cp -au MOVED/. {path.parent.parent}/")


def test_of_a_run_directory_that_a_link_has_taken_the_place_of_it_is_said_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "run/journal/train.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    tail = JournalTail(path)
    tail.new()
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").symlink_to("moved")
    with pytest.raises(RunDirectoryError, match="a symbolic link is in its path") as told:
        tail.new()
    assert "give the same command again" in str(told.value.hint)


def test_what_is_appended_while_a_journal_is_read_is_left_to_the_next_reading(
    path: Path, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_then = written.index(b"\n") + 11
    monkeypatch.setattr(journal_module, "os", SimpleNamespace(fstat=lambda fd: SimpleNamespace(st_size=size_then)))
    reading = read_journal(path)
    assert [record.fact for record in reading.records] == FACTS[:1]
    assert reading.torn_bytes == 10


def test_a_line_that_is_too_long_is_named_as_such(path: Path, written: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written.splitlines(keepends=True)
    path.write_bytes(lines[0] + b"7" * 2000 + b"\n" + lines[1])
    monkeypatch.setattr(journal_module, "_LINE_LIMIT", 1000)
    damage = examine_journal(path).damage
    assert damage == Damage(2, len(lines[0]), "it has more than 1000 bytes")


@pytest.mark.parametrize(
    ("values", "wrong"), [({"step": "many", "batch": "few"}, "valid integer"), ({"step": -1}, "greater than or equal")]
)
def test_a_fact_whose_values_cannot_be_is_damage_that_names_the_first_of_them(
    path: Path, values: dict[str, Any], wrong: str
) -> None:
    journal = Journal(path, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic's, of the values
        journal.append(Finished(step=1, batch=1).model_copy(update=values))
    journal.append(FACTS[0])
    journal.close()
    damage = examine_journal(path).damage
    assert damage is not None
    assert "step" in damage.reason
    assert wrong in damage.reason


def test_a_last_line_that_is_whole_and_not_understood_is_damage_and_stays(path: Path, written: bytes) -> None:
    """A newer version's, say. Taken for a torn one, it would be cut off, and with it what it says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic's, of the value
        write(path, [FACTS[0].model_copy(update={"kind": "of_another_version"})])
    before = path.read_bytes()
    damage = examine_journal(path).damage
    assert damage is not None
    assert "knows no fact 'of_another_version'" in damage.reason
    with pytest.raises(JournalDamaged):
        Journal(path, 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "changed", [{"at": 7}, {"attempt": -1}, {"attempt": 1 << 53}, {"attempt": "1"}, {"at": 7, "attempt": -1}]
)
def test_a_line_whose_moment_or_attempt_cannot_be_is_damage(path: Path, changed: dict[str, Any]) -> None:
    path.parent.mkdir()
    told: dict[str, Any] = {"at": "2030-01-01", "attempt": 1, **changed}
    path.write_bytes(journal_line(FACTS[0], 0, told["at"], told["attempt"], GENESIS, "train")[0])
    damage = examine_journal(path).damage
    assert damage == Damage(1, 0, "seq, at or attempt is missing, or not what it should be")


def test_what_a_supervisor_without_an_attempt_says_is_read(path: Path) -> None:
    write(path, FACTS, attempt=0)
    assert [record.attempt for record in read_journal(path).records] == [0] * len(FACTS)


def test_an_opened_journal_is_on_disk_with_the_directories_that_were_made_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    really_sync = os.fsync

    def note_and_sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        really_sync(fd)

    monkeypatch.setattr(os, "fsync", note_and_sync)
    Journal(path, 1).close()
    assert {str(path), str(path.parent), str(path.parent.parent)} <= set(synced)


def test_a_journal_that_cannot_be_opened_for_writing_is_refused_with_what_to_do(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RunDirectoryError, match=r"opening the journal .*train\.jsonl: Input/output error"):
        Journal(path, 1)
    assert os.listdir("/proc/self/fd") == before, "it is tried again with each fact"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a key that seals from now on."""
    file = tmp_path / "key"
    file.write_bytes(bytes(range(32)))
    file.chmod(0o600)
    monkeypatch.setenv(seal.ENV_SEAL, str(file))
    return file


def test_each_line_that_is_written_with_a_key_bears_a_seal_of_its_journal(path: Path, key: Path) -> None:
    write(path, FACTS)
    reading = read_journal(path)
    assert (reading.seals, len(reading.records)) == (4, 4)
    other = path.with_name("supervisor.jsonl")
    other.write_bytes(path.read_bytes())  # sound, but what is said in one journal is not said in the other
    reason = "line 1 is not what was written: its seal is missing, or not of this key"
    with pytest.raises(JournalDamaged, match=reason) as caught:
        read_journal(other)
    assert (caught.value.hint or "").startswith("name the key that the run was begun with; if it is this one, restore")


def test_a_line_without_a_seal_is_not_believed_where_there_is_a_key(path: Path, written: bytes, key: Path) -> None:
    damage = examine_journal(path).damage
    assert damage == Damage(1, 0, "its seal is missing, or not of this key")
    assert examine_journal(path).seals == 0


def test_seals_are_counted_without_the_key_too(path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, FACTS)
    monkeypatch.delenv(seal.ENV_SEAL)
    write(path, FACTS[:1], attempt=2)
    assert read_journal(path).seals == 4


def test_a_journal_that_was_fetched_is_believed_where_every_line_is_sealed(
    path: Path, written: bytes, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = path.with_name("sealed") / "train.jsonl"
    write(sealed, FACTS)
    content = sealed.read_bytes()
    require_sealed(content, "train")
    for doubtful in (written, content[:-1], content[:50], content.replace(b'"step":2', b'"step":3', 1)):
        with pytest.raises(JournalDamaged, match="the train journal is not what was written and sealed"):
            require_sealed(doubtful, "train")
    with pytest.raises(JournalDamaged):
        require_sealed(content, "supervisor")
    monkeypatch.delenv(seal.ENV_SEAL)
    require_sealed(content[:50], "train")  # without a key a torn or damaged journal is the reader's affair


def test_a_tail_tells_how_many_of_the_new_lines_are_sealed(path: Path, key: Path) -> None:
    write(path, FACTS[:3])
    tail = JournalTail(path)
    tail.new()
    assert tail.seals == 3
    write(path, FACTS[3:], attempt=2)
    tail.new()
    assert tail.seals == 1


def test_a_journal_beyond_the_limit_is_refused_with_a_way_out_and_one_at_it_is_read(
    path: Path, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_LIMIT", len(written))
    assert facts_of(path) == FACTS
    tail = JournalTail(path)
    tail.new()
    write(path, FACTS[:1], attempt=2)
    assert [record.attempt for record in tail.new()] == [2], "the launch in which it grows so large goes on"
    size = path.stat().st_size
    with pytest.raises(JournalDamaged, match=f"{size} bytes; at most {len(written)} are believed") as refused:
        read_journal(path)
    assert "rollback ring export" in str(refused.value.hint), "what to do"
