"""A rank of one of several hosts dies, and all hosts keep the state together: no step is lost."""

import json
import os
import random
import signal
import time
from pathlib import Path

import hosts
import pytest
from fleet import Fleet, fleet_of
from hosts import Host, hosts_on_a_switch
from job_results import Scenarios
from selection import soak
from toy import Toy, facts, require_same, supervisor_facts

from rollback.checkpoints.fast_tier.end_marks import ranks_of, read_ends
from rollback.checkpoints.fast_tier.mark_copies import all_copied
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.facts.training import Attached, Committed, LastSnapshotMade, NoLastSnapshot, PartBroughtBack

pytestmark = pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))

STEPS, KILL, EPOCH = 30, 21, 10
# Random states of three libraries, a buffer that moves in every forward, a scheduler.
TOY = Toy(samples=16 * STEPS, sampler="distributed", augment=True, patient=False, settings={"snapshot_every": 50})


def outcome_of(fleet: Fleet) -> LastSnapshotMade:
    made = supervisor_facts(fleet.leads().root, LastSnapshotMade)
    assert len(made) == 1, fleet.told()
    (outcome,) = made
    assert isinstance(outcome, LastSnapshotMade)
    return outcome


def require_whole_record(fleet: Fleet, rank: int) -> None:
    """That rank is said to be gone, and each step is there once."""
    outcome, run = outcome_of(fleet), fleet.leads()
    assert f"rank {rank} is gone" in outcome.reason
    assert outcome.checkpoint in [fact.checkpoint for fact in facts(run.root, Committed)]
    assert not facts(run.root, NoLastSnapshot)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
def test_a_killed_rank_of_several_hosts_costs_no_step(tmp_path: Path, rank: int) -> None:
    with fleet_of(2, tmp_path, TOY, each=2, signal=[rank, KILL, signal.SIGKILL, 1]) as fleet:
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        run = fleet.run(0)
        assert [fact.step for fact in facts(run.root, Attached)][1:] == [KILL], fleet.told()
        outcome = outcome_of(fleet)
        assert (outcome.step, outcome.steps_lost) == (KILL, 0)
        require_whole_record(fleet, rank)
        fleet.require_as_undisturbed()


@pytest.mark.parametrize("shared", [True, *soak(False)], ids=["shared", "apart"])
@pytest.mark.parametrize(
    ("how", "step"),
    [
        ("kill in its update", KILL + 1),
        *soak(("raise", KILL), ("raise in its update", KILL + 1), ("stop", KILL), ("hold", KILL)),
    ],
)
def test_a_rank_of_the_second_host_that_ends_in_another_way_costs_no_step(
    tmp_path: Path, how: str, step: int, shared: bool
) -> None:
    """It dies in its update, when all have its gradients; it raises; it is stopped or hangs, and the leader ends the
    attempt."""
    with fleet_of(2, tmp_path, TOY, each=2, shared=shared, ends=[3, KILL, how]) as fleet:
        fleet.launch(flags=("--hang-after", "8") if how in ("stop", "hold") else ())
        assert fleet.wait() == [0, 0], fleet.told()
        assert [fact.step for fact in facts(fleet.leads().root, Attached)][1:] == [step], fleet.told()
        outcome = outcome_of(fleet)
        assert (outcome.step, outcome.steps_lost) == (step, 0), outcome
        if how.startswith("kill"):
            require_whole_record(fleet, 3)
        fleet.require_as_undisturbed()


@pytest.mark.parametrize("seconds", [0.5, *soak(0.0)])
def test_a_rank_of_several_hosts_that_dies_between_two_epochs_costs_no_step(tmp_path: Path, seconds: float) -> None:
    """The ranks of the other host have begun the next epoch meanwhile: they stand at two ends, and it at the first."""
    toy = TOY.but(samples=16 * EPOCH, epochs=3, loop="rehearsed epochs", between=True)
    with fleet_of(2, tmp_path, toy, each=2, evaluates=[3, 2, seconds]) as fleet:
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert [fact.step for fact in facts(fleet.leads().root, Attached)][1:] == [2 * EPOCH], fleet.told()
        assert outcome_of(fleet).steps_lost == 0
        fleet.require_as_undisturbed()


