"""The Slurm recipes on a real Slurm of one node: told to stop, requeued, and bit for bit where they would have been.

`scripts/test --soak tests/e2e/test_slurm.py` runs them: a requeued job waits a while before Slurm starts it again.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from job_results import JOB, Scenarios
from slurm import Slurm
from toy import Toy, facts, require_same

from rollback.facts.training import Attached, Stopped
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not())),
]
RECIPES = Path(__file__).parents[2] / "launch" / "slurm"
LIMIT = 240.0
SETTLED = 3.0
"""Seconds after a requeue: slurmd refuses a start in the same second as the end, as one that was revoked."""
TOY = Toy(
    samples=4000, sampler="distributed", epochs=2, loop="epochs", between=True, nan=(60, 700), nan_rank=1,
    patient=False, settings={
        "policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    scenarios = Scenarios(tmp_path_factory.mktemp("undisturbed"))
    scenarios.add("run", TOY)
    scenarios.torchrun(2)
    return [scenarios.portrait("run", rank) for rank in range(2)]


class Job:
    """A recipe, submitted with the toy as its script."""

    def __init__(self, cluster: Slurm, folder: Path, recipe: str, *options: str, **environment: str) -> None:
        self.cluster, self.folder = cluster, folder
        self.scenarios = Scenarios(folder)
        self.scenarios.add("run", TOY)
        self.paths = RunPaths(self.scenarios.run("run"))
        # `rollback` as installed may be that of another tree.
        (folder / "rollback").write_text(f'#!/bin/sh\nexec {sys.executable} -m rollback "$@"\n')
        (folder / "rollback").chmod(0o755)
        said = cluster.run(
            "sbatch", f"--chdir={folder}", f"--output={folder}/output", *options, str(RECIPES / recipe), str(JOB),
            str(self.scenarios.path), RUN=str(self.paths.root), NO_COLOR="1",
            PATH=f"{folder}:{cluster.environment['PATH']}", **environment,
        )  # fmt: skip
        assert said.startswith("Submitted batch job "), said
        self.number = said.split()[-1]

    def wait_until(self, what: str, condition: object) -> None:
        deadline = time.monotonic() + LIMIT
        bad, requeued = 0, time.monotonic()
        while not condition():  # type: ignore[operator]
            state = self.cluster.job(self.number)
            # A job that is being requeued is shown as failed for a moment.
            bad = bad + 1 if state.get("JobState") in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") else 0
            assert bad < 50, f"not {what}: {state}\n{self.told()}\n{self.cluster.logs()}"
            assert time.monotonic() < deadline, f"not {what}: {state}\n{self.told()}\n{self.cluster.logs()}"
            if state.get("JobState") != "PENDING" or int(state.get("Restarts", 0)) == 0:
                requeued = time.monotonic()
            elif time.monotonic() - requeued > SETTLED:
                self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            time.sleep(0.2)

    def trains(self, attempt: int, step: int) -> bool:
        beats = [beat.step for beat in read_heartbeats(self.paths.ranks).values() if beat.attempt == attempt]
        return len(beats) == 2 and min(beats) >= step

    def restarted(self) -> bool:
        return self.cluster.job(self.number).get("Restarts") == "1"

    def completed(self) -> bool:
        return self.cluster.job(self.number)["JobState"] == "COMPLETED"

    def told(self) -> str:
        output = self.folder / "output"
        return output.read_text() if output.exists() else ""

    def require_what_an_undisturbed_one_ends_with(self, undisturbed: list[dict[str, str]]) -> None:
        (stopped,) = facts(self.paths.root, Stopped)
        assert [fact.step for fact in facts(self.paths.root, Attached)] == [0, stopped.step], self.told()
        for rank in range(2):
            require_same(self.scenarios.portrait("run", rank), undisturbed[rank], f"rank {rank}")


@pytest.mark.parametrize("how", ["--batch", "--full"])
def test_a_job_on_one_node_that_is_warned_is_requeued_and_goes_on_exactly(
    cluster: Slurm, tmp_path: Path, undisturbed: list[dict[str, str]], how: str
) -> None:
    """`--batch` signals the batch script alone, as its `--signal=B:USR1` does; `--full` every process of the job."""
    job = Job(cluster, tmp_path, "one-node.sbatch", NPROC="2")
    job.wait_until("training", lambda: job.trains(1, 50))
    cluster.run("scancel", "--signal=USR1", how, job.number)
    job.wait_until("requeued", job.restarted)
    job.wait_until("completed", job.completed)
    job.require_what_an_undisturbed_one_ends_with(undisturbed)


def test_a_job_on_many_nodes_that_is_warned_is_requeued_and_goes_on_exactly(
    cluster: Slurm, tmp_path: Path, undisturbed: list[dict[str, str]]
) -> None:
    """The two nodes are two tasks on the one node there is."""
    job = Job(cluster, tmp_path, "many-nodes.sbatch", "--nodes=1", "--ntasks-per-node=2", NPROC="1")
    job.wait_until("training", lambda: job.trains(1, 50))
    cluster.run("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_until("requeued", job.restarted)
    job.wait_until("completed", job.completed)
    job.require_what_an_undisturbed_one_ends_with(undisturbed)


def test_a_job_that_slurm_preempts_is_back_when_the_other_one_is_through(
    cluster: Slurm, tmp_path: Path, undisturbed: list[dict[str, str]]
) -> None:
    job = Job(cluster, tmp_path, "one-node.sbatch", NPROC="2")
    job.wait_until("training", lambda: job.trains(1, 50))
    urgent = cluster.run("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    assert urgent.startswith("Submitted"), urgent
    job.wait_until("requeued", job.restarted)
    job.wait_until("completed", job.completed)
    job.require_what_an_undisturbed_one_ends_with(undisturbed)
