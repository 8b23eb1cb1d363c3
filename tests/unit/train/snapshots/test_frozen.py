"""Weights that nothing trains: left out of snapshots, stored once, found again; and found out where they do change."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rollback.checkpoints.format import frozen
from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.rundir.paths import RunPaths
from rollback.sentinel import Sentinel
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.comm.ranks import Ranks
from rollback.train.data.cursor import cursor_for
from rollback.train.restore.restore import RestoreOutcome, restore
from rollback.train.snapshots import frozen as module
from rollback.train.snapshots.in_flight import Landing
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.nonfinite import FiniteCheck
from rollback.train.state.state import TrainingState

LARGE = 600  # 600 x 600 float32: more than LEAST


class Adapted(nn.Module):
    """A frozen base, whole numbers among it, with something small to train."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(LARGE, LARGE)
        self.base.requires_grad_(False)
        self.packed = nn.Parameter(torch.randint(0, 255, (64,), dtype=torch.uint8), requires_grad=False)
        self.adapter = nn.Linear(LARGE, 2)
        self.register_buffer("count", torch.zeros(3))


def state_of(model: nn.Module, **objects: object) -> TrainingState:
    trained = [item for item in model.parameters() if item.requires_grad]
    return TrainingState(model, torch.optim.AdamW(trained), objects, cursor_for([1, 2]), Sentinel("normal"))  # type: ignore[arg-type]


class OneRank:
    """Takes snapshots of a state, and puts them back."""

    def __init__(self, folder: Path) -> None:
        self.paths, self.ranks = RunPaths(folder), Ranks()
        self.paths.ring.mkdir(parents=True)
        self.snapshots = Snapshots(self.paths, self.ranks, FiniteCheck((), repr), 0, 1)

    def take(self, state: TrainingState, step: int) -> Landing:
        if self.snapshots.memory.outgrown:
            self.snapshots.fit_memory(state.image())
            self.snapshots.memory.use_slots(0)
        self.snapshots.await_ready(state.image())
        self.snapshots.start_snapshot(state.image(), step=step, batch=step, epoch=0, timeline=0)
        landing = self.snapshots.await_landing()
        assert landing is not None
        return landing

    def manifest(self, landing: Landing) -> Manifest:
        assert landing.committed, landing.fault
        return read_manifest(self.paths.checkpoint(landing.manifest.name))

    def put_back(self, landing: Landing, state: TrainingState) -> RestoreOutcome:
        name = landing.manifest.name
        return restore(name, [CheckpointPlace(self.paths.checkpoint(name), self.paths)], self.ranks, state)

    def files(self) -> list[Path]:
        return sorted(self.paths.frozen.iterdir()) if self.paths.frozen.exists() else []


@pytest.fixture
def one(tmp_path: Path) -> Iterator[OneRank]:
    one = OneRank(tmp_path / "run")
    yield one
    one.snapshots.close()


def same(state: TrainingState, other: TrainingState) -> bool:
    return all(map(torch.equal, state.model.state_dict().values(), other.model.state_dict().values()))


def flip(path: Path, place: int = -1000) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_frozen_weights_are_stored_once_and_no_snapshot_has_them(one: OneRank) -> None:
    state = state_of(Adapted())
    first, second = (one.manifest(one.take(state, step)) for step in (1, 2))
    assert first.frozen == second.frozen is not None
    (file,) = one.files()
    assert file.name == f"{first.frozen.hash}.safetensors"
    assert file.stat().st_size > LARGE * LARGE * 4
    assert first.bytes < LARGE * LARGE * 4 / 2
    with frozen.read_frozen(one.paths, first.frozen) as reader:
        assert set(reader.entries) == {"shared/model/base.weight", "shared/model/base.bias", "shared/model/packed"}


def test_a_restore_reads_the_file_only_where_the_live_weights_differ(one: OneRank) -> None:
    saved = state_of(Adapted())
    landing = one.take(saved, 1)
    back = state_of(Adapted())
    back.model.adapter.weight.data.zero_()  # type: ignore[union-attr, operator]
    (file,) = one.files()
    moved = file.rename(file.with_suffix(".away"))
    assert one.put_back(landing, back).reread == 0, "it is not there, and need not be"
    assert same(saved, back)
    moved.rename(file)
    flipped = back.model.base.weight.data  # type: ignore[union-attr]
    flipped.view(torch.int32)[3, 4] ^= 1  # type: ignore[operator, index]
    assert not same(saved, back)
    assert one.put_back(landing, back).reread == 1
    assert same(saved, back)
    other = state_of(Adapted(seed=2))
    assert one.put_back(landing, other).reread == 3
    assert same(saved, other)


def test_a_damaged_file_hurts_only_who_needs_what_is_damaged(one: OneRank) -> None:
    saved = state_of(Adapted())
    landing = one.take(saved, 1)
    (file,) = one.files()
    with frozen.read_frozen(one.paths, one.manifest(landing).frozen) as reader:  # type: ignore[arg-type]
        place = reader.entries["shared/model/base.weight"].start + 4000
    flip(file, place)
    assert one.put_back(landing, state_of(Adapted())).place is not None
    small = state_of(Adapted())
    small.model.base.bias.data.zero_()  # type: ignore[union-attr, operator]
    assert one.put_back(landing, small).reread == 1
    other = state_of(Adapted(seed=2))
    before = [item.clone() for item in other.model.parameters()]
    outcome = one.put_back(landing, other)
    assert outcome.place is None
    assert str(file) in outcome.fault.message
    assert "base.weight" in outcome.fault.message
    assert all(map(torch.equal, before, other.model.parameters())), "nothing was touched"
    file.unlink()
    assert "cannot be put back" in one.put_back(landing, other).fault.message


