"""Replicas that differ: who is named, and that a single bit shows."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollback.train.comm.ranks import Ranks
from rollback.train.snapshots import drift
from rollback.train.snapshots.capture import share_of
from rollback.train.snapshots.in_flight import ShardReport, ShardReports, Written
from rollback.train.state.image import Image


@pytest.mark.parametrize(
    ("digests", "named"),
    [
        ([7], ()),
        ([7, 7, 7], ()),
        ([7, 8], (0, 1)),
        ([7, 7, 8], (2,)),
        ([8, 7, 7, 9], (0, 1, 2, 3)),
        ([8, 7, 7, 7, 9], (0, 4)),
    ],
)
def test_the_majority_names_those_that_differ(digests: list[int], named: tuple[int, ...]) -> None:
    assert drift.differing(torch.tensor(digests)) == named


def test_in_words() -> None:
    assert "rank 2 are not" in drift.in_words((2,), 4)
    assert "ranks 0, 4 are not" in drift.in_words((0, 4), 5)
    assert "parameters of ranks 0, 1 differ" in drift.in_words((0, 1), 2)
    assert "the optimizer and of objects) of ranks 0, 1 differ" in drift.in_words((0, 1), 2, drift.PLAIN)


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_folding_keeps_every_single_bit(digest: int, bit: int) -> None:
    assert 0 <= drift.narrowed(digest) < 2**drift.BITS
    assert drift.narrowed(digest) != drift.narrowed(digest ^ (1 << bit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@given(place=st.integers(0, 14), bit=st.integers(0, 7))
def test_a_changed_bit_changes_the_digest_that_a_device_makes(dtype: torch.dtype, place: int, bit: int) -> None:
    tensors = [torch.arange(15).to(dtype), torch.ones(3, dtype=dtype)]
    before = drift.on_device(tensors)
    flat = tensors[0].view(torch.uint8)
    flat[place * tensors[0].element_size()] ^= 1 << bit
    assert drift.on_device(tensors) != before


@given(st.integers(0, 40), st.integers(0, 9))
def test_the_digest_that_a_device_makes_does_not_depend_on_where_a_tensor_lies(size: int, start: int) -> None:
    memory = torch.arange(64, dtype=torch.bfloat16)
    assert drift.on_device([memory[start : start + size]]) == drift.on_device([memory[start : start + size].clone()])


@given(sizes=st.lists(st.sampled_from([0, 1, 3, 1 << 17]), max_size=50), first=st.integers(0, 10_000))
def test_all_tensors_of_objects_have_their_turn_and_no_turn_takes_long(sizes: list[int], first: int) -> None:
    tensors = {f"{place:03d}": torch.full((size, 2), place) for place, size in enumerate(sizes)}
    turns = [drift.spot_check(tensors, turn) for turn in range(first, first + 2 * len(sizes) + 1)]
    places = {int(item[0]) for turn in turns for item in turn if len(item)}
    assert places == {place for place, size in enumerate(sizes) if size}
    assert all(len(turn) <= 16 and sum(item.nbytes for item in turn) <= 4 << 20 for turn in turns)


@pytest.mark.parametrize("turn", range(7))
def test_what_the_optimizer_keeps_is_compared_too_a_few_tensors_in_turn(turn: int) -> None:
    """Ranks that average parameters every few updates, and no gradients, have the same ones then."""
    kept = ("exp_avg", "exp_avg_sq", "step")
    tensors = {f"shared/optimizer/state/{place}/{name}": torch.ones(2) for place in range(5) for name in kept}
    tensors |= {"shared/model/weight": torch.ones(2), "shared/objects/average/weight": torch.ones(2)}
    two = cast(Ranks, SimpleNamespace(rank=0, world_size=2, is_rank_0=True))
    share = share_of(Image({}, {}, tensors, {}, {}, {}), two, turn=turn)
    assert [*share.replicas] == ["shared/model/weight"]
    names = [name for item in share.spot_check for name, one in tensors.items() if one.data_ptr() == item.data_ptr()]
    assert "shared/objects/average/weight" in names
    assert len(names) == 4
    assert any("exp_avg" in name for name in names)


@given(st.integers(8, 2**52), st.integers(0, 2**128 - 1), *[st.integers(0, 2**52 - 1)] * 3)
def test_a_shard_report_arrives_as_it_was_written_through_floats(
    size: int, number: int, digest: int, place: int, held: int
) -> None:
    report = ShardReport(Written(size, f"{number:032x}"), digest, part=(place, held), spot_check=held)
    arrived = ShardReports(torch.tensor([report.words()], dtype=torch.float64).long())
    assert [shard.written for shard in arrived.shards()] == [report.written]
    assert (arrived.digests.tolist(), arrived.parts.tolist()) == ([digest], [[place, held]])
    assert arrived.spot_checks.tolist() == [held]


@pytest.mark.parametrize(
    ("digests", "ranks"),
    [
        ([(0, 0), (0, 0)], ()),
        ([(1, 7), (2, 8), (1, 7), (2, 8)], ()),
        ([(1, 7), (2, 8), (1, 7), (2, 9)], (1, 3)),
        ([(1, 7), (1, 7), (1, 6), (2, 8)], (2,)),
        ([(1, 7), (1, 6), (2, 8), (2, 9)], (0, 1, 2, 3)),
    ],
)
def test_only_ranks_with_the_same_part_are_compared(digests: list[tuple[int, int]], ranks: tuple[int, ...]) -> None:
    assert drift.differing_parts(torch.tensor(digests)) == ranks
