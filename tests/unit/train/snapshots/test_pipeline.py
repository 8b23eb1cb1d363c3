"""A snapshot's flight, on one rank and on two that share a directory and whose beats the test reduces."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from rollback.checkpoints import ring
from rollback.checkpoints.fast_tier import slots
from rollback.rundir.paths import RunPaths
from rollback.train.comm.beat import Beat, Signs
from rollback.train.comm.ranks import Ranks
from rollback.train.snapshots import pipeline as module
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.pipeline import Landing, Snapshots
from rollback.train.snapshots.tier_choice import CaptureMode
from rollback.train.state.image import Image
from rollback.train.state.nonfinite import FiniteCheck


def start(snapshots: Snapshots, image: Image, step: int) -> str:
    """The name that the checkpoint will have."""
    return snapshots.start_snapshot(image, step=step, batch=step, epoch=0, timeline=0).manifest.name


class TwoRanks:
    """Two ranks' snapshots in one process; `beat` does what the pulse does between them."""

    def __init__(self, folder: Path, fast: Sequence[FastTier | None] = (None, None)) -> None:
        self.paths = RunPaths(folder)
        self.paths.ring.mkdir(parents=True)
        self.ranks = []
        for rank in range(2):
            one = Ranks()
            one.rank, one.world_size = rank, 2
            self.ranks.append(Snapshots(self.paths, one, FiniteCheck((), repr), 0, 1, fast[rank]))
        self.weights = torch.arange(6.0)
        self.image = Image({"$tensor": "w"}, {"$tensor": "l"}, {"w": self.weights}, {"l": torch.ones(2)})

    def begin(self, step: int) -> str:
        for one in self.ranks:
            if not one.ready:
                one.await_ready(self.image)
        names = {start(one, self.image, step) for one in self.ranks}
        (name,) = names
        return name

    def beat(self) -> list[Landing | None]:
        for one in self.ranks:
            one.wait()
        said: list[Signs] = [one.signs() for one in self.ranks]
        reports = [sign.shard_report for sign in said if sign.shard_report]
        reduced = Beat(
            loss=None, grad_norm=None, nonfinite_ranks=(), stop=False, scaler_skipped=False,
            shard_written=sum(sign.shard_written for sign in said),
            shard_failed=sum(sign.shard_failed for sign in said),
            committed=sum(sign.committed for sign in said), torn=sum(sign.torn for sign in said),
            ready=sum(sign.ready for sign in said), tier_failed=sum(sign.tier_failed for sign in said),
            outgrown=sum(sign.outgrown for sign in said),
            shard_reports=torch.tensor(reports) if reports else None,
        )  # fmt: skip
        return [one.advance(reduced) for one in self.ranks]

    def close(self) -> None:
        for one in self.ranks:
            one.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoRanks]:
    two = TwoRanks(tmp_path / "run")
    yield two
    two.close()


def test_it_lands_on_all_ranks_in_the_same_step(two: TwoRanks) -> None:
    name = two.begin(10)
    assert two.beat() == [None, None], "written"
    assert two.beat() == [None, None], "what was written is told"
    landed = two.beat()
    assert all(landing is not None and landing.committed and landing.manifest.name == name for landing in landed)
    assert ring.names(two.paths) == [name]
    assert not any(one.in_flight for one in two.ranks)


def test_training_may_go_on_over_the_tensors_at_once(two: TwoRanks) -> None:
    """`start_snapshot` has copied; what is written is the state of that moment, however late the thread gets to it."""
    overwritten = threading.Event()
    for one in two.ranks:
        one.await_ready(two.image)
        one.thread.submit(overwritten.wait)
    name = two.begin(10)
    two.weights.fill_(-1.0)
    overwritten.set()
    for _ in range(3):
        two.beat()
    (manifest,), _ = ring.manifests(two.paths)
    readers = ring.open_shards(two.paths.checkpoint(manifest.name), manifest)
    (holder,) = [reader for reader in readers if "w" in reader.entries]
    assert torch.frombuffer(bytearray(holder.data("w")), dtype=torch.float32).tolist() == list(range(6))
    assert manifest.name == name


