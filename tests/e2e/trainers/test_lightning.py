"""Lightning under `rollback.protect`: bit for bit the unprotected run, the one given its skips, or the undisturbed one.

With what was logged and saved. A few at one rank and at two; `scripts/test --soak tests/e2e/trainers` tries all.
"""

from pathlib import Path

import pytest
from compared_runs import PHASES, require_all_same, require_undisturbed
from job_results import Scenarios
from toy import require_same
from trainer_job import JOB, LIMIT, MODULES, TrainerJob

LIGHTNING = TrainerJob(loop="lightning")
"""30 batches in an epoch, twice."""
AS_SET = {"rewind": None, "skip_after": None}  # the policy's own
SHORT = {"samples": 24}
"""12 batches in an epoch: the jobs of the default suite."""
UNEVEN = {"samples": 156, "accumulate": 4, "settings": {"rewind": 1, "skip_after": 0, "snapshot_every": 2}}
"""78 batches in an epoch, four to an update: a window takes along what is left over, and ends within an update's."""
BEST = {"saving": {"monitor": "evaluated", "save_top_k": 2}}
PERSISTENT = LIGHTNING.but(
    **SHORT, workers=1, evaluate=11, more={"persistent": True, "trainer": {"num_sanity_val_steps": 0}}
)
"""Validated first in the first epoch, and once more in the second."""

CLEAN = {
    "plain": LIGHTNING,
    "accumulation": LIGHTNING.but(samples=76, accumulate=4, evaluate=6),
    "by steps": LIGHTNING.but(max_steps=47, epochs=-1, save=10),
    "best of several": LIGHTNING.but(**SHORT, evaluate=4, more={**BEST, "trainer": {"limit_train_batches": 0.7}}),
    "limited": LIGHTNING.but(
        more={"scheduler": "both", "trainer": {"limit_train_batches": 17, "limit_val_batches": 0.5}}
    ),
    "schedulers by step and by epoch": LIGHTNING.but(more={"scheduler": "both"}),
    "plateau": LIGHTNING.but(evaluate=10, more={"scheduler": "plateau"}),
    "stopped early": LIGHTNING.but(epochs=6, more={"patience": 1, "delta": 1.0}),
    "stopped": LIGHTNING.but(stop_at=41),
    "stopped before it may": LIGHTNING.but(stop_at=11, more={"trainer": {"min_epochs": 2}}, epochs=3),
    "epochs left early": LIGHTNING.but(accumulate=4, epochs=3, more={"leave_at": 10}),
    "validation now and then": LIGHTNING.but(epochs=4, more={"trainer": {"check_val_every_n_epoch": 2}}),
    "validation over epochs": LIGHTNING.but(evaluate=21, more={"trainer": {"check_val_every_n_epoch": None}}),
    "no clipping, and all steps logged": LIGHTNING.but(more={"clip": None, "trainer": {"log_every_n_steps": 1}}),
    "bfloat16": LIGHTNING.but(more={"trainer": {"precision": "bf16-mixed"}}),
    "scaled": LIGHTNING.but(more={"scaled": True}),
    "worker": LIGHTNING.but(workers=1),
    "a generator of the loader's own": LIGHTNING.but(**SHORT, epochs=3, more={"generator": True}),
    "batches left out": LIGHTNING.but(**SHORT, accumulate=2, more={"left_out": [1]}),
    "sharded": LIGHTNING.but(**SHORT, sharded=True, accumulate=2, evaluate=6, more={"clip": None}),
    "several evaluations in a step": LIGHTNING.but(samples=20, more={"optimizer": "lbfgs", "clip": None}),
}
BAD = {
    "in the middle": LIGHTNING.but(bad_at=(17,), evaluate=5, save=5),
    "in the last update": LIGHTNING.but(bad_at=(59,)),
    "at an epoch's tail": LIGHTNING.but(**SHORT, bad_at=(11,), more={"scheduler": "both"}),
    "at an epoch's tail, alone": LIGHTNING.but(bad_at=(29,), settings={"policy": "surgical", **AS_SET}),
    "over an epoch's start": LIGHTNING.but(
        bad_at=(27,), evaluate=5, save=4, more={"trainer": {"limit_train_batches": 25}}
    ),
    "validated within an update": LIGHTNING.but(accumulate=2, samples=76, evaluate=11, bad_at=(30,), more=BEST),
    "over a whole epoch's start": LIGHTNING.but(bad_at=(32,), evaluate=5, save=4),
    "limited, accumulation": LIGHTNING.but(
        bad_at=(22,), accumulate=4, samples=76, more={"trainer": {"limit_train_batches": 0.5}}
    ),
    "over an epoch's start, plateau": LIGHTNING.but(bad_at=(32,), more={"scheduler": "plateau", **BEST}),
    "surgical": LIGHTNING.but(bad_at=(22,), settings={"policy": "surgical", **AS_SET}),
    "balanced": LIGHTNING.but(bad_at=(41,), settings=AS_SET),
    "accumulation": LIGHTNING.but(bad_at=(58,), evaluate=6, **UNEVEN),
    "accumulation, at the start": LIGHTNING.but(bad_at=(81,), epochs=3, **UNEVEN),
    "by steps": LIGHTNING.but(bad_at=(12, 50), max_steps=70, epochs=-1),
    "stopped": LIGHTNING.but(bad_at=(20,), stop_at=21),
    "epochs left early": LIGHTNING.but(bad_at=(25,), epochs=3, more={"leave_at": 10}),
    "stopped early": LIGHTNING.but(bad_at=(41,), epochs=6, more={"patience": 1, "delta": 1.0}),
    "short epochs": LIGHTNING.but(samples=15, epochs=5, bad_at=(18,), settings={"rewind": 12}),
    "worker": LIGHTNING.but(bad_at=(32,), workers=1),
    "first validation undone": PERSISTENT.but(bad_at=(11,)),
    "a generator of the loader's own": LIGHTNING.but(**SHORT, bad_at=(14,), epochs=3, more={"generator": True}),
    "sharded": LIGHTNING.but(**SHORT, sharded=True, bad_at=(14,), evaluate=6, save=4),
}
KILLED = LIGHTNING.but(bad_at=(32,), bad_rank=1, samples=76, accumulate=2, evaluate=6, save=4)
FEW: dict[int, tuple[list[str], list[str]]] = {
    1: (
        ["accumulation", "a generator of the loader's own", "batches left out"],
        ["accumulation", "a generator of the loader's own", "in the middle", "over an epoch's start"],
    ),
    2: (
        ["best of several"],
        ["at an epoch's tail", "epochs left early", "first validation undone", "sharded"],
    ),
}
"""Clean ones, and those with a bad batch."""


