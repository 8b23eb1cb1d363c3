"""The pulse: what one rank's beat says, and that ranks that reduce theirs read the same."""

import functools
import gc
import itertools
import math
import operator
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_ranks import in_two_ranks
from torch import Tensor

from rollback.train.comm.beat import (
    FIELDS,
    NO_GAUGES,
    SCALARS,
    SHARD_REPORT,
    Beat,
    GaugeFields,
    Gauges,
    HostFields,
    Signs,
    beat_of,
    read_beat,
)  # fmt: skip
from rollback.train.comm.pulse import Pulse
from rollback.train.comm.ranks import Ranks
from rollback.train.snapshots import drift

numbers = st.none() | st.floats(width=32)
signs = st.builds(Signs, *[st.booleans()] * 5)


def scalar(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value)


def same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def expected(values: list[float | None]) -> float | None:
    """Of all ranks: NaN if any is, else infinite if any is, else the mean of those that are there."""
    present = [value for value in values if value is not None]
    if any(math.isnan(value) for value in present):
        return math.nan
    if any(math.isinf(value) for value in present):
        return math.inf
    return sum(present) / len(present) if present else None


def reduce(
    rows: list[tuple[float | None, float | None, Signs]], on_device: bool, gauges: list[Gauges] | None = None
) -> Beat:
    """The beat that ranks with these rows would read, without a process group: composed by each, then summed.

    Who is ailing is what each rank says of itself: the last collective of `read` sums up just that, and the one before
    it, of a device, what of its vector is finite.
    """
    total, pulses = torch.zeros(FIELDS, dtype=torch.float64), []
    for rank, (loss, grad_norm, said) in enumerate(rows):
        ranks = Ranks()
        ranks.world_size, ranks.rank = len(rows), rank
        pulses.append(Pulse(ranks, torch.device("cpu")))
        compose = pulses[-1]._compose_on_device if on_device else pulses[-1]._compose_on_host
        row = compose(scalar(loss), scalar(grad_norm), said, gauges[rank] if gauges else NO_GAUGES)
        total += torch.as_tensor(row, dtype=torch.float64)
    if on_device and not math.isfinite(sum(total[:SCALARS].tolist())):
        total = torch.stack([pulse._sum_without_ill(total) for pulse in pulses]).sum(0)
    beat = read_beat(total, len(rows))
    beat.nonfinite_ranks = tuple(rank for pulse in pulses for rank in pulse._nonfinite_ranks(beat))
    return beat


@pytest.mark.parametrize("on_device", [False, True])
@given(rows=st.lists(st.tuples(numbers, numbers, signs), min_size=1, max_size=5))
def test_a_beat_says_what_the_ranks_said(on_device: bool, rows: list[tuple[float | None, float | None, Signs]]) -> None:
    beat = reduce(rows, on_device)
    losses, norms = [row[0] for row in rows], [row[1] for row in rows]
    for read, values in ((beat.loss, losses), (beat.grad_norm, norms)):
        mean = expected(values)
        assert same(read, mean) or math.isclose(read or 0.0, mean or 0.0, rel_tol=1e-12, abs_tol=1e-300)
    ill = [[value is not None and not math.isfinite(value) for value in values] for values in (losses, norms)]
    named = ill[0] if any(ill[0]) else ill[1]
    assert beat.nonfinite_ranks == tuple(rank for rank, is_ill in enumerate(named) if is_ill)
    assert beat.stop == any(said.stop for *_, said in rows)
    assert beat.scaler_skipped == any(said.scaler_skipped for *_, said in rows)
    assert beat.committed == sum(said.committed for *_, said in rows)
    assert beat.shard_written == sum(said.shard_written for *_, said in rows)
    assert beat.shard_failed == sum(said.shard_failed for *_, said in rows)


