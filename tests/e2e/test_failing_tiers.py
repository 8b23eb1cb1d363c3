"""Supervised jobs whose fast tier fails, whose disk is full, or whose last save fails: what they say and go on from."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import disk_of, fill, may_mount
from job_results import Scenarios
from toy import Toy, facts, require_same

from rollback.checkpoints import tiers
from rollback.environment import ENV_APART
from rollback.facts.training import (
    Attached,
    BecameGood,
    CheckpointLost,
    Committed,
    Dropped,
    Evicted,
    Finished,
    LastSaveFailed,
    LeftDurableRing,
    Planned,
    Saving,
    Stopped,
)
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths

pytestmark = pytest.mark.skipif(not may_mount(), reason="only root may mount, and not everywhere")

TOY = Toy(samples=260, augment=True, sampler="distributed")  # 65 steps, a snapshot every 10
STOPPED_AT = 54


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with disk_of("8m", tmp_path / "memory") as disk:
        yield disk


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    scenarios = Scenarios(tmp_path_factory.mktemp("undisturbed"))
    scenarios.add("job", TOY)
    scenarios.torchrun(1)
    return scenarios.portrait("job", 0)


@pytest.mark.parametrize("fault", ["full", "removed", "its shards removed"])
def test_a_fast_tier_that_fails_after_its_slots_were_mapped_is_left_for_the_run_directory(
    tmp_path: Path, memory: Path, undisturbed: dict[str, str], fault: str
) -> None:
    does = {
        "full": fill(memory),
        "removed": f"rm -rf {memory}/*",
        "its shards removed": f"rm {memory}/*/*/slot-*/rank-*",
    }[fault]
    scenarios, run = Scenarios(tmp_path), tmp_path / "job"
    toy = TOY.with_settings(fast_tier=str(memory))
    scenarios.add("job", toy, shell=[0, 27, does], signal=[0, STOPPED_AT, signal.SIGTERM, 1])
    status, output = scenarios.launch(run, ranks=1)
    assert status == 75, output
    (stopped,) = facts(run, Stopped)
    dropped = facts(run, Dropped)
    assert len(dropped) <= 1, dropped
    assert facts(run, Saving)[-1].slots == 0
    assert {fact.tier for fact in facts(run, Committed) if fact.step > 40} == {"durable"}, facts(run, Committed)
    assert max(fact.step for fact in facts(run, Committed)) == stopped.step >= STOPPED_AT
    assert stopped.checkpoint in {place.name for place in tiers.locate(RunPaths(run)) if place.tier == "durable"}
    held = {place.name for place in tiers.locate(RunPaths(run)) if tiers.is_whole(place)}
    drainer = read_journal(RunPaths(run).supervisor_journal).records
    left = {fact.checkpoint for fact in facts(run, Evicted, CheckpointLost)}
    left |= {record.fact.checkpoint for record in drainer if isinstance(record.fact, LeftDurableRing)}
    committed = {fact.checkpoint for fact in facts(run, Committed)}
    if tiers.fast_tier_of(RunPaths(run)) is None:  # given back at the end, if its newest had been drained by then
        left |= {fact.checkpoint for fact in facts(run, Committed) if fact.tier == "fast"}
    assert committed - left <= held, "these do not exist, and nobody has said so"
    lost = facts(run, CheckpointLost)
    assert {fact.checkpoint for fact in facts(run, BecameGood)} <= committed
    assert bool(lost) == (fault != "full")
    status, output = scenarios.launch(run, ranks=1)
    assert status == 0, output
    assert facts(run, Attached)[-1].step == stopped.step
    require_same(scenarios.portrait("job", 0), undisturbed, fault)


@pytest.mark.parametrize("fault", ["full", "its shards removed", "removed"])
def test_hosts_apart_use_a_fast_tier_that_has_failed_again_once_it_works(
    tmp_path: Path, memory: Path, undisturbed: dict[str, str], fault: str
) -> None:
    """They have no other place for checkpoints: that of another host is of no use to them."""
    scenarios, run = Scenarios(tmp_path), tmp_path / "job"
    fails, works = {
        "full": (fill(memory), f"rm {memory}/filler"),
        "its shards removed": (f"rm {memory}/*/*/slot-*/rank-*", ":"),
        "removed": (f"rm -rf {memory}/*", ":"),
    }[fault]
    toy = TOY.with_settings(fast_tier=str(memory), ring=f"file://{tmp_path}/bucket")
    scenarios.add("job", toy, shell=[0, 17, fails, 0, 38, works])
    scenarios.environment[ENV_APART] = "1"
    output = scenarios.torchrun(1)
    committed = facts(run, Committed)
    assert {fact.tier for fact in committed} == {"fast"}
    (finished,) = facts(run, Finished)
    assert finished.checkpoint == committed[-1].checkpoint, output
    assert [fact.step for fact in committed if fact.step > 38][:2] == [40, 50], output
    assert output.count("the fast tier: it") == 1, "it is said once"
    assert "run directory from now on" not in output
    assert facts(run, Saving)[-1].slots > 0
    assert (fault == "full") == ("could be written again" in output)
    require_same(scenarios.portrait("job", 0), undisturbed, fault)


@pytest.mark.soak
def test_a_disk_that_is_full_for_longer_than_the_hang_limit_ends_no_job(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    with disk_of("8m", tmp_path / "disk") as disk:
        scenarios, run = Scenarios(tmp_path), disk / "job"
        room = f"rm {disk}/filler"
        scenarios.add("job", TOY.with_settings(fast_tier="off"), shell=[0, 15, fill(disk), 0, 55, room], slow=0.15)
        status, output = scenarios.launch(run, "--hang-after", "3", ranks=1)
        assert status == 0, output
        assert len(facts(run, Attached)) == 1, "it was ended"
        dropped = [fact.step for fact in facts(run, Dropped)]
        assert dropped == [20, 30, 40, 50], "it was not full for long enough"
        assert output.count(f"writing the metrics {RunPaths(run.resolve()).metrics} fails") == 1, "it is said once"
        require_same(scenarios.portrait("job", 0), undisturbed, "full disk")


@pytest.mark.parametrize("there", [True, False], ids=["an older checkpoint", "no checkpoint"])
def test_a_stop_whose_last_save_failed_says_so_and_is_resumable_only_if_a_checkpoint_is_there(
    tmp_path: Path, there: bool
) -> None:
    scenarios, run = Scenarios(tmp_path), tmp_path / "job"
    removed = [] if there else [0, 35, f"rm -rf {run}/ring/c*"]
    scenarios.add(
        "job", TOY.with_settings(fast_tier="off"), full_disk=[0, 21], shell=removed,
        signal=[0, 37, signal.SIGTERM, 1],
    )  # fmt: skip
    status, output = scenarios.launch(run, ranks=1)
    (failed,), (stopped,) = facts(run, LastSaveFailed), facts(run, Stopped)
    assert failed.step == stopped.step >= 37
    assert stopped.checkpoint == failed.checkpoint
    if there:
        assert status == 75, output
        assert failed.checkpoint.endswith("s00000020")
        assert f"stopped, resumable (goes on at step 20 of {stopped.step}: the last save failed because " in output
        assert f"{stopped.step - 20} updates will be done again" in output
    else:
        assert status == 74, output
        assert failed.checkpoint is None
        assert "there is no checkpoint to go on from: the last save failed because " in output
    assert "No space left on device" in output.splitlines()[-1]


def test_a_rank_that_loses_its_files_takes_all_ranks_to_the_run_directory(tmp_path: Path, memory: Path) -> None:
    scenarios, run = Scenarios(tmp_path), tmp_path / "lost"
    removed = f"rm {memory}/*/*/slot-*/rank-00001.safetensors"
    scenarios.add("lost", TOY.with_settings(fast_tier=str(memory)), shell=[1, 13, removed])
    scenarios.add("undisturbed", TOY)
    scenarios.torchrun(2)
    assert len(facts(run, Dropped)) <= 1
    assert {fact.tier for fact in facts(run, CheckpointLost)} == {"fast"}
    assert {fact.tier for fact in facts(run, Committed) if fact.step <= 10} == {"fast"}
    assert {fact.tier for fact in facts(run, Committed) if fact.step > 20} == {"durable"}
    for rank in range(2):
        require_same(scenarios.portrait("lost", rank), scenarios.portrait("undisturbed", rank), f"rank {rank}")


def test_a_run_directory_s_disk_that_stays_full_costs_neither_the_slots_nor_the_script_its_name(
    tmp_path: Path, memory: Path, undisturbed: dict[str, str]
) -> None:
    """A rank is killed while it is full, and it is full at the end of training."""
    scenarios = Scenarios(tmp_path)
    with disk_of("8m", tmp_path / "disk") as disk:
        run = disk / "job"
        toy = TOY.with_settings(fast_tier=str(memory))
        scenarios.add("job", toy, shell=[0, 27, fill(disk)], signal=[0, STOPPED_AT, signal.SIGKILL, 1])
        status, output = scenarios.launch(run, ranks=1)
        assert status == 74, output
        assert "resuming at step 50" in output, "from the slot of the attempt before"
        untrue = ["there is no fast tier", "is gone from", "cannot be used", "loop over the guard", "works again"]
        assert not [words for words in untrue if words in output], output
        (ended,) = [line for line in output.splitlines() if line.startswith("rollback: failed: ")]
        assert "training is complete at step 65" in ended
        assert "No space left on device" in ended  # for the journal, or for the ring where something else made room
        (disk / "filler").unlink()
        status, output = scenarios.launch(run, ranks=1)
        assert status == 0, output
        require_same(scenarios.portrait("job", 0), undisturbed, "trained again")


def test_what_lies_behind_a_rollback_that_no_journal_has_is_not_gone_on_from(tmp_path: Path, memory: Path) -> None:
    """The plan waits for room on the disk, checkpoints do not: they are in memory when rank 0 dies, and the plan with
    its skip window is not. A full disk has room in the journal's last page: for the first of three plans."""
    scenarios, toy = Scenarios(tmp_path), TOY.but(samples=480, nan=(30, 50, 70))
    with disk_of("8m", tmp_path / "disk") as disk:
        run = disk / "job"
        kill = [0, 100, signal.SIGKILL, 1]
        scenarios.add("job", toy.with_settings(fast_tier=str(memory)), shell=[0, 27, fill(disk)], signal=kill)
        status, output = scenarios.launch(run, ranks=1)
        assert status == 74, output
        assert "cannot be used: it is from behind a rollback that the journal could not take" in output
        (disk / "filler").unlink()
        status, output = scenarios.launch(run, ranks=1)
        assert status == 0, output
        assert len(facts(run, Planned)) == 3, "the record has what was skipped"
        (tmp_path / "told").mkdir()
        told = Scenarios(tmp_path / "told")
        told.add("job", toy, skips_of=str(run))
        told.torchrun(1)
        require_same(scenarios.portrait("job", 0), told.portrait("job", 0), "told of its own record from the start")


