"""A rank dies, and the others keep the state: the run goes on at the very step, and ends as if nothing had been."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cgroups import IN_CGROUP, memory_cgroup
from job_results import LAUNCH, Scenarios
from random_kills import kill_a_rank
from selection import soak
from test_hangs import IMPATIENT
from toy import Toy, facts, require_same, supervisor_facts

from rollback.facts.training import (
    Attached,
    AttemptEnded,
    Committed,
    Evicted,
    Incident,
    LastSnapshotMade,
    NoLastSnapshot,
    Restored,
)
from rollback.rundir.paths import CheckpointName, RunPaths

LIMIT = 200.0
# Random states of three libraries, a buffer that moves in every forward, a scheduler; 30 steps.
STEPS = 30
TOY = Toy(samples=8 * STEPS, sampler="distributed", augment=True, patient=False, settings={"snapshot_every": 50})
KILL = 21
ON_GPU = TOY.but(settings={**TOY.settings, "last_snapshot": "on"})
EPOCH = 10
EPOCHS = TOY.but(samples=8 * EPOCH, epochs=3, loop="rehearsed epochs", between=True)


class Launched:
    """One toy job under `rollback launch`, in a folder of its own."""

    def __init__(self, folder: Path, toy: Toy, ranks: int = 2, **more: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run, self.ranks = folder, folder / "run", ranks
        self.launch = LAUNCH
        self.scenarios = Scenarios(folder)
        self.scenarios.add("job", toy, run=str(self.run), **more)

    def start(self, *flags: str) -> subprocess.Popen[str]:
        memory = self.folder / "memory"
        memory.mkdir(exist_ok=True)
        flags = ("--fast-tier", str(memory), *flags)
        return self.scenarios.start_launch(self.run, *flags, ranks=self.ranks, program=self.launch)

    def finish(self, *flags: str) -> str:
        job = self.start(*flags)
        output, _ = job.communicate(timeout=LIMIT)
        assert job.returncode == 0, output
        return output

    @property
    def resumed_at(self) -> list[int]:
        return [fact.step for fact in facts(self.run, Attached)][1:]

    @property
    def outcomes(self) -> list[LastSnapshotMade]:
        return supervisor_facts(self.run, LastSnapshotMade)

    def require(self, undisturbed: "Launched") -> None:
        for rank in range(self.ranks):
            portraits = [launched.scenarios.portrait("job", rank) for launched in (self, undisturbed)]
            require_same(*portraits, f"rank {rank}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    launched = Launched(tmp_path_factory.mktemp("undisturbed"), TOY)
    launched.finish()
    return launched


@pytest.mark.parametrize("rank", [0, *soak(1)])
def test_a_killed_rank_costs_no_step(tmp_path: Path, undisturbed: Launched, rank: int) -> None:
    launched = Launched(tmp_path, TOY, signal=[rank, KILL, signal.SIGKILL, 1])
    launched.finish()
    assert launched.resumed_at == [KILL], launched.outcomes
    (outcome,) = launched.outcomes
    assert (outcome.step, outcome.steps_lost, outcome.rank) == (KILL, 0, 1 - rank)
    assert f"rank {rank} is gone" in outcome.reason
    launched.require(undisturbed)
    rows = [json.loads(line) for line in RunPaths(launched.run).metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert outcome.checkpoint in [fact.checkpoint for fact in facts(launched.run, Committed)]
    assert not facts(launched.run, NoLastSnapshot)


@pytest.mark.parametrize("rank", [0, *soak(1)])
def test_of_a_job_on_a_gpu_a_killed_rank_costs_no_step(tmp_path: Path, undisturbed: Launched, rank: int) -> None:
    """The CPU in its place, and late. The buffer that moves in every forward lies there, and what goes on the pulse."""
    launched = Launched(tmp_path, ON_GPU, signal=[rank, KILL, signal.SIGKILL, 1], late_gpu=True)
    launched.finish()
    assert launched.resumed_at == [KILL], launched.outcomes
    launched.require(undisturbed)


def test_of_a_job_on_a_gpu_a_rank_that_dies_in_its_update_costs_no_step(tmp_path: Path, undisturbed: Launched) -> None:
    """Its GPU has told early of the buffers that it had."""
    launched = Launched(tmp_path, ON_GPU, ends=[1, KILL, "kill in its update"], late_gpu=True)
    launched.finish()
    assert launched.resumed_at == [KILL + 1], launched.outcomes
    launched.require(undisturbed)


def test_a_job_on_a_gpu_is_asked_first(tmp_path: Path) -> None:
    launched = Launched(tmp_path, TOY, late_gpu=True)
    launched.finish()
    (told,) = facts(launched.run, NoLastSnapshot)
    assert told.reason == "the parameters are on a GPU, where it has to be asked for: --last-snapshot on"


def test_buffers_that_ddp_does_not_broadcast_next_are_not_broadcast_behind_a_kill_either(tmp_path: Path) -> None:
    """Behind an evaluation the next forward uses each rank's own buffers, and the toy's weights depend on them."""
    toy = TOY.but(level="hidden", evaluates_behind=KILL - 1)
    undisturbed = Launched(tmp_path / "undisturbed", toy)
    launched = Launched(tmp_path / "killed", toy, signal=[1, KILL, signal.SIGKILL, 1])
    for each in (undisturbed, launched):
        each.finish()
    assert launched.resumed_at == [KILL], launched.outcomes
    launched.require(undisturbed)


def test_a_rank_that_was_a_step_behind_the_dead_one_keeps_the_step_that_both_have(
    tmp_path: Path, undisturbed: Launched
) -> None:
    launched = Launched(tmp_path, TOY, signal=[1, KILL, signal.SIGKILL, 1], lags=[0, KILL - 1])
    launched.finish()
    assert launched.resumed_at == [KILL], launched.outcomes
    launched.require(undisturbed)


@pytest.mark.parametrize("how", ["raise", *soak("leave")])
def test_a_rank_that_raises_or_leaves_costs_no_step(tmp_path: Path, undisturbed: Launched, how: str) -> None:
    launched = Launched(tmp_path, TOY, ends=[1, KILL, how])
    launched.finish()
    assert launched.resumed_at == [KILL], launched.outcomes
    launched.require(undisturbed)


def test_a_rank_that_the_kernel_kills_for_memory_costs_no_step(tmp_path: Path, undisturbed: Launched) -> None:
    launched = Launched(tmp_path, TOY, ends=[1, KILL, "eat"])
    with memory_cgroup(1 << 30) as members:
        launched.launch = [sys.executable, "-c", IN_CGROUP.format(members=str(members)), "launch"]
        launched.finish()
    assert [(ended.why, ended.rank) for ended in supervisor_facts(launched.run, AttemptEnded)][:1] == [("oom_kill", 1)]
    assert launched.resumed_at == [KILL], launched.outcomes
    launched.require(undisturbed)


@pytest.mark.parametrize(
    ("rank", "how"),
    [(0, "kill"), *soak((1, "raise"), (1, "kill"), (0, "raise"), (1, "hold"), (1, "stop"), (1, "sleep"))],
)
def test_a_rank_that_ends_in_its_update_costs_no_step(
    tmp_path: Path, undisturbed: Launched, rank: int, how: str
) -> None:
    """All gradients were summed, so the other rank finishes the step. This one had told before what it knew."""
    launched = Launched(tmp_path, TOY, ends=[rank, KILL, f"{how} in its update"])
    launched.launch = [sys.executable, "-c", IMPATIENT, "launch"]
    launched.finish()
    assert launched.resumed_at == [KILL + 1], launched.outcomes
    launched.require(undisturbed)
    rows = [json.loads(line) for line in RunPaths(launched.run).metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))


@pytest.fixture(scope="module")
def undisturbed_epochs(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    launched = Launched(tmp_path_factory.mktemp("epochs"), EPOCHS)
    launched.finish()
    return launched


@pytest.mark.parametrize("seconds", [0.5, *soak(0.0)])
def test_a_rank_that_dies_in_an_evaluation_between_two_epochs_costs_no_step(
    tmp_path: Path, undisturbed_epochs: Launched, seconds: float
) -> None:
    """Also where the other one has begun the next epoch meanwhile, and waits for it."""
    launched = Launched(tmp_path, EPOCHS, evaluates=[1, 2, seconds])
    launched.finish()
    assert launched.resumed_at == [2 * EPOCH], launched.outcomes
    launched.require(undisturbed_epochs)


def test_what_is_lost_is_said_where_the_newest_checkpoint_is_of_an_epoch_s_end_and_none_to_go_on_from(
    tmp_path: Path,
) -> None:
    """It is kept for the case that training was over there; the run goes on from the one before it."""
    launched = Launched(tmp_path, EPOCHS.but(loop="epochs"), evaluates=[0, 2, 0.0])
    launched.finish()
    (resumed,), (outcome,) = launched.resumed_at, launched.outcomes
    assert outcome.checkpoint is None
    assert outcome.steps_lost == 2 * EPOCH - resumed > 0
    left = [fact for fact in facts(launched.run, Evicted) if fact.reason == "beyond where the run goes on"]
    assert [(fact.tier, CheckpointName(fact.checkpoint).step) for fact in left] == [("fast", 2 * EPOCH)]


@pytest.mark.soak
def test_four_ranks_go_on_between_two_epochs(tmp_path: Path) -> None:
    """Their first step is rehearsed, for DDP's buckets."""
    toy = EPOCHS.but(samples=16 * EPOCH)
    undisturbed = Launched(tmp_path / "undisturbed", toy, 4)
    launched = Launched(tmp_path / "run", toy, 4, evaluates=[3, 2, 0.5])
    for each in (undisturbed, launched):
        each.finish()
    assert launched.resumed_at == [2 * EPOCH], launched.outcomes
    launched.require(undisturbed)


