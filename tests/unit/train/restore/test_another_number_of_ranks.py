"""Going on with another number of ranks, and with a data set of another length: which samples come then."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from rollback.errors import RunDoesNotFit
from rollback.rundir.identity import JobIdentity, require_same_job
from rollback.rundir.paths import RunPaths
from rollback.train.data import rng
from rollback.train.data.cursor import Cursor, cursor_for
from rollback.train.restore.reader import local_for, source_of

GLOBAL = 8  # samples in a batch of all ranks together
WORLDS = (1, 2, 4, 8)


class Numbers(Dataset[int]):
    """Sample i is i. With `noise`, reading it draws."""

    def __init__(self, length: int, noise: bool = False) -> None:
        self.length = length
        self.noise = noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return (index, random.random()) if self.noise else index


def cursors(length: int, ranks: int, *, shuffle: bool = True, drop_last: bool = False) -> list[Cursor]:
    """One for each rank, of a job that takes `GLOBAL` samples a batch."""
    made = []
    for rank in range(ranks):
        data = Numbers(length)
        sampler: DistributedSampler[int] = DistributedSampler(data, ranks, rank, shuffle=shuffle, drop_last=drop_last)
        made.append(cursor_for(DataLoader(data, GLOBAL // ranks, sampler=sampler, drop_last=drop_last)))
    return made


def take(ranks: list[Cursor], batches: int) -> list[tuple[int, ...]]:
    """The samples of so many batches, of all ranks together, over the ends of epochs."""
    taken = []
    while len(taken) < batches:
        for cursor in ranks:
            if not cursor.opened:
                cursor.open_epoch()
        try:
            shares = [cursor.next().tolist() for cursor in ranks]
            taken.append(tuple(sorted(index for share in shares for index in share)))
        except StopIteration:
            for cursor in ranks[1:]:
                with pytest.raises(StopIteration):
                    cursor.next()
    return taken


def local_states(ranks: list[Cursor]) -> list[dict[str, Any]]:
    return [{"buffers": {}, "random": rng.capture(), "cursor": cursor.state_dict()} for cursor in ranks]


def hand_over(states: list[dict[str, Any]], ranks: list[Cursor]) -> None:
    """What a restore does on every rank."""
    for rank, cursor in enumerate(ranks):
        cursor.load_state_dict(local_for(states[source_of(rank, len(states))], rank, len(states))["cursor"])


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(GLOBAL, 200), worlds=st.lists(st.sampled_from(WORLDS), min_size=2, max_size=5),
    stretch=st.integers(0, 30), shuffle=st.booleans(), drop_last=st.booleans(),
)  # fmt: skip
def test_every_batch_of_all_ranks_together_is_the_same_whatever_their_number(
    length: int, worlds: list[int], stretch: int, shuffle: bool, drop_last: bool
) -> None:
    """Through any chain of worlds. Only an epoch's last batch differs, in what the sampler pads it with."""
    options = {"shuffle": shuffle, "drop_last": drop_last}
    (alone,) = cursors(length, 1, **options)
    counts = {cursors(length, world, **options)[0].describe()["batches"] for world in worlds}
    assert counts == {alone.describe()["batches"]}, "another number of batches in an epoch would be refused"
    expected = take([alone], len(worlds) * stretch)
    ranks = cursors(length, worlds[0], **options)
    seen = take(ranks, stretch)
    for world in worlds[1:]:
        states = local_states(ranks)
        ranks = cursors(length, world, **options)
        hand_over(states, ranks)
        seen += take(ranks, stretch)
    for found, should in zip(seen, expected, strict=True):
        assert found == should or (len(should) < GLOBAL and set(should) <= set(found))


def test_an_order_that_is_another_one_is_refused() -> None:
    ranks = cursors(100, 2)
    take(ranks, 5)
    states = local_states(ranks)
    other = cursors(100, 4)
    for cursor in other:
        cursor._index_sampler.sampler.seed = 1  # type: ignore[attr-defined]
    with pytest.raises(RunDoesNotFit, match="other indices come before it"):
        hand_over(states, other)


