"""Two ranks on two hosts, each with memory of its own: what they hold together, and what they restore from it."""

import copy
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from checkpoints import damage
from hashing_threads import note_threads
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.shard import ShardReader
from rollback.checkpoints.tiers import Located
from rollback.config import Settings
from rollback.errors import CheckpointDamaged, JournalDamaged, StateRefused
from rollback.facts.history import History
from rollback.rundir.identity import new_identity, write_identity
from rollback.rundir.paths import MANIFEST, RunPaths, shard_name
from rollback.sentinel import Sentinel
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.comm import ranks as module
from rollback.train.comm.ranks import Ranks
from rollback.train.data.cursor import cursor_for
from rollback.train.restore.restore import RestoreOutcome, restore, verify
from rollback.train.snapshots import frozen
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.start import attach, found_run
from rollback.train.start.found_run import InSlot, common, is_enough, read_run
from rollback.train.state.nonfinite import FiniteCheck
from rollback.train.state.state import TrainingState

SLOT = 0


class Meeting:
    """Where ranks that are threads of one process meet: each gets what all have brought."""

    def __init__(self, ranks: int) -> None:
        self._brought: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=30)

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self._brought[rank] = item
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found


class Thread(Ranks):
    """A rank that is a thread, alone on its host."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__()
        self.rank, self.world_size, self.distributed = rank, 2, True
        self.on_this_host, self.host_count = [rank], 2
        self._meeting = meeting

    def from_each(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, json.loads(json.dumps(value)))

    def all_of(self, condition: bool) -> bool:
        return all(self._meeting.exchange(self.rank, condition))

    def _broadcast(self, buffer: Tensor, source: int) -> None:
        found = self._meeting.exchange(self.rank, buffer)[source].clone()
        self._meeting.exchange(self.rank, None)
        buffer.copy_(found)


def state_of(seed: int, rank: int, *, still: bool = False) -> TrainingState:
    """Replicas by their seed, but for what each rank has for itself: buffers that moved. still: the first is frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 1))
    model[0].requires_grad_(not still)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model[1].running_mean += rank
    return TrainingState(model, optimizer, {}, cursor_for([1, 2, 3]), Sentinel("normal"))


class TwoHosts:
    def __init__(self, folder: Path, *, still: bool = False) -> None:
        meeting = Meeting(2)
        self.ranks = [Thread(rank, meeting) for rank in range(2)]
        self._pool = ThreadPoolExecutor(2)
        self.tiers = []
        for rank in range(2):
            (folder / f"memory-{rank}").mkdir()
            self.tiers.append(slots.tier_of(folder / f"memory-{rank}", "0123456789abcdef"))
            slots.claim(self.tiers[rank], folder)
        self.paths = RunPaths(folder / "run")
        self.saved = [state_of(1, rank, still=still) for rank in range(2)]
        self.name = self.both(self._save)[0]

    def both(self, act: Callable[[int], Any]) -> list[Any]:
        return [future.result(60) for future in [self._pool.submit(act, rank) for rank in range(2)]]

    def _save(self, rank: int) -> str:
        ranks, image = self.ranks[rank], self.saved[rank].image()
        tier = FastTier(self.tiers[rank], rank, leads=True, here=[rank])
        snapshots = Snapshots(self.paths, ranks, FiniteCheck((), repr), 0, 1, tier)
        snapshots.fit_memory(image)
        snapshots.memory.use_slots(1)
        snapshots.await_ready(image)
        name = snapshots.start_snapshot(image, step=7, batch=7, epoch=0, timeline=0).manifest.name
        landing = snapshots.await_landing()
        assert landing is not None
        assert landing.committed
        snapshots.close()
        return name

    def place(self, rank: int) -> CheckpointPlace:
        return CheckpointPlace(self.tiers[rank].slot(SLOT), self.paths, in_slot=True)

    def restore(self, states: list[TrainingState]) -> list[RestoreOutcome]:
        return self.both(lambda rank: restore(self.name, [self.place(rank)], self.ranks[rank], states[rank]))


@pytest.fixture
def two(tmp_path: Path) -> TwoHosts:
    return TwoHosts(tmp_path)


