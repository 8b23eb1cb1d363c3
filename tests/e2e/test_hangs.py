"""Two ranks that hang in four ways and meet a poisoned sample: what the supervisor calls it, and `rollback why`."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launch, launching

from rollback.facts.training import AttemptEnded, Blamed, Hung, RunEnded, SampleQuarantine
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.stacks import read_processes

TROUBLED = Path(__file__).parent / "jobs" / "troubled.py"

# The limits that a long job has are minutes. A job as short as this one has few steps, and an evaluation may be one of
# them: ten times their median would be half a minute.
IMPATIENT = """
from rollback import cli
from rollback.supervisor.diagnosis import hang

hang.FLOOR = hang.SLOW_FLOOR = 4.0
hang.TIMES_A_STEP = 1.0
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


def rows(job: Launch, attempt: int) -> dict[str, str]:
    """The head of what `rollback why` prints, and (`stacks`) what stands behind it."""
    head, _, rest = job.why("--attempt", str(attempt)).partition("\n\n")
    assert head.startswith("why "), "the cause does not come first"
    labels = [(line[:11].strip(), line[11:].strip()) for line in head.splitlines()]
    return {**dict(labels), "stacks": rest}


def test_a_stopped_rank_is_named_and_not_the_one_that_waits_for_it(job: Launch) -> None:
    ended, hung = job.facts(AttemptEnded)[0], job.facts(Hung)[0]
    assert (ended.why, ended.rank, hung.suspect) == ("stopped", 1, 1)
    assert hung.reason.startswith("rank 1 is stopped (SIGSTOP), last seen ")
    assert hung.stacks == (0,)
    told = job.account(1)
    assert (told["why"], told["rank"], told["host"]) == ("stopped", 1, socket.gethostname())
    assert told["step"] >= 5
    shown = rows(job, 1)
    assert shown["why"] == f"hang: {hung.reason}"
    assert shown["rank"] == f"1, on host {socket.gethostname()}"
    assert shown["then"].startswith("another attempt was started at once")
    stopped, waiting = shown["stacks"].index("rank 1, pid"), shown["stacks"].index("rank 0, pid")
    assert stopped < waiting, "the stopped rank does not come first"


def test_an_evaluation_longer_than_the_limit_and_its_waiting_peer_are_no_hang(job: Launch) -> None:
    """Else the first hang would not be that of the stopped rank, at batch 5."""
    assert job.facts(AttemptEnded)[0].step >= 5


def test_the_peers_stacks_are_there_and_the_stopped_rank_s_are_said_to_be_missing(job: Launch) -> None:
    seen = read_processes(job.paths.all_processes(1))
    ranks = {item.rank: item for item in seen if item.is_rank}
    assert ranks[1].state in ("T", "t")
    assert ranks[1].size == 0
    assert "stopped process cannot write" in (ranks[1].why_none or "")
    assert any(not item.is_rank and item.rank == 0 and item.size for item in seen), "no stacks of a loader worker"
    stacks = rows(job, 1)["stacks"]
    assert "torch/distributed/distributed_c10d.py:" in stacks
    assert " in get_into_trouble\n" in stacks
    assert "fork_server.py" not in stacks, "how ranks are forked says nothing about a hang"


def test_a_rank_whose_interpreter_lock_is_held_is_named_with_its_stack(job: Launch) -> None:
    ended, hung = job.facts(AttemptEnded)[1], job.facts(Hung)[1]
    assert (ended.why, ended.rank) == ("hang", 1)
    assert "no thread of rank 1 gets to run" in hung.reason
    assert hung.stacks == (0, 1)
    (rank,) = (item for item in read_processes(job.paths.all_processes(2)) if item.is_rank and item.rank == 1)
    assert rank.size > 0
    told, shown = job.account(2), rows(job, 2)
    assert (told["why"], told["rank"]) == ("hang", 1)
    assert shown["why"].startswith("hang: no thread of rank 1 gets to run")
    suspect, _, others = shown["stacks"].partition("rank 0, pid")
    assert " in get_into_trouble\n" in suspect
    assert " in all_reduce\n" in others


def test_a_rank_that_leaves_a_collective_out_is_named(job: Launch) -> None:
    ended, hung = job.facts(AttemptEnded)[2], job.facts(Hung)[2]
    assert (ended.why, ended.rank) == ("hang", 0)
    assert hung.reason.startswith("rank 0 is behind")
    told, shown = job.account(3), rows(job, 3)
    assert (told["why"], told["rank"]) == ("hang", 0)
    assert shown["why"] == f"hang: {hung.reason}"
    assert "step 8, batch 8" in shown["why"]
    suspect, _, others = shown["stacks"].partition("rank 1, pid")
    assert "threading.py:" in suspect
    assert " in get_into_trouble\n" in suspect
    assert " in all_reduce\n" in others


def test_a_rank_that_leaves_a_beat_out_is_named_whatever_signals_its_peer_gets(job: Launch) -> None:
    ended, hung = job.facts(AttemptEnded)[5], job.facts(Hung)[3]
    assert (ended.why, ended.rank) == ("hang", 1)
    assert hung.reason.startswith("rank 1 is behind")
    suspect, _, others = rows(job, 6)["stacks"].partition("rank 0, pid")
    assert " in get_into_trouble\n" in suspect
    assert "host_sums.py:" in others


def test_a_poisoned_sample_is_blamed_after_two_crashes_of_the_rank_that_reads_it(job: Launch) -> None:
    ended = job.facts(AttemptEnded)[3:]
    # Samples 36 and 38 are in batch 9 of rank 0, 37 and 39 in batch 9 of rank 1.
    assert [(fact.why, fact.rank, fact.batch) for fact in ended[:2]] == [("exception", 1, 9)] * 2
    (blamed,) = job.facts(Blamed)
    assert (blamed.batch, blamed.rank, blamed.fingerprint) == (9, 1, ended[0].fingerprint)
    assert blamed.samples == (37,)
    facts = [record.fact for record in read_journal(job.paths.train_journal).records]
    (added,) = (fact for fact in facts if isinstance(fact, SampleQuarantine))
    assert (added.samples, added.batch, added.who) == ((37,), 9, "the supervisor")
    assert job.facts(RunEnded)[-1].exit_code == 0


def test_why_shows_rank_error_and_what_was_done_and_obeys_no_escape_sequence(job: Launch) -> None:
    shown = rows(job, 5)
    assert "rank 1" in shown["why"]
    assert "sample 37 cannot be decoded" in shown["why"]
    assert shown["why"].endswith("then rank 0 failed too")
    assert shown["step"].endswith("with batch 9 in hand")
    assert shown["followed"] == "rank 0 failed because of it"
    assert "the samples 37 will be left out from batch 9 on" in shown["blamed"]
    assert "__getitem__" in shown["stacks"], "the worker's traceback is missing"
    assert "rank 0: RuntimeError: " in shown["stacks"].partition("what followed")[2]
    assert "\x1b" not in job.why("--attempt", "5")
    told = job.account(5)
    assert (told["why"], told["rank"], told["batch"]) == ("exception", 1, 9)
    assert told["blamed"]["window"] == {"first": 9, "last": 9}


def test_why_without_an_attempt_is_about_the_last_one_that_failed(job: Launch) -> None:
    told = job.account()
    assert (told["state"], told["attempt"], sorted(told["earlier"])) == ("ended", 6, ["1", "2", "3", "4", "5"])