def test_a_rank_that_dies_in_the_update_of_an_epoch_s_last_step_costs_no_step(
    tmp_path: Path, undisturbed_epochs: Launched
) -> None:
    launched = Launched(tmp_path, EPOCHS, ends=[1, 2 * EPOCH - 1, "kill in its update"])
    launched.finish()
    assert launched.resumed_at == [2 * EPOCH], launched.outcomes
    launched.require(undisturbed_epochs)


@pytest.mark.soak
def test_a_stopped_rank_costs_no_step(tmp_path: Path, undisturbed: Launched) -> None:
    launched = Launched(tmp_path, TOY, signal=[1, KILL, signal.SIGSTOP, 1])
    require_ended_for_a_hang(launched, undisturbed, keeps=[0])


@pytest.mark.parametrize(("how", "keeps"), [("hold", [0]), *soak(("sleep", [0, 1]))])
def test_a_rank_that_hangs_costs_no_step(tmp_path: Path, undisturbed: Launched, how: str, keeps: list[int]) -> None:
    """Where it holds the interpreter's lock, the thread that would answer cannot run. Where it sleeps, either rank may
    be the one that keeps the state."""
    require_ended_for_a_hang(Launched(tmp_path, TOY, ends=[1, KILL, how]), undisturbed, keeps)