# --- what was each rank's own -----------------------------------------------------------------------------------------


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_a_rank_that_was_there_goes_on_drawing_and_a_new_one_draws_its_own() -> None:
    states = []
    for rank in range(2):
        rng.seed_all(f"rank {rank}")
        states.append(local_states(cursors(50, 2))[rank])
    before = rng.capture()
    adopted = [local_for(states[source_of(rank, 2)], rank, 2) for rank in range(4)]
    again = [local_for(states[source_of(rank, 2)], rank, 2) for rank in range(4)]
    assert torch.equal(before["torch"], rng.capture()["torch"]), "deriving draws"
    seen = []
    for first, second in zip(adopted, again, strict=True):
        rng.restore(first["random"])
        seen.append(draws())
        rng.restore(second["random"])
        assert draws() == seen[-1]
    assert len({value for drawn in seen for value in drawn}) == 12, "two ranks draw alike"
    rng.restore(states[1]["random"])
    assert draws() == seen[1]


def test_a_new_rank_has_states_of_its_own_also_where_the_gpu_of_the_run_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    of_gpu = {**rng.capture(cuda=False), "cuda": [torch.zeros(16, dtype=torch.uint8)], "device": 0}
    rng.restore(rng.derived(of_gpu, "rank 1"))
    drawn = draws()
    rng.restore(rng.derived({**of_gpu, "cuda": []}, "rank 1"))
    assert draws() == drawn


def test_data_workers_of_a_new_rank_have_seeds_of_their_own() -> None:
    def with_workers(rank: int, ranks: int, persistent: bool) -> Cursor:
        data = Numbers(64, noise=True)
        sampler: DistributedSampler[int] = DistributedSampler(data, ranks, rank)
        size = GLOBAL // ranks
        return cursor_for(DataLoader(data, size, sampler=sampler, num_workers=1, persistent_workers=persistent))

    for persistent in (False, True):
        torch.manual_seed(3)
        states = []
        for rank in range(2):
            cursor = with_workers(rank, 2, persistent)
            cursor.open_epoch()
            states.append({"buffers": {}, "random": rng.capture(), "cursor": cursor.state_dict()})
        seeds = set()
        for rank in range(4):
            cursor = with_workers(rank, 4, persistent)
            cursor.load_state_dict(local_for(states[source_of(rank, 2)], rank, 2)["cursor"])
            seeds.add(cursor._base_seed)  # type: ignore[attr-defined]
        assert len(seeds) == 4


# --- who is let in ----------------------------------------------------------------------------------------------------


def job(ranks: int, **data: Any) -> JobIdentity:
    shared_out = {
        "kind": "map-style", "length": 100, "batch_size": 8 // ranks, "drop_last": False,
        "sampler": "DistributedSampler", "batches": 13,
    }  # fmt: skip
    return JobIdentity(
        world_size=ranks, model=[("w", "float32", [2])], optimizer={"class": "SGD", "groups": [1]}, objects=[],
        data={**shared_out, **data},
    )  # fmt: skip


def admit(recorded: JobIdentity, present: JobIdentity, **options: Any) -> Any:
    return require_same_job(RunPaths(Path("runs/train")), recorded, present, **options)


@pytest.mark.parametrize(("then", "now"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 8), (8, 1)])
def test_another_number_of_ranks_over_the_same_batches_is_let_in_and_said(then: int, now: int) -> None:
    (fact,) = admit(job(then), job(now))
    assert (fact.what, fact.before["world_size"], fact.after["world_size"]) == ("ranks", then, now)
    assert f"world size {then} -> {now}" in fact.in_words()
    assert admit(job(then), job(then)) == []


@pytest.mark.parametrize(
    ("present", "reason"),
    [
        (job(4, batch_size=4), "a batch had 2 x 4 samples and would have 4 x 4"),
        (job(4, sampler="RandomSampler"), "needs a map-style DataLoader with torch's DistributedSampler"),
        (job(4, shares=2), "of 4 ranks, 2 read batches of their own, and the others the same ones"),
        (job(4, kind="stateful"), "needs a map-style DataLoader with torch's DistributedSampler"),
        (job(4, batch_size=None), "needs a loader with a batch size"),
        (job(4, batches=12), "data, batches: the run has 13, this job 12"),
        (job(4, length=101), "data, length: the run has 100, this job 101"),
        (job(4).model_copy(update={"model": [("w", "float32", [3])]}), "model: 'w'"),
    ],
    ids=["global batch", "sampler", "same batches", "kind", "no batch size", "batches", "length", "model"],
)
def test_another_number_of_ranks_that_would_train_on_other_batches_is_refused(
    present: JobIdentity, reason: str
) -> None:
    with pytest.raises(RunDoesNotFit, match="belongs to another job") as refused:
        admit(job(2), present)
    assert reason in str(refused.value)
    assert "the run has 2 ranks, this job 4" in str(refused.value) or "ranks" not in reason


