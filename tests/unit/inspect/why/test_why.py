"""`rollback why` on records that no job of two ranks would leave: many ranks, no exception, no failure."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recorded_run import RecordedRun, hold, stopped_by_themselves
from rollback.agent.fork_server import run_script
from rollback.facts.ending import SCRIPT_LEFT
from rollback.facts.supervisor import Why
from rollback.facts.training import (
    Accepted,
    AttemptEnded,
    AttemptStarted,
    Fetched,
    FinalStateLost,
    Finished,
    LastSnapshotMade,
    NoLastSnapshot,
    RunEnded,
    ScriptLeft,
    Signalled,
    Stopped,
    StuckAtExit,
    Window,
)
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.audit.text import print_audit
from rollback.inspect.record.cost import Death, deaths
from rollback.inspect.record.ending import NO_END
from rollback.inspect.status.status import read_status
from rollback.inspect.why.stacks import groups, ranges
from rollback.inspect.why.text import print_attempt_report
from rollback.inspect.why.why import ProcessStacks, read_attempt_report
from rollback.rundir.failures import FailureRecord, write_failure
from rollback.rundir.heartbeats import Heartbeat, write_heartbeat
from rollback.rundir.paths import RunPaths
from rollback.rundir.stacks import ProcessSeen, write_processes

FORKED = f"""  File "/opt/rollback/agent/fork_server.py", line 209 in {run_script.__name__}
  File "/opt/rollback/agent/entry.py", line 208 in main
"""
WAITING = f"""Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 9 in wait