def write_past_the_counter(model: Adapted) -> None:
    model.base.bias.data.add_(1.0)


def assign(model: Adapted) -> None:
    model.base.bias.data = model.base.bias.data + 1.0


def unfreeze(model: Adapted) -> None:
    model.base.bias.requires_grad_(True)


def replace(model: Adapted) -> None:
    model.base.bias = nn.Parameter(torch.ones(LARGE), requires_grad=False)


@pytest.mark.parametrize("change", [write_past_the_counter, assign, unfreeze, replace])
def test_what_changes_all_the_same_is_stored_with_every_snapshot_from_then_on(
    one: OneRank, change: Callable[[Adapted], None]
) -> None:
    model = Adapted()
    state = state_of(model)
    one.take(state, 1)
    change(model)
    dropped = one.take(state, 2)
    assert not dropped.committed
    assert "'shared/model/base.bias'" in str(dropped.fault)
    assert one.snapshots.frozen.unchanged == {"shared/model/base.weight", "shared/model/packed"}
    landing = one.take(state, 3)
    manifest = one.manifest(landing)
    assert manifest.frozen is not None, "the rest is still in the file"
    assert len(one.files()) == 1
    later = one.take(state, 4)
    back = state_of(Adapted(seed=2))
    for kept in (landing, later):
        assert one.put_back(kept, back).place is not None
        assert same(state, back)


def test_what_changes_before_the_file_is_there_is_not_in_it(one: OneRank) -> None:
    model = Adapted()
    state = state_of(model)
    one.snapshots.fit_memory(state.image())
    one.snapshots.memory.use_slots(0)
    write_past_the_counter(model)
    assert not one.take(state, 1).committed
    manifest = one.manifest(one.take(state, 2))
    (file,) = one.files()
    with frozen.read_frozen(one.paths, manifest.frozen) as reader:  # type: ignore[arg-type]
        assert "shared/model/base.bias" not in reader.entries
    assert file.name.startswith(manifest.frozen.hash)  # type: ignore[union-attr]


def test_a_full_disk_puts_them_into_the_snapshots(one: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(frozen, "write_shard", refuse)
    state = state_of(Adapted())
    dropped = one.take(state, 1)
    assert "No space left" in str(dropped.fault)
    manifest = one.manifest(one.take(state, 2))
    assert manifest.frozen is None
    assert manifest.bytes > LARGE * LARGE * 4
    assert one.files() == []
    other = state_of(Adapted(seed=2))
    assert one.put_back(one.take(state, 3), other).reread == 0
    assert same(state, other)


class Tied(Adapted):
    """The base's weight is trained under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(LARGE, LARGE)
        self.other.weight.data = self.base.weight.data
        self.rows = nn.Parameter(self.packed.data[:8], requires_grad=False)


def test_what_is_tied_to_a_trained_weight_or_held_by_an_optimizer_is_not_frozen() -> None:
    tied = Tied()
    names = state_of(tied).image().frozen
    assert names == {"shared/model/base.bias", "shared/model/packed", "shared/model/rows"}
    model = Adapted()
    held = torch.optim.SGD([model.base.weight], lr=0.1)
    assert state_of(model, other=held).image().frozen == {"shared/model/base.bias", "shared/model/packed"}
    of_buffer = Adapted()
    of_buffer.count = of_buffer.base.bias.data[:3]
    assert "shared/model/base.bias" not in state_of(of_buffer).image().frozen


def test_a_few_frozen_numbers_have_no_file_of_their_own(one: OneRank) -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    assert one.manifest(one.take(state_of(model), 1)).frozen is None
    assert one.files() == []


def test_a_file_that_no_checkpoint_names_is_removed_and_one_in_quarantine_keeps_its_own(one: OneRank) -> None:
    landing = one.take(state_of(Adapted()), 1)
    manifest = one.manifest(landing)
    other = one.paths.frozen / f"{'0' * 32}.safetensors"
    half = one.paths.frozen / f".{'1' * 32}.safetensors.tmp"
    stranger = one.paths.frozen / "notes.txt"
    for path in (other, half, stranger):
        path.write_text("x")
    one.paths.quarantine.mkdir()
    directory = one.paths.checkpoint(manifest.name)
    directory.rename(one.paths.quarantine / manifest.name)
    frozen.sweep(one.paths, [])
    assert {path.name for path in one.files()} == {manifest.frozen.file, "notes.txt"}  # type: ignore[union-attr]
    (one.paths.quarantine / manifest.name).rename(directory)
    frozen.sweep(one.paths, [])
    assert [path.name for path in one.files()] == ["notes.txt"]


def test_whatever_lies_on_its_side_is_digested_as_it_is_stored() -> None:
    plain = torch.arange(12, dtype=torch.int8).reshape(3, 4)
    turned: dict[str, Tensor] = {"w": plain.t()}
    assert module.prints_of(turned) == module.prints_of({"w": plain.t().contiguous()})
