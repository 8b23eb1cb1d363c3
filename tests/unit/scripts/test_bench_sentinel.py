"""The yardstick measures what it says: a detector with known calls gets the score that one works out by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from bench_sentinel import Score
from detectors import PEERS
from formula_traces import FAMILIES, formula_traces
from leave_one_out import NORMAL, chosen, cost
from rollback.sentinel.presets import Preset
from traces import Trace

HUNDRED = list(np.random.default_rng(0).normal(2.0, 0.1, 400))


def trace(labels: list[tuple[int, int, str]], seen: bool = False, kind: str = "damage") -> Trace:
    return Trace("t", "made", kind, np.arange(1000), np.zeros(1000), None, labels, seen)


@pytest.mark.parametrize(
    ("calls", "delay"), [([304], 4), ([299], None), ([499], 199), ([500], None), ([310, 320], 10), ([], None)]
)
def test_a_divergence_is_hit_within_its_reach(calls: list[int], delay: int | None) -> None:
    score = Score()
    score.add(trace([(300, 1000, "divergence")]), calls)
    assert score.sudden == [delay]


def test_an_onset_that_was_seen_may_be_called_a_little_earlier() -> None:
    score = Score()
    score.add(trace([(300, 1000, "divergence")], seen=True), [292])
    assert (score.sudden, score.false) == ([-8], 0)


def test_ramps_count_as_slow() -> None:
    score = Score()
    score.add(trace([(300, 1000, "divergence")], kind="ramp"), [400])
    assert (score.slow, score.sudden) == ([100], [])


def test_false_calls_close_together_are_one_and_other_labels_are_none() -> None:
    score = Score()
    score.add(trace([(300, 400, "grey"), (500, 520, "blip"), (600, 700, "shift")]), [10, 40, 85, 200, 350, 510, 650])
    assert score.false == 2
    assert score.healthy == 1000 - 100 - 20 - 100
    assert (score.blips, score.shifts) == ([True], [True])


def test_non_finite_steps_must_be_called_in_their_step() -> None:
    score = Score()
    score.add(trace([(300, 400, "nonfinite")]), [300])
    score.add(trace([(300, 400, "nonfinite")]), [301])
    assert score.nonfinite == [True, False]


@pytest.mark.parametrize("name", PEERS)
def test_every_rule_of_another_library_runs_on_a_log_with_and_without_norms(name: str) -> None:
    losses = [*HUNDRED, *[60.0] * 10, float("nan"), float("inf"), *HUNDRED]
    for norms in (None, [abs(loss) for loss in losses]):
        calls = PEERS[name](losses, norms)
        assert calls == sorted(calls)
        assert all(0 <= call < len(losses) for call in calls)
        if norms is not None or name != "ZClip z-score":
            assert calls


def test_what_is_chosen_on_other_families_is_what_costs_least_there() -> None:
    asked = []

    def score(family: str, preset: Preset) -> Score:
        asked.append(family)
        return Score(
            sudden=[4, None if preset.drift >= NORMAL.drift else 4], healthy=10_000, false=int(preset.alone < 6)
        )

    assert cost([score("one", NORMAL)]) == 0.5
    assert cost([score("one", replace(NORMAL, alone=5.5))]) == 1.5
    preset = chosen(["one", "two"], score)
    assert preset == replace(NORMAL, drift=2.0)
    assert set(asked) == {"one", "two"}


def test_traces_from_formulas_are_the_same_for_the_same_seed_and_cover_every_family() -> None:
    one, other = formula_traces(3), formula_traces(3)
    assert {made.kind for made in one} == set(FAMILIES)
    assert all(np.array_equal(a.loss, b.loss, equal_nan=True) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0].loss, formula_traces(4)[0].loss)
