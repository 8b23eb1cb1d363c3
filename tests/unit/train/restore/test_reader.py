"""Reading a checkpoint back: with how many threads a rank hashes and reads, wherever it lies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding import fully_sharded, one_rank
from torch import nn

from hashing_threads import note_threads
from rollback.checkpoints.fast_tier import slots
from rollback.rundir.paths import RunPaths
from rollback.sentinel import Sentinel
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.comm.ranks import Ranks
from rollback.train.data.cursor import cursor_for
from rollback.train.restore import reads
from rollback.train.restore.reader import targets
from rollback.train.restore.restore import restore
from rollback.train.sharded import local_of
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.nonfinite import FiniteCheck
from rollback.train.state.state import TrainingState


def state_of(seed: int) -> TrainingState:
    torch.manual_seed(seed)
    model = nn.Linear(3, 40)
    return TrainingState(model, torch.optim.AdamW(model.parameters()), {}, cursor_for([1, 2, 3]), Sentinel("normal"))


def host(ranks: int) -> Ranks:
    """One rank that takes part, of so many that share its host."""
    one = Ranks()
    one.on_this_host = list(range(ranks))
    return one


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(6, 1, 6), (6, 4, 1), (6, 3, 2), (2, 8, 1), (64, 1, 16)])
def test_a_rank_reads_with_the_cores_that_fall_to_it(
    cores: int, ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "cores_here", lambda: cores)
    assert reads.threads_of(host(ranks)) == expected


@pytest.mark.parametrize("place", ["the ring", "a slot"])
def test_a_checkpoint_is_verified_with_all_of_them(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = None
    if place == "a slot":
        owned = slots.tier_of(tmp_path, "0123456789abcdef")
        slots.claim(owned, tmp_path)
        tier = FastTier(owned, 0, leads=True, here=[0])
    paths = RunPaths(tmp_path / "run")
    paths.ring.mkdir(parents=True)
    saved, ranks = state_of(1), Ranks()
    snapshots = Snapshots(paths, ranks, FiniteCheck((), repr), 0, 1, tier)
    snapshots.fit_memory(saved.image())
    snapshots.memory.use_slots(0 if tier is None else 1)
    snapshots.await_ready(saved.image())
    flight = snapshots.start_snapshot(saved.image(), step=7, batch=7, epoch=0, timeline=0)
    name = flight.manifest.name
    landing = snapshots.await_landing()
    assert landing is not None
    assert landing.committed

    used = note_threads(monkeypatch, cores=5)
    found = [CheckpointPlace(paths.checkpoint(name), paths)]
    if tier is not None and flight.slot is not None and (memory := tier.memory(flight.slot)) is not None:
        found = [CheckpointPlace(tier.paths.slot(flight.slot), paths, in_slot=True, memory=memory.view)]
    assert found[0].in_slot == (place == "a slot")
    back = state_of(2)
    assert restore(name, found, ranks, back).place == found[0]
    assert used == [5]
    assert all(map(torch.equal, saved.model.parameters(), back.model.parameters()))
    snapshots.close()


def test_where_each_rank_has_its_shard_alone_all_are_told_of_what_is_not_sharded_and_of_nothing_else(
    tmp_path: Path,
) -> None:
    """Of the parts of thousands of ranks each would have a list else, a thousand times as long as its own."""
    told: list[object] = []

    class OnManyHosts(Ranks):
        def from_each(self, value: Any) -> list[Any]:
            told.append(value)
            return super().from_each(value)

    def sharded(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        model = fully_sharded(nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        return TrainingState(model, optimizer, {}, cursor_for([1, 2, 3]), Sentinel("normal"))

    with one_rank():
        saved, back, ranks, paths = sharded(1), sharded(2), OnManyHosts(), RunPaths(tmp_path / "run")
        owned = slots.tier_of(tmp_path, "0123456789abcdef")
        slots.claim(owned, tmp_path)
        snapshots = Snapshots(paths, ranks, FiniteCheck((), repr), 0, 1, FastTier(owned, 0, leads=True, here=[0]))
        snapshots.fit_memory(saved.image())
        snapshots.memory.use_slots(1)
        snapshots.await_ready(saved.image())
        flight = snapshots.start_snapshot(saved.image(), step=7, batch=7, epoch=0, timeline=0)
        snapshots.await_landing()
        ranks.host_count = 2
        told.clear()
        place = CheckpointPlace(owned.slot(flight.slot or 0), paths, in_slot=True)
        assert restore(flight.manifest.name, [place], ranks, back).place == place
        texts = json.dumps(told)
        assert "shared/optimizer/state/0/step" in texts
        assert not any(word in texts for word in ("exp_avg", "shared/model/", "local/"))
        for one, other in zip(saved.model.state_dict().values(), back.model.state_dict().values(), strict=True):
            assert torch.equal(local_of(one), local_of(other))
        snapshots.close()


def test_what_an_object_keeps_is_read_to_the_device_of_its_own() -> None:
    """Who gets it may keep it, as an average of weights does, and computes with it there. `meta` stands in."""
    live = {"shared/model/weight": torch.ones(2)}
    there = torch.empty(3, device="meta")
    found = dict.fromkeys(("shared/objects/average/0", "shared/optimizer/param_groups/0/lr"), there)
    own = {"shared/optimizer/state/0/step": there, "shared/objects/second/state/0/step": nn.Parameter(there)}
    target_of = targets(live, {**found, **own, "shared/objects/other": torch.ones(3)}.get)
    assert target_of("shared/model/weight", ("F32", (2,))) is live["shared/model/weight"]
    for name in found:
        made = target_of(name, ("F32", (5,)))
        assert made is not None
        assert (made.device, made.shape) == (there.device, (5,))
    for name in (*own, "shared/objects/other", "local/kept/seen"):
        assert target_of(name, ("F32", (3,))) is None, "an optimizer puts its own in place, and the host's is the rule"


def test_the_groups_of_an_optimizer_have_a_place() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), capturable=True)
    state = TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal"))
    rate = state.places()("shared/optimizer/param_groups/0/lr")
    assert rate is not None
    assert rate.item() == 0.5
