"""Protected jobs beside what each is to be like, bit for bit: unprotected, given its skips, or not killed."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from job_results import Scenarios
from toy import facts, require_same
from trainer_job import JOB, LIMIT, MODULES, TrainerJob

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Finished, Incident, Restored, Stopped


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


BEHIND: dict[str, dict[str, Any]] = {"behind the end": {"die": ["Finished", 1], "behind": True}}


TOLD: dict[str, dict[str, Any]] = {
    "by SIGTERM": {"told": [0, 13, "SIGTERM"]},
    "by SIGTERM behind an epoch's start": {"told": [1, 41, "SIGTERM"]},
    "by rollback stop": {"told": [0, 5, "rollback stop"]},
}
"""For jobs without a bad batch: a stop saves, and where checkpoints lie decides what a rollback skips."""


def require_undisturbed(
    folder: Path, job: TrainerJob, phases: list[str], modules: str = MODULES, *, url: bool = False
) -> None:
    """Kill a rank of two, or tell it to stop, in each of the phases: the job ends as one that was left alone.

    modules: what is imported warm. url: with a ring at a URL, which is all that there is of the run after a stop.
    """
    undisturbed = Scenarios(folder, JOB, modules, LIMIT)
    undisturbed.add("undisturbed", job)
    undisturbed.torchrun(2)
    how = {**PHASES, **BEHIND, **TOLD}
    for number, phase in enumerate(phases):
        killed = Scenarios(folder / str(number), JOB, modules, LIMIT)
        killed.folder.mkdir()
        killed.add("killed", job, **how[phase])
        run = killed.run("killed")
        ring = ["--ring", f"file://{killed.folder}/url"] if url else []
        if phase in TOLD:
            code, output = killed.launch(run, *ring)
            assert code == ExitCode.RESUMABLE, output[-8000:]
            assert facts(run, Stopped)[0].checkpoint.endswith(f"{facts(run, Stopped)[0].step:08d}")
            if url:
                shutil.rmtree(run)
        code, output = killed.launch(run, *ring)
        assert code == 0, output[-8000:]
        assert len(facts(run, Attached)) == 2, output[-8000:]
        assert bool(facts(run, Restored)) == bool(job.bad_at)
        assert facts(run, Finished)
        for rank in (0, 1):
            require_same(killed.portrait("killed", rank), undisturbed.portrait("undisturbed", rank), phase)