Current thread 0x1 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 3 in all_reduce
  File "train.py", line 7 in <module>
{FORKED}"""
SAVING = WAITING.replace("line 7 in <module>", "line 9 in save")
IDLE = """Current thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113 in get
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 334 in _worker_loop
"""


def process(rank: int, stacks: str | None, *, is_rank: bool = True, state: str = "S") -> ProcessStacks:
    return ProcessStacks(
        rank=rank, pid=100 + rank, command="python", is_rank=is_rank, state=state, waits_in=None, stacks=stacks,
        why_none=None if stacks else "it is stopped",
    )  # fmt: skip


def test_who_stands_at_the_same_place_is_told_of_once_and_the_suspect_first() -> None:
    seen = [process(rank, SAVING if rank == 5 else WAITING) for rank in range(8) if rank != 3]
    seen += [process(3, None, state="T"), *(process(rank, IDLE, is_rank=False) for rank in range(8))]
    found = [(group.title, group.lines) for group in groups(seen, 3)]
    assert found == [
        ("rank 3, pid 103: stopped", ("no stacks: it is stopped",)),
        ("below rank 3, pid 103 (python): waiting", ("waits for the next batch to read",)),
        (
            "ranks 0-2, 4, 6, 7: waiting",
            ("torch/distributed/c10d.py:3 in all_reduce", "train.py:7 in <module>"),
        ),
        ("rank 5, pid 105: waiting", ("torch/distributed/c10d.py:3 in all_reduce", "train.py:9 in save")),
        ("7 processes below ranks 0-2, 4-7 (python): waiting", ("waits for the next batch to read",)),
    ]


def test_ranks_in_a_row_are_a_range() -> None:
    assert ranges([5, 1, 2, 0, 7, 8]) == "0-2, 5, 7, 8"


def attempt_ended(**known: Any) -> AttemptEnded:
    return AttemptEnded(status=1, cause="it ended", step=5, seconds=9.0, **known)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    recorded = RecordedRun(tmp_path / "run", monkeypatch)
    recorded.tell(0, AttemptStarted(command=("torchrun",), host="node1", pid=1))
    recorded.attach(0, 1, None, 0)
    return recorded


def shown(run: RecordedRun, attempt: int | None = None) -> str:
    output = io.StringIO()
    print_attempt_report(Console(file=output, width=200, highlight=False), read_attempt_report(run.paths.root, attempt))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def test_of_a_rank_that_left_no_exception_the_end_of_its_stderr_is_shown(run: RecordedRun) -> None:
    run.tell(9, attempt_ended(why="exit", rank=1, host="node2", followed=(0, 2, 3)))
    log = run.paths.rank_log(1, 1, "err")
    log.parent.mkdir(parents=True)
    log.write_text("a line\n" * 3000 + "lr is negative \x1b[31m\n")
    text = shown(run)
    assert "rank       1, on host node2" in text
    assert "followed   ranks 0, 2, 3 failed because of it" in text
    assert f"the end of {log}" in text
    assert "  lr is negative \\x1b[31m" in text
    assert text.count("a line") == 19
    told = read_attempt_report(run.paths.root).last_words
    assert told is not None
    assert len(told.text) == 8 << 10


def test_a_supervisor_that_is_killed_after_the_end_of_an_epoch_has_left_a_failure(run: RecordedRun) -> None:
    run.tell(9, Finished(step=10, batch=20))
    assert read_attempt_report(run.paths.root).cause == (
        "no end is on record: its supervisor was killed, its host went down, or its disk took no more"
    )


def test_a_run_that_may_go_on_on_another_host_is_not_called_killed(run: RecordedRun) -> None:
    """As seen from another host that shares the disk."""
    hold(run.paths, alive=True, host="somewhere.else")
    assert read_attempt_report(run.paths.root).attempt is None
    assert "no failure is on record; whether the run goes on, on another host, cannot be seen from here" in shown(run)
    write_failure(run.paths.failure(1, 1), failure(1, 2.0, "RuntimeError", "bad"))
    assert read_attempt_report(run.paths.root).cause == "rank 1 raised RuntimeError (no supervisor was there to judge)"


def test_a_supervisor_that_is_killed_has_left_a_failure_also_where_its_ranks_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_by_themselves(tmp_path / "saved", monkeypatch)
    hold(run.paths, alive=True)
    assert read_attempt_report(run.paths.root).attempt is None, "it is alive"
    hold(run.paths, alive=False)
    account = read_attempt_report(run.paths.root)
    assert (account.attempt, account.cause) == (1, NO_END)
    assert "then       the same command goes on" in shown(run)
    run.tell(60, AttemptStarted(command=("torchrun",), host="node1", pid=2), 2)
    hold(run.paths, alive=True)
    assert read_attempt_report(run.paths.root).cause == NO_END, "the next attempt began"


def test_a_log_that_is_no_file_of_ours_is_left_alone(run: RecordedRun, tmp_path: Path) -> None:
    run.tell(9, attempt_ended(why="signal", rank=1))
    log = run.paths.rank_log(1, 1, "err")
    log.parent.mkdir(parents=True)
    (tmp_path / "secret").write_text("a secret")
    log.symlink_to(tmp_path / "secret")
    assert read_attempt_report(run.paths.root).last_words is None


def test_of_a_run_of_which_no_attempt_failed_it_says_how_it_ended(run: RecordedRun) -> None:
    run.tell(8, Signalled(signal="SIGUSR1"))
    run.tell(9, AttemptEnded(status=0, cause="the ranks stopped together", step=5, seconds=9.0))
    run.tell(9, RunEnded(exit_code=75, reason="told to stop"))
    assert "no attempt of this run has failed" in shown(run)
    assert "signals    SIGUSR1" in shown(run)
    assert "then       the run was ended with exit code 75: told to stop" in shown(run)
    assert read_attempt_report(run.paths.root).attempt is None


def test_of_a_launch_that_was_killed_before_its_ranks_began_it_is_not_said_that_nothing_failed(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.train_journal.parent.mkdir(parents=True)
    hold(paths, alive=False)
    printed = io.StringIO()
    print_attempt_report(Console(file=printed, width=200), read_attempt_report(paths.root))
    assert "why        it is gone without a word" in printed.getvalue()
    assert "then       the same command goes on" in printed.getvalue()


def test_processes_of_all_nodes_are_shown(run: RecordedRun) -> None:
    run.tell(9, attempt_ended(why="hang", rank=2))
    for node, rank in (("node-0", 0), ("node-1", 2)):
        seen = ProcessSeen(
            rank=rank, pid=7, command="python", is_rank=True, state="S", waits_in=None, offset=None, size=0,
            why_none="it did not answer",
        )  # fmt: skip
        write_processes(run.paths.processes(1, node), [seen])
    assert [item.rank for item in read_attempt_report(run.paths.root).processes] == [0, 2]


def failure(rank: int, seconds: float, error: str, message: str) -> FailureRecord:
    return FailureRecord(
        rank=rank, pid=rank, host="node1", attempt=1, at="", seconds=seconds, step=5, batch=5,
        whole_step=Window(first=5, last=5), doing="training", error=error, message=message, traceback="",
        frames=[], fingerprint=str(rank),
    )  # fmt: skip


def test_without_a_supervisors_word_the_rank_to_name_is_not_the_one_that_noticed_it_first(run: RecordedRun) -> None:
    records = [failure(0, 1.0, "RuntimeError", "Connection closed by peer"), failure(1, 2.0, "ValueError", "bad")]
    for record in records:
        write_failure(run.paths.failure(1, record.rank), record)
    account = read_attempt_report(run.paths.root)
    assert account.cause == "rank 1 raised ValueError (no supervisor was there to judge)"
    assert [record.rank for record in account.failures] == [1, 0]


def test_what_a_run_has_accepted_and_could_not_keep_is_told_by_why_and_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.tell(0, AttemptStarted(command=("torchrun",), host="h", pid=1))
    run.attach(1, 1, None, 0)
    run.tell(2, Accepted(what="ranks", before={"ranks": 4}, after={"ranks": 2}))
    run.tell(3, NoLastSnapshot(reason="the model is sharded"))
    run.tell(4, Fetched(checkpoint="c000001-s00000020", step=20, place="s3://b/run", bytes=9, seconds=1.5))
    run.tell(5, StuckAtExit(ranks=(1,), silent=20.0))
    run.tell(6, AttemptEnded(status=1, why="signal", cause="rank 1 was killed", rank=1, step=30, seconds=9.0))
    remarks = [
        "going on with other ranks: ranks 4 -> 2",
        "no last snapshots: the model is sharded",
        "checkpoint c000001-s00000020 was fetched from s3://b/run in 1.50 s",
        "all ranks had done their work 20 s ago, and some have not ended (1): ending them",
    ]
    assert read_attempt_report(run.paths.root).remarks == remarks
    assert re.search("also +no last snapshots: the model is sharded", shown(run))
    audit = compile_audit(read_run_contents(run.paths.root))
    assert audit.attempts[0].remarks == remarks
    out = io.StringIO()
    print_audit(Console(file=out, width=2000), audit)
    assert "; ".join(remarks) in out.getvalue()


@pytest.mark.parametrize(
    ("ends", "why", "code"),
    [
        ("unsupervised", None, None),
        ("supervised", "left", 1),
        ("before it was a class", None, 1),
        ("without a word", "left", 1),
        ("told to stop", "left", 75),  # as by a `break` on a flag that the script's own handler has set
        ("on a full disk", None, 74),
    ],
)
def test_how_a_script_left_its_loop_or_lost_its_final_state_is_told_in_the_same_words_everywhere(
    run: RecordedRun, ends: str, why: Why | None, code: int | None
) -> None:
    words, how = SCRIPT_LEFT, "left"
    if ends == "on a full disk":
        run.tell(5, FinalStateLost(step=63, batch=126, checkpoint=None, steps=63, reason="the disk is full"))
        words, how = "the training loop ended, but its last 63 updates are in no checkpoint", "finished"
    elif ends != "without a word":
        run.tell(5, ScriptLeft(step=63, batch=126, unjudged=0, checkpoint=None))
    if code is not None:
        run.tell(1, AttemptStarted(command=("torchrun",), host="h", pid=1))
        run.tell(6, AttemptEnded(status=0, why=why, cause="in whatever words", step=63, seconds=6.0))
        run.tell(6, RunEnded(exit_code=code, reason=words))
    audit = compile_audit(read_run_contents(run.paths.root))
    entry, ending = audit.attempts[0], read_status(run.paths.root).ending
    # Ranks that left by `os._exit` have told their step in a heartbeat, if at all, and may have gone further.
    assert (entry.ended, entry.cause, entry.at_least) == (how, words, ends == "without a word")
    assert audit.ending is not None
    assert ending is not None
    assert audit.ending.account == ending.account == words
    assert ending.how == ("preempted" if ends == "told to stop" else "gave_up")
    assert read_attempt_report(run.paths.root).cause == (words if how == "left" else None)
    assert "why        the script left" in shown(run) or how != "left"
    print_audit(Console(file=(out := io.StringIO()), width=2000), audit)
    assert f"{how}: {words}" in out.getvalue()


@pytest.mark.parametrize("end", [None, Finished(step=80, batch=160)])
def test_a_loop_that_was_left_is_not_the_end_of_a_process_that_trains_again(
    run: RecordedRun, end: Finished | None
) -> None:
    run.tell(5, ScriptLeft(step=63, batch=126, unjudged=0, checkpoint=None))
    run.attach(6, 1, None, 63)
    if end is not None:
        run.tell(9, end)
    entry = compile_audit(read_run_contents(run.paths.root)).attempts[0]
    assert (entry.ended, entry.cause) == ("running_or_unknown" if end is None else "finished", None)
    assert (entry.ended_at is None) == (end is None)
    assert read_attempt_report(run.paths.root).cause != SCRIPT_LEFT


def test_what_ended_before_a_process_trained_again_is_no_end_of_what_came_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two guards in one process, without a supervisor: the second one's training is killed."""
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    run.tell(5, Finished(step=63, batch=126))
    run.attach(6, 1, None, 0)
    assert read_status(run.paths.root).state == "died"
    assert read_attempt_report(run.paths.root).cause == "no end is on record: its ranks were killed"
    run.tell(7, Stopped(reason="structural", step=5, batch=9, checkpoint=None, account="it does not help"))
    assert read_attempt_report(run.paths.root).cause is None
    run.attach(8, 1, "c000001-s00000010", 10)
    audit = compile_audit(read_run_contents(run.paths.root))
    assert (audit.attempts[0].ended, audit.attempts[0].at_least) == ("running_or_unknown", True)


