"""Laws that hold for the sentinel on any sequence whatsoever."""

import itertools
import json
import math

from curves import descent, norms, observations, raised, verdicts
from hypothesis import given, settings
from hypothesis import strategies as st

from rollback.backtest.steps import counted_on
from rollback.sentinel import Hint, Kind, Observation, Sentinel

ordinary = st.floats(min_value=-1e12, max_value=1e12)
anything = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True, width=64))
hints = st.sampled_from([Hint.NONE] * 12 + list(Hint.__members__.values()))
steps = st.lists(st.tuples(anything, anything, hints), max_size=120)
sensitivities = st.sampled_from(["low", "normal", "high"])


@st.composite
def eventful_curves(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """A descent of some hundred steps to which a few things happen."""
    count = draw(st.integers(60, 400))
    seed = draw(st.integers(0, 10_000))
    losses, grad_norms = descent(count, seed, noise=draw(st.floats(0.01, 0.6))), norms(count, seed)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(30, count - 1))
        length = draw(st.integers(1, 200))
        losses = raised(losses, at, draw(st.floats(-2.0, 30.0)), length, draw(st.sampled_from([20.0, math.inf])))
        factor = draw(st.floats(0.05, 50.0))
        grad_norms = [norm * (factor if at <= i < at + length else 1) for i, norm in enumerate(grad_norms)]
    return losses, grad_norms


@given(steps, sensitivities)
@settings(deadline=None)
def test_any_non_finite_value_is_called_in_its_step_whatever_came_before(sequence: list, sensitivity: str) -> None:
    sentinel = Sentinel(sensitivity)  # type: ignore[arg-type]
    for step, (loss, norm, hint) in enumerate(sequence):
        verdict = sentinel.update(Observation(step, loss, norm, hint))
        broken_loss = loss is not None and not math.isfinite(loss)
        broken_norm = norm is not None and not math.isfinite(norm) and Hint.SCALER_SKIPPED not in hint
        assert (verdict.kind is Kind.NONFINITE) == (broken_loss or broken_norm)
        assert verdict.step == step
        assert verdict.onset is None or verdict.onset <= step


@given(eventful_curves(), st.floats(1e-6, 1e6), sensitivities)
@settings(max_examples=40, deadline=None)
def test_scaling_all_losses_by_a_constant_changes_no_verdict(
    curve: tuple[list[float], list[float]], factor: float, sensitivity: str
) -> None:
    losses, grad_norms = curve
    plain = verdicts(observations(losses, grad_norms), Sentinel(sensitivity))  # type: ignore[arg-type]
    scaled = verdicts(observations([x * factor for x in losses], grad_norms), Sentinel(sensitivity))  # type: ignore[arg-type]
    assert [(v.kind, v.onset, v.rule) for v in plain] == [(v.kind, v.onset, v.rule) for v in scaled]


@given(st.integers(0, 10_000), st.floats(0.02, 0.6), st.integers(0, 6), st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=40, deadline=None)
def test_a_healthy_descent_is_not_called_however_it_is_rounded(
    seed: int, noise: float, places: int, factor: float
) -> None:
    losses = [factor * round(loss, places) for loss in descent(400, seed, noise=noise)]
    said = verdicts(observations(losses, norms(400, seed)))
    assert all(verdict.kind in (Kind.HEALTHY, Kind.WATCH) for verdict in said)


@given(st.integers(10, 200), st.integers(3, 12), st.integers(0, 9), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_step_column_that_starts_again_with_each_epoch_is_counted_on(
    epoch: int, epochs: int, last: int, stride: int, first: int
) -> None:
    rows = epoch * epochs + last
    column = counted_on([first + stride * (row % epoch) for row in range(rows)])
    assert all(later > earlier for earlier, later in itertools.pairwise(column.steps))
    assert sorted(column.epochs) == list(range(epoch, rows, epoch))
    assert column.resumes == frozenset()


@given(eventful_curves())
@settings(max_examples=20, deadline=None)
def test_rejected_values_never_move_the_baseline(curve: tuple[list[float], list[float]]) -> None:
    sentinel = Sentinel()
    after = sentinel.state_dict()
    for observation in observations(*curve):
        before = after
        verdict = sentinel.update(observation)
        after = sentinel.state_dict()
        high = verdict.value is not None and verdict.threshold is not None and verdict.value > verdict.threshold
        # By the other rules a loss above the threshold is rejected only together with the norm, or a trend.
        if verdict.kind in (Kind.WATCH, Kind.SPIKE) and high and verdict.rule == "loss-high":
            assert (before["loss"], before["norm"]) == (after["loss"], after["norm"])


@given(st.floats(20.0, 1e9), st.floats(20.0, 1e9), st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_how_high_a_blip_was_changes_nothing_after_it(low: float, high: float, length: int, seed: int) -> None:
    states = []
    for by in (low, high):
        sentinel = Sentinel()
        verdicts(observations(raised(descent(250, seed), 200, by, length), norms(250, seed)), sentinel)
        states.append({name: sentinel.state_dict()[name] for name in ("state", "loss", "norm", "drift", "excursion")})
    assert states[0] == states[1]


@given(st.floats(0.5, 1e6), st.integers(0, 1000), sensitivities)
@settings(max_examples=40, deadline=None)
def test_a_level_that_persists_is_accepted(by: float, seed: int, sensitivity: str) -> None:
    losses = raised(descent(600, seed), 200, by)
    said = verdicts(observations(losses, norms(600, seed)), Sentinel(sensitivity))  # type: ignore[arg-type]
    assert sum(verdict.kind is Kind.HEALTHY for verdict in said[420:]) > 0.95 * 180


@given(steps, st.integers(0, 120), sensitivities)
@settings(deadline=None)
def test_state_survives_json_in_the_middle_of_anything(sequence: list, cut: int, sensitivity: str) -> None:
    seen = [Observation(step, *values) for step, values in enumerate(sequence)]
    _assert_resumes(seen, cut, sensitivity)


@given(eventful_curves(), st.integers(0, 400), sensitivities)
@settings(max_examples=40, deadline=None)
def test_state_survives_json_in_the_middle_of_a_curve(
    curve: tuple[list[float], list[float]], cut: int, sensitivity: str
) -> None:
    _assert_resumes(observations(*curve), cut, sensitivity)


def _assert_resumes(seen: list[Observation], cut: int, sensitivity: str) -> None:
    whole, first, second = (Sentinel(sensitivity) for _ in range(3))  # type: ignore[arg-type]
    expected = verdicts(seen, whole)
    before = verdicts(seen[:cut], first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    after = verdicts(seen[cut:], second)
    assert repr(before + after) == repr(expected)  # repr: a NaN does not equal itself
    assert second.state_dict() == whole.state_dict()


def test_state_does_not_grow_with_the_run() -> None:
    sizes = []
    sentinel = Sentinel()
    for step, loss in enumerate(raised(descent(4000, noise=0.5), 1500, 5.0, 700)):
        sentinel.update(Observation(step, loss, 1.0 + step % 7))
        sizes.append(len(json.dumps(sentinel.state_dict())) if step % 50 == 0 else 0)
    assert max(sizes[2000:]) < 1.2 * max(sizes[:2000]) < 30_000
