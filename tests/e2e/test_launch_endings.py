"""How `rollback launch` ends: real processes, signals and run directories, with one rank in torchrun's place."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launch, is_gone, launching, tree
from waiting import LIMIT, wait_for

from rollback.facts.training import (
    Attached,
    AttemptEnded,
    AttemptStarted,
    Hung,
    RestartScheduled,
    RunEnded,
    Signalled,
)
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal.journal import Journal
from rollback.rundir.lock import RunLock


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path, with_torchrun=False) as launch:
        yield launch


def test_restarts_without_progress_are_bounded_and_the_reason_is_told(job: Launch) -> None:
    code, output = job.finish("die_always", "--restart-budget", "1")
    assert code == 1
    # The first attempt reaches step 3, which is progress; the second has the one restart and gets no further.
    assert len(job.facts(AttemptStarted)) == 2
    assert "killed by signal 9" in output.splitlines()[-1]
    assert "1 restarts brought no progress" in output.splitlines()[-1]


def test_a_script_that_raises_behind_its_training_is_not_started_again(job: Launch) -> None:
    code, output = job.finish("raise_behind_the_training")
    assert code == 1
    assert len(job.facts(AttemptStarted)) == 1
    (ended,) = job.facts(RunEnded)
    assert ended.reason.startswith("the script failed behind its training: rank 0")
    assert re.search(r"complete at step 9, and its final state \S+ is in no durable ring: ", output), (
        "this one keeps none"
    )


def test_a_script_that_raises_behind_an_epoch_again_and_again_is_given_up_whatever_its_attempts_keep(
    job: Launch,
) -> None:
    code, output = job.finish("raise_behind_an_epoch", "--restart-budget", "2")
    assert code == 1
    assert len(job.facts(AttemptStarted)) == 3
    assert job.facts(RestartScheduled)[1].reason == "no progress, restart 2"
    assert "2 restarts brought no progress" in output


def test_a_script_that_cannot_start_is_given_up_after_two_attempts(job: Launch) -> None:
    code, output = job.finish("broken", "--max-restarts", "5")
    assert code == 1
    assert len(job.facts(AttemptStarted)) == 2
    assert job.facts(RestartScheduled)[0].budget_left == 4
    assert "this script never worked" in output


def test_a_start_up_that_hangs_is_ended_by_the_user_s_limit(job: Launch) -> None:
    code, output = job.finish("hang_at_the_start", "--hang-after", "1.5")
    assert code == 0, output
    (hung,) = job.facts(Hung)
    assert hung.suspect is None
    assert hung.reason.startswith("no rank has its Guard yet")
    assert job.facts(AttemptEnded)[0].why == "hang"


def test_a_second_interrupt_ends_ranks_that_do_not_listen(job: Launch) -> None:
    supervisor = job.start("ignore_everything")
    (rank,) = job.wait_for_heartbeats(1)
    supervisor.send_signal(signal.SIGINT)
    told = time.monotonic()
    wait_for(lambda: len(job.facts(Signalled)) == 1 and time.monotonic() > told + 0.5)  # no echo of the first one
    supervisor.send_signal(signal.SIGINT)
    output, _ = supervisor.communicate(timeout=LIMIT)
    assert supervisor.returncode == 75, output
    assert is_gone(rank)


def test_when_the_grace_is_over_everything_is_ended_and_the_run_is_resumable(job: Launch) -> None:
    supervisor = job.start("ignore_everything", "--grace", "0.2")
    (rank,) = job.wait_for_heartbeats(1)
    supervisor.send_signal(signal.SIGTERM)
    output, _ = supervisor.communicate(timeout=LIMIT)
    assert supervisor.returncode == 75, output
    assert is_gone(rank)


def test_a_structural_stop_is_accounted_for(job: Launch) -> None:
    code, output = job.finish("structural")
    assert code == 76
    assert "three rollbacks did not help" in output
    assert job.facts(RunEnded)[0].exit_code == 76


def test_a_refused_job_leaves_an_existing_run_directory_as_it_was(job: Launch) -> None:
    journal = Journal(job.paths.train_journal, 3)
    attached = {"host": "h", "pid": 1, "checkpoint": None, "step": 0, "batch": 0, "torch": "2.13", "settings": {}}
    journal.append(Attached(world_size=1, supervised=True, **attached))
    journal.close()
    job.paths.holder.write_text('{"pid": 1, "host": "elsewhere"}')
    before = tree(job.folder)
    code, _ = job.finish("refuse")
    assert code == 78
    assert tree(job.folder) == before


def test_a_run_directory_in_use_is_refused_with_the_name_of_the_holder(job: Launch) -> None:
    lock = RunLock(job.paths, "rollback launch")
    write_identity(job.paths, new_identity(JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={})))
    before = tree(job.folder)
    code, output = job.finish("finish")
    assert code == 73
    assert f"in use by rollback launch with pid {os.getpid()}" in output
    assert tree(job.folder) == before
    lock.release()
