"""Protected jobs beside what each is to be like, bit for bit: unprotected, or given its skips from the start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from job_results import Scenarios
from toy import facts, require_same
from trainer_job import JOB, LIMIT, MODULES, TrainerJob

from rollback.facts.training import Finished, Incident, Restored


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