@pytest.mark.parametrize("shared", [False, *soak(True)], ids=["apart", "shared"])
@pytest.mark.parametrize(
    ("how", "step"),
    [
        ("kill", KILL),
        *soak(("kill in its update", KILL + 1), ("raise in its update", KILL + 1), ("stop", KILL), ("hold", KILL)),
    ],
)
@pytest.mark.parametrize("rank", [0, *soak(1)])
def test_a_host_that_has_lost_its_only_rank_still_has_what_it_knew(
    tmp_path: Path, rank: int, how: str, step: int, shared: bool
) -> None:
    """If it is rank 0, the other host decides, and tells what is small and the same on all."""
    toy = TOY.but(samples=8 * STEPS)
    with fleet_of(2, tmp_path, toy, shared=shared, ends=[rank, KILL, how]) as fleet:
        fleet.launch(flags=("--hang-after", "8") if how in ("stop", "hold") else ())
        assert fleet.wait() == [0, 0], fleet.told()
        outcome = outcome_of(fleet)
        assert (outcome.step, outcome.steps_lost) == (step, 0), (outcome, fleet.told())
        assert [fact.step for fact in facts(fleet.leads().root, Attached)][1:] == [step], fleet.told()
        assert how != "kill" or outcome.reason == f"rank {rank} is gone"
        rows = [json.loads(line) for line in fleet.leads().metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == [*range(STEPS)]
        fleet.require_as_undisturbed()


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_was_a_step_behind_the_dead_rank_comes_there(tmp_path: Path, rank: int) -> None:
    """The rank that lags on that host begins its update when the hosts have begun to agree."""
    killed = [3 - 2 * rank, KILL, signal.SIGKILL, 1]
    with fleet_of(2, tmp_path, TOY, each=2, signal=killed, lags=[2 * rank, KILL - 1]) as fleet:
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert [fact.step for fact in facts(fleet.run(0).root, Attached)][1:] == [KILL], fleet.told()
        assert outcome_of(fleet).steps_lost == 0
        fleet.require_as_undisturbed()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("methods", "step"),
    [
        (("_write_shards", "agree"), KILL + 1),
        (("agree", "_write_shards"), KILL + 1),
        (("agree", "agree"), KILL + 1),
        (("", "agree"), KILL),
        (("agree", ""), KILL + 1),
    ],
    ids=["the other host", "the host of rank 0", "both", "one that rank 0's never follows", "rank 0's alone"],
)
def test_a_host_that_begins_its_update_behind_the_plan_keeps_the_next_step(
    tmp_path: Path, methods: tuple[str, str], step: int
) -> None:
    """All have the sums of the step in which a rank died. They agree on the step before, and then a host goes on."""
    moves = [KILL, str(tmp_path), *methods]
    with fleet_of(2, tmp_path, TOY, each=2, ends=[3, KILL, "kill in its update"], lags_behind=moves) as fleet:
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert [fact.step for fact in facts(fleet.run(0).root, Attached)][1:] == [step], outcome_of(fleet)
        assert outcome_of(fleet).steps_lost == KILL + 1 - step
        fleet.require_as_undisturbed()


# What the rank that speaks for its host is at when it is killed, and whether the others have it whole all the same.
MOMENTS = {
    "it has told what its host can keep": ("agree", "after"),
    "it has not written yet": ("_write_shards", "before"),
    "its shards are whole": ("_write_shards", "after"),
    "all shards are whole": ("_await_commitment", "after"),
    "it has committed": ("_await_done", "before"),
    "all have committed": ("_await_done", "after"),
}


@pytest.mark.soak
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("host", [0, 1])
def test_whoever_speaks_for_its_host_is_killed_and_the_other_rank_there_goes_on(
    tmp_path: Path, host: int, moment: str
) -> None:
    dies = [[2 * host, 2 * host + 1], *MOMENTS[moment], str(tmp_path / "died")]
    killed = [3 - 2 * host, KILL, signal.SIGKILL, 1]
    with fleet_of(2, tmp_path, TOY, each=2, signal=killed, dies_keeping=dies) as fleet:
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert (tmp_path / "died").exists()
        assert [fact.step for fact in facts(fleet.run(0).root, Attached)][1:] == [KILL], fleet.told()
        outcome = outcome_of(fleet)
        assert (outcome.step, outcome.steps_lost) == (KILL, 0)
        fleet.require_as_undisturbed()


@pytest.mark.parametrize(
    ("host", "moment"),
    [
        (1, "it has not written yet"),
        *soak(
            (1, "its shards are whole"),
            (1, "it has committed"),
            (0, "it has not written yet"),
            (0, "all shards are whole"),
            (0, "its shards are whole"),
        ),
    ],
)
def test_what_the_last_rank_of_a_host_has_written_is_committed_and_else_all_agree_anew(
    tmp_path: Path, host: int, moment: str
) -> None:
    """It dies when it speaks for its host. Then nobody there has the parameters any more."""
    dies = [[2 * host], *MOMENTS[moment], str(tmp_path / "died")]
    killed = [2 * host + 1, KILL, signal.SIGKILL, 1]
    with fleet_of(2, tmp_path, TOY, each=2, signal=killed, dies_keeping=dies) as fleet:
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert (tmp_path / "died").exists()
        assert [fact.step for fact in facts(fleet.run(0).root, Attached)][1:] == [KILL], fleet.told()
        assert outcome_of(fleet).steps_lost == 0
        fleet.require_as_undisturbed()


