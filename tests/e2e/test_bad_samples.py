"""Samples that are bad for good: each epoch meets them again, and the run goes on without them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from job_results import JOB, LAUNCH, LIMIT, Scenarios
from toy import PRESETS, Toy, facts

from rollback.audit.compile import compile_ledger
from rollback.audit.material import read_material
from rollback.events import Incident
from rollback.suspects import suspects


def launch(job: Scenarios, name: str, *flags: str) -> tuple[int, str]:
    command = [*LAUNCH, "--nproc", "2", "--run", str(job.run(name)), *flags, str(JOB), str(job.path)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}, timeout=LIMIT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


BAD = (417, 1603)


def test_two_bad_samples_of_two_thousand_over_twelve_epochs_with_default_settings(tmp_path: Path) -> None:
    """Done, both named, and nothing lost but what the first answers cost."""
    toy = Toy(2048, epochs=12, batch_size=16, sampler="distributed", loop="epochs", bad=BAD, settings=PRESETS)
    job = Scenarios(tmp_path)
    job.add("run", toy)
    code, output = launch(job, "run")
    assert code == 0, output[-4000:]
    run = job.run("run")
    totals = compile_ledger(read_material(run)).totals
    print(f"goodput {totals.goodput}, {totals.steps} steps, {totals.skipped_batches} batches skipped")
    print(output)
    found = suspects(facts(run, Incident))
    assert {*BAD} <= {*found}
