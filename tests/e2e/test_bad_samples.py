"""Samples that are bad for good: each epoch meets them again, and the run goes on without them."""

from pathlib import Path

import pytest
from attempts import DIED, Forker
from job_results import Scenarios
from selection import soak
from toy import PRESETS, Toy, facts, left_out, require_same, same_skips_from_the_start, skipped, train
from typer.testing import CliRunner

from rollback.cli import app
from rollback.facts.training import Incident, Planned, SampleQuarantine, Stopped
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents

BAD = (417, 1603)
TOY = Toy(2048, epochs=12, batch_size=16, sampler="distributed", loop="epochs", bad=BAD, settings=PRESETS)
ITSELF = {"rewind": None, "skip_after": None}  # no window by hand: a batch that did it alone is skipped alone
SMALL = Toy(400, epochs=3, batch_size=8, bad=(33, 301), augment=True, settings=ITSELF)  # epochs of 50 batches


def audit(run: Path, *flags: str) -> str:
    return CliRunner().invoke(app, ["audit", str(run), *flags]).stdout


@pytest.mark.soak
@pytest.mark.parametrize("epochs", [pytest.param(3, id="three epochs"), pytest.param(12, id="twelve epochs")])
def test_two_bad_samples_of_two_thousand_with_default_settings(tmp_path: Path, epochs: int) -> None:
    """Done, both named, and nothing lost but what the first answers cost: the batches in hand, each once."""
    job, toy = Scenarios(tmp_path), TOY.but(epochs=epochs)
    job.add("run", toy)
    code, output = job.launch(job.run("run"))
    assert code == 0, output[-4000:]
    run, incidents = job.run("run"), facts(job.run("run"), Incident)
    assert [len(plan.skip) for plan in facts(run, Planned)] == [1] * len(incidents)
    assert len(incidents) <= 2 * len(BAD) + 1, "each is met twice, and once more where another was suspected by chance"
    told = [line.split(":")[0] for line in audit(run, "--samples").splitlines() if "left out from batch" in line]
    assert {f"sample {sample}" for sample in BAD} <= {*told}
    totals = compile_audit(read_run_contents(run)).totals
    assert (totals.steps, totals.skipped_batches) == (64 * epochs - len(incidents), len(incidents))
    print(f"goodput {totals.goodput}: {totals.steps} steps count and {totals.steps_lost} were undone")


@pytest.mark.parametrize("workers", [1, *soak(0, 2)])
def test_a_run_that_finds_bad_samples_is_the_run_that_was_told_from_the_start(tmp_path: Path, workers: int) -> None:
    toy, run = SMALL.but(workers=workers), tmp_path / "run"
    ended = train(toy, run)
    assert {33, 301} <= {sample for entry in left_out(run) for sample in entry["samples"]}
    assert all(plan.escalation == 0 for plan in facts(run, Planned))
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), f"{workers} workers")


@pytest.mark.parametrize(
    "die",
    [
        ["after", "sample_quarantine", 1],
        pytest.param(["before", "sample_quarantine", 1], marks=pytest.mark.soak),
        pytest.param(["after", "plan", 3], marks=pytest.mark.soak),
    ],
)
def test_a_crash_around_the_quarantine_changes_nothing(tmp_path: Path, forker: Forker, die: list[object]) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    assert forker.status(SMALL, run, log=str(log), die=die) == DIED
    ended = forker.finish(SMALL, run, log=log)
    assert {33, 301} <= {sample for entry in left_out(run) for sample in entry["samples"]}
    require_same(ended, same_skips_from_the_start(SMALL, run, tmp_path / "fresh"), "crashed")


@pytest.mark.soak
def test_with_quarantine_off_each_epoch_meets_them_again(tmp_path: Path) -> None:
    toy = SMALL.with_settings(quarantine="off")
    run = tmp_path / "run"
    ended = train(toy, run)
    assert len(facts(run, Incident)) == len(skipped(run)) == 6
    assert facts(run, SampleQuarantine) == []
    assert "sample 33: suspect of incidents" in audit(run, "--samples")
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "quarantine off")


def test_a_run_that_was_stopped_does_not_end_well_because_it_is_started_again(tmp_path: Path) -> None:
    """Everything is bad: it stops with 76, and the same command says so once more instead of training nothing."""
    job = Scenarios(tmp_path)
    job.add("run", TOY.but(bad=tuple(range(2048))))
    code, output = job.launch(job.run("run"))
    assert code == 76, output[-4000:]
    again, told = job.launch(job.run("run"))
    assert again == 76, told[-4000:]
    assert "was stopped as structural at step" in told
    assert "--accept-structural" in told
    assert len(facts(job.run("run"), Stopped)) == 1
