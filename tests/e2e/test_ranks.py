"""Two ranks and three under torchrun: one job each, with scenario after scenario in the same process group."""

import re
import signal
from pathlib import Path

import pytest
from job_results import Scenarios
from toy import Toy, facts, files, require_same, skipped, train, weights

from rollback.facts.training import Committed, Dropped, Incident, Planned, Quarantined, Restored, Stopped

BAD = {
    "one rank's nan": Toy(192, epochs=2, sampler="distributed", nan=(29,), nan_rank=1, augment=True, average=True),
    "garbage": Toy(592, sampler="distributed", workers=2, garbage=(40, 64)).with_settings(skip_after=0),
    "accumulation": Toy(480, sampler="distributed", accumulate=2, nan=(41,), nan_rank=0),
    "drawn": Toy(loader="drawn", max_steps=48, nan=(27,)),
    "epochs": Toy(136, epochs=3, loop="epochs", between=True, sampler="distributed", nan=(36,)).with_settings(
        rewind=12
    ),
    "behind an evaluation": Toy(level="hidden", sampler="distributed", evaluates_behind=29, nan=(41,), samples=440),
    "screen": Toy(608, sampler="distributed", accumulate=2, garbage=(48, 59), augment=True).with_settings(
        policy="screen", snapshot_every=5, probation=6
    ),
}
SHUFFLED_BY_EACH = Toy(400, sampler="random", nan=(57,))
HEALTHY = Toy(216, epochs=2, sampler="distributed", augment=True)  # 54 batches of 4 for each of two ranks
STATISTIC = Toy(216, epochs=2, sampler="distributed", level="aside", nan_input=(39,), nan_rank=1)

UNREADABLE = HEALTHY.but(nan=(47,))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    scenarios = Scenarios(tmp_path_factory.mktemp("two"))
    for name, toy in BAD.items():
        scenarios.add(name, toy)
        scenarios.add(f"{name}, fresh", toy, skips_of=str(scenarios.run(name)))
    scenarios.add("statistic", STATISTIC)
    scenarios.add("statistic, fresh", STATISTIC, skips_of=str(scenarios.run("statistic")))
    scenarios.add("join", Toy(96, join=True))
    scenarios.add("guarded", HEALTHY)
    scenarios.add("unguarded", HEALTHY, run=None)
    scenarios.add("told to stop", HEALTHY, signal=[1, 33, signal.SIGTERM])
    scenarios.add("told to stop, then", HEALTHY, run=str(scenarios.run("told to stop")))
    scenarios.add("asked", HEALTHY, ask=[37, {"order": "rewind", "to": 35, "skip": [40, 44], "why": "a hunch"}])
    scenarios.add("asked, fresh", HEALTHY, skips_of=str(scenarios.run("asked")))
    scenarios.add("one full disk", HEALTHY, full_disk=[1, 15])
    scenarios.add("one unreadable disk", UNREADABLE, unreadable=[1, "c000004-s00000030", 2])
    scenarios.add("one unreadable disk, fresh", UNREADABLE, skips_of=str(scenarios.run("one unreadable disk")))
    scenarios.add("unlike", HEALTHY, otherwise=[1, {"horizon": 50, "evidence_limit": 1}, 1000])
    train(Toy(60), scenarios.run("of one rank"))
    scenarios.add("of one rank", Toy(60))
    scenarios.torchrun(2)
    return scenarios


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", BAD)
def test_as_if_the_bad_batches_had_never_been_there(two: Scenarios, name: str, rank: int) -> None:
    assert facts(two.run(name), Restored)
    require_same(two.portrait(name, rank), two.portrait(f"{name}, fresh", rank), f"{name}, rank {rank}")


@pytest.mark.parametrize("name", BAD)
def test_replicas_stay_replicas(two: Scenarios, name: str) -> None:
    parameters = [
        {key: text for key, text in weights(two.portrait(name, rank)).items() if "module.1" not in key}
        for rank in (0, 1)
    ]
    require_same(*parameters, name)


def test_the_rank_with_the_nan_is_named(two: Scenarios) -> None:
    assert [fact.ranks for fact in facts(two.run("one rank's nan"), Incident)] == [(1,)]
    assert [fact.ranks for fact in facts(two.run("accumulation"), Incident)] == [(0,)]
    assert [fact.ranks for fact in facts(two.run("drawn"), Incident)] == [(0, 1)]


def test_batches_of_different_number_inside_of_join_are_refused_at_the_first_one(two: Scenarios) -> None:
    for rank in (0, 1):
        told = two.result("join", rank)
        assert told["error"] == "UsageError"
        assert "inside torch's join()" in told["message"]


def test_a_statistic_that_is_nan_on_one_rank_is_answered_by_all(two: Scenarios) -> None:
    (incident,) = facts(two.run("statistic"), Incident)
    assert (incident.rule, incident.ranks) == ("nonfinite-state", (1,))
    for rank in (0, 1):
        require_same(two.portrait("statistic", rank), two.portrait("statistic, fresh", rank), f"rank {rank}")


def test_each_rank_records_its_own_skipped_samples(two: Scenarios) -> None:
    name = "one rank's nan"
    (plan,) = facts(two.run(name), Planned)
    records = [skipped(two.run(name), rank) for rank in (0, 1)]
    assert [sorted(record) for record in records] == [list(range(plan.skip.first, plan.skip.last + 1))] * 2
    of_one_epoch = [{i for batch, ids in record.items() if batch < 24 for i in ids or ()} for record in records]
    assert [len(ids) for ids in of_one_epoch] == [4 * (24 - plan.skip.first)] * 2
    assert not of_one_epoch[0] & of_one_epoch[1]


