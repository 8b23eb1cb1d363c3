"""Copies of snapshots in another host's memory: hosts are directories here, the connections are real."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpoints import RANKS, content, manifest_of, shard_of
from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import buddy_copies, slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.hashing import hash_of
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import ShardReader
from rollback.facts.training import PartBroughtBack
from rollback.rundir.identity import Identity, JobIdentity, new_identity, write_identity
from rollback.rundir.paths import RunPaths, shard_name
from rollback.supervisor.buddy import sender, server
from rollback.supervisor.buddy.buddy import Buddy
from rollback.supervisor.buddy.wire import (
    Answer,
    Buddies,
    BuddyRequest,
    Parcel,
    Refused,
    answer,
    connect,
    parcel_of,
    say,
)

SECRET = "of this launch"
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
        copy = buddy_copies.newest(self.tier, seat)
        return copy.manifest.seq if copy is not None else None


Make = Callable[..., HostHere]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as closing:

        def made(name: str, seat: int, *, attached: bool = True) -> HostHere:
            host = HostHere(tmp_path / name, seat, attached=attached)
            closing.callback(host.buddy.close)
            return host

        yield made


def of(*hosts: HostHere, run: str = IDENTITY.run_id) -> Buddies:
    return Buddies(secret=SECRET, run=run, addresses=tuple(host.buddy.address for host in hosts))


def begin(*hosts: HostHere) -> list[PartBroughtBack | None]:
    return [host.buddy.begin(host.seat, of(*hosts)) for host in hosts]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_new_host_gets_the_lost_one_s_part_from_the_buddy_s_memory(make: Make, tmp_path: Path) -> None:
    first, second = make("first", 0), make("second", 1)
    assert begin(first, second) == [None, None]
    for seq in (1, 2):
        first.save(seq, seq)
        second.save(seq, seq)
        until(lambda seq=seq: (second.has_copy_of(0), first.has_copy_of(1)) == (seq, seq))  # type: ignore[misc]
    until(lambda: [path.name for path in second.tier.root.glob("buddy-*")] == ["buddy-00000-02"])  # one is enough
    first.buddy.close()
    second.buddy.rest()
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
    assert spare.buddy.begin(0, of(spare, second)) is None, "it is there by now"


def test_a_copy_that_does_not_come_whole_leaves_the_slots_as_they_were(make: Make) -> None:
    first, second = make("first", 0), make("second", 1)
    begin(first, second)
    first.save(2, 2)
    until(lambda: second.has_copy_of(0) == 2)
    first.buddy.rest()
    first.save(2, 1)  # as if it had never got further
    (shard,) = second.tier.root.glob("buddy-*/*.safetensors")
    os.truncate(shard, 10)
    assert begin(first, second) == [None, None]
    assert "from another host: the files are not those of" in first.said[-1]
    assert [(place.slot, place.manifest.seq) for place in tiers.in_slots(first.paths)] == [(2, 1)]
    assert not list(first.tier.root.glob("buddy-00000-*"))


def test_a_host_that_has_all_there_is_gets_nothing(make: Make) -> None:
    first, second = make("first", 0), make("second", 1)
    begin(first, second)
    first.save(0, 1)
    until(lambda: second.has_copy_of(0) == 1)
    first.buddy.rest()
    first.save(1, 2)
    assert begin(first, second) == [None, None]
    assert {place.manifest.seq for place in tiers.in_slots(first.paths)} == {1, 2}


def test_a_snapshot_is_sent_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make("first", 0), make("second", 1)
    looked = []
    in_slots = tiers.in_slots
    monkeypatch.setattr(sender.tiers, "in_slots", lambda paths: looked.append(paths) or in_slots(paths))
    begin(first, second)
    first.save(0, 1)
    until(lambda: second.has_copy_of(0) == 1)
    (copy,) = second.tier.root.glob("buddy-*/manifest.json")
    there, before = copy.stat().st_ino, len(looked)
    until(lambda: looked[before:].count(first.paths) > 2)
    assert copy.stat().st_ino == there


def test_a_slot_that_is_needed_again_is_given_up_and_the_copy_before_stays(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make("first", 0), make("second", 1)
    begin(first, second)
    first.save(0, 1)
    until(lambda: second.has_copy_of(0) == 1)
    given_up = []
    with monkeypatch.context() as patch:
        patch.setattr(sender.tiers, "has_left", lambda place: given_up.append(place.manifest.seq) or True)
        first.save(1, 2)
        until(lambda: len(given_up) > 1)
        assert second.has_copy_of(0) == 1
    until(lambda: second.has_copy_of(0) == 2)
    until(lambda: first.said)
    (cost,) = first.said
    assert re.fullmatch(r"[\d.]+ KiB of each snapshot go to the memory of 127\.0\.0\.1 too: .* of the network", cost)


def test_a_host_without_room_says_so_and_training_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make("first", 0), make("second", 1)
    monkeypatch.setattr(sender, "_AGAIN", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(server, "free_memory", lambda root: 100)
        begin(first, second)
        first.save(0, 1)
        until(lambda: first.buddy.fault)
    assert "its host has no room for" in (first.buddy.fault or "")
    assert first.said[:1] == [f"the snapshots of this host are in no other host's memory: {first.buddy.fault}"]
    until(lambda: second.has_copy_of(0) == 1)
    until(lambda: first.buddy.fault is None)


def test_before_the_ranks_have_attached_nothing_is_kept_and_nobody_minds_for_long(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make("first", 0), make("second", 1, attached=False)
    monkeypatch.setattr(sender, "_AGAIN", 0.01)
    begin(first, second)
    first.save(0, 1)
    until(lambda: first.buddy.fault)
    second.attach(IDENTITY)
    until(lambda: second.has_copy_of(0) == 1)


def test_a_run_that_begins_asks_nobody_and_one_host_has_no_buddy(make: Make) -> None:
    first = make("first", 0)
    assert first.buddy.begin(0, Buddies(secret=SECRET, run="", addresses=("",))) is None
    assert first.buddy.fault == "no other host takes part in this attempt"
    assert first.buddy.begin(0, Buddies(secret=SECRET, run="", addresses=(first.buddy.address, ""))) is None
    assert first.buddy.fault == "the host that should keep them was started without --replicas"


def test_a_buddy_that_is_gone_costs_no_attempt(make: Make) -> None:
    first, second = make("first", 0), make("second", 1)
    told = of(first, second)
    second.buddy.close()
    assert first.buddy.begin(0, told) is None


def ask(host: HostHere, request: BuddyRequest, body: bytes = b"") -> None:
    """Raises what a buddy answers, or that it does not."""
    with connect(host.buddy.address) as connection, connection.makefile("rb") as stream:
        say(connection, request)
        answer(stream)
        connection.sendall(body)
        connection.shutdown(socket.SHUT_WR)
        answer(stream)


def test_who_does_not_know_the_secret_is_not_answered(make: Make) -> None:
    host = make("host", 1)
    wanted = BuddyRequest(secret=SECRET, run=IDENTITY.run_id, seat=0, wants="look")

    def look(**changed: str) -> Answer:
        with connect(host.buddy.address) as connection, connection.makefile("rb") as stream:
            say(connection, wanted.model_copy(update=changed))
            return answer(stream)

    with pytest.raises(OSError, match="broke off"):
        look(secret="")  # nobody leads yet
    host.buddy.begin(1, of(host, host))
    assert look() == Answer()
    for stranger in ("", "guess"):
        with pytest.raises(OSError, match="broke off"):
            look(secret=stranger)
    with pytest.raises(Refused, match="no memory of that run"):
        look(run="0" * 32)
    with connect(host.buddy.address) as connection:
        connection.sendall(b"\xff" * 10 + b"\n")
        assert connection.recv(1) == b""


def parcel_and_body(host: HostHere) -> tuple[Parcel, bytes]:
    host.save(0, 5)
    directory = host.tier.slot(0)
    shard, manifest = directory / shard_name(host.seat), (directory / "manifest.json").read_bytes()
    return parcel_of(3, [shard], manifest), shard.read_bytes() + manifest


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda parcel, body: (parcel, body[:-40]), "damaged"),
        (lambda parcel, body: (parcel, body[:100]), "broke off"),
        (lambda parcel, body: (parcel, body.replace(b'"step": 5', b'"step": 6')), "damaged"),
        (
            lambda parcel, body: (parcel.model_copy(update={"sizes": (parcel.sizes[0] - 1,)}), body[1:]),
            "are not those of",
        ),
    ],
    ids=["half a manifest", "half a shard", "another manifest", "another size"],
)
def test_what_does_not_come_as_it_was_said_is_not_kept(
    make: Make, spoil: Callable[[Parcel, bytes], tuple[Parcel, bytes]], reason: str
) -> None:
    host, other = make("host", 1), make("other", 0)
    host.buddy.begin(1, of(other, host))
    parcel, body = spoil(*parcel_and_body(other))
    request = BuddyRequest(secret=SECRET, run=IDENTITY.run_id, seat=0, wants="keep", parcel=parcel)
    with pytest.raises(Refused, match=reason):
        ask(host, request, body)
    assert host.has_copy_of(0) is None
    until(lambda: not list(host.tier.root.glob("buddy-*")))


@pytest.mark.parametrize("name", ["../run.json", "manifest.json", "rank-00000.safetensors/x", ""])
def test_no_file_but_a_shard_can_be_sent(make: Make, name: str) -> None:
    host, other = make("host", 1), make("other", 0)
    host.buddy.begin(1, of(other, host))
    parcel, body = parcel_and_body(other)
    told = json.loads(
        BuddyRequest(secret=SECRET, run=IDENTITY.run_id, seat=0, wants="keep", parcel=parcel).model_dump_json()
    )
    told["parcel"]["names"] = [name]
    with connect(host.buddy.address) as connection:
        connection.sendall(json.dumps(told).encode() + b"\n" + body)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream, pytest.raises(OSError):
            answer(stream)
    assert not list(host.tier.root.glob("buddy-*"))


def test_the_memory_of_copies_is_given_back_when_nobody_wants_them_and_at_the_run_s_end(make: Make) -> None:
    first, second = make("first", 0), make("second", 1)
    begin(first, second)
    first.save(0, 1)
    until(lambda: second.has_copy_of(0) == 1)
    first.buddy.rest()
    second.save(0, 1)
    buddy_copies.give_up(second.tier)
    assert [path.name for path in second.tier.root.iterdir() if path.is_dir()] == ["slot-00"]
    begin(first, second)
    until(lambda: second.has_copy_of(0) == 1)
    slots.remove(second.tier)
    assert not second.tier.root.exists()