def require_ended_for_a_hang(launched: Launched, undisturbed: Launched, keeps: list[int]) -> None:
    launched.launch = [sys.executable, "-c", IMPATIENT, "launch"]
    launched.finish()
    assert launched.resumed_at == [KILL], launched.outcomes
    (outcome,) = launched.outcomes
    assert outcome.rank in keeps
    assert outcome.reason == "the ranks hang"
    launched.require(undisturbed)


@pytest.mark.parametrize("who", ["supervisor", *soak("torchrun")])
def test_whoever_started_the_ranks_is_killed_and_no_step_is_lost(
    tmp_path: Path, undisturbed: Launched, who: str
) -> None:
    """The other rank waits at that batch meanwhile, and is ended with its peer."""
    launched = Launched(tmp_path, TOY, shell=[1, KILL, f"kill -9 $(cat {tmp_path}/pid); sleep 3"])
    job = launched.start()
    supervisor = psutil.Process(job.pid)
    while not (children := supervisor.children()):
        time.sleep(0.01)
    (tmp_path / "pid").write_text(str(children[0].pid if who == "torchrun" else job.pid))
    job.communicate(timeout=LIMIT)
    if who == "supervisor":
        launched.finish()
    assert launched.resumed_at == [KILL], launched.outcomes
    (outcome,) = launched.outcomes
    assert (outcome.step, outcome.steps_lost) == (KILL, 0), "the next supervisor tells it, if its own was gone"
    launched.require(undisturbed)


@pytest.mark.soak
def test_a_grace_that_is_too_short_for_the_step_in_progress_costs_no_step(
    tmp_path: Path, undisturbed: Launched
) -> None:
    launched = Launched(tmp_path, TOY, shell=[1, KILL, f"kill -TERM $(cat {tmp_path}/pid); sleep 20"])
    job = launched.start("--grace", "1")
    (tmp_path / "pid").write_text(str(job.pid))
    job.communicate(timeout=LIMIT)
    (outcome,) = launched.outcomes
    assert (outcome.step, outcome.reason) == (KILL, "the grace is over")
    launched.finish()
    assert launched.resumed_at == [KILL]
    launched.require(undisturbed)


def test_a_rank_that_dies_when_all_have_stopped_and_save_costs_no_step(tmp_path: Path, undisturbed: Launched) -> None:
    launched = Launched(tmp_path, TOY, signal=[0, KILL, signal.SIGTERM, 1], dies_stopping=1)
    launched.finish()
    (outcome,) = launched.outcomes
    assert outcome.steps_lost == 0
    assert launched.resumed_at == [outcome.step] == [KILL + 2], "the ranks know of it at the next step's end"
    launched.require(undisturbed)