@pytest.mark.parametrize("parcel", [32 << 20, 13], ids=["large parcels", "small parcels"])
def test_what_lies_on_two_hosts_is_restored_on_both(
    two: TwoHosts, monkeypatch: pytest.MonkeyPatch, parcel: int
) -> None:
    monkeypatch.setattr(module, "_PARCEL", parcel)
    assert [sorted(path.name for path in tier.slot(SLOT).iterdir()) for tier in two.tiers] == [
        ["manifest.json", shard_name(rank)] for rank in range(2)
    ]
    states = [state_of(2, rank) for rank in range(2)]
    states[1].optimizer.state.clear()  # as in a new process
    before = [[item.data_ptr() for item in state.model.parameters()] for state in states]
    versions = [[item._version for item in state.model.parameters()] for state in states]
    assert [result.place for result in two.restore(states)] == [two.place(rank) for rank in range(2)]
    for rank, state in enumerate(states):
        require_equal(state, two.saved[rank])
        assert [item.data_ptr() for item in state.model.parameters()] == before[rank], "in place"
        assert all(now._version > then for now, then in zip(state.model.parameters(), versions[rank], strict=True))
    assert not torch.equal(states[0].model[1].running_mean, states[1].model[1].running_mean), "each rank's own"


def test_frozen_weights_are_in_no_host_s_memory_and_are_put_back_on_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "LEAST", 1)
    two = TwoHosts(tmp_path, still=True)
    (file,) = two.paths.frozen.iterdir()
    kept = [(tier.slot(SLOT) / shard_name(rank)).read_bytes() for rank, tier in enumerate(two.tiers)]
    weight = two.saved[0].model[0].weight.detach().numpy().tobytes()
    assert weight in file.read_bytes()
    assert not any(weight in shard for shard in kept)
    states = [state_of(1, 0, still=True), state_of(2, 1, still=True)]
    assert [result.reread for result in two.restore(states)] == [0, 2]
    for rank, state in enumerate(states):
        require_equal(state, two.saved[rank])
    damage(file)
    assert [result.place for result in two.restore([state_of(1, 0, still=True), state_of(2, 1, still=True)])] == [
        None
    ] * 2
    assert all(result.place for result in two.restore([state_of(1, rank, still=True) for rank in range(2)]))


