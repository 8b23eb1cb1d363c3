"""Oracle B: a rank is killed at random moments; the run ends bit for bit as one that was never disturbed.

25 kills in the soak: 22 of a single rank, one after another in the same runs, and 3 of a rank among two under
`rollback launch`; by default 6 of a single rank and 2 of a rank among two.
"""

import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from attempts import Forker
from job_results import Scenarios
from selection import soak
from toy import Toy, facts, require_same, supervisor_facts

from rollback.facts.training import Attached, AttemptEnded, Incident
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths

LIMIT = 90.0
# What is skipped must not depend on which checkpoints a killed run happens to have: only what is bad, each time.
SURGICAL = {"policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20}
JOBS = {
    "epochs and an incident": Toy(
        samples=180, epochs=2, loop="epochs", between=True, augment=True, nan=(25, 62), patient=False,
        settings=SURGICAL,
    ),
    "workers and an incident": Toy(samples=320, workers=1, augment=True, nan=(60,), patient=False, settings=SURGICAL),
    "drawn and accumulated": Toy(loader="drawn", accumulate=2, max_steps=70, patient=False, settings=SURGICAL),
}  # fmt: skip


@pytest.mark.parametrize(
    ("job", "kills"),
    [
        *((job, 2) for job in JOBS),
        *soak(*zip(JOBS, (8, 7, 7), strict=True)),
    ],
)
def test_a_rank_killed_at_random_moments(tmp_path: Path, forker: Forker, job: str, kills: int) -> None:
    """A moment is a share of the time that an undisturbed attempt takes. When a run is through, another begins."""
    toy, seed = JOBS[job], f"{job}/1"
    moments = random.Random(seed)
    # The first attempt of a process is several times slower than the others.
    forker.finish(toy.but(max_steps=3), tmp_path / "warm-up")
    began = time.monotonic()
    undisturbed = forker.finish(toy, tmp_path / "undisturbed", log=tmp_path / "undisturbed-log")
    takes = time.monotonic() - began
    killed, runs = 0, 0
    while killed < kills:
        run, log = tmp_path / f"run{runs}", tmp_path / f"log{runs}"
        runs += 1
        delays = []
        while killed < kills:
            delays.append(moments.uniform(0.05, 0.6) * takes)
            status = forker.status(toy, run, log=str(log), kill_after=delays[-1])
            assert status in (0, -signal.SIGKILL), Path(f"{run}.txt").read_text()
            if status == 0:
                break
            killed += 1
        ended = forker.finish(toy, run, log=log)
        require_same(ended, undisturbed, f"seed {seed!r}, run {runs}, killed after {delays} s")


@pytest.mark.parametrize("kills", [2, *soak(3)])
def test_a_rank_of_two_killed_at_random_moments_under_launch(tmp_path: Path, kills: int) -> None:
    """The supervisor starts the next attempt by itself. A kill may come at any step, also while ranks are starting."""
    seed = 3
    moments, run = random.Random(seed), tmp_path / "killed"
    toy = Toy(
        samples=320, sampler="distributed", epochs=2, loop="epochs", between=True, nan=(24, 58), nan_rank=1,
        patient=False, settings=SURGICAL,
    )  # fmt: skip
    killed_at: list[tuple[int, int]] = []
    job = _launch(toy, run)
    try:
        for aim in sorted(moments.sample(range(10, 64), kills)):
            victim = moments.randrange(2)
            beat = _heartbeat_from(run, victim, aim, job)
            if beat is None:
                break
            psutil.Process(beat[0]).kill()
            killed_at.append((victim, beat[1]))
        output, _ = job.communicate(timeout=LIMIT)
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
    told = f"seed {seed}, killed (rank, step) {killed_at}"
    assert job.returncode == 0, f"{told}\n{output}"
    ended = supervisor_facts(run, AttemptEnded)
    assert len(ended) == len(killed_at) + 1, told
    assert len(killed_at) == kills, told
    assert all("signal 9" in fact.cause for fact in ended[:-1]), [fact.cause for fact in ended]
    assert {fact.onset_batch for fact in facts(run, Incident)} == {24, 58}
    assert len(facts(run, Attached)) == len(ended)
    scenarios = Scenarios(tmp_path)
    scenarios.add("undisturbed", toy)
    scenarios.torchrun(2)
    for rank in range(2):
        portraits = [scenarios.portrait(name, rank) for name in ("killed", "undisturbed")]
        require_same(*portraits, f"{told}, rank {rank}")


def _launch(toy: Toy, run: Path) -> subprocess.Popen[str]:
    scenarios = Scenarios(run.parent)
    scenarios.add(run.name, toy)
    return scenarios.start_launch(run)


def _heartbeat_from(run: Path, rank: int, step: int, job: subprocess.Popen[str]) -> tuple[int, int] | None:
    """Pid and step of a rank as soon as its heartbeat has reached a step; None where the job ended before."""
    deadline = time.monotonic() + LIMIT
    while job.poll() is None and time.monotonic() < deadline:
        beat = read_heartbeats(RunPaths(run).ranks).get(rank)
        if beat is not None and beat.step >= step and beat.doing != "ended" and psutil.pid_exists(beat.pid):
            return beat.pid, beat.step
        time.sleep(0.01)
    return None