def test_where_no_thread_can_be_made_to_copy_the_loop_copies_itself(
    two: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.begin(10)
    for _ in range(3):
        two.beat()
    for one in two.ranks:
        one._copier.shutdown()
        one._copier, one.mode = module._copier(), "overlapped"
    for one in two.ranks:
        one.await_ready(two.image)

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        two.begin(20)
    assert [two.beat() for _ in range(2)] == [[None, None]] * 2
    assert all(landing is not None and landing.committed for landing in two.beat())


def test_a_fast_tier_that_fails_while_it_is_waited_for_is_left_for_its_own_reason(tmp_path: Path) -> None:
    """And not because somebody would read the slot that is wanted."""
    (tmp_path / "closed").touch()
    fast = FastTier(slots.SlotPaths(tmp_path / "closed" / "slots"), 0, leads=True, here={0})
    fast.resize(1)
    one = Snapshots(RunPaths(tmp_path / "run"), Ranks(), FiniteCheck((), repr), 0, 1, fast)
    try:
        image = Image({}, {}, {"w": torch.ones(2)}, {})
        assert os.strerror(errno.ENOTDIR) in one.await_ready(image)
        assert one.memory.tier == "durable"
        assert one.ready
        assert one.await_ready(image) == ""
    finally:
        one.close()


def test_memory_is_not_ready_while_a_thread_works_on_a_snapshot_in_it(two: TwoRanks) -> None:
    one = two.ranks[0]
    one.fit_memory(two.image)
    one.memory.use_slots(0)
    one.wait()
    assert one.signs().ready
    one.memory.used_by = Future()
    assert not one.signs().ready
    one.memory.used_by.set_result(None)
    assert one.signs().ready


def test_one_rank_that_fails_drops_it_on_all_and_leaves_nothing(two: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(module, "write_direct", refuse)
    two.begin(10)
    landed = two.beat()
    monkeypatch.undo()
    assert all(landing is not None and not landing.committed for landing in landed)
    two.ranks[0].thread.submit(int).result()
    assert os.listdir(two.paths.ring) == []
    later = two.begin(20)
    for _ in range(3):
        two.beat()
    assert ring.names(two.paths) == [later]


def test_a_commit_that_fails_drops_it_on_all(two: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(ring, "commit", refuse)
    two.begin(10)
    assert two.beat() == two.beat() == [None, None]
    landed = two.beat()
    assert [landing and landing.committed for landing in landed] == [False, False]
    assert ring.names(two.paths) == []


def test_a_state_that_outgrows_its_room_on_one_rank_is_dropped_on_all_and_fits_the_next_time(two: TwoRanks) -> None:
    two.begin(10)
    for _ in range(3):
        two.beat()
    larger = Image(two.image.shared, ["x" * 300_000, {"$tensor": "l"}], two.image.shared_tensors, {"l": torch.ones(2)})
    images = [two.image, larger]
    names = {start(one, image, 20) for one, image in zip(two.ranks, images, strict=True)}
    assert len(names) == 1
    landed = two.beat()
    assert [landing is not None and not landing.committed for landing in landed] == [True, True]
    assert "what is kept has grown" in str(landed[1].fault)  # type: ignore[union-attr]
    assert [one.memory.outgrown for one in two.ranks] == [True, True], "all ranks make room, or none would agree on it"
    two.beat()
    assert not any(one.ready for one in two.ranks), "there is none yet"
    for one, image in zip(two.ranks, images, strict=True):
        one.fit_memory(image)
        one.memory.use_slots(0)
    two.beat()
    assert all(one.ready for one in two.ranks)
    for one, image in zip(two.ranks, images, strict=True):
        start(one, image, 30)
    for _ in range(3):
        landed = two.beat()
    assert [landing is not None and landing.committed for landing in landed] == [True, True]
    assert ring.names(two.paths) == ["c000000-s00000010", "c000002-s00000030"]


def test_ranks_that_were_ready_for_another_slot_are_not_ready_for_one_that_is_released_then(tmp_path: Path) -> None:
    """A checkpoint lands and evicts an older one in the very step in which the next snapshot is due."""
    tier = slots.tier_of(tmp_path, "0123456789abcdef")
    slots.claim(tier, tmp_path / "run")
    fast = [FastTier(tier, rank, leads=rank == 0, here=[0, 1], taken=[0]) for rank in (0, 1)]
    two = TwoRanks(tmp_path / "run", fast)
    for one in two.ranks:
        one.memory.use_slots(4)
    two.begin(10)  # into slot 1
    for _ in range(3):
        two.beat()
    for one in fast:
        one.wait(30)
    two.beat()
    assert all(one.ready for one in two.ranks), "for slot 2"
    for one in fast:
        one.release(0)
    assert not any(one.ready for one in two.ranks)
    two.begin(20)
    for _ in range(3):
        landed = two.beat()
    two.close()
    assert [landing is not None and landing.committed for landing in landed] == [True, True]
    slots.require_committed(tier, 0, (0, 1))


def test_only_one_is_in_flight(two: TwoRanks) -> None:
    two.begin(10)
    with pytest.raises(RuntimeError, match="in flight"):
        two.begin(20)


def test_a_bug_of_ours_is_not_taken_for_a_refusing_disk(two: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(module, "write_direct", bug)
    two.begin(10)
    with pytest.raises(AssertionError, match="ours"):
        two.beat()


class Replicas(TwoRanks):
    """The model is the same on both ranks, and each stores one of its two parameters."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.models = [[torch.arange(6.0), torch.ones(6)] for _ in range(2)]
        self.images = [
            Image({}, {}, {f"shared/model/{number}": item for number, item in enumerate(model)}, {})
            for model in self.models
        ]

    def begin(self, step: int) -> str:
        for one, image in zip(self.ranks, self.images, strict=True):
            if not one.ready:
                one.await_ready(image)
        for one, image in zip(self.ranks, self.images, strict=True):
            name = start(one, image, step)
        return name

    def land(self) -> Landing:
        return next(landing for landing, _ in iter(self.beat, None) if landing is not None)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    two = Replicas(tmp_path / "run")
    yield two
    two.close()


@pytest.mark.parametrize("mode", ["overlapped", "at_once", "held"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_bit_that_differs_is_found_whichever_rank_stores_the_parameter(
    replicas: Replicas, mode: CaptureMode, number: int
) -> None:
    for one in replicas.ranks:
        one.mode = mode
    replicas.begin(10)
    assert replicas.land().committed
    replicas.models[1][number].view(torch.int32)[3] ^= 1
    replicas.begin(20)
    landing = replicas.land()
    assert not landing.committed
    assert landing.drifted == (0, 1), "of two, none is the majority"
    assert all(one.drifted for one in replicas.ranks)


def test_a_parameter_that_another_rank_stores_must_not_move_before_it_is_digested(replicas: Replicas) -> None:
    replicas.begin(10)
    for item in replicas.models[1]:
        item.add_(1.0)
    landing = replicas.land()
    assert (landing.committed, landing.drifted) == (False, ())
    assert "outside of optimizer.step() while they were copied" in str(landing.fault)
    for item in replicas.models[1]:
        item.sub_(1.0)
    assert {one.mode for one in replicas.ranks} == {"held"}
    name = replicas.begin(20)
    replicas.models[1][0].add_(1.0)
    assert replicas.land().committed
    assert ring.names(replicas.paths) == [name]