def test_each_host_verifies_its_part_with_all_its_cores(two: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    used = note_threads(monkeypatch, cores=3)
    two.restore([state_of(2, rank) for rank in range(2)])
    assert used == [3, 3]


@pytest.mark.parametrize("fault", ["lost", "flipped", "without its shard", "another by that name", "other hosts"])
def test_where_one_host_has_not_got_its_part_none_restores_and_nothing_is_touched(two: TwoHosts, fault: str) -> None:
    slot = two.tiers[1].slot(SLOT)
    match fault:
        case "lost":
            slots.remove(two.tiers[1])
        case "flipped":
            damage(slot / shard_name(1))
        case "without its shard":
            (slot / shard_name(1)).unlink()
        case "another by that name":
            manifest = next(slots_manifest(two.tiers[1]))
            (slot / "manifest.json").write_bytes(manifest.model_copy(update={"batch": 8}).to_json())
        case _:
            two.tiers.reverse()
    states = [state_of(2, rank) for rank in range(2)]
    before = [copy.deepcopy(state.model.state_dict()) for state in states]
    results = two.restore(states)
    assert [result.place for result in results] == [None, None]
    why = results[0].fault.message
    assert why == results[1].fault.message != ""
    for state, values in zip(states, before, strict=True):
        assert all(torch.equal(value, values[name]) for name, value in state.model.state_dict().items())
    faults = two.both(lambda rank: verify(two.name, [two.place(rank)], two.ranks[rank]))
    assert [fault.message for fault in faults] == [why] * 2


def test_a_rank_that_cannot_read_after_all_tells_the_others_before_anybody_waits_for_it(
    two: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the second try succeeds. For good: the place is no good, on both."""
    read, failing = ShardReader.read_into, [1]

    def fail(shard: ShardReader, name: str, memory: memoryview, start: int | None = None) -> None:
        if shard.path.name == shard_name(1) and failing[0] > 0:
            failing[0] -= 1
            raise CheckpointDamaged("the memory fails")
        read(shard, name, memory, start)

    monkeypatch.setattr(ShardReader, "read_into", fail)
    states = [state_of(2, rank) for rank in range(2)]
    assert all(result.place for result in two.restore(states))
    for rank, state in enumerate(states):
        require_equal(state, two.saved[rank])
    failing[0] = 1000
    assert [result.fault.message for result in two.restore(states)] == ["the memory fails"] * 2


def test_what_the_objects_of_one_rank_refuse_ends_the_restore_on_all(
    two: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that rank would leave, and the others wait for it until their collective's time is over."""
    states = [state_of(2, rank) for rank in range(2)]

    def refuse(*_: Any) -> None:
        raise StateRefused("not of this kind", hint="make it anew")

    def restored(rank: int) -> str | None:
        with pytest.raises(StateRefused, match="not of this kind") as refused:
            restore(two.name, [two.place(rank)], two.ranks[rank], states[rank])
        return refused.value.hint

    monkeypatch.setattr(states[1], "load", refuse)
    assert two.both(restored) == ["make it anew", "make it anew"]


def test_nobody_waits_in_a_collective_for_as_long_as_the_first_rank_fetches_the_run(
    two: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take longer than a collective has time, and each start would end in the same way."""
    met = threading.Semaphore(0)
    all_of = two.ranks[1].all_of

    def meet(condition: bool) -> bool:
        met.release()
        return all_of(condition)

    def fetch(*_: object) -> tuple[str, ...]:
        for _ in range(3):
            assert met.acquire(timeout=30), "the other rank waits"
        return ()

    monkeypatch.setattr(two.ranks[1], "all_of", meet)
    monkeypatch.setattr(found_run, "reach_ring", lambda _: "a ring")
    monkeypatch.setattr(found_run, "fetch", fetch)
    jobs = [state.job(2) for state in two.saved]
    paths = RunPaths(two.paths.root.with_name("another"))
    with ExitStack() as held:
        first, second = two.both(lambda rank: read_run(paths, jobs[rank], two.ranks[rank], Settings(), held))
    assert (first.attempt, first.history) == (second.attempt, second.history)


def test_a_damaged_checkpoint_in_a_directory_whose_name_is_no_utf_8_is_told_to_all_ranks(two: TwoHosts) -> None:
    jobs = [state.job(2) for state in two.saved]
    paths = RunPaths(two.paths.root.with_name(os.fsdecode(b"caf\xe9")))
    paths.checkpoint(two.name).mkdir(parents=True)
    (paths.checkpoint(two.name) / MANIFEST).write_text("no JSON")
    write_identity(paths, new_identity(jobs[0]))
    with ExitStack() as held:
        first, second = two.both(lambda rank: read_run(paths, jobs[rank], two.ranks[rank], Settings(), held))
    assert first.damaged == second.damaged
    assert f"caf\\udce9/ring/{two.name}" in first.damaged[two.name]


def test_where_rank_0_alone_finds_a_journal_damaged_the_others_do_not_wait_for_it(
    two: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contradicted(*_: object) -> NoReturn:
        raise JournalDamaged("line 3 contradicts what is before it")

    def refused(rank: int) -> str:
        with pytest.raises(JournalDamaged) as caught:
            attach._none_is_usable(two.paths, History(), {two.name}, {}, two.ranks[rank], None)
        return caught.value.message

    monkeypatch.setattr(attach, "fold_journal", contradicted)
    assert two.both(refused) == ["line 3 contradicts what is before it"] * 2


def test_what_every_host_has_in_the_same_slot_counts() -> None:
    one, two, three = InSlot(0, "c1", "a"), InSlot(1, "c2", "b"), InSlot(2, "c3", "c")
    assert common([[one, two, three]]) == ([one, two, three], []), "one host"
    assert common([[one, two], [two, one]]) == ([one, two], [])
    assert common([[one, two], [two]]) == ([two], ["c1"]), "it died between two commits"
    assert common([[one, two], [two, three]]) == ([two], ["c1", "c3"])
    assert common([[one], []]) == ([], ["c1"]), "it was lost"
    assert common([[one], [InSlot(0, "c1", "another")]]) == ([], ["c1"])
    assert common([[one], [InSlot(3, "c1", "a")]]) == ([], ["c1"])


def test_slots_count_where_the_ranks_find_their_shards(two: TwoHosts) -> None:
    (tier, _), name = two.tiers, two.name
    manifest = next(slots_manifest(tier))
    place = Located(manifest, tier.slot(SLOT), "fast", SLOT)
    assert is_enough(place, two.ranks[0])
    assert not is_enough(place, two.ranks[1]), "they have changed places"
    alone = Ranks()
    assert not is_enough(place, alone), "all on one host now"
    (tier.slot(SLOT) / shard_name(1)).touch()
    assert is_enough(place, alone)
    two.ranks[0].world_size = 3
    assert not is_enough(place, two.ranks[0]), f"{name} is of two ranks"


def test_the_shards_of_ranks_that_have_moved_away_leave_a_slot_that_is_written_again(two: TwoHosts) -> None:
    tier = two.tiers[0]
    (tier.slot(SLOT) / shard_name(5)).write_bytes(b"of another placement")
    assert slots.uncommit(tier, SLOT)
    slots.remove_strangers(tier, SLOT, [0])
    assert [path.name for path in tier.slot(SLOT).iterdir()] == [shard_name(0)]


def slots_manifest(tier: SlotPaths) -> Iterator[Any]:
    with slots.reading(tier.slot(SLOT)) as (manifest, _):
        yield manifest


def require_equal(state: TrainingState, saved: TrainingState) -> None:
    assert all(torch.equal(v, saved.model.state_dict()[k]) for k, v in state.model.state_dict().items())
    for mine, theirs in zip(*(s.optimizer.state_dict()["state"].values() for s in (state, saved)), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
