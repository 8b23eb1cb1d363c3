"""What is done where there are thousands of ranks, by four of them."""

from pathlib import Path

from job_results import Scenarios
from toy import Toy, facts, require_same

from rollback.facts.training import Incident, Restored
from rollback.rundir.paths import RunPaths

JOB = Path(__file__).parent / "jobs" / "as_if_many.py"
RANKS, ILL = 4, 2
SETTINGS = {
    "policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20,
    "fast_tier": "off",
}  # fmt: skip
TOY = Toy(samples=480, sampler="distributed", nan=(25,), nan_rank=ILL, patient=False, settings=SETTINGS)


def test_the_rank_that_saw_a_nan_and_one_that_did_not_write_evidence_and_the_run_is_that_of_the_skip(
    tmp_path: Path,
) -> None:
    scenarios = Scenarios(tmp_path, JOB)
    run = RunPaths(scenarios.run("job"))
    scenarios.add("job", TOY)
    scenarios.add("skipped", TOY, skips_of=str(run.root))
    scenarios.torchrun(RANKS)
    (incident,) = facts(run.root, Incident)
    assert facts(run.root, Restored)
    assert incident.ranks == (ILL,)
    told = {path.stem for path in run.incident(incident.incident).glob("rank-*.json")}
    assert told == {"rank-00000", f"rank-{ILL:05d}"}
    for rank in range(RANKS):
        require_same(scenarios.portrait("job", rank), scenarios.portrait("skipped", rank), f"rank {rank}")