def test_where_nobody_could_find_out_how_an_attempt_ended_all_say_why(run: RecordedRun) -> None:
    why = "reading the journal runs/x/journal/train.jsonl: Input/output error"
    run.tell(9, RunEnded(exit_code=74, reason=why))
    entry, ending = compile_audit(read_run_contents(run.paths.root)).attempts[0], read_status(run.paths.root).ending
    assert ending is not None
    assert (entry.ended, entry.cause, ending.account) == ("died", why, why)
    assert entry.ended_at is not None
    assert read_attempt_report(run.paths.root).cause == why


def death_in(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("lost")).removeprefix("lost").strip()


def deaths_of(run: RecordedRun, next_start: tuple[str, int]) -> dict[int, Death]:
    contents = read_run_contents(run.paths.root)
    return deaths(contents.records, contents.history.reached, {}, next_start)


def test_of_an_attempt_that_ended_well_and_whose_final_state_is_lost_no_rank_is_missed(run: RecordedRun) -> None:
    run.commit(4, "c000001-s00000050", 50)
    run.tell(5, Finished(step=63, batch=126))
    run.tell(5, AttemptEnded(status=0, cause="all ranks ended", step=63, seconds=9.0))
    run.attach(6, 2, "c000001-s00000050", 50)
    told = "13 steps of attempt 1: the run went back to c000001-s00000050, step 50"
    assert deaths_of(run, ("c000001-s00000050", 50))[1].in_words() == told