def replace_by_file(directory: Path) -> str:
    """Whoever writes there may make it anew in between."""
    return f"n=0; until test -f {directory}; do n=$((n + 1)); mv {directory} {directory}-$n; touch {directory}; done"


@pytest.mark.parametrize("fault", ["the ring is read-only", "the ring is a file", "run.json is gone"])
def test_a_final_state_that_did_not_get_into_the_ring_is_told_with_the_reason(
    tmp_path: Path, memory: Path, fault: str
) -> None:
    """The account is read later, too, where no lines are above it."""
    scenarios = Scenarios(tmp_path)
    with disk_of("8m", tmp_path / "disk") as disk:
        paths = RunPaths(disk / "job")
        does, why = {
            "the ring is read-only": (f"mount -t tmpfs -o ro rollback-test {paths.ring}", "Read-only file system"),
            "the ring is a file": (replace_by_file(paths.ring), "Not a directory"),
            "run.json is gone": (f"rm {paths.identity}", f"the fast tier cannot be found by {paths.identity} and "),
        }[fault]
        scenarios.add("job", TOY.with_settings(fast_tier=str(memory)), shell=[0, 27, does])
        status, output = scenarios.launch(paths.root, ranks=1)
    assert status == 74, output
    (ended,) = [line for line in output.splitlines() if line.startswith("rollback: failed: ")]
    in_memory = "in memory alone, which a reboot or a new container takes, and "
    where = f"{'' if fault == 'run.json is gone' else in_memory}in no durable ring: "
    assert f"training is complete at step 65, but its final state is {where}" in ended
    assert why in ended
    assert "above" not in ended
