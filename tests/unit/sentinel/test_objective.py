"""Losses that measure no progress: what of them is called, and what is advice."""

import itertools
import json
import math
import random

import pytest
from curves import descent, norms, observations, raised, verdicts

from rollback.config import Objective
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


def new_targets(count: int, period: int, decay: float, seed: int = 0, start: float = 0.5) -> list[float]:
    """Each new target takes the loss up at once, and it is learned: deep Q between two syncs, or PPO in an update."""
    chance = random.Random(seed)
    highest = [start, *(min(0.5, start + 0.1 * i) for i in range(1, count // period + 1))]
    falls = [0.02 + highest[i // period] * math.exp(-(i % period) / decay) for i in range(count)]
    return [fallen * math.exp(chance.gauss(0, 0.15)) for fallen in falls]


TEETH = {
    "deep Q": (200, 60.0, 0.5),
    "deep Q, quick": (200, 25.0, 0.5),
    "deep Q, rewards come late": (200, 50.0, 0.02),
    "PPO": (64, 16.0, 0.5),
    "PPO, 32 minibatches": (32, 4.0, 0.5),
}


def called(said: list[Verdict]) -> list[tuple[int, str]]:
    return [(verdict.step, verdict.rule) for verdict in said if verdict.kind in (Kind.SPIKE, Kind.NONFINITE)]


WITHOUT_PROGRESS = {"waves": waves(900, 1.0, 0.4, 260), "saw-teeth": saw_teeth(900), "critic": critic(900)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", WITHOUT_PROGRESS)
def test_a_loss_that_measures_no_progress_is_recognised_and_its_swings_are_not_called(kind: str, seed: int) -> None:
    made = {"waves": lambda: waves(900, 1.0, 0.4, 260, seed=seed), "saw-teeth": lambda: saw_teeth(900, seed)}
    losses = made.get(kind, lambda: critic(900, seed))()
    assert called(verdicts(observations(losses, norms(900, seed)))) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", TEETH)
def test_calls_that_come_back_by_themselves_again_and_again_are_the_teeth_of_a_saw(kind: str, seed: int) -> None:
    period, decay, start = TEETH[kind]
    losses = new_targets(8 * period + 2000, period, decay, seed, start)
    said = called(verdicts(observations(losses)))
    assert len(said) <= 5
    assert all(step < 10 * period for step, _ in said)
    seen = observations(raised(losses, len(losses) - 20, 9.0))
    assert called(verdicts(seen))[-1][1] == "loss-beyond-seen"


DIVERGENCE = raised(descent(600, noise=0.05), 400, 3.0)


def test_a_divergence_that_a_rollback_answers_is_called_each_time() -> None:
    sentinel = Sentinel()
    verdicts(observations(DIVERGENCE)[:350], sentinel)
    before = sentinel.state_dict()
    for _ in range(6):
        sentinel.load_state_dict(before)
        assert called(verdicts(observations(DIVERGENCE)[350:], sentinel)) == [(404, "loss-high")]


def test_a_divergence_that_ends_with_a_resume_is_called_each_time() -> None:
    again = [
        Observation(step, DIVERGENCE[step], None, Hint.RESUMED if step == 300 else Hint.NONE)
        for step in range(300, 480)
    ]
    said = called(verdicts([*observations(DIVERGENCE)[:480], *again * 5]))
    assert said == [(404, "loss-high")] * 6


def test_calls_of_all_heights_that_come_back_are_no_teeth() -> None:
    losses = descent(1500, noise=0.05)
    for at, height in (300, 2.0), (500, 9.0), (700, 4.0), (900, 2.0), (1100, 25.0):
        losses = raised(losses, at, height, length=60, decay=15.0)
    said = called(verdicts(observations(raised(losses, 1300, 2.5))))
    assert [step for step, _ in said] == [304, 504, 704, 904, 1104, 1304]


def test_stretches_that_were_not_called_are_no_teeth() -> None:
    losses = descent(3000, noise=0.05)
    for at in range(300, 2700, 130):
        losses = raised(losses, at, 2.5, length=4)
    assert called(verdicts(observations(raised(losses, 2800, 2.5)))) == [(2804, "loss-high")]


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


@pytest.mark.parametrize("objective", ["auto", "adversarial", "rl"])
def test_who_has_said_what_the_loss_is_of_is_not_asked_to(objective: Objective) -> None:
    said = [
        verdict.advice
        for verdict in verdicts(observations(WITHOUT_PROGRESS["waves"]), Sentinel(objective=objective))
        if verdict.advice
    ]
    assert said
    for text in said:
        assert ("say so: --objective supervised" in text) == (objective == "auto")
        assert (f"objective '{objective}' was told" in text) == (objective != "auto")


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
    curves = WITHOUT_PROGRESS["saw-teeth"], new_targets(900, 64, 16.0)
    for cut, losses in itertools.product((10, 40, 199, 333), curves):
        whole, first, second = Sentinel(), Sentinel(), Sentinel()
        seen = observations(losses, norms(900))
        expected = verdicts(seen, whole)
        before = verdicts(seen[:cut], first)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert before + verdicts(seen[cut:], second) == expected


def test_a_state_that_is_loaded_replaces_all_that_was_seen() -> None:
    fresh, used = Sentinel(), Sentinel()
    seen = observations(new_targets(900, 64, 16.0), norms(900))
    verdicts(seen[:40], fresh)
    verdicts(seen, used)
    used.load_state_dict(fresh.state_dict())
    assert used.state_dict() == fresh.state_dict()


def test_an_unknown_objective_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="generative"):
        Sentinel(objective="generative")  # type: ignore[arg-type]
