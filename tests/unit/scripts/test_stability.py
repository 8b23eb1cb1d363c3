"""The stability bench: others' rules act as documented, troubles come back as they should, the table counts right."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

import bench_stability
import detectors
from stability.arms import ARMS, SkipStep, Watch, ZClip
from stability.fleet import cases, read_results
from stability.job import RunResult, run_one
from stability.table import as_text, lines
from stability.text import CONTEXT, SAMPLES, batches
from stability.troubles import ONSET, POISONED, STEPS, STRETCH, TROUBLES


def curves(seed: int) -> tuple[list[float], list[float]]:
    noise = random.Random(seed)
    loss = [3.0 - i / 500 + noise.gauss(0, 0.1) + (4.0 if i in (200, 201, 350) else 0.0) for i in range(400)]
    norm = [1.0 + noise.gauss(0, 0.1) + (9.0 if i in (150, 201) else 0.0) for i in range(400)]
    return loss, norm


@pytest.mark.parametrize("blind", [None, 220])
def test_skip_step_drops_the_updates_that_its_documented_rule_calls(blind: int | None) -> None:
    loss, norm = curves(0)
    if blind is not None:
        loss[blind] = math.nan
    rule = SkipStep()
    dropped = [i for i in range(400) if rule.limit(loss[i], norm[i]) is None]
    assert dropped == detectors.olmo_core(loss, norm)
    assert {150, 201, 350} <= {*dropped}
    assert (len(dropped) > 128) == (blind is not None), "one NaN blinds it for the whole interval"


def test_zclip_clips_the_updates_that_its_documented_rule_calls() -> None:
    loss, norm = curves(1)
    rule = ZClip()
    limits = [rule.limit(loss[i], norm[i]) or 0.0 for i in range(400)]
    assert [i for i in range(400) if limits[i] < math.inf] == detectors.zclip(loss, norm)
    assert limits[201] < norm[201]


def test_the_watch_stops_at_what_is_not_finite_and_at_five_high_losses_in_a_row() -> None:
    watch = Watch()
    assert Watch().stops(math.nan)
    assert not any(watch.stops(2.0) for _ in range(100))
    assert [watch.stops(4.5) for _ in range(5)] == [False] * 4 + [True]


def test_troubles_of_the_data_change_their_batches_and_no_other() -> None:
    changed = {"labels": range(ONSET, ONSET + STRETCH), "constant": range(ONSET, ONSET + STRETCH), "poisoned": POISONED,
               "repeated": range(ONSET, ONSET + STRETCH), "shift": range(ONSET, STEPS)}  # fmt: skip
    clean = batches(STEPS, 0)
    assert clean.inputs.shape == (STEPS, SAMPLES, CONTEXT)
    assert (clean.inputs[:, :, 1:] == clean.targets[:, :, :-1]).all()
    for name, trouble in TROUBLES.items():
        given = batches(STEPS, 0)
        if trouble.corrupt is not None:
            trouble.corrupt(given, np.random.default_rng(0))
        parts = zip((clean.inputs, clean.targets), (given.inputs, given.targets), strict=True)
        differs = np.any([(then != now).any((1, 2)) for then, now in parts], 0)
        assert {*differs.nonzero()[0]} <= {*changed.get(name, ())}, name
        assert differs.sum() >= len(changed.get(name, ())) - 1, name  # the first of the repeated documents may be it


def result(arm: str, loss: float | None, seed: int = 0, trouble: str = "none", **given: object) -> RunResult:
    end = given.pop("end", "done" if loss is not None else "structural")
    values = {"made": STEPS, "kept": STEPS, "incidents": 0, "seconds": 1.0, "curve": [(400, 2.5), (800, loss)], **given}
    return RunResult(seed, trouble, arm, end, loss, **values)  # type: ignore[arg-type]


def test_the_table_counts_what_is_lost_against_the_undisturbed_run_of_each_seed() -> None:
    results = [result("nothing", 2.2), result("nothing", 2.6, 1)]
    results += [result("clip", 2.4, 0, "bit"), result("clip", None, 1, "bit", end="done")]
    results += [result("balanced", 2.5, 0, "bit", kept=760, made=836), result("balanced", None, 1, "bit")]
    results += [result("ZClip", 2.2, 2, "bit")]  # of a seed without an undisturbed run
    found = {(line.trouble, line.arm): line for line in lines(results)}
    clip, balanced = found["bit", "clip"], found["bit", "balanced"]
    assert (clip.runs, clip.exploded, clip.stopped, clip.loss, clip.worst) == (2, 1, 0, None, None)
    assert (balanced.runs, balanced.exploded, balanced.stopped) == (2, 2, 1)
    assert (balanced.samples_lost, balanced.time_lost) == (pytest.approx(5), pytest.approx(10))
    assert ("bit", "ZClip") not in found


def test_a_result_that_is_cut_off_is_made_again_and_seeds_come_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(result("nothing", 2.2).to_json() + "\n" + result("clip", 2.3).to_json()[:40])
    assert [(one.arm, one.curve) for one in read_results(path)] == [("nothing", [(400, 2.5), (800, 2.2)])]
    every = cases(10, quick=False)
    assert len(every) == 10 * len(ARMS) * len(TROUBLES)
    assert [seed for seed, _, _ in every] == sorted(seed for seed, _, _ in every)
    assert cases(2, quick=False, only=["clip", "bit"]) == [(0, "bit", "clip"), (1, "bit", "clip")]


@pytest.mark.soak
def test_a_gradient_times_ten_costs_nothing_and_a_nan_costs_its_batch(tmp_path: Path) -> None:
    """Under the default policy, at update 500 of 800. Some seconds each."""
    runs = {
        (trouble, arm): run_one(0, trouble, arm, tmp_path / f"{trouble}-{arm}")
        for trouble, arm in [("none", "nothing"), ("gradient x10", "nothing"), ("gradient x10", "balanced"),
                             ("NaN", "balanced")]
    }  # fmt: skip
    tenfold = runs["gradient x10", "balanced"]
    assert (tenfold.made, tenfold.kept, tenfold.incidents) == (STEPS, STEPS, 0)
    assert tenfold.curve == runs["gradient x10", "nothing"].curve
    nan = runs["NaN", "balanced"]
    assert (nan.end, nan.kept, nan.incidents) == ("done", STEPS - 1, 1)
    undisturbed = runs["none", "nothing"].loss
    assert nan.loss == pytest.approx(undisturbed, abs=0.02)
    assert json.loads(nan.to_json())["loss"] == nan.loss


def test_the_document_shows_the_table_of_the_results_that_are_kept() -> None:
    shown = bench_stability.PAGE.read_text().split(bench_stability.BEGIN)[1].split(bench_stability.END)[0]
    assert shown == as_text(read_results(bench_stability.KEPT)), "run python scripts/bench_stability.py --docs"
