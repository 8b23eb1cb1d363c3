"""Losses that measure no progress: what of them is called, and what is advice."""

import json
import math
import random

import pytest
from curves import descent, norms, observations, raised, verdicts

from rollback.errors import UsageError
from rollback.sentinel import Hint, Kind, Observation, Sentinel, Verdict


def waves(count: int, centre: float, high: float, period: int, noise: float = 0.05, seed: int = 0) -> list[float]:
    """A loss that goes up first and then down and up, as when two nets play against each other."""
    chance = random.Random(seed)
    return [centre + high * math.sin(2 * math.pi * i / period) + chance.gauss(0, noise) for i in range(count)]


def saw_teeth(count: int, seed: int = 0) -> list[float]:
    """The loss of deep Q: small, and up for a while with each new target."""
    chance = random.Random(seed)
    teeth = [min(i // 120, 4) * 0.2 if i % 120 < 40 else 0.0 for i in range(count)]
    return [0.3 + tooth + chance.gauss(0, 0.08) for tooth in teeth]


def critic(count: int, seed: int = 0) -> list[float]:
    """Begins at zero, goes below it, and comes back: the two nets have drawn level."""
    chance = random.Random(seed)
    return [-1.2 * math.sin(math.pi * min(i, 300) / 300) + chance.gauss(0, 0.05) for i in range(count)]


def called(said: list[Verdict]) -> list[tuple[int, str]]:
    return [(verdict.step, verdict.rule) for verdict in said if verdict.kind in (Kind.SPIKE, Kind.NONFINITE)]


WITHOUT_PROGRESS = {"waves": waves(900, 1.0, 0.4, 260), "saw-teeth": saw_teeth(900), "critic": critic(900)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", WITHOUT_PROGRESS)
def test_a_loss_that_measures_no_progress_is_recognised_and_its_swings_are_not_called(kind: str, seed: int) -> None:
    made = {"waves": lambda: waves(900, 1.0, 0.4, 260, seed=seed), "saw-teeth": lambda: saw_teeth(900, seed)}
    losses = made.get(kind, lambda: critic(900, seed))()
    assert called(verdicts(observations(losses, norms(900, seed)))) == []


def test_what_would_have_been_called_is_advice_with_its_reason() -> None:
    said = [verdict for verdict in verdicts(observations(WITHOUT_PROGRESS["waves"])) if verdict.advice]
    assert said
    assert all(verdict.rule and "does not seem to measure progress" in verdict.advice for verdict in said)
    assert all(verdict.kind in (Kind.HEALTHY, Kind.WATCH) for verdict in said)


@pytest.mark.parametrize("kind", WITHOUT_PROGRESS)
def test_a_loss_far_beyond_all_seen_is_called_all_the_same(kind: str) -> None:
    said = called(verdicts(observations(raised(WITHOUT_PROGRESS[kind], 700, 9.0))))
    assert said == [(704, "loss-beyond-seen")]


def test_gradient_norms_far_beyond_all_seen_are_called_all_the_same() -> None:
    grown = [norm * (30 if i >= 700 else 1) for i, norm in enumerate(norms(900))]
    said = called(verdicts(observations(WITHOUT_PROGRESS["waves"], grown)))
    assert said == [(704, "grad-norm-beyond-seen")]


@pytest.mark.parametrize("objective", ["adversarial", "rl"])
def test_who_says_what_the_loss_is_of_is_believed(objective: str) -> None:
    seen = observations(raised(descent(400), 300, 1.5))
    assert called(verdicts(seen, Sentinel(objective="supervised"))) == [(304, "loss-high")]
    assert called(verdicts(seen, Sentinel(objective=objective))) == []  # type: ignore[arg-type]
    swings = observations(WITHOUT_PROGRESS["waves"])
    assert called(verdicts(swings, Sentinel(objective="supervised")))


def test_non_finite_values_of_such_a_loss_are_called() -> None:
    losses = [*WITHOUT_PROGRESS["waves"][:500], math.nan]
    assert called(verdicts(observations(losses), Sentinel(objective="rl"))) == [(500, "nonfinite-loss")]


def test_a_loss_with_much_noise_that_came_down_a_little_measures_progress() -> None:
    losses = descent(600, start=0.9, end=0.45, noise=0.1)
    assert called(verdicts(observations(raised(losses, 400, 1.0)))) == [(404, "loss-high")]


def test_a_flat_loss_that_has_never_climbed_is_taken_for_one_that_measures_progress() -> None:
    chance = random.Random(0)
    losses = [1.3 + chance.gauss(0, 0.05) for _ in range(600)]
    assert called(verdicts(observations(raised(losses, 400, 0.7)))) == [(404, "loss-high")]


def test_a_loss_that_measured_progress_does_so_in_an_announced_phase() -> None:
    seen = observations(raised(descent(700), 500, 1.5), hints={400: Hint.ANNOUNCED})
    assert called(verdicts(seen)) == [(504, "loss-high")]


def test_in_a_screen_only_what_is_far_beyond_all_seen_stands_out() -> None:
    sentinel = Sentinel()
    verdicts(observations(WITHOUT_PROGRESS["saw-teeth"][:650]), sentinel)
    assert sentinel.screen(Observation(650, 1.4, None)) is None
    assert sentinel.screen(Observation(650, 9.0, None)) is not None


def test_what_was_seen_survives_json() -> None:
    for cut in (10, 40, 333):
        whole, first, second = Sentinel(), Sentinel(), Sentinel()
        seen = observations(WITHOUT_PROGRESS["saw-teeth"], norms(900))
        expected = verdicts(seen, whole)
        before = verdicts(seen[:cut], first)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert before + verdicts(seen[cut:], second) == expected


def test_an_unknown_objective_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="generative"):
        Sentinel(objective="generative")  # type: ignore[arg-type]