def test_of_an_attempt_without_an_end_it_is_told_which_one_went_on(run: RecordedRun) -> None:
    run.tell(1, AttemptStarted(command=("torchrun",), host="h", pid=1))
    assert "the same command goes on" in shown(run, 1)
    run.tell(60, AttemptStarted(command=("torchrun",), host="h", pid=2), 2)
    assert re.search("then +a later launch went on with attempt 2", shown(run, 1))


def test_what_a_death_has_undone_is_told_by_why_and_status_as_by_audit(run: RecordedRun) -> None:
    run.commit(2, "c000000-s00000000", 0)
    run.commit(4, "c000001-s00000050", 50)
    run.tell(5, AttemptEnded(status=1, cause="rank 0 was killed", step=63, seconds=9.0, why="signal", rank=0))
    told = "at least 13 steps of attempt 1: {} to c000001-s00000050, step 50; nothing newer is left ({})"
    nobody = "no rank was left that could keep it"
    next_start = deaths_of(run, ("c000001-s00000050", 50))
    assert next_start[1].in_words() == told.format("the next start goes back", nobody)
    run.attach(6, 2, "c000001-s00000050", 50)
    run.tell(6, NoLastSnapshot(reason="it is switched off"), 2)
    said = told.format("the run went back", nobody)
    assert death_in(shown(run, 1)) == said
    status = read_status(run.paths.root)
    assert status.death is not None
    assert status.death.in_words() == said
    audit = compile_audit(read_run_contents(run.paths.root))
    assert (audit.attempts[0].steps_lost, audit.attempts[0].at_least) == (13, True)
    run.tell(
        7, AttemptEnded(status=1, cause="rank 1 raised", step=71, seconds=9.0, why="exception", fingerprint="f"), 2
    )
    run.attach(8, 3, "c000001-s00000050", 50)
    assert death_in(shown(run, 2)) == (
        "21 steps of attempt 2: the run went back to c000001-s00000050, step 50; nothing newer is left (no last "
        "snapshots: it is switched off)"
    )
    assert " ".join(shown(run, 2).split()).count("it is switched off") == 1, "and not once more, below"
    assert death_in(shown(run, 1)) == said