def pick(jobs: dict[str, TrainerJob], names: list[str]) -> dict[str, TrainerJob]:
    return {name: jobs[name] for name in names}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_protected_fit_is_the_unprotected_one_or_that_given_its_skips(tmp_path: Path, ranks: int) -> None:
    clean, bad = FEW[ranks]
    require_all_same(tmp_path, ranks, pick(CLEAN, clean), pick(BAD, bad))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_way_to_fit_and_each_place_for_a_bad_batch(tmp_path: Path, ranks: int) -> None:
    of_one_rank = {"batches left out"} if ranks > 1 else set()  # Lightning refuses it of several
    require_all_same(tmp_path, ranks, pick(CLEAN, [*CLEAN.keys() - of_one_rank]), BAD)


def test_behind_a_window_of_no_whole_updates_a_schedule_goes_on(tmp_path: Path) -> None:
    """Lightning's `frequency` is of batches, and an update ends at no multiple of it then."""
    scenarios = Scenarios(tmp_path, JOB, MODULES, LIMIT)
    job = LIGHTNING.but(accumulate=4, epochs=1, more={"frequency": 4})
    scenarios.add("skipping", job.with_settings(skip=[{"first": 2, "last": 3}]))
    scenarios.python()
    assert scenarios.portrait("skipping", 0)["/scheduler/0/last_epoch"] == "6", "of 7 updates; the last ends the epoch"


def test_a_rank_that_is_killed_costs_no_step_no_row_and_no_file(tmp_path: Path) -> None:
    """In the second epoch, while the rollback goes back into the first one. A config is saved where it was before."""
    require_undisturbed(tmp_path, KILLED.but(samples=44, more={"config": True}), ["in the middle of the rollback"])


@pytest.mark.soak
def test_a_rank_of_a_sharded_model_is_killed_and_costs_nothing(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, KILLED.but(samples=44, sharded=True), ["in a step"])


@pytest.mark.soak
def test_a_first_validation_in_a_new_process_draws_no_seed_for_workers_that_persist(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, PERSISTENT.but(samples=LIGHTNING.samples), ["in a step"])


@pytest.mark.soak
@pytest.mark.parametrize("ended", [{"stop_at": 12}, {"max_steps": 12, "epochs": -1}, {"epochs": 1}], ids=str)
def test_a_last_epoch_has_its_end_once_where_a_rank_is_killed_behind_the_training(
    tmp_path: Path, ended: dict[str, int]
) -> None:
    """What is logged, counted and saved there: the final state was kept before."""
    require_undisturbed(tmp_path, LIGHTNING.but(**SHORT).but(**ended), ["behind the end"])


def test_a_stopped_fit_goes_on_where_it_is_asked_for_more(tmp_path: Path) -> None:
    """More patience is as if asked for at once. More epochs come behind the one that was stopped, which is left."""
    scenarios = Scenarios(tmp_path, JOB, MODULES, LIMIT)
    patient = LIGHTNING.but(samples=18, epochs=6, more={"patience": 3, "delta": 1.0})
    stopped = LIGHTNING.but(samples=18, epochs=2, stop_at=7)
    scenarios.add("patience", patient.but(more={"patience": 1, "delta": 1.0}))
    scenarios.add("patience", patient)
    scenarios.add("patience at once", patient)
    scenarios.add("epochs", stopped)
    scenarios.add("epochs", stopped.but(epochs=3))
    scenarios.python()
    require_same(scenarios.portrait("patience", 0), scenarios.portrait("patience at once", 0), "patience")
    epochs = scenarios.portrait("epochs", 0)
    assert (epochs["/steps"], epochs["/ends"]) == ("25", "3"), "7, and two whole epochs of 9"


@pytest.mark.soak
def test_a_rank_that_is_killed_anywhere_costs_no_step_no_row_and_no_file(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, KILLED, list(PHASES))


def test_a_callback_that_answers_a_stop_signal_by_the_end_of_the_training_does_not_end_it(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, LIGHTNING.but(samples=32, stops_when_told=True), ["by SIGTERM"])