def test_another_length_is_let_in_on_demand_only() -> None:
    grown = job(2, length=101, batches=14)
    with pytest.raises(RunDoesNotFit) as refused:
        admit(job(2), grown)
    assert "--accept-data-change" in (refused.value.hint or "")
    (fact,) = admit(job(2), grown, accept_data_change=True)
    assert (fact.what, fact.before, fact.after) == (
        "data", {"length": 100, "batches": 13}, {"length": 101, "batches": 14},
    )  # fmt: skip
    with pytest.raises(RunDoesNotFit):
        admit(job(2), job(2, length=101, batch_size=5), accept_data_change=True)


@pytest.mark.parametrize(
    "present",
    [
        job(2, length=101, batch_size=5),
        job(2, length=101).model_copy(update={"model": [("w", "float32", [3])]}),
        job(4, length=101, batch_size=4),
        job(2, length=101).model_copy(update={"objects": ["ema"]}),
    ],
    ids=["batch size", "model", "ranks", "objects"],
)
def test_to_accept_other_data_is_not_recommended_where_it_would_be_refused_all_the_same(present: JobIdentity) -> None:
    with pytest.raises(RunDoesNotFit) as refused:
        admit(job(2), present)
    assert "--accept-data-change" not in (refused.value.hint or "")


def test_to_accept_other_data_is_recommended_beside_a_number_of_ranks_that_fits() -> None:
    with pytest.raises(RunDoesNotFit) as refused:
        admit(job(2, batch_size=4), job(4, batch_size=2, length=101, batches=14))
    assert "--accept-data-change" in (refused.value.hint or "")
    assert admit(job(2, batch_size=4), job(4, batch_size=2, length=101, batches=14), accept_data_change=True)


# --- a data set of another length ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(20, 60), st.integers(20, 60), st.integers(0, 12), st.booleans())
def test_a_data_set_of_another_length_keeps_the_position_and_has_the_new_order_from_there(
    then: int, now: int, batches: int, shuffle: bool
) -> None:
    """The same as a run that had the new data from the start of this epoch has at this position."""
    assume(batches * 4 <= then)

    def cursor_of(length: int) -> Cursor:
        torch.manual_seed(9)
        return cursor_for(DataLoader(Numbers(length), 4, shuffle=shuffle))

    cursor, fresh = cursor_of(then), cursor_of(now)
    rng_at_opening = rng.capture()
    cursor.open_epoch()
    for _ in range(batches):
        cursor.next()
    rng.restore(rng_at_opening)
    fresh.open_epoch()
    changed = cursor_of(now)
    changed.accepts_other_length = True
    changed.load_state_dict(cursor.state_dict())
    assert (changed.batch, changed.offset) == (batches, batches)
    expected = []
    for place in range(1000):
        try:
            found = fresh.next().tolist()
        except StopIteration:
            break
        expected += [found] if place >= batches else []
    seen = []
    while True:
        try:
            seen.append(changed.next().tolist())
        except StopIteration:
            break
    assert seen == expected


def test_a_new_rank_begins_with_the_kept_values_of_its_source() -> None:
    (cursor,) = cursors(GLOBAL, 1)
    cursor.open_epoch()
    local = {"buffers": {}, "random": rng.capture(), "cursor": cursor.state_dict(), "kept": {"best": 0.5}}
    assert [local_for(local, rank, 1)["kept"] for rank in (0, 1)] == [{"best": 0.5}] * 2


def test_a_rank_that_is_added_draws_by_a_generator_of_the_script_as_the_script_made_it() -> None:
    kept = {"generator noise": {"state": "drawn"}, "best": 1.0}
    cursor = {"base_seed": None, "opening": None}
    local = {"random": rng.capture(), "cursor": cursor, "kept": kept}
    assert local_for(local, 1, 2)["kept"] == kept
    assert local_for(local, 3, 2)["kept"] == {"best": 1.0}
