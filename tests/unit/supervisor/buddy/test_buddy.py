"""Copies of snapshots in another host's memory: hosts are directories here, the connections are real."""

import errno
import json
import os
import re
import secrets
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_for

from checkpoints import RANKS, content, manifest_of, shard_of
from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import buddy_copies, slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.hashing import hash_of
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import ShardReader
from rollback.facts.training import PartBroughtBack
from rollback.rundir import seal
from rollback.rundir.identity import Identity, JobIdentity, new_identity, write_identity
from rollback.rundir.paths import RunPaths, shard_name
from rollback.supervisor.buddy import bring_back, sender, server, wire
from rollback.supervisor.buddy.bring_back import is_needed
from rollback.supervisor.buddy.buddy import Buddy
from rollback.supervisor.buddy.wire import Answer, Buddies, BuddyConnection, BuddyRefused, BuddyRequest, Parcel, connect

SECRET = secrets.token_hex()
IDENTITY = new_identity(JobIdentity(world_size=RANKS, model=[], optimizer={}, objects=[], data={}))
SOON = 20.0


class HostHere:
    """A host with a run directory and a memory of its own. Its only rank has the number of its seat."""

    def __init__(self, folder: Path, seat: int, *, attached: bool = True) -> None:
        self.paths, self.base, self.seat = RunPaths(folder / "run"), folder / "memory", seat
        self.base.mkdir(parents=True)
        self.said: list[str] = []
        self.buddy = Buddy(self.paths, self.base, f"node-{seat}", "127.0.0.1", self.said.append)
        if attached:
            self.attach(IDENTITY)

    def attach(self, identity: Identity) -> None:
        """What ranks do at their first attempt here."""
        self.paths.root.mkdir(exist_ok=True)
        write_identity(self.paths, identity)
        slots.claim(slots.tier_of(self.base, identity.run_id), self.paths.root)
        tiers.point_to_fast_tier(self.paths, self.tier, RANKS)

    @property
    def tier(self) -> SlotPaths:
        return slots.tier_of(self.base, IDENTITY.run_id)

    def save(self, slot: int, seq: int) -> Manifest:
        """This host's part of a snapshot goes into a slot."""
        regions = [shard_of(rank, seq) for rank in range(RANKS)]
        shards = tuple(
            ShardRecord(file=shard_name(rank), size=region.size, hash=hash_of(region.view))
            for rank, region in enumerate(regions)
        )
        assert slots.uncommit(self.tier, slot)
        mapped = slots.map_shard(self.tier, slot, self.seat, regions[self.seat].size)
        mapped.view[:] = regions[self.seat].view
        mapped.close()
        manifest = manifest_of(seq, seq).model_copy(update={"shards": shards})
        slots.commit(self.tier, slot, manifest, here=[self.seat])
        return manifest

    def has_copy_of(self, seat: int) -> int | None:
        copies = buddy_copies.copies_of(self.tier, seat)
        return max((copy.manifest.seq for copy in copies), default=None)

    def begin(self, buddies: Buddies | None, given_up: Callable[[], bool] = lambda: False) -> PartBroughtBack | None:
        return self.buddy.begin(self.seat, buddies, given_up)

    @property
    def slots(self) -> list[tuple[int | None, int]]:
        return [(place.slot, place.manifest.seq) for place in tiers.in_slots(self.paths)]

    @property
    def arriving(self) -> list[Path]:
        return list(self.tier.root.glob("arriving-*"))


Make = Callable[..., HostHere]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as closing:

        def made(name: str, seat: int, *, attached: bool = True) -> HostHere:
            host = HostHere(tmp_path / name, seat, attached=attached)
            closing.callback(host.buddy.close)
            return host

        yield made


ALL = tuple(manifest_of(seq, seq).name for seq in range(9, 0, -1))


def of(*hosts: HostHere | str, wanted: tuple[str, ...] = ALL, secret: str = SECRET) -> Buddies:
    addresses = tuple(host if isinstance(host, str) else host.buddy.address for host in hosts)
    return Buddies(secret=secret, run=IDENTITY.run_id, wanted=wanted, addresses=addresses)