def test_windows_cover_whole_updates_under_accumulation(two: Scenarios) -> None:
    (plan,) = facts(two.run("accumulation"), Planned)
    assert plan.skip.first % 2 == 0
    assert len(plan.skip) % 2 == 0
    (incident,) = facts(two.run("accumulation"), Incident)
    assert (incident.onset_step, incident.onset_batch, incident.detection_batch) == (20, 40, 41)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_guard_changes_nothing(two: Scenarios, rank: int) -> None:
    require_same(two.portrait("guarded", rank), two.portrait("unguarded", rank), f"rank {rank}")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_is_told_to_stop_stops_all_at_one_step(two: Scenarios, rank: int) -> None:
    assert two.result("told to stop", rank) == {"exit": 75}
    (stopped,) = facts(two.run("told to stop"), Stopped)
    assert stopped.step == 35
    ended = weights(two.portrait("told to stop, then", rank))
    require_same(ended, weights(two.portrait("unguarded", rank)), f"rank {rank}")


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_carry_out_at_one_step_what_an_operator_asks_for(two: Scenarios, rank: int) -> None:
    (restored,) = facts(two.run("asked"), Restored)
    assert (restored.step, restored.steps_lost) == (30, 9)
    assert len(skipped(two.run("asked"), rank)) == 5
    require_same(two.portrait("asked", rank), two.portrait("asked, fresh", rank), f"rank {rank}")


def test_a_rank_that_cannot_write_its_shard_means_no_checkpoint_and_no_harm(two: Scenarios) -> None:
    run = two.run("one full disk")
    for rank in (0, 1):
        require_same(two.portrait("one full disk", rank), two.portrait("unguarded", rank), f"rank {rank}")
    assert {fact.step for fact in facts(run, Committed)} == {0, 10}
    assert len(facts(run, Dropped)) >= 5
    assert sorted(path.name for path in (run / "ring").iterdir()) == [
        fact.checkpoint for fact in facts(run, Committed)
    ], "something is left of what was dropped"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_restore_that_fails_twice_on_one_rank_sends_all_to_an_older_checkpoint(two: Scenarios, rank: int) -> None:
    """Rank 0 has read all of the newer one by then."""
    name = "one unreadable disk"
    assert [fact.checkpoint for fact in facts(two.run(name), Quarantined)] == ["c000004-s00000030"]
    assert [fact.checkpoint for fact in facts(two.run(name), Restored)] == ["c000002-s00000020"]
    require_same(two.portrait(name, rank), two.portrait(f"{name}, fresh", rank), f"rank {rank}")


def test_a_run_of_another_world_size_is_refused_on_all_ranks(two: Scenarios, tmp_path: Path) -> None:
    for rank in (0, 1):
        result = two.result("of one rank", rank)
        assert result["error"] == "RanksDoNotFit"
        assert "the run has 1 rank, this job 2" in result["message"]
    train(Toy(60), tmp_path / "alike")
    assert files(two.run("of one rank")).keys() == files(tmp_path / "alike").keys()


def test_ranks_with_settings_of_their_own_are_refused_together(two: Scenarios) -> None:
    """As by a host with another command line. What is kept as evidence is each host's own affair."""
    for rank in (0, 1):
        result = two.result("unlike", rank)
        assert result.get("error") == "WrongSetting", result
        assert re.search(
            r"horizon is 100 on rank 0 and 50 on rank 1 \(.+\), max_steps is None on rank 0 and 1000", result["message"]
        ), result
        assert "evidence_limit" not in result["message"]
    assert not two.run("unlike").exists()


@pytest.mark.soak
def test_so_it_is_where_each_rank_shuffles_by_itself(tmp_path: Path) -> None:
    scenarios = Scenarios(tmp_path)
    scenarios.add("bad", SHUFFLED_BY_EACH)
    scenarios.add("fresh", SHUFFLED_BY_EACH, skips_of=str(scenarios.run("bad")))
    scenarios.torchrun(2)
    for rank in (0, 1):
        require_same(scenarios.portrait("bad", rank), scenarios.portrait("fresh", rank), f"rank {rank}")


def test_three_ranks(tmp_path: Path) -> None:
    scenarios = Scenarios(tmp_path)
    buckets = Toy(156, epochs=2, sampler="distributed", augment=True, width=64, bucket_cap_mb=1e-4)
    replicas = {how: buckets.but(replicas=how) for how in ("guarded", "compiled", "part", "unguarded")}
    for name, toy in replicas.items():
        scenarios.add(f"{name}, undisturbed", toy, run=None)
        scenarios.add(f"{name}, told to stop", toy, signal=[1, 9, signal.SIGTERM])
        scenarios.add(f"{name}, resumed", toy, run=str(scenarios.run(f"{name}, told to stop")))
    toy = Toy(324, sampler="distributed", nan=(21,), nan_rank=2)
    scenarios.add("bad", toy)
    scenarios.add("fresh", toy, skips_of=str(scenarios.run("bad")))
    scenarios.torchrun(3)
    assert [fact.ranks for fact in facts(scenarios.run("bad"), Incident)] == [(2,)]
    for rank in range(3):
        require_same(scenarios.portrait("bad", rank), scenarios.portrait("fresh", rank), f"rank {rank}")
        # With more than two ranks, sums depend on DDP's buckets, which every process cuts anew after its first step.
        for name in replicas:
            ended = weights(scenarios.portrait(f"{name}, resumed", rank))
            require_same(ended, weights(scenarios.portrait(f"{name}, undisturbed", rank)), f"{name}, rank {rank}")
