"""`rollback launch --adopt`: plain scripts without a changed line, and what `rollback adopt` makes of them.

A few cases at one rank and at two; `scripts/test --soak tests/e2e/trainers` tries all. What a script consumed is in the
state that is compared: a buffer of its model.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from adopted import OWN_POLICY, PLAIN, Case, Job, refused
from selection import by_default, soak
from toy import facts
from warm_server import run_warm

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Finished, Incident, Restored

UNEVEN = ("--samples", "157", "--accumulate", "3", "--scaler")
"""40 batches in an epoch, three to an update, and one that is left over."""
PREPARED = ("--samples", "59", "--accumulate", "4")
CASES = {
    "clean": Case(),
    "clean, accumulation": Case(words=UNEVEN),
    "clean, accelerate": Case(script="accelerated.py", words=PREPARED),
    "in the middle": Case(bad=17),
    "in the last update": Case(bad=-1),
    "at an epoch's tail": Case(bad=29),
    "over an epoch's start": Case(bad=31),
    "over an epoch's start, later": Case(bad=38),
    "surgical": Case(bad=22, settings=(*OWN_POLICY, "--policy", "surgical")),
    "balanced": Case(bad=41, settings=OWN_POLICY),
    "accumulation": Case(bad=17, words=UNEVEN[:-1]),
    "accumulation, over an epoch's start": Case(bad=45, words=(*UNEVEN[:-1], "--own")),
    "accumulation, the last one": Case(bad=-1, words=UNEVEN[:-1]),
    "accelerate, in the middle": Case(bad=17, script="accelerated.py"),
    "accelerate, over an epoch's start": Case(bad=31, script="accelerated.py"),
}
PHASES = {"in the first step": 1, "in a step": 26, "behind an epoch's start": 42, "in the last step": 80}
"""So many batches have been taken, of 40 in an epoch."""


def require_exact(folder: Path, case: Case, ranks: int) -> None:
    job = Job(folder, case, ranks)
    job.plain("plain")
    if case.bad is None:
        output = job.launched("adopted", "--adopt=strict")
        job.require_same("adopted", "plain")
    else:
        job.spoil("plain")
        output = job.launched("adopted", "--adopt=strict")
        job.launched("oracle", "--adopt=strict", "--skips-of", "adopted")
        job.require_same("adopted", "oracle")
    run = folder / "adopted"
    assert bool(facts(run, Incident)) == bool(facts(run, Restored)) == (case.bad is not None), output
    assert facts(run, Finished), output


@pytest.mark.parametrize(("name", "ranks"), [("clean, accumulation", 2), ("accumulation, over an epoch's start", 1)])
def test_an_adopted_script_is_the_plain_one_or_that_given_its_skips(tmp_path: Path, name: str, ranks: int) -> None:
    require_exact(tmp_path, CASES[name], ranks)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_each_place_for_a_bad_batch(tmp_path: Path, name: str, ranks: int) -> None:
    require_exact(tmp_path, CASES[name], ranks)


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "words"), [(4, ()), (2, ("--workers", "1")), (2, ("--compile",))])
def test_more_ranks_workers_and_a_compiled_model(tmp_path: Path, ranks: int, words: tuple[str, ...]) -> None:
    require_exact(tmp_path, Case(bad=31, words=words), ranks)


def require_undisturbed(folder: Path, case: Case, phases: list[str]) -> None:
    job = Job(folder, case, 2)
    job.plain("plain")
    for phase in phases:
        name = phase.replace(" ", "-").replace("'", "")
        output = job.launched(name, "--adopt=strict", words=("--kill", f"1:{PHASES[phase]}"))
        assert len(facts(folder / name, Attached)) == 2, output
        job.require_same(name, "plain")


def test_a_rank_that_is_killed_in_the_middle_of_an_accumulation_costs_nothing(tmp_path: Path) -> None:
    """Nor of what the script keeps for itself: a generator of random numbers, an average of the weights."""
    require_undisturbed(tmp_path, Case(words=(*UNEVEN, "--own")), ["in a step"])


@pytest.mark.soak
@pytest.mark.parametrize("script", ["epochs.py", "accelerated.py"])
def test_a_rank_that_is_killed_anywhere_costs_nothing(tmp_path: Path, script: str) -> None:
    words = UNEVEN if script == "epochs.py" else UNEVEN[:-1]
    require_undisturbed(tmp_path, Case(script=script, words=words), list(PHASES))


@pytest.mark.parametrize("script", by_default(("by_trainer.py", "by_lightning.py"), "by_trainer.py"))
def test_a_trainer_of_a_library_is_protected_as_by_a_line_in_the_script(tmp_path: Path, script: str) -> None:
    require_undisturbed(tmp_path, Case(script=script), ["in a step"])


@pytest.mark.soak
@pytest.mark.parametrize("script", ["by_trainer.py", "by_lightning.py"])
def test_a_second_training_by_the_same_trainer_goes_on_unprotected(tmp_path: Path, script: str) -> None:
    """And behind a kill the first one stays as it was."""
    job = Job(tmp_path, Case(script=script, words=("--again",)), 1)
    job.plain("plain")
    output = job.launched("killed", "--adopt", words=("--kill", "0:70"))
    assert output.count("not protected from here on: the script trains a second time") == 2, output
    job.require_same("killed", "plain")


@pytest.mark.parametrize("disks", by_default(("shared", "apart"), "apart"))
def test_a_script_that_begins_behind_its_own_snapshot_is_trained_to_its_last_epoch(tmp_path: Path, disks: str) -> None:
    job = Job(tmp_path, Case(script="own_snapshot.py", words=("--apart",) if disks == "apart" else ()), 2)
    job.plain("plain")
    output = job.launched("killed", "--adopt=strict", words=("--kill", "1:26"))
    assert "the script begins with epoch 2 now, and the run began with epoch 0" in output
    job.require_same("killed", "plain")


def test_a_script_over_accelerate_that_resumes_by_itself_goes_on_from_the_runs_checkpoint(tmp_path: Path) -> None:
    """And it may load a folder of its own behind the training."""
    job = Job(tmp_path, Case(script="resumes_itself.py"), 2)
    job.plain("plain")
    output = job.launched("killed", "--adopt=strict", words=("--kill", "1:36"))
    assert "leaves out 4 batches (skip_first_batches), as if it resumed: this is left aside" in output
    job.require_same("killed", "plain")


def test_a_script_that_draws_what_it_passes_over_to_resume_is_refused_before_it_loses_that(tmp_path: Path) -> None:
    run = "--run", "run", "--last-snapshot", "off", "--snapshot-every", "100"  # begins anew, before its own folder
    words = str(PLAIN / "resumes_itself.py"), "killed", "--again", "--kill", "1:36"
    done = refused(tmp_path, "--adopt=strict", *run, *words, ranks=2)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert "does not train on the first batch that it takes of an epoch" in done.stdout
    assert "take that loading out" in done.stdout


def test_a_loop_over_epochs_around_a_training_in_another_file_begins_where_the_run_stands(tmp_path: Path) -> None:
    Job(tmp_path, Case(script="elsewhere.py", words=("3",)), 1).plain("plain")
    for epochs in "2", "3":
        job = Job(tmp_path, Case(script="elsewhere.py", words=(epochs,)), 1)
        job.launched("longer", "--adopt=strict")
    job.require_same("longer", "plain")
    job.launched("killed", "--adopt=strict", words=("33",))
    job.require_same("killed", "plain")


def test_a_loop_that_evaluates_too_counts_each_of_its_loaders(tmp_path: Path) -> None:
    job = Job(tmp_path, Case(script="shared_loop.py"), 1)
    job.plain("plain")
    job.launched("adopted", "--adopt=strict")
    job.require_same("adopted", "plain")


# Made explicit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("in the middle", 1), *soak(*((name, 2) for name in CASES))])
def test_what_rollback_adopt_prints_applies_and_is_exact(tmp_path: Path, name: str, ranks: int) -> None:
    case = CASES[name]
    job = Job(tmp_path, case, ranks)
    for script in PLAIN.glob("*.py"):
        (tmp_path / script.name).write_text(script.read_text())
    command = [sys.executable, "-m", "rollback", "adopt", case.script]
    diff = run_warm(command, cwd=tmp_path, capture_output=True, check=True).stdout
    job.plain("plain")
    subprocess.run(["patch", "-p0"], input=diff, text=True, cwd=tmp_path, check=True, capture_output=True)
    explicit = tmp_path / case.script
    if case.bad is not None:
        job.spoil("plain")
    job.launched("explicit", script=explicit)
    assert facts(tmp_path / "explicit", Finished)
    if case.bad is None:
        job.require_same("explicit", "plain")
        return
    job.launched("oracle", "--skips-of", "explicit", script=explicit)
    job.require_same("explicit", "oracle")