@pytest.mark.soak
def test_a_rank_that_dies_while_the_loss_stands_out_costs_no_step_and_the_trouble_is_answered_as_without(
    tmp_path: Path,
) -> None:
    """The sentinel has seen two of the bad batches, and calls in the next attempt."""
    settings = {"snapshot_every": 10, "probation": 10, "policy": "surgical"}
    toy = TOY.but(samples=8 * 80, garbage=(50, 60), patient=True, settings=settings)
    undisturbed = Launched(tmp_path / "undisturbed", toy)
    launched = Launched(tmp_path / "killed", toy, signal=[1, 52, signal.SIGKILL, 1])
    for each in (undisturbed, launched):
        each.finish()
    assert launched.resumed_at == [52], launched.outcomes
    called = [
        [(fact.onset_step, fact.detection_step) for fact in facts(each.run, Incident)]
        for each in (undisturbed, launched)
    ]
    assert called[0] == called[1] != []
    launched.require(undisturbed)


def test_what_is_kept_at_a_death_in_the_first_step_is_good_as_the_state_before_any_step_is(tmp_path: Path) -> None:
    """The checkpoint of that state was not committed yet, and nothing else is from before the trouble."""
    toy = TOY.but(nan=(12,), settings={**TOY.settings, "probation": 25})
    launched = Launched(tmp_path, toy, signal=[1, 0, signal.SIGKILL, 1])
    launched.finish()
    assert launched.resumed_at == [0], launched.outcomes
    (kept,) = launched.outcomes
    (restored,) = facts(launched.run, Restored)
    assert restored.checkpoint == kept.checkpoint


def test_ranks_that_stop_together_at_the_end_of_an_epoch_s_batches_have_raised_nothing(tmp_path: Path) -> None:
    """The second batch that is not finite is the last one of an epoch, so the stop comes where its end is handled."""
    settings = {"snapshot_every": 5, "probation": 6, "max_undone": 1, "rewind": None, "skip_after": None}
    toy = TOY.but(samples=8 * EPOCH, epochs=3, loop="epochs", nan=(18, 19), settings=settings)
    launched = Launched(tmp_path, toy)
    output, _ = (job := launched.start()).communicate(timeout=LIMIT)
    assert job.returncode == 76, output
    assert "could not be kept" not in output
    assert launched.outcomes == []
    assert supervisor_facts(launched.run, NoLastSnapshot) + facts(launched.run, NoLastSnapshot) == []


def test_switched_off_the_newest_checkpoint_serves(tmp_path: Path, undisturbed: Launched) -> None:
    launched = Launched(tmp_path, TOY, signal=[1, KILL, signal.SIGKILL, 1])
    launched.finish("--last-snapshot", "off")
    assert launched.resumed_at == [0]
    assert not launched.outcomes
    launched.require(undisturbed)


SEEDS = {2: int(os.environ.get("KILLS_OF_TWO", "6")), 4: int(os.environ.get("KILLS_OF_FOUR", "2"))}
LONG = TOY.but(samples=1600, epochs=2, loop="epochs", between=True)
WIDE = LONG.but(samples=3200)


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Launched]:
    found = {}
    for ranks in SEEDS:
        found[ranks] = Launched(tmp_path_factory.mktemp("long"), WIDE if ranks == 4 else LONG, ranks)
        found[ranks].finish()
    return found


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "late_gpu"), [(2, False), (4, False), (2, True)])
def test_a_rank_killed_at_a_random_moment_costs_no_step(
    tmp_path: Path, undisturbed_long: dict[int, Launched], ranks: int, late_gpu: bool
) -> None:
    """Every kill ends bit for bit as if nothing had been. Prints the steps lost, and why. late_gpu: the CPU in a GPU's
    place, and late."""
    toy = WIDE if ranks == 4 else LONG
    if late_gpu:
        toy = toy.but(settings=ON_GPU.settings)
    lost: list[int] = []
    for seed in range(SEEDS[ranks]):
        launched = Launched(tmp_path / str(seed), toy, ranks, late_gpu=late_gpu)
        job = launched.start()
        kill_a_rank(job, launched.run, ranks, random.Random(f"{ranks}/{seed}"))
        output, _ = job.communicate(timeout=LIMIT)
        assert job.returncode == 0, f"seed {seed}\n{output}"
        launched.require(undisturbed_long[ranks])
        for outcome in launched.outcomes:
            lost.append(outcome.steps_lost or 0)
            print(f"ranks {ranks}, seed {seed}: {outcome.in_words()}")
        if not launched.outcomes:
            print(f"ranks {ranks}, seed {seed}: no attempt at one; resumed at {launched.resumed_at}")
    print(f"ranks {ranks}: {len(lost)} kills, {sum(lost) / max(1, len(lost)):.2f} steps lost in the mean: {lost}")
