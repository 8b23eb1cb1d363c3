"""Losses that are zero in nearly all rows: what is other than zero now and then is no divergence."""

import random

import pytest
from curves import norms, observations, verdicts

from rollback.config import Objective
from rollback.sentinel import Hint, Kind, Sentinel, Verdict


def spikes(said: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in said if verdict.kind is Kind.SPIKE]


def zeros_with_clumps(seed: int, count: int = 3000) -> list[float]:
    """A loss that is zero but for some rows now and then, about 15 in a thousand, as one of GRPO or with a hinge."""
    chance, losses, inside = random.Random(seed), list[float](), False
    for _ in range(count):
        inside = chance.random() < (0.85 if inside else 0.004)
        losses.append(round(chance.uniform(0, 0.002), 4) if inside else 0.0)
    return losses


OBJECTIVES: list[Objective] = ["auto", "supervised", "rl"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_is_other_than_zero_now_and_then_is_not_called_and_a_hundred_times_as_much_is(
    objective: Objective,
) -> None:
    for seed in range(3):
        losses = zeros_with_clumps(seed)
        scaled = [1e6 * loss for loss in losses]
        assert not spikes(verdicts(observations(losses), Sentinel(objective=objective)))
        assert not spikes(verdicts(observations(scaled), Sentinel(objective=objective)))
        gone = observations(losses + [100 * max(losses)] * 10)
        (call,) = spikes(verdicts(gone, Sentinel(objective=objective)))
        assert (call.onset, call.step) == (3000, 3004)
        assert call.threshold is not None
        assert call.threshold > max(losses)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_of_an_always_zero_loss_nothing_is_called_that_says_for_the_first_time_how_large_it_may_be(
    objective: Objective,
) -> None:
    burst = [1e-4, 1.3e-4, 1.7e-4, 1.1e-4, 1.9e-4, 1.2e-4]
    for losses in ([0.0] * 100 + [1e-12] * 5 + [0.0] * 100, ([0.0] * 100 + burst) * 10):
        assert not spikes(verdicts(observations(losses), Sentinel(objective=objective)))


def test_a_mostly_zero_loss_that_was_called_and_came_back_is_not_called_again() -> None:
    losses = zeros_with_clumps(0) + ([0.05] * 10 + [0.0] * 400) * 5
    assert [call.step for call in spikes(verdicts(observations(losses)))] == [3004]


@pytest.mark.parametrize("objective", ["auto", "supervised"])
def test_one_wild_loss_and_a_phase_of_a_solved_task_blind_nobody(objective: Objective) -> None:
    chance = random.Random(0)
    hinge = [1 + chance.random() if chance.random() < 0.05 else 0.0 for _ in range(400)]
    wild = [1e9 if step == 100 else loss for step, loss in enumerate(hinge)] + [1e3 + step for step in range(20)]
    assert [call.step for call in spikes(verdicts(observations(wild), Sentinel(objective=objective)))] == [404]
    solved = [max(0.0, 1 - step / 50) for step in range(400)] + [50.0 + step for step in range(20)]
    told = [it._replace(hints=Hint.ANNOUNCED) if it.step == 300 else it for it in observations(solved)]
    assert [call.step for call in spikes(verdicts(told, Sentinel(objective=objective)))] == [404]


def test_gradient_norms_are_judged_where_the_loss_is_always_zero() -> None:
    grown = [norm * (30 if i >= 300 else 1) for i, norm in enumerate(norms(400))]
    (call,) = spikes(verdicts(observations([0.0] * 400, grown)))
    assert (call.step, call.rule) == (304, "grad-norm-beyond-seen")
