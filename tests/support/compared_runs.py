"""Protected jobs beside what each is to be like, bit for bit: unprotected, given its skips, or not killed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from job_results import LAUNCH, Scenarios
from toy import facts, require_same
from trainer_job import JOB, LIMIT, MODULES, TrainerJob

from rollback.facts.training import Attached, Finished, Incident, Restored


def require_all_same(
    folder: Path, ranks: int, clean: Mapping[str, TrainerJob], bad: Mapping[str, TrainerJob], modules: str = MODULES
) -> None:
    """Run them all, and compare. modules: what is imported warm."""
    scenarios = Scenarios(folder, JOB, modules, LIMIT)
    for name, job in clean.items():
        scenarios.add(f"clean {name}", job)
        scenarios.add(f"clean {name}, oracle", job, run=None)
    for name, job in ((name, job.but(bad_rank=ranks - 1)) for name, job in bad.items()):
        scenarios.add(f"bad {name}", job)
        scenarios.add(f"bad {name}, oracle", job, skips_of=str(scenarios.run(f"bad {name}")))
    output = scenarios.python() if ranks == 1 else scenarios.torchrun(ranks)
    for name in [*(f"clean {name}" for name in clean), *(f"bad {name}" for name in bad)]:
        run = scenarios.run(name)
        for rank in range(ranks):
            require_same(scenarios.portrait(name, rank), scenarios.portrait(f"{name}, oracle", rank), name)
        assert bool(facts(run, Incident)) == bool(facts(run, Restored)) == name.startswith("bad"), output
        assert facts(run, Finished), output


PHASES: dict[str, dict[str, Any]] = {
    "in the first step": {"kill": [1, 0]},
    "in a step": {"kill": [1, 25]},
    "behind an epoch's start": {"kill": [1, 60]},
    "while a checkpoint is committed": {"die": ["Committed", 3]},
    "before the incident is journalled": {"die": ["Incident", 1]},
    "before the plan is": {"die": ["Planned", 1]},
    "in the middle of the rollback": {"die": ["Restored", 1]},
    "before the end is": {"die": ["Finished", 1]},
}


def require_undisturbed(folder: Path, job: TrainerJob, phases: list[str], modules: str = MODULES) -> None:
    """Kill a rank of two in each of the phases: the job ends as one that nobody has killed."""
    undisturbed = Scenarios(folder, JOB, modules, LIMIT)
    undisturbed.add("undisturbed", job)
    undisturbed.torchrun(2)
    for number, phase in enumerate(phases):
        killed = Scenarios(folder / str(number), JOB, modules, LIMIT)
        killed.folder.mkdir()
        killed.add("killed", job, **PHASES[phase])
        command = [*LAUNCH, "--nproc", "2", "--run", str(killed.run("killed")), str(JOB), str(killed.path)]
        done = subprocess.run(
            command, env={**killed.environment, "NO_COLOR": "1"}, timeout=LIMIT, text=True, cwd=folder, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:]
        run = killed.run("killed")
        assert len(facts(run, Attached)) == 2, done.stdout[-8000:]
        assert facts(run, Restored)
        assert facts(run, Finished)
        for rank in (0, 1):
            require_same(killed.portrait("killed", rank), undisturbed.portrait("undisturbed", rank), phase)