def begin(*hosts: HostHere) -> list[PartBroughtBack | None]:
    for host in hosts:
        host.buddy.get_ready(of(*hosts))
    return [host.begin(of(*hosts)) for host in hosts]


def with_a_copy(make: Make, *seqs: int) -> tuple[HostHere, HostHere]:
    """Two hosts that rest: the second has a copy of the last of the first one's snapshots, each in the slot of its
    number."""
    first, second = make("first", 0), make("second", 1)
    begin(first, second)
    for seq in seqs:
        first.save(seq, seq)
        wait_for(lambda seq=seq: second.has_copy_of(0) == seq)  # type: ignore[misc]
    wait_for(lambda: len(list(second.tier.root.glob("buddy-*"))) == 1)
    first.buddy.rest()
    second.buddy.rest()
    return first, second


def after(module: Any, name: str, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act each time when a function has done its work, before its caller goes on."""
    function = getattr(module, name)

    def then(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        act()
        return result

    monkeypatch.setattr(module, name, then)


def before(module: Any, name: str, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **named: (act(), function(*given, **named))[1])


# Its way there and back --------------------------------------------------------------------------------------------


def test_a_new_host_gets_the_lost_one_s_part_from_the_buddy_s_memory(make: Make, tmp_path: Path) -> None:
    first, second = with_a_copy(make, 1, 2)
    (copy,) = second.tier.root.glob("buddy-*")
    assert copy.name == f"buddy-00000-02-{manifest_of(2, 2).name}", "one is enough"
    first.buddy.close()
    shutil.rmtree(tmp_path / "first")

    spare = make("spare", 0, attached=False)
    brought, nothing = begin(spare, second)
    assert brought is not None
    assert nothing is None
    assert (brought.checkpoint, brought.step, brought.source) == (manifest_of(2, 2).name, 2, "127.0.0.1")
    (place,) = tiers.in_slots(spare.paths)
    assert place.slot == 2, "as on the other hosts, or no rank would use it"
    record = place.manifest.shards[0]
    with ShardReader(place.directory / record.file, record.written) as reader:
        assert bytes(reader.data("w0")) == content(0, 2)
    assert not (place.directory / shard_name(1)).exists()
    spare.buddy.rest()
    assert spare.begin(of(spare, second)) is None, "it is there by now"


def test_hosts_that_begin_at_once_do_not_spoil_each_other_s_part(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbour's copy becomes whole here while this host's own part arrives."""
    _, second = with_a_copy(make, 1)
    second.save(1, 1)
    spare = make("spare", 0, attached=False)
    spare.buddy.get_ready(of(spare, second))
    second.buddy.get_ready(of(spare, second))
    after(bring_back, "receive_shards", lambda: wait_for(lambda: spare.has_copy_of(1) == 1), monkeypatch)
    second.begin(of(spare, second))
    brought = spare.begin(of(spare, second))
    assert brought is not None, spare.said
    (place,) = tiers.in_slots(spare.paths)
    assert (place.directory / shard_name(0)).exists()
    assert spare.has_copy_of(1) == 1


def test_until_a_copy_is_whole_the_one_before_stays_also_of_the_same_slot(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = with_a_copy(make, 1)
    arrives, go_on = threading.Event(), threading.Event()

    def held() -> None:
        arrives.set()
        assert go_on.wait(SOON)

    before(server, "receive_shards", held, monkeypatch)
    begin(first, second)
    first.save(1, 5)
    assert arrives.wait(SOON)
    assert second.has_copy_of(0) == 1
    go_on.set()
    wait_for(lambda: second.has_copy_of(0) == 5)


def test_a_snapshot_is_sent_once_in_all_attempts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make("first", 0), make("second", 1)
    sent, told = [], []
    before(sender, "send_shards", lambda: sent.append(1), monkeypatch)
    after(sender.BuddySender, "_send", lambda: told.append(1), monkeypatch)
    first.save(0, 1)
    for attempt in (1, 2, 3):
        begin(first, second)
        wait_for(lambda attempt=attempt: len(told) == attempt)  # type: ignore[misc]
        first.buddy.rest()
    assert len(sent) == 1
    assert second.has_copy_of(0) == 1


def test_behind_a_rollback_the_copy_is_of_the_newest_snapshot_that_is_left(make: Make) -> None:
    first, second = make("first", 0), make("second", 1)
    begin(first, second)
    for seq in (1, 2):
        first.save(seq, seq)
        wait_for(lambda seq=seq: second.has_copy_of(0) == seq)  # type: ignore[misc]
    slots.uncommit(first.tier, 2)
    wait_for(lambda: second.has_copy_of(0) == 1)


def test_a_slot_that_is_used_again_behind_the_last_piece_makes_no_copy(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent and not yet received is still the slot's memory."""
    first, second = with_a_copy(make, 1)
    sent, used_again = threading.Event(), threading.Event()
    torn = []
    monkeypatch.setattr(sender, "_SNAPSHOTS_AGAIN", 0.01)
    with monkeypatch.context() as patch:
        after(sender, "send_shards", sent.set, patch)
        before(server, "receive_shards", lambda: used_again.wait(SOON), patch)
        before(server, "in_words", lambda: torn.append(1), patch)
        begin(first, second)
        first.save(2, 2)
        assert sent.wait(SOON)
        slots.uncommit(first.tier, 2)
        shard = first.tier.slot(2) / shard_name(0)
        with shard.open("r+b") as file:
            file.write(bytes(shard.stat().st_size))
        used_again.set()
        wait_for(lambda: torn)
        assert second.has_copy_of(0) == 1
    first.save(3, 3)
    wait_for(lambda: second.has_copy_of(0) == 3)


# What is brought back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(), (manifest_of(1, 1).name,)], ids=["nothing", "an older one"])
def test_what_the_leader_does_not_name_is_not_brought_back(make: Make, wanted: tuple[str, ...]) -> None:
    _, second = with_a_copy(make, 2)
    spare = make("spare", 0, attached=False)
    second.buddy.get_ready(of(spare, second))
    assert spare.begin(of(spare, second, wanted=wanted)) is None
    assert spare.slots == []
    assert spare.said == []


@pytest.mark.parametrize(
    ("here", "needed"),
    [((), True), (("c2",), False), (("c3",), False), (("c1", "c9"), True)],
    ids=["nothing is here", "it is here", "a newer one is here", "an older one and a stranger are here"],
)
def test_a_checkpoint_is_needed_unless_it_or_one_that_is_wanted_more_is_here(
    here: tuple[str, ...], needed: bool
) -> None:
    assert is_needed("c2", ("c3", "c2", "c1"), here) == needed
    with pytest.raises(BuddyRefused, match="nobody wants"):
        is_needed("c9", ("c3", "c2", "c1"), here)


def test_a_host_that_had_another_seat_gets_the_part_of_its_present_one(make: Make) -> None:
    _, second = with_a_copy(make, 2)
    moved = make("moved", 1)
    moved.save(2, 2)
    moved.seat = 0
    second.buddy.get_ready(of(moved, second))
    assert moved.begin(of(moved, second)) is not None, moved.said
    (place,) = tiers.in_slots(moved.paths)
    assert (place.directory / shard_name(0)).exists()


def test_a_part_that_does_not_come_whole_leaves_the_slots_as_they_were(make: Make) -> None:
    first, second = with_a_copy(make, 2)
    first.save(2, 1)  # as if it had never got further
    (shard,) = second.tier.root.glob("buddy-*/*.safetensors")
    os.truncate(shard, 10)
    assert begin(first, second) == [None, None]
    assert "part of the newest snapshot back from 127.0.0.1: " in first.said[-1]
    assert first.slots == [(2, 1)]
    assert not first.arriving


def test_a_part_that_was_spoilt_in_the_buddy_s_memory_is_not_brought_back(make: Make) -> None:
    first, second = with_a_copy(make, 2)
    first.save(2, 1)
    (shard,) = second.tier.root.glob("buddy-*/*.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    assert begin(first, second) == [None, None]
    assert "its hash is another one" in first.said[-1]
    assert first.slots == [(2, 1)]


def test_a_host_that_has_all_there_is_gets_nothing(make: Make) -> None:
    first, second = with_a_copy(make, 1)
    first.save(2, 2)
    assert begin(first, second) == [None, None]
    assert {seq for _, seq in first.slots} == {1, 2}


def test_a_host_that_has_only_got_ready_gives_what_it_keeps_and_knows_no_earlier_secret(make: Make) -> None:
    _, second = with_a_copy(make, 1)
    new = secrets.token_hex()
    second.buddy.get_ready(of("", "", secret=new))
    late = make("late", 0, attached=False)
    assert late.begin(of(late, second)) is None, "a host that has lost its seat"
    late.buddy.rest()
    assert late.begin(of(late, second, secret=new)) is not None, late.said


def test_nobody_but_the_buddy_is_asked(make: Make) -> None:
    _, second = with_a_copy(make, 1)
    spare = make("spare", 0, attached=False)
    with socket.create_server(("127.0.0.1", 0)) as third:
        third.setblocking(False)
        told = of(spare, second, f"127.0.0.1:{third.getsockname()[1]}")
        second.buddy.get_ready(told)
        assert spare.begin(told) is not None
        with pytest.raises(BlockingIOError):
            third.accept()


def test_a_run_that_is_sealed_takes_no_run_json_without_the_seal(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    monkeypatch.setenv(seal.ENV_SEAL, str(key))
    _, second = with_a_copy(make, 1)
    monkeypatch.setattr(server, "read_identity", lambda paths: IDENTITY)
    spare = make("spare", 0, attached=False)
    second.buddy.get_ready(of(spare, second))
    assert spare.begin(of(spare, second)) is None
    assert "is not sealed" in spare.said[-1]
    assert not spare.paths.identity.exists()


# What goes wrong ---------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a host that is gone in such a way that connections to it stay open."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_who_is_told_to_stop_waits_for_no_buddy(make: Make, silent: str) -> None:
    first = make("first", 0)
    began = time.monotonic()
    assert first.begin(of(first, silent), lambda: time.monotonic() > began + 0.1) is None
    assert time.monotonic() - began < 10


def test_a_sender_ends_although_its_buddy_died_in_the_middle_of_a_copy(make: Make, silent: str) -> None:
    first = make("first", 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first.begin(of(first, f"127.0.0.1:{listening.getsockname()[1]}", wanted=()))
        first.save(0, 1)
        line, _ = listening.accept()
        with line:
            assert line.recv(1)
            began = time.monotonic()
            first.buddy.rest()
            assert time.monotonic() - began < 10
    assert first.buddy.fault is None


def test_snapshots_that_never_arrive_before_their_slots_are_used_again_are_told(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = with_a_copy(make, 1)
    with monkeypatch.context() as patch:
        patch.setattr(wire, "_PIECE", 1000)  # there is more to come behind the first piece
        number = iter(range(1000))
        patch.setattr(sender.slots, "commit_of", lambda tier, slot: (next(number), 0))
        begin(first, second)
        first.save(2, 2)
        wait_for(lambda: first.buddy.fault)
    assert first.buddy.fault == (
        "sending them to 127.0.0.1: each leaves its slot before it has arrived (a faster network, or fewer snapshots)"
    )
    assert second.has_copy_of(0) == 1
    wait_for(lambda: second.has_copy_of(0) == 2)
    wait_for(lambda: first.buddy.fault is None)
    costs = [line for line in first.said if "of each snapshot go to" in line]
    assert len(costs) == 2, "once in each attempt"
    assert re.fullmatch(
        r"[\d.]+ KiB of each snapshot go to the memory of 127\.0\.0\.1 too: .* of the network", costs[0]
    )


def test_a_host_without_room_says_so_once_and_training_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make("first", 0), make("second", 1)
    monkeypatch.setattr(sender, "_SNAPSHOTS_AGAIN", 0.01)
    with monkeypatch.context() as patch:
        asked: list[int] = []
        patch.setattr(server, "free_memory", lambda root: asked.append(1) or len(asked))
        begin(first, second)
        first.save(0, 1)
        wait_for(lambda: len(asked) > 5)
    assert "its host has no room" in (first.buddy.fault or "")
    assert first.said == [f"the snapshots of this host are in no other host's memory: {first.buddy.fault}"]
    wait_for(lambda: second.has_copy_of(0) == 1)
    wait_for(lambda: first.buddy.fault is None)


def test_a_buddy_that_is_not_there_yet_is_no_fault(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make("first", 0), make("second", 1, attached=False)
    refused = []
    with monkeypatch.context() as patch:
        patch.setattr(sender, "_SNAPSHOTS_AGAIN", 0.01)
        patch.setattr(sender, "_TOLD_AFTER", 1000)
        after(sender.BuddySender, "_fail", lambda: refused.append(1), patch)
        begin(first, second)
        first.save(0, 1)
        wait_for(lambda: len(refused) > 2)
        assert first.buddy.fault is None
        second.attach(IDENTITY)
        wait_for(lambda: second.has_copy_of(0) == 1)
    assert sender._TOLD_AFTER > 2


def test_why_there_is_no_copy_is_told(make: Make) -> None:
    first = make("first", 0)
    reasons = [
        (None, "the leader was started without --replicas"),
        (of(first), "no other host takes part in this attempt"),
        (of(first, ""), "the host that should keep them keeps none: without --replicas, or with two nodes on it"),
        (of("", "127.0.0.1:9"), "another node of this job is on this host, or on one of the same name"),
    ]
    for buddies, reason in reasons:
        assert first.begin(buddies) is None
        assert first.buddy.fault == reason


def test_a_buddy_that_is_gone_costs_no_attempt(make: Make) -> None:
    first, second = make("first", 0), make("second", 1)
    told = of(first, second)
    second.buddy.close()
    assert first.begin(told) is None
    assert "back from 127.0.0.1: " in first.said[-1]


def test_a_host_that_can_start_no_sender_begins_without_copies(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    host, other = make("host", 0), make("other", 1)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        assert host.begin(of(host, other, wanted=())) is None
    assert host.buddy.fault == "starting a thread (rollback-BuddySender): can't start new thread"
    assert host.said[-1].startswith("the end marks of this host are in no other host's memory: starting a thread")
    host.buddy.rest()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:http", "127.0.0.1:99999", f"{'x' * 70}.example:1", "a\0b:1"])
def test_an_address_that_is_none_costs_no_attempt(make: Make, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(sender, "_SNAPSHOTS_AGAIN", 0.01)
    first = make("first", 0)
    first.save(0, 1)
    assert first.begin(of(first, address)) is None
    assert "back from" in first.said[0]
    wait_for(lambda: first.buddy.fault)


@pytest.mark.parametrize(
    "identity",
    [b"{}", b"\xff", IDENTITY.model_copy(update={"run_id": "0" * 32}).model_dump_json().encode()],
    ids=["empty", "no JSON", "another run's"],
)
def test_a_run_json_that_is_not_this_run_s_changes_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, identity: bytes
) -> None:
    _, second = with_a_copy(make, 1)
    given = server._Conversation._give
    monkeypatch.setattr(
        server._Conversation,
        "_give",
        lambda self, connection, tier, request, _: given(self, connection, tier, request, identity),
    )
    spare = make("spare", 0, attached=False)
    second.buddy.get_ready(of(spare, second))
    assert spare.begin(of(spare, second)) is None
    assert "back from 127.0.0.1: " in spare.said[-1]
    assert not spare.paths.root.exists()
    assert not spare.arriving


# What anybody may send ---------------------------------------------------------------------------------------------


def ask(host: HostHere, request: BuddyRequest, *parts: bytes, secret: str = SECRET) -> Answer:
    """The last answer. Raises what a buddy answers, or that it does not."""
    with connect(host.buddy.address, secret, lambda: False) as connection:
        connection.say(request)
        for part in parts[:-1]:
            connection.send(part)
            connection.answer()
        connection.send(parts[-1] if parts else b"")
        connection._socket.shutdown(socket.SHUT_WR)
        return connection.answer()


def ask_as_it_is(host: HostHere, message: bytes, *, size: int | None = None) -> Answer:
    with connect(host.buddy.address, SECRET, lambda: False) as connection:
        connection.send((len(message) if size is None else size).to_bytes(4, "big") + message)
        return connection.answer()


GONE = r"broke off|reset|Broken pipe|not connected"
"""What a connection says that the other side has closed: the kernel's word depends on who was first."""


def test_who_does_not_know_the_secret_is_not_answered(make: Make) -> None:
    host = make("host", 1)
    wanted = BuddyRequest(run=IDENTITY.run_id, seat=0, give=ALL)
    for secret in ("0" * 64, SECRET):
        with pytest.raises(OSError, match=GONE):
            ask(host, wanted, secret=secret)  # nobody leads yet
    host.buddy.get_ready(of(host, host))
    assert ask(host, wanted) == Answer()
    with pytest.raises(OSError, match=GONE):
        ask(host, wanted, secret="0" * 64)
    with pytest.raises(BuddyRefused, match="no memory of that run"):
        ask(host, wanted.model_copy(update={"run": "0" * 32}))
    host.buddy.rest()
    with pytest.raises(OSError, match=GONE):
        ask(host, wanted)


def test_strangers_take_no_more_than_some_connections_for_some_seconds(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_STRANGERS", 0.5)
    host = make("host", 1)
    host.buddy.get_ready(of(host, host))
    address = host.buddy.address.rpartition(":")
    with ExitStack() as closing:
        crowd = [
            closing.enter_context(socket.create_connection((address[0], int(address[2])), timeout=SOON))
            for _ in range(server._CONNECTIONS + 3)
        ]
        for line in crowd:
            assert line.recv(1) == b"", "the last ones are turned away at once, the others when their time is up"
    assert ask(host, BuddyRequest(run=IDENTITY.run_id, seat=0, give=ALL)) == Answer()


def test_a_host_that_could_start_no_threads_for_a_while_answers_as_before(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make("host", 1)
    host.buddy.get_ready(of(host, host))
    wanted = BuddyRequest(run=IDENTITY.run_id, seat=0, give=ALL)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(server._CONNECTIONS + 1):
            with pytest.raises(OSError, match=GONE):
                ask(host, wanted)
    assert ask(host, wanted) == Answer()


def parcel_of(host: HostHere) -> tuple[dict[str, Any], bytes, bytes]:
    """What a sender says of its snapshot, the manifest, and the shard."""
    host.save(0, 5)
    directory = host.tier.slot(0)
    body = (directory / "manifest.json").read_bytes()
    return (
        {"slot": 3, "ranks": [host.seat], "manifest": len(body)},
        body,
        (directory / shard_name(host.seat)).read_bytes(),
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda body, shard: (body[:-40], b""), "broke off"),
        (lambda body, shard: (body, shard[:100]), "broke off"),
        (lambda body, shard: (body.replace(b'"step": 5', b'"step": 6'), b""), "damaged"),
        (lambda body, shard: (body, shard[:-1] + b"\0"), "hash is another one"),
    ],
    ids=["half a manifest", "half a shard", "another manifest", "another shard"],
)
def test_what_does_not_come_as_it_was_said_is_not_kept(
    make: Make, spoil: Callable[[bytes, bytes], tuple[bytes, bytes]], reason: str
) -> None:
    host, other = make("host", 1), make("other", 0)
    host.buddy.get_ready(of(other, host))
    told, body, shard = parcel_of(other)
    request = BuddyRequest(run=IDENTITY.run_id, seat=0, keep=Parcel.model_validate(told))
    with pytest.raises(BuddyRefused, match=reason):
        ask(host, request, *(part for part in spoil(body, shard) if part))
    assert host.has_copy_of(0) is None
    wait_for(lambda: not host.arriving)
    assert ask(host, request, body, shard).whole
    assert host.has_copy_of(0) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": []}, {"ranks": [-1]}, {"ranks": [0, 0]}, {"ranks": [RANKS]}, {"ranks": ["../run.json"]}, {"slot": -1},
        {"slot": 10_000}, {"manifest": 0}, {"manifest": 1 << 40}, {"sizes": [-5, 7]},
    ],
    ids=str,
)  # fmt: skip
def test_a_parcel_that_makes_no_sense_is_refused_and_leaves_nothing_behind(make: Make, wrong: dict[str, Any]) -> None:
    host, other = make("host", 1), make("other", 0)
    host.buddy.get_ready(of(other, host))
    told, body, _ = parcel_of(other)
    request = json.dumps({"run": IDENTITY.run_id, "seat": 0, "keep": {**told, **wrong}}).encode()
    with pytest.raises(BuddyRefused):
        ask_as_it_is(host, request + body, size=len(request))
    assert not host.arriving
    assert host.has_copy_of(0) is None


@pytest.mark.parametrize(("message", "size"), [(b"", 1 << 31), (b"null", 4), (b"{}{}", 4)], ids=str)
def test_a_message_that_is_none_is_refused(make: Make, message: bytes, size: int) -> None:
    host = make("host", 1)
    host.buddy.get_ready(of(host, host))
    with pytest.raises(BuddyRefused):
        ask_as_it_is(host, message, size=size)


def test_a_connection_on_which_nothing_moves_is_given_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_SILENCE", 0.1)
    with connect(silent, SECRET, lambda: False) as connection, pytest.raises(TimeoutError, match="nothing moved"):
        connection.receive(1)


def test_when_a_host_rests_nothing_more_arrives_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may then be given back."""
    first, second = make("first", 0), make("second", 1)
    told, body, _ = parcel_of(first)
    second.buddy.get_ready(of(first, second))
    with connect(second.buddy.address, SECRET, lambda: False) as connection:
        connection.say(BuddyRequest(run=IDENTITY.run_id, seat=0, keep=Parcel.model_validate(told)))
        connection.send(body)
        connection.answer()
        assert second.arriving
        second.buddy.rest()
        assert not second.arriving
    slots.remove(second.tier)
    assert not second.tier.root.exists()


def test_who_was_let_in_when_the_host_begins_to_rest_leaves_nothing_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its copy had begun to arrive, so that nobody waited for its end."""
    first, second = make("first", 0), make("second", 1)
    told, body, shard = parcel_of(first)
    second.buddy.get_ready(of(first, second))
    after(server, "read_identity", second.buddy.rest, monkeypatch)
    with pytest.raises(OSError, match=rf"given up|{GONE}"):
        ask(second, BuddyRequest(run=IDENTITY.run_id, seat=0, keep=Parcel.model_validate(told)), body, shard)
    assert second.has_copy_of(0) is None


def test_the_memory_of_copies_and_of_what_was_arriving_is_given_back(make: Make) -> None:
    _, second = with_a_copy(make, 1)
    second.save(0, 1)
    (second.tier.root / "arriving-copy").mkdir()  # of a supervisor that was killed
    slots.remove_copies(second.tier)
    assert [path.name for path in second.tier.root.iterdir() if path.is_dir()] == ["slot-00"]
    with_a_copy_again = second.tier.root / "buddy-00000-01-c000001-s00000001"
    with_a_copy_again.mkdir()
    slots.remove(second.tier)
    assert not second.tier.root.exists()


def test_a_connection_passes_files_of_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PIECE", 1000)
    data = os.urandom(100_500)
    (tmp_path / "file").write_bytes(data)
    one, other = socket.socketpair()
    pieces: list[int] = []
    with one, other:
        here, there = BuddyConnection(one, lambda: False), BuddyConnection(other, lambda: False)
        here.send_file(tmp_path / "file", len(data), pieces.append)
        assert there.receive(len(data)) == data
        with pytest.raises(BuddyRefused, match="shorter than its manifest says"):
            here.send_file(tmp_path / "file", len(data) + 1, lambda count: None)
    assert sum(pieces) == len(data)
    assert max(pieces) <= 1000


def test_a_buddy_that_can_open_no_further_file_pauses_and_then_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, pauses = socketserver.TCPServer.get_request, list[float]()

    def refuse_at_first(self: socketserver.TCPServer) -> Any:
        if len(pauses) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", refuse_at_first)
    monkeypatch.setattr(server, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
    with (
        closing(server.BuddyServer(RunPaths(tmp_path / "run"))) as listening,
        socket.create_connection(("127.0.0.1", listening.port), SOON) as caller,
    ):
        caller.settimeout(SOON)
        caller.sendall(bytes(wire.SECRET))
        assert caller.recv(1) == b"", "a stranger is hung up on"
    assert pauses == [server._PAUSE] * 3


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "::1"])
def test_a_buddy_is_reached_by_either_kind_of_address(tmp_path: Path, host: str) -> None:
    with (
        closing(server.BuddyServer(RunPaths(tmp_path / "run"))) as listening,
        connect(f"{host}:{listening.port}", SECRET, lambda: False),
    ):
        pass
