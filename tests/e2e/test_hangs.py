"""Two ranks that hang in three ways and meet a poisoned sample: what the supervisor calls it, and `rollback why`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Launch, launching

from rollback.events import AttemptEnded, Blamed, Hung, RunEnded, SkipAdded
from rollback.rundir.journal import read_journal
from rollback.rundir.stacks import read_processes

TROUBLED = Path(__file__).parent / "jobs" / "troubled.py"

# The limits that a long job has are minutes; nothing else is different.
IMPATIENT = """
from rollback import cli
from rollback.supervisor import hang

hang.FLOOR = hang.SLOW_FLOOR = 4.0
cli.main()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with launching(tmp_path_factory.mktemp("troubled"), with_torchrun=True, script=TROUBLED) as launch:
        launch.program = ["-c", IMPATIENT]
        process = launch.start("", ranks=2)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        yield launch


def why(job: Launch, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rollback", "why", str(job.run), *arguments],
        env={**os.environ, "NO_COLOR": "1"}, stdout=subprocess.PIPE, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout if "--json" in arguments else " ".join(done.stdout.split())


def account(job: Launch, attempt: int) -> dict[str, Any]:
    return dict(json.loads(why(job, "--attempt", str(attempt), "--json")))


def test_a_stopped_rank_is_named_and_not_the_one_that_waits_for_it(job: Launch) -> None:
    ended, hung = job.facts(AttemptEnded)[0], job.facts(Hung)[0]
    assert (ended.why, ended.rank, hung.suspect) == ("stopped", 1, 1)
    assert hung.reason == "rank 1 is stopped (SIGSTOP)"
    assert hung.stacks == (0,)
    told = account(job, 1)
    assert (told["why"], told["rank"]) == ("stopped", 1)
    assert "SIGSTOP" in told["cause"]


def test_an_evaluation_longer_than_the_limit_and_its_waiting_peer_are_no_hang(job: Launch) -> None:
    """Else the first hang would not be that of the stopped rank, at batch 5."""
    assert job.facts(AttemptEnded)[0].step >= 5


def test_the_peers_stacks_are_there_and_the_stopped_rank_s_are_said_to_be_missing(job: Launch) -> None:
    seen = read_processes(job.paths.processes(1))
    ranks = {item.rank: item for item in seen if item.is_rank}
    assert ranks[1].state in ("T", "t")
    assert ranks[1].size == 0
    assert "stopped process cannot write" in (ranks[1].why_none or "")
    assert any(not item.is_rank and item.rank == 0 and item.size for item in seen), "no stacks of a loader worker"
    text = why(job, "--attempt", "1")
    assert "all_reduce" in text
    assert "get_into_trouble" in text


def test_a_rank_whose_interpreter_lock_is_held_is_named_with_its_stack(job: Launch) -> None:
    ended, hung = job.facts(AttemptEnded)[1], job.facts(Hung)[1]
    assert (ended.why, ended.rank) == ("hang", 1)
    assert "no thread of rank 1 gets to run" in hung.reason
    assert hung.stacks == (0, 1)
    (rank,) = (item for item in read_processes(job.paths.processes(2)) if item.is_rank and item.rank == 1)
    assert rank.size > 0


def test_a_rank_that_leaves_a_collective_out_is_named(job: Launch) -> None:
    ended, hung = job.facts(AttemptEnded)[2], job.facts(Hung)[2]
    assert (ended.why, ended.rank) == ("hang", 0)
    assert hung.reason.startswith("rank 0 is behind")


def test_a_poisoned_sample_is_blamed_after_two_crashes_of_the_rank_that_reads_it(job: Launch) -> None:
    ended = job.facts(AttemptEnded)[3:]
    # Samples 36 and 38 are in batch 9 of rank 0, 37 and 39 in batch 9 of rank 1.
    assert [(fact.why, fact.rank, fact.batch) for fact in ended[:2]] == [("exception", 1, 9)] * 2
    (blamed,) = job.facts(Blamed)
    assert (blamed.batch, blamed.rank, blamed.fingerprint) == (9, 1, ended[0].fingerprint)
    (added,) = (
        record.fact for record in read_journal(job.paths.train_journal).records if isinstance(record.fact, SkipAdded)
    )
    assert (added.window, added.who) == (blamed.window, "the supervisor")
    assert job.facts(RunEnded)[-1].exit_code == 0


def test_why_shows_rank_error_and_what_was_done_and_obeys_no_escape_sequence(job: Launch) -> None:
    text = why(job, "--attempt", "5")
    assert "rank 1" in text
    assert "sample 37 cannot be decoded" in text
    assert "__getitem__" in text, "the worker's traceback is missing"
    assert "will be skipped" in text
    assert "\x1b" not in text
    told = account(job, 5)
    assert (told["why"], told["rank"], told["batch"]) == ("exception", 1, 9)
    assert told["blamed"]["window"] == {"first": 9, "last": 9}


def test_why_without_an_attempt_is_about_the_last_one_that_failed(job: Launch) -> None:
    told = json.loads(why(job, "--json"))
    assert (told["state"], told["attempt"], sorted(told["earlier"])) == ("ended", 5, ["1", "2", "3", "4"])
