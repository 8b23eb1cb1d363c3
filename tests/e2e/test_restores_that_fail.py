"""Checkpoints that pass verification and cannot be read after it: tried once more, then an older one is used.

That all ranks do so together where one of them cannot read is in test_ranks.py.
"""

import signal
from pathlib import Path

import pytest
from asking import answers, asking, hand_in
from attempts import Forker
from selection import soak
from toy import Toy, facts, require_same, same_skips_from_the_start, train
from unreadable import cut_short, forbidden, unreadable

from rollback.checkpoints import tiers
from rollback.errors import CheckpointForbidden, ExitCode
from rollback.facts.training import Attached, Planned, Quarantined, Restored
from rollback.ring.in_run import RingInRun
from rollback.rundir.paths import RunPaths

TOY = Toy(augment=True)
BAD = Toy(augment=True, nan=(57,))  # goes back to the checkpoint of step 40
NEWEST, OLDER = "c000004-s00000040", "c000003-s00000030"


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    return train(TOY)


def killed(forker: Forker, toy: Toy, run: Path, log: Path) -> None:
    """An attempt that dies seven steps after its newest checkpoint."""
    assert forker.status(toy, run, log=str(log), signal=[47, signal.SIGKILL]) == -signal.SIGKILL


# In process ---------------------------------------------------------------------------------------------------------


def test_a_restore_that_fails_once_in_a_rollback_is_tried_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with unreadable(NEWEST, times=1) as attempts:
        ended = train(BAD, run)
    assert attempts.count == 2
    assert [fact.checkpoint for fact in facts(run, Restored)] == [NEWEST]
    assert not facts(run, Quarantined)
    require_same(ended, same_skips_from_the_start(BAD, run, tmp_path / "fresh"), "failed once")


@pytest.mark.parametrize("for_good", [False, True], ids=["cannot be read", "is cut short"])
def test_a_restore_that_fails_twice_in_a_rollback_makes_that_checkpoint_bad_and_takes_an_older_one(
    tmp_path: Path, for_good: bool
) -> None:
    """Where the disk only refuses, a third try would succeed."""
    run = tmp_path / "run"
    with cut_short(NEWEST) if for_good else unreadable(NEWEST, times=2):
        ended = train(BAD, run)
    first, second = facts(run, Planned)
    assert (first.checkpoint, second.checkpoint) == (NEWEST, OLDER)
    (bad,) = facts(run, Quarantined)
    assert bad.checkpoint == NEWEST
    assert bad.reason.startswith("the shard" if for_good else "reading the shard")
    assert (run / "quarantine" / NEWEST).is_dir()
    assert [(fact.checkpoint, fact.route) for fact in facts(run, Restored)] == [(OLDER, "in_process")]
    require_same(ended, same_skips_from_the_start(BAD, run, tmp_path / "fresh"), "failed twice")


def test_a_rewind_that_was_asked_for_and_fails_twice_stops_and_the_next_start_takes_an_older_one(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """Nobody asked for another checkpoint, and the live state is none to go on from."""
    run, log = tmp_path / "run", tmp_path / "log"
    with unreadable(NEWEST, times=2), pytest.raises(SystemExit) as stopped:
        train(TOY, run, log=log, hook=asking(57, lambda: hand_in(run, "rewind", to=44)))
    assert stopped.value.code == 75
    assert [fact.checkpoint for fact in facts(run, Quarantined)] == [NEWEST]
    assert not facts(run, Restored)
    ended = train(TOY, run, log=log)
    assert [(fact.checkpoint, fact.route) for fact in facts(run, Restored)] == [(OLDER, "relaunch")]
    assert [carried_out for carried_out, _ in answers(run).values()] == [True]
    require_same(ended, undisturbed, "rewound further than was asked for")


# At the start of an attempt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [2, *soak(1)])
def test_a_restore_that_fails_at_a_start_is_tried_again_and_then_an_older_checkpoint_is_used(
    tmp_path: Path, forker: Forker, undisturbed: dict[str, str], times: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    killed(forker, TOY, run, log)
    with unreadable(NEWEST, times) as attempts:
        ended = train(TOY, run, log=log)
    assert attempts.count == 2
    assert facts(run, Attached)[-1].checkpoint == (NEWEST if times == 1 else OLDER)
    assert [fact.checkpoint for fact in facts(run, Quarantined)] == ([] if times == 1 else [NEWEST])
    assert (run / "quarantine" / NEWEST).is_dir() == (times == 2)
    require_same(ended, undisturbed, f"failed {times} times")


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors"])
def test_a_checkpoint_that_may_not_be_read_refuses_the_start_and_is_left_where_it_is(
    tmp_path: Path, forker: Forker, undisturbed: dict[str, str], file: str
) -> None:
    """It is no damage: whoever mends the permissions goes on from it, and no step is trained twice."""
    run, log = tmp_path / "run", tmp_path / "log"
    killed(forker, TOY, run, log)
    attempts = facts(run, Attached)
    with forbidden(run / "ring" / NEWEST / file), pytest.raises(CheckpointForbidden) as refused:
        train(TOY, run, log=log)
    assert refused.value.exit_code == ExitCode.IO
    assert str(run / "ring" / NEWEST / file) in refused.value.message
    assert "chmod" in str(refused.value.hint)
    assert facts(run, Attached) == attempts
    ended = train(TOY, run, log=log)
    assert not facts(run, Quarantined)
    assert facts(run, Attached)[-1].checkpoint == NEWEST
    require_same(ended, undisturbed, "readable again")


@pytest.mark.parametrize("drained", [False, True], ids=["in memory alone", "in the ring too"])
def test_a_slot_that_cannot_be_read_at_a_start_gives_way_to_the_ring_or_to_an_older_checkpoint(
    tmp_path: Path, forker: Forker, undisturbed: dict[str, str], drained: bool
) -> None:
    run, log, memory = tmp_path / "run", tmp_path / "log", tmp_path / "memory"
    memory.mkdir()
    toy = TOY.with_settings(fast_tier=str(memory))
    killed(forker, toy, run, log)
    (newest,) = [place for place in tiers.locate(RunPaths(run)) if place.name == NEWEST]
    assert newest.tier == "fast"
    if drained:
        RingInRun(RunPaths(run)).put(newest.manifest, newest.directory)
    with unreadable(NEWEST, times=2, where=lambda shard: memory in shard.parents) as attempts:
        ended = train(toy, run, log=log)
    assert attempts.count == 2
    assert facts(run, Attached)[-1].checkpoint == (NEWEST if drained else OLDER)
    assert [fact.checkpoint for fact in facts(run, Quarantined)] == ([] if drained else [NEWEST])
    require_same(ended, undisturbed, "the slot could not be read")