@given(rows=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=2))
def test_survivors_read_of_what_devices_have_sent_what_the_group_would_have_read(
    rows: list[tuple[float | None, float | None]],
) -> None:
    sent = []
    for loss, norm in rows:
        pulse = Pulse(Ranks(), torch.device("cpu"))
        pulse._compose_on_device(scalar(loss), scalar(norm), Signs())
        sent.append(bytes(pulse._sent.numpy()))  # type: ignore[union-attr]
    found, whole = beat_of(sent), reduce([(*row, Signs()) for row in rows], on_device=True)
    assert found is not None
    assert same(found.loss, whole.loss)
    assert same(found.grad_norm, whole.grad_norm)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_number_of_the_host_arrives_as_a_scalar_of_the_device_does(on_device: bool) -> None:
    told = [Gauges(scale=0.5, clip_factor=0.25), Gauges(scale=torch.tensor(1.5), clip_factor=torch.tensor(0.75))]
    beat = reduce([(1.0, None, Signs())] * 2, on_device, told)
    assert (beat.loss, beat.scale, beat.clip_factor, beat.measured) == (1.0, 1.0, 0.5, None)


def beat_from(losses: Sequence[float]) -> Beat | None:
    """By what ranks with these losses have sent."""
    sent = []
    for loss in losses:
        pulse = Pulse(Ranks(), torch.device("cpu"))
        pulse._compose_on_host(torch.tensor(loss, dtype=torch.float64), None, Signs())
        sent.append(bytes(pulse._sent))  # type: ignore[arg-type]
    return beat_of(sent)


multiples = st.builds(lambda whole, power: whole * 2.0**power, st.integers(-99, 99), st.sampled_from([-3, 0, 60]))


@given(st.lists(multiples | st.floats(-1e20, 1e20), min_size=3, max_size=5))
def test_what_survivors_read_is_the_sum_in_whatever_order_the_group_adds_it_up(losses: list[float]) -> None:
    beat = beat_from(losses)
    means = {functools.reduce(operator.add, order) / len(losses) for order in itertools.permutations(losses)}
    assert beat is None or {beat.loss} == means


@pytest.mark.parametrize(
    ("losses", "known"),
    [
        ([0.0, 0.0, 0.0], True),
        ([0.5, 0.25, 3.0], True),
        ([2.0**60, 2.0**60, 2.0**62], True),
        ([2.0**52, 1.0, 1.0], True),
        ([0.125, 0.125, 2.0**49], True),
        ([2.0**53, 1.0, 1.0], False),
        ([2.0**51, 0.25, 0.5], False),
        ([3 * 2.0**52, 3.0, 3.0], False),
        ([1 + 2.0**-40] * 3, True),
        ([-(2.0**53), 1.0, 2.0**53], False),
        ([2.0**53, 0.1], True),
    ],
)
def test_survivors_know_a_sum_of_three_only_where_it_is_exact(losses: list[float], known: bool) -> None:
    assert (beat_from(losses) is not None) is known


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_that_overflow_together_are_infinite_for_survivors_too(ranks: int) -> None:
    beat = beat_from([2.0**1023] * ranks)
    assert beat is not None
    assert beat.loss == math.inf


def a_value_of(kind: type) -> float:
    return 0.5 if kind is float else kind(True)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("field", fields(HostFields), ids=lambda field: field.name)
def test_each_field_of_the_table_arrives_at_its_own_place_and_no_other(field: Field[Any], on_device: bool) -> None:
    """Three ranks, of which two say it: so any, two, or two thirds of what they say."""
    kind = type(field.default)
    said = Signs(**{field.name: a_value_of(kind)})
    beat = reduce([(None, None, said), (None, None, Signs()), (None, None, said)], on_device)
    expected_of: dict[type, float] = {bool: True, int: 2, float: 1 / 3}
    assert beat == Beat(**{field.name: expected_of[kind]})
    assert type(getattr(beat, field.name)) is kind


ROOTS = {"grad_norm": "squares", "measured": "measured_squares"}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("field", fields(GaugeFields), ids=lambda field: field.name)
def test_each_gauge_is_the_mean_over_the_ranks_that_have_one(field: Field[Any], on_device: bool) -> None:
    given = [Gauges(**{field.name: scalar(value)}) for value in (3.0, None, math.nan, 4.0)]
    rows = [(None, None, Signs())] * len(given)
    norm = {name: math.sqrt(3.5) for name, of in ROOTS.items() if of == field.name}
    assert reduce(rows, on_device, given) == Beat(**{field.name: 3.5, **norm})