@pytest.mark.soak
def test_a_host_that_does_not_answer_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    stops = [part for rank in (2, 3) for part in (rank, KILL, "kill -STOP $PPID")]
    why = "no rank has answered (on the host of rank 2)"
    with fleet_of(2, tmp_path, TOY, each=2, signal=[1, KILL, signal.SIGKILL, 1], shell=stops) as fleet:
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert [fact.step for fact in facts(fleet.run(0).root, Attached)][1:] == [0], fleet.told()
        outcome = outcome_of(fleet)
        assert (outcome.checkpoint, outcome.why_not, outcome.steps_lost) == (None, why, KILL)
        fleet.require_as_undisturbed()


@pytest.mark.parametrize(
    ("shared", "leads"), [(True, 1), *soak((True, 0), (False, 0))], ids=["shared, it leads", "shared", "apart"]
)
def test_a_lost_host_costs_no_step_where_another_host_has_its_marks(tmp_path: Path, shared: bool, leads: int) -> None:
    """All of it: its processes, its memory, and its disk if it has one of its own. Rank 0 is on another host. Where it
    led, it does again when it is back, and has nothing."""
    go_on = tmp_path / "go-on"
    with fleet_of(2, tmp_path, TOY, shared=shared, each=2, holds=[KILL, str(go_on)]) as fleet:
        fleet.launch(leads, flags=("--replicas", "2"))
        fleet.until(fleet.run(leads).holder.exists)
        fleet.launch(1 - leads, flags=("--replicas", "2"))
        fleet.until(lambda: fleet.reached(KILL))  # before that there may be no program that has the host's memory
        fleet.until(lambda: told_of(fleet.hosts[0], KILL) == 2)
        fleet.lose(1)
        go_on.touch()
        fleet.launch(1, flags=("--replicas", "2"))
        assert fleet.wait() == [0, 0], fleet.told()
        leader = fleet.leads().root
        outcome = outcome_of(fleet)
        assert (outcome.step, outcome.steps_lost) == (KILL, 0), fleet.told()
        assert outcome.reason == "ranks 2, 3 are gone"
        (brought,) = supervisor_facts(leader, PartBroughtBack)
        assert (brought.node, brought.checkpoint) == ("node-1", outcome.checkpoint), fleet.told()
        assert [(fact.step, fact.tier) for fact in facts(leader, Attached)][1:] == [(KILL, "fast")], fleet.told()
        fleet.require_as_undisturbed()


def told_of(host: Host, step: int) -> int:
    """Of how many ranks of another host there are marks at that step's end here."""
    copied = [copied for path in host.memory.glob("rollback-*/*") for copied in all_copied(SlotPaths(path))]
    ranks = [(each.marks, rank) for each in copied for rank in ranks_of(each.marks)]
    return sum(any(end.step == step for end in read_ends(marks, rank)) for marks, rank in ranks)


LONG = TOY.but(samples=3200, epochs=2, loop="epochs", between=True)
SEEDS = int(os.environ.get("KILLS_OF_HOSTS", "4"))


@pytest.mark.soak
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("what", ["rank", "host"])
def test_a_loss_at_a_random_moment_costs_no_step(tmp_path: Path, what: str, shared: bool) -> None:
    """Of a rank of two hosts, or of one of three hosts, but for that of rank 0, with its memory (its marks have some
    milliseconds to come to another host, so steps are not shorter than real ones there). Every loss ends bit for bit as
    if nothing had been. Prints the steps lost, and why."""
    lost: list[int] = []
    count, flags, more = (3, ("--replicas", "2"), {"slow": 0.1}) if what == "host" else (2, (), {})
    undisturbed = Scenarios(tmp_path / "undisturbed")
    undisturbed.folder.mkdir()
    toy = LONG.but(samples=400 * 2 * count)
    undisturbed.add("job", toy)
    undisturbed.torchrun(2 * count)
    with hosts_on_a_switch(count) as some:
        for seed in range(SEEDS):
            chance = random.Random(seed)
            folder = tmp_path / str(seed)
            folder.mkdir()
            fleet = Fleet(some, folder, toy, shared=shared, each=2, **more)
            fleet.launch(flags=flags)
            fleet.until(lambda fleet=fleet: fleet.reached(1))
            time.sleep(chance.uniform(0, 4 if what == "host" else 1.5))
            if what == "rank":
                gone = chance.randrange(2 * count)
                fleet.signal_rank(gone)
            else:
                gone = chance.randrange(1, count)
                fleet.lose(gone)
                fleet.launch(gone, flags=flags)
            assert fleet.wait() == [0] * count, fleet.told()
            for outcome in supervisor_facts(fleet.leads().root, LastSnapshotMade):
                assert isinstance(outcome, LastSnapshotMade)
                lost.append(outcome.steps_lost if outcome.steps_lost is not None else -1)
                print(f"seed {seed}, {what} {gone}, {outcome.seconds:.2f} s: {outcome.in_words()}")
            for rank in range(2 * count):
                require_same(fleet.scenarios.portrait("job", rank), undisturbed.portrait("job", rank), f"rank {rank}")
    print(f"{len(lost)} losses, {sum(lost) / max(1, len(lost)):.2f} steps lost in the mean: {lost}")
