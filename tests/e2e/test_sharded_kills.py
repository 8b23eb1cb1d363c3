"""Sharded models under `rollback launch`, killed and stopped at random moments and within a rollback: the run ends bit
for bit as one that was never disturbed. And on other numbers of ranks, with every sample where it belongs."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from job_results import Scenarios
from toy import Toy, consumed, facts, require_same, train

from rollback.facts.training import Attached, Finished, Restored, Stopped
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths

pytestmark = pytest.mark.soak
LIMIT = 240.0
# What is skipped must not depend on which checkpoints a killed run happens to have: only what is bad, each time.
SURGICAL = {"policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20}
TOY = Toy(
    samples=320, epochs=2, loop="epochs", between=True, sampler="distributed", width=17, nan=(45,), nan_rank=1,
    patient=False, settings=SURGICAL,
)  # fmt: skip
JOBS = {
    "fsdp": (2, TOY.but(sharding="fsdp")),
    "accumulated": (2, TOY.but(samples=640, sharding="fsdp, offloaded", accumulate=2)),
    "hsdp": (4, TOY.but(samples=640, sharding="hsdp")),
    "tensor parallel": (4, TOY.but(sharding="tensor parallel")),
}
SEEDS = [("fsdp", seed) for seed in range(25)]
SEEDS += [(job, seed) for job in ("accumulated", "hsdp", "tensor parallel") for seed in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenarios]:
    made = {}
    for job, (ranks, toy) in JOBS.items():
        made[job] = Scenarios(tmp_path_factory.mktemp("undisturbed"), limit=LIMIT)
        made[job].add("job", toy)
        made[job].torchrun(ranks)
        assert facts(made[job].run("job"), Restored)
    return made


class Launched:
    """The same job under the supervisor, as often as it is launched."""

    def __init__(self, folder: Path, job: str, **more: object) -> None:
        self.ranks, self.toy = JOBS[job]
        self.run = folder / "run"
        self.scenarios = Scenarios(folder)
        self.scenarios.add("job", self.toy, run=str(self.run), **more)

    def launch(self) -> subprocess.Popen[str]:
        return self.scenarios.start_launch(self.run, ranks=self.ranks)

    def end(self, job: subprocess.Popen[str], told: str) -> int:
        output, _ = job.communicate(timeout=LIMIT)
        assert job.returncode in (0, 75), f"{told}\n{output}"
        return int(job.returncode)

    def require(self, undisturbed: Scenarios, told: str) -> None:
        for rank in range(self.ranks):
            portraits = [scenarios.portrait("job", rank) for scenarios in (self.scenarios, undisturbed)]
            require_same(*portraits, f"{told}, rank {rank}")

    def pid_at(self, job: subprocess.Popen[str], rank: int, step: int) -> int | None:
        """Of a rank, as soon as its heartbeat has reached a step; None: the job ended before."""
        deadline = time.monotonic() + LIMIT
        while job.poll() is None and time.monotonic() < deadline:
            beat = read_heartbeats(RunPaths(self.run).ranks).get(rank)
            if beat is not None and beat.step >= step and beat.doing != "ended" and psutil.pid_exists(beat.pid):
                return beat.pid
            time.sleep(0.005)
        return None


@pytest.mark.parametrize(("job", "seed"), SEEDS)
def test_a_rank_killed_at_a_random_moment(
    tmp_path: Path, undisturbed: dict[str, Scenarios], job: str, seed: int
) -> None:
    moments, launched = random.Random(f"{job}/{seed}"), Launched(tmp_path, job)
    victim, aim, later = moments.randrange(launched.ranks), moments.randrange(75), moments.uniform(0.0, 0.1)
    told = f"{job}, seed {seed}: rank {victim}, {later:.3f} s behind step {aim}"
    running = launched.launch()
    if (pid := launched.pid_at(running, victim, aim)) is not None:
        time.sleep(later)
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()
    assert launched.end(running, told) == 0, told
    launched.require(undisturbed[job], told)


@pytest.mark.parametrize(("job", "seed"), [("fsdp", 0), ("fsdp", 1), ("fsdp", 2), ("hsdp", 0)])
def test_a_job_that_is_preempted_goes_on(
    tmp_path: Path, undisturbed: dict[str, Scenarios], job: str, seed: int
) -> None:
    moments, launched = random.Random(f"preempted {job}/{seed}"), Launched(tmp_path, job)
    aim, told = moments.randrange(70), f"{job}, seed {seed}"
    running = launched.launch()
    launched.pid_at(running, 0, aim)
    running.send_signal(signal.SIGTERM)
    assert launched.end(running, told) == 75, told
    assert facts(launched.run, Stopped)
    assert launched.end(launched.launch(), told) == 0, told
    launched.require(undisturbed[job], told)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_rank_killed_in_the_midst_of_a_rollback(
    tmp_path: Path, undisturbed: dict[str, Scenarios], job: str, moment: str
) -> None:
    """Before it reads the state that is restored, or behind it, while others do."""
    launched = Launched(tmp_path, job, dies_in_restore=[1, moment])
    assert launched.end(launched.launch(), job) == 0
    assert len(facts(launched.run, Attached)) == 2
    launched.require(undisturbed[job], f"{job}, {moment}")


STAGES = ((4, 17), (2, 30), (3, 45), (4, None))
CHAINED = Toy(samples=420, epochs=2, sampler="distributed", augment=True, width=17, sharding="fsdp")  # 35 batches each


def test_every_batch_is_made_of_the_same_samples_on_4_2_3_and_4_ranks(tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {}
    for place, (ranks, told) in enumerate(STAGES):
        (tmp_path / str(place)).mkdir()
        scenarios = Scenarios(tmp_path / str(place))
        stop = {} if told is None else {"signal": [ranks - 1, told, signal.SIGTERM]}
        scenarios.add("job", CHAINED.but(batch_size=12 // ranks), run=str(tmp_path / "run"), **stop)
        scenarios.torchrun(ranks)
        of_stage: dict[int, list[int]] = {}
        for rank in range(ranks):
            assert ("portrait" if told is None else "exit") in scenarios.result("job", rank)
            for line in (scenarios.folder / f"job-{rank}.log").read_text().splitlines():
                _, _, position, ids = json.loads(line)
                of_stage.setdefault(position, []).extend(ids)
        seen |= of_stage
    undisturbed = consumed(train(CHAINED.but(batch_size=12, sharding=None)))
    assert {position: sorted(ids) for position, ids in seen.items()} == {
        position: sorted(ids) for position, ids in undisturbed.items()
    }
    assert [fact.world_size for fact in facts(tmp_path / "run", Attached)] == [ranks for ranks, _ in STAGES]
    assert facts(tmp_path / "run", Finished)[-1].step == 70