def test_what_a_rank_with_a_part_of_the_gradients_does_not_know_of_clipping_needs_no_further_sum() -> None:
    """Else there would be one in each step, on a device."""
    total = torch.zeros(FIELDS, dtype=torch.float64)
    for kept in (math.nan, 0.25, 0.75):
        gauges = Gauges(clip_factor=scalar(kept), measured_squares=scalar(12.0))
        total += torch.as_tensor(Pulse(Ranks(), torch.device("cpu"))._compose_on_device(None, None, Signs(), gauges))
    assert math.isfinite(sum(total.tolist()))
    beat = read_beat(total, 3)
    assert (beat.clip_factor, beat.measured) == (0.5, math.sqrt(12.0))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_share_of_clipping_that_is_infinite_is_left_out_of_the_mean_of_sharded_gradients_too(on_device: bool) -> None:
    given = [Gauges(clip_factor=scalar(kept), measured_squares=scalar(12.0)) for kept in (math.inf, math.nan, 0.5)]
    assert reduce([(None, None, Signs())] * 3, on_device, given).clip_factor == 0.5


@pytest.mark.parametrize("on_device", [False, True])
def test_the_norm_of_sharded_gradients_is_the_root_of_all_squares_and_none_where_a_part_is_not_finite(
    on_device: bool,
) -> None:
    """Two ranks with half of the squares each, times two."""
    given = [Gauges(squares=scalar(value)) for value in (2 * 9.0, 2 * 16.0)]
    assert reduce([(None, scalar(norm), Signs()) for norm in (3.0, 4.0)], on_device, given).grad_norm == 5.0
    broken = [Gauges(squares=scalar(value)) for value in (2 * 9.0, math.nan)]
    beat = reduce([(None, scalar(norm), Signs()) for norm in (3.0, math.nan)], on_device, broken)
    assert beat.grad_norm is not None
    assert math.isnan(beat.grad_norm)
    assert beat.nonfinite_ranks == (1,)


@pytest.mark.parametrize("on_device", [False, True])
def test_numbers_of_different_types_arrive_as_they_are(on_device: bool) -> None:
    pulse = Pulse(Ranks(), torch.device("cpu"))
    compose = pulse._compose_on_device if on_device else pulse._compose_on_host
    whole, half = torch.tensor(2**24 + 1), torch.tensor([0.5], dtype=torch.float16)
    row = torch.as_tensor(compose(whole, half, Signs(), NO_GAUGES), dtype=torch.float64)
    beat = read_beat(row, 1)
    assert (beat.loss, beat.grad_norm) == (2.0**24 + 1, 0.5)


def test_a_beat_is_as_long_for_any_number_of_ranks() -> None:
    ranks = Ranks()
    ranks.world_size = 100_000
    pulse = Pulse(ranks, torch.device("cpu"))
    for compose in (pulse._compose_on_host, pulse._compose_on_device):
        assert len(compose(scalar(math.nan), scalar(1.0), Signs())) == FIELDS


@pytest.mark.parametrize("on_device", [False, True])
def test_shard_reports_arrive_as_one_row_for_each_rank(on_device: bool) -> None:
    total, reports = torch.zeros(FIELDS + 3 * SHARD_REPORT, dtype=torch.float64), []
    for rank in range(3):
        ranks = Ranks()
        ranks.world_size, ranks.rank = 3, rank
        reports.append(tuple(2**53 - 1 - rank - place for place in range(SHARD_REPORT)))
        pulse = Pulse(ranks, torch.device("cpu"))
        compose = pulse._compose_on_device if on_device else pulse._compose_on_host
        total += compose(None, None, Signs(shard_report=reports[-1]))
    read = read_beat(total, 3).shard_reports
    assert read is not None
    assert read.tolist() == [list(report) for report in reports]
    assert read_beat(total[:FIELDS], 3).shard_reports is None


def test_the_shard_reports_of_a_hundred_thousand_ranks_make_no_object_for_each_rank() -> None:
    ranks = Ranks()
    ranks.world_size = 100_000
    pulse = Pulse(ranks, torch.device("cpu"))
    pulse.send(None, None, Signs(shard_report=(1,) * SHARD_REPORT))
    gc.collect()
    before = sys.getallocatedblocks()
    beat = pulse.read()
    assert sys.getallocatedblocks() - before < 1000
    assert beat.shard_reports is not None
    assert beat.shard_reports.shape == (100_000, SHARD_REPORT)
    assert drift.differing(beat.shard_reports[1:, 6]) == ()