def test_a_checkpoint_that_is_on_record_and_was_lost_tells_status_and_audit_alike_how_far_it_had_come(
    run: RecordedRun,
) -> None:
    run.commit(2, "c000000-s00000050", 50)
    run.commit(4, "c000001-s00000070", 70)
    run.attach(6, 2, "c000000-s00000050", 50)
    death = read_status(run.paths.root).death
    audit = compile_audit(read_run_contents(run.paths.root))
    assert (death and death.steps_lost) == audit.attempts[0].steps_lost == 20


def test_what_is_given_up_and_what_a_later_attempt_says_was_kept_is_no_loss_without_a_reason(run: RecordedRun) -> None:
    run.commit(2, "c000001-s00000050", 50)
    run.tell(5, AttemptEnded(status=1, cause="rank 0 was killed", step=63, seconds=9.0, why="signal", rank=0))
    run.attach(6, 2, "c000002-s00000060", 60)
    run.tell(6, LastSnapshotMade(reason="asked", checkpoint="c000002-s00000060", step=60, rank=0, steps_lost=3), 2)
    given_up = Stopped(reason="structural", step=90, batch=90, checkpoint=None, account="it came back")
    run.tell(7, given_up, 2)
    found = deaths_of(run, ("c000002-s00000060", 60))
    assert {attempt: death.why_not_kept for attempt, death in found.items()} == {1: None}


def test_where_a_state_was_kept_its_account_tells_what_is_lost_to_the_step(run: RecordedRun) -> None:
    kept = LastSnapshotMade(reason="rank 1 is gone", checkpoint="c000001-s00000077", step=77, rank=0, steps_lost=0)
    run.tell(5, kept)
    run.tell(5, AttemptEnded(status=1, cause="rank 1 was killed", step=77, seconds=9.0, why="signal", rank=1))
    run.attach(6, 2, "c000001-s00000077", 77)
    assert read_status(run.paths.root).last_snapshot == kept.in_words()
    run.paths.ranks.mkdir()
    for rank, step in ((0, 77), (1, 65)):
        beat = Heartbeat(pid=7, host="h", attempt=1, step=step, batch=step, doing="training", monotonic=1.0)
        write_heartbeat(run.paths.heartbeat(rank), beat)
    assert [stood.rank for stood in read_attempt_report(run.paths.root, 1).ranks] == [0], (
        "rank 1 had come to step 77, too"
    )
    assert read_attempt_report(run.paths.root).death is None
    totals = compile_audit(read_run_contents(run.paths.root)).totals
    assert (totals.steps_lost, totals.steps_lost_at_least) == (0, False)
    run.tell(7, AttemptEnded(status=1, cause="rank 1 was killed", step=99, seconds=9.0, why="signal", rank=1), 2)
    assert read_status(run.paths.root).last_snapshot is None, "that was the attempt before it"