def test_one_process_reads_its_own_beat() -> None:
    pulse = Pulse(Ranks(), torch.device("cpu"))
    assert not pulse.under_way
    with pytest.raises(RuntimeError, match="no beat"):
        pulse.read()
    pulse.send(torch.tensor(2.0), None, Signs(stop=True))
    assert pulse.under_way
    beat = pulse.read()
    assert (beat.loss, beat.grad_norm, beat.stop, beat.nonfinite_ranks) == (2.0, None, True, ())
    assert not pulse.under_way


class _Backend:
    """In place of a backend: a thread that lets go of a tensor a moment after its collective is over, as gloo's may."""

    def __init__(self, done_after: float, held_for: float) -> None:
        self.done_after, self.held_for = done_after, held_for
        self.threads: list[threading.Thread] = []
        self.done = threading.Event()
        self.released = threading.Event()

    def all_reduce(self, tensor: Tensor, async_op: bool) -> "_Backend":
        assert async_op
        held = [tensor.view(-1)]  # its base holds the tensor below Python

        def work() -> None:
            time.sleep(self.done_after)
            self.done.set()
            time.sleep(self.held_for)
            self.released.set()
            held.clear()

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        return self

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()


@pytest.mark.parametrize("read", [False, True])
def test_when_it_is_closed_nothing_of_a_beat_is_under_way_or_held(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, ranks = _Backend(0.05, 0.1), Ranks()
    ranks.distributed = True
    monkeypatch.setattr("rollback.train.comm.pulse.dist.all_reduce", backend.all_reduce)
    pulse = Pulse(ranks, torch.device("cpu"))
    pulse.send(torch.tensor(2.0), None, Signs())
    if read:
        pulse.read()
    pulse.close()
    assert backend.released.is_set(), "an interpreter that ends now would wait for this thread for ever"
    assert not pulse.under_way
    pulse.close()
    backend.threads[0].join()


RANK = """
import json, math, sys, torch, torch.distributed as dist
from datetime import timedelta
from rollback.train.comm.beat import SHARD_REPORT, Signs
from rollback.train.comm.pulse import Pulse
from rollback.train.comm.ranks import Ranks
dist.init_process_group("gloo", timeout=timedelta(seconds=77))
ranks = Ranks()
losses = [[1.0, 3.0], [math.nan, 1.0], [1.0, math.inf], [None, 4.0]]
read = {1: [], 2: []}
for ranks.host_count in read:
    pulse = Pulse(ranks, torch.device("cpu"))
    assert (pulse._shared is None) == (ranks.host_count > 1)
    assert pulse._shared is None or pulse._shared._patience == 77
    for loss in losses:
        mine = None if loss[ranks.rank] is None else torch.tensor(loss[ranks.rank])
        report = (ranks.rank,) * SHARD_REPORT if loss[0] is None else None
        pulse.send(mine, torch.tensor(1.0 + ranks.rank), Signs(stop=ranks.rank == 1, shard_report=report))
        beat = pulse.read()
        reports = None if beat.shard_reports is None else beat.shard_reports.tolist()
        read[ranks.host_count].append([repr(beat.loss), beat.grad_norm, list(beat.nonfinite_ranks), beat.stop, reports])
    pulse.close()
    pulse.close()
texts = ranks.from_each("x" * (3 * ranks.rank) + "é")
between = ranks.exchanged(["ü", ranks.rank], [0, 1]), ranks.exchanged(1, [ranks.rank])
assert between == ({1 - ranks.rank: ["ü", 1 - ranks.rank]}, {})
print(json.dumps([read[1], read[2], texts, ranks.from_first({"from": ranks.rank}), ranks.all_of(ranks.rank == 0)]))
dist.destroy_process_group()
"""


def test_two_ranks_read_the_same() -> None:
    first, second = in_two_ranks(RANK)
    assert first == second
    beats, of_hosts, texts, from_first, all_of = first
    assert beats == of_hosts
    assert [beat[0] for beat in beats] == ["2.0", "nan", "inf", "4.0"]
    assert [beat[2] for beat in beats] == [[], [0], [1], []]
    assert all(beat[1] == 1.5 and beat[3] for beat in beats)
    assert [beat[4] for beat in beats] == [None, None, None, [[0] * SHARD_REPORT, [1] * SHARD_REPORT]]
    assert (texts, from_first, all_of) == (["é", "xxxé"], {"from": 0}, False)
