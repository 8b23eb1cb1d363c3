"""The pure parts of the supervisor: how an attempt ended, what follows, and what torchrun is called with."""

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import launched
from torch.distributed.run import get_args_parser

from rollback.config import Settings
from rollback.errors import (
    ExitCode,
    JournalDamaged,
    RefusalKind,
    RollbackError,
    RunDirectoryError,
    ScriptRefused,
    UsageError,
)
from rollback.facts.training import (
    Attached,
    Committed,
    Fact,
    FinalStateLost,
    Finished,
    JournalEntry,
    LastSaveFailed,
    Restored,
    RunEnded,
    Signalled,
    Stopped,
)
from rollback.instructions import program
from rollback.rundir.heartbeats import read_all_heartbeats
from rollback.rundir.journal.journal import Journal, JournalTail, last_fact, read_journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor import patience
from rollback.supervisor.attempts import Attempts
from rollback.supervisor.budget import LONGEST_DELAY, Budget, GiveUp, Restart, after_unguarded
from rollback.supervisor.claim import Claim
from rollback.supervisor.diagnosis.attempt_record import AttemptRecord, got_further
from rollback.supervisor.diagnosis.evidence import TrainJournal
from rollback.supervisor.diagnosis.first_cause import FirstCause
from rollback.supervisor.diagnosis.hang import HangLimits
from rollback.supervisor.diagnosis.outcome import (
    AttemptEnding,
    AttemptEvidence,
    Failures,
    HostOutcome,
    RankFailure,
    Refusal,
    ending,
    reason_of,
)
from rollback.supervisor.hang_watch import HangWatcher
from rollback.supervisor.journal import SupervisorJournal
from rollback.supervisor.nodes.membership import membership, place_among_nodes
from rollback.supervisor.nodes.nodes import Nodes
from rollback.supervisor.preflight import require_files
from rollback.supervisor.signals import StopSignals
from rollback.supervisor.supervise import _private_directory, supervise
from rollback.supervisor.torchrun.command import LaunchedJob, NodeGroup, torchrun_command
from rollback.supervisor.torchrun.host import Host, Running
from rollback.supervisor.torchrun.processes import THIS_HOST
from rollback.system import files
from rollback.system.processes import name_process

PREEMPTED = Stopped(reason="preempted", step=3, batch=3, checkpoint="c000001-s00000003", account="saved")
LOST = FinalStateLost(step=9, batch=9, checkpoint=None, steps=9, reason="no room")
UNSAVED = LastSaveFailed(step=3, batch=3, checkpoint=None, steps=3, reason="the disk is full")
WITHOUT = Stopped(reason="no_checkpoint", step=3, batch=3, checkpoint=None, account="no good checkpoint is left")
STRUCTURAL = Stopped(reason="structural", step=3, batch=3, checkpoint=None, account="no use")


def evidence(
    *,
    status: int = 0,
    told: bool = False,
    refusal: Refusal | None = None,
    stopped: Stopped | None = None,
    failures: Failures | None = None,
    finished: bool = False,
    lost: bool = False,
    attached: bool = True,
    unsaved: bool = False,
    step: int | None = None,
    checkpoint_step: int | None = None,
) -> AttemptEvidence:
    return AttemptEvidence(
        left=HostOutcome(status=status, refusal=refusal, failures=failures),
        told_to_stop=told,
        attached=attached,
        finished=Finished(step=9, batch=9, checkpoint="c000001-s00000009") if finished else None,
        final_state_lost=LOST if lost else None,
        stopped=stopped,
        step=step,
        save_failed=UNSAVED if unsaved else None,
        checkpoint_step=checkpoint_step,
    )


@pytest.mark.parametrize(
    ("ranks", "soft", "hard", "do"),
    [
        ("2", 24, resource.RLIM_INFINITY, "ulimit -n 4096"),
        ("2", 24, 256, "ulimit -n 256"),  # more is not to be had
        ("2", 24, 24, "have the hard limit raised, which is 24, then: ulimit -n 4096"),
        ("2000", 4096, 1 << 20, "ulimit -n 8032"),  # which 4096 are too few for
    ],
)
def test_what_is_to_be_done_about_a_low_limit_of_open_files_can_be_done_and_is_enough(
    ranks: str, soft: int, hard: int, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    with pytest.raises(UsageError) as refused:
        require_files({"nproc-per-node": ranks})
    assert refused.value.hint == do


@pytest.mark.parametrize(
    ("soft", "hard", "do"),
    [(1024, resource.RLIM_INFINITY, "ulimit -f unlimited"), (1024, 1024, "have the hard limit raised, which is 1024")],
)
def test_files_that_may_not_have_a_journal_s_first_lines_are_told_before_anything_starts(
    soft: int, hard: int, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    limits = {resource.RLIMIT_FSIZE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    with pytest.raises(UsageError, match="a file may have 1024 bytes at most here") as refused:
        require_files({})
    assert refused.value.hint is not None
    assert refused.value.hint.startswith(do)
    limits[resource.RLIMIT_FSIZE] = (1 << 20, 1 << 20)
    require_files({})


def test_a_journal_that_cannot_be_read_for_a_moment_ends_no_attempt(tmp_path: Path) -> None:
    paths, nodes = RunPaths(tmp_path), Nodes()
    order, output = SimpleNamespace(paths=paths), SimpleNamespace(keep=lambda: None)
    own_journal = SupervisorJournal(paths, print)
    attempts = Attempts(order, print, SimpleNamespace(output=output), own_journal, StopSignals(), nodes, lambda: None)  # type: ignore[arg-type]
    journal = Journal(paths.train_journal, 1)
    journal.append(attached_at(0))
    attempts._journal.history  # noqa: B018 - reads
    aside = paths.train_journal.rename(tmp_path / "aside")
    assert not attempts._look_at_journal(2, attached=False)
    assert attempts._look_at_journal(1, attached=True)
    aside.rename(paths.train_journal)
    journal.attempt = 2
    journal.append(attached_at(0))
    assert attempts._look_at_journal(2, attached=False)
    assert own_journal.opened
    paths.train_journal.write_bytes(paths.train_journal.read_bytes() + b"no line\nof ours\n")
    with pytest.raises(JournalDamaged):
        attempts._look_at_journal(3, attached=False)
    own_journal.close()
    journal.close()


@pytest.mark.parametrize("returns", [True, False])
def test_a_record_that_cannot_be_read_for_a_moment_when_an_attempt_ends_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    paths, said, open_file, refusals = RunPaths(tmp_path), list[str](), os.open, iter([True] * 3)
    with contextlib.closing(Journal(paths.train_journal, 1)) as journal:
        journal.append(attached_at(0))
        journal.append(Committed(checkpoint="c", step=7, batch=7, timeline=0, bytes=1, seconds=0.0))

    def refused(path: Any, *how: Any, **more: Any) -> int:
        if str(path).endswith(paths.train_journal.name) and next(refusals, not returns):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_file(path, *how, **more)

    running = SimpleNamespace(attempt=1, poll=lambda: 1, command=(), pid=1)
    host = SimpleNamespace(
        attempt=lambda number, group: contextlib.nullcontext(running), conditions=lambda salt: {},
        left=lambda status, running: HostOutcome(status=status),
    )  # fmt: skip
    order = launched(paths, LaunchedJob({}, "train.py", []))
    own_journal = SupervisorJournal(paths, print)
    attempts = Attempts(order, said.append, host, own_journal, StopSignals(), Nodes(), lambda: None)  # type: ignore[arg-type]
    monkeypatch.setattr(patience, "_POLL", 0.0)
    monkeypatch.setattr(patience, "_REFUSED_FOR", 60.0 if returns else 0.0)
    monkeypatch.setattr(os, "open", refused)
    if not returns:
        own_journal.open()
        with pytest.raises(RunDirectoryError, match=os.strerror(errno.EIO)) as caught:
            attempts._attempt(1)
        ended = last_fact(read_journal(paths.supervisor_journal).records, RunEnded)
        assert ended == RunEnded(exit_code=caught.value.exit_code, reason=caught.value.message)
        own_journal.close()
        return
    found, _ = attempts._attempt(1)
    assert (found.attached, found.step) == (True, 7)
    assert said == [f"reading the journal {paths.train_journal}: Input/output error; it is tried again for 60 s"]


def test_what_was_noted_before_the_journal_was_opened_has_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an attempt that hung before its ranks attached, the record is written when it is over."""
    times = iter(["2030-01-01T00:00:01.000+00:00", "2030-01-01T00:00:06.000+00:00"])
    monkeypatch.setattr("rollback.supervisor.journal.now", lambda: next(times))
    with contextlib.closing(SupervisorJournal(RunPaths(tmp_path), print)) as journal:
        journal.note(Signalled(signal="SIGTERM"))
        journal.note(Signalled(signal="SIGINT"))
        journal.open()
    noted = read_journal(RunPaths(tmp_path).supervisor_journal).records
    assert [entry.at[17:19] for entry in noted] == ["01", "06"]


def test_how_a_run_ended_is_on_record_also_where_the_ranks_journal_cannot_be_read(tmp_path: Path) -> None:
    paths, said = RunPaths(tmp_path), list[str]()
    with contextlib.closing(Journal(paths.train_journal, 1)) as journal:
        journal.append(attached_at(0))
    with contextlib.closing(SupervisorJournal(paths, print)) as own_journal:
        order = launched(paths, LaunchedJob({}, "train.py", []))
        attempts = Attempts(order, said.append, SimpleNamespace(), own_journal, StopSignals(), Nodes(), lambda: None)  # type: ignore[arg-type]
        own_journal.open()
        paths.train_journal.write_text("no line\nof ours\n")
        result = attempts._end(ExitCode.FAILED, "rank 1 was killed")
    assert (result.exit_code, result.reason) == (ExitCode.FAILED, "rank 1 was killed")
    ended = last_fact(read_journal(paths.supervisor_journal).records, RunEnded)
    assert ended == RunEnded(exit_code=1, reason="rank 1 was killed")
    (line,) = said
    assert line.startswith("what is in memory may not get to the durable ring: reading the journal")


def test_an_attempt_that_cannot_be_started_ends_the_run_on_record(tmp_path: Path) -> None:
    """As where the machine has no memory for torchrun, behind an attempt that it cost."""
    paths, error = RunPaths(tmp_path), RollbackError("starting torchrun: Cannot allocate memory")

    ended = list[bool]()

    class OtherNodes(Nodes):
        def end(self) -> None:
            ended.append(not read_journal(paths.supervisor_journal).records)

    def refused(number: int, group: object) -> Any:
        raise error

    with contextlib.closing(Journal(paths.train_journal, 1)) as journal:
        journal.append(attached_at(0))
    with contextlib.closing(SupervisorJournal(paths, print)) as own_journal:
        order = launched(paths, LaunchedJob({}, "train.py", []))
        host = SimpleNamespace(attempt=refused)
        attempts = Attempts(order, print, host, own_journal, StopSignals(), OtherNodes(), lambda: None)  # type: ignore[arg-type]
        own_journal.attempt = 1
        own_journal.open()
        with pytest.raises(RollbackError):
            attempts._attempt(2)
    (entry,) = read_journal(paths.supervisor_journal).records
    assert (entry.attempt, entry.fact) == (1, RunEnded(exit_code=1, reason=error.message)), "there is no attempt 2"
    assert ended == [True], "their ranks, first"


def test_a_second_stop_signal_ends_the_wait_for_a_disk_and_one_alone_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, now, signalled_at = itertools.count(1), [0.0], (2, 5)

    def refused() -> None:
        now[0] += 1.0
        if (read := next(reads)) in signalled_at:
            signal.raise_signal(signal.SIGTERM)
        raise RunDirectoryError(f"at the read {read}") from OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(patience, "_POLL", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with StopSignals() as signals, pytest.raises(RunDirectoryError, match="at the read 5"):
        patience.patiently(refused, print, lambda: signals.insistent)


def fails_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the disk of a file server that is away for a moment."""

    def failing(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def fail(path: Any = ".", *args: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and str(path).startswith(str(root)):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return call(path, *args, **more)

        return fail

    for name in ("stat", "open", "scandir", "listdir"):
        monkeypatch.setattr(os, name, failing(name))


def test_what_is_looked_at_while_an_attempt_runs_may_be_on_a_disk_that_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the watch over an attempt raises ends its ranks."""
    paths = RunPaths(tmp_path / "run")
    claim = Claim(paths)
    for directory in (paths.ranks, paths.failures(1), paths.nodes):
        directory.mkdir(parents=True)
    running = Running(paths, 1, (), SimpleNamespace(pid=0), None, None)  # type: ignore[arg-type]
    fails_at(paths.root, monkeypatch)
    assert (running.beats(), running.look()) == ({}, {})
    assert HangWatcher(paths, HangLimits(after=0.0), running, Nodes()).look() is not None
    assert read_all_heartbeats(paths) == {}
    claim.keep()
    monkeypatch.undo()
    claim.release()


def test_what_the_disk_refuses_at_the_end_of_a_launch_is_not_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stand in the place of what is told then, and of its exit code."""

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    paths = RunPaths(tmp_path / "run")
    place = place_among_nodes({"nnodes": "2", "node-rank": "0", "local-addr": "127.0.0.1"})
    assert place is not None
    own_journal = SupervisorJournal(paths, print)
    own_journal.open()
    own_journal.note(Signalled(signal="SIGTERM"))
    with monkeypatch.context() as patched, membership(paths, place):
        patched.setattr(files, "unlink", refused)
        patched.setattr(Journal, "close", refused)
        own_journal.close()
    with membership(paths, place):  # it is free
        assert not own_journal.opened


@pytest.mark.parametrize("lacking", [True, False])
def test_how_to_go_on_at_another_url_is_said_only_of_an_end_that_is_about_the_ring(
    tmp_path: Path, lacking: bool
) -> None:
    """Where rank 0 raised ValueError, another URL mends nothing."""
    paths, own_journal = RunPaths(tmp_path), SupervisorJournal(RunPaths(tmp_path), print)
    order = SimpleNamespace(paths=paths)
    attempts = Attempts(order, print, SimpleNamespace(), own_journal, StopSignals(), Nodes(), lambda: None)  # type: ignore[arg-type]
    attempts._draining = SimpleNamespace(hint="name another URL", finish=print, follow=print, close=print)  # type: ignore[assignment]
    with contextlib.closing(own_journal):
        own_journal.open()
        result = attempts._end(ExitCode.IO, "why", lacking=lacking)
    assert (result.reason, result.hint) == ("why", "name another URL" if lacking else None)
    (entry,) = read_journal(paths.supervisor_journal).records
    assert entry.fact.reason == ("why; name another URL" if lacking else "why")  # type: ignore[attr-defined]


def test_the_end_of_the_stderr_is_that_of_the_rank_with_which_it_began(tmp_path: Path) -> None:
    paths, said = RunPaths(tmp_path), list[str]()
    output = SimpleNamespace(stderr_tail="the end of rank {}".format, tell_consequence=lambda: None)
    order, own_journal = SimpleNamespace(paths=paths), SupervisorJournal(paths, print)
    host: Any = SimpleNamespace(output=output)
    attempts = Attempts(order, said.append, host, own_journal, StopSignals(), Nodes(), lambda: None)  # type: ignore[arg-type]
    attempts._tell_failure(FirstCause("stopped", "rank 3 was stopped", rank=3), "rank 3 was stopped")
    attempts._tell_failure(FirstCause("exit", "torchrun ended"), "torchrun ended")
    assert said[1:] == ["the end of rank 3", "attempt 0 failed: torchrun ended"]


def attached_at(step: int) -> Attached:
    return Attached(
        world_size=1, host="h", pid=1, supervised=True, checkpoint=None, step=step, batch=step, torch="", settings={}
    )


def test_where_the_next_start_goes_on_is_told_only_where_no_host_s_part_is_lost_and_steps_are() -> None:
    behind = evidence(step=84, checkpoint_step=75, told=True)
    assert behind.goes_on_at == 75
    assert replace(behind, left=HostOutcome(status=0, lost_nodes=("node-1",))).goes_on_at is None
    assert replace(behind, checkpoint_step=84).goes_on_at is None
    assert evidence(step=84, checkpoint_step=75, finished=True).goes_on_at is None


class TestEnding:
    @pytest.mark.parametrize(
        ("unsaved", "told", "status", "expected"),
        [
            (True, True, 0, "unsaved"),
            (True, False, 0, "unsaved"),
            (True, False, 1, "failed"),
            (False, True, 0, "ended"),
        ],
    )
    def test_a_stop_without_a_checkpoint_is_not_resumable(
        self, unsaved: bool, told: bool, status: int, expected: str
    ) -> None:
        stopped = PREEMPTED.model_copy(update={"checkpoint": None})
        assert ending(evidence(stopped=stopped, told=told, status=status, unsaved=unsaved)) == expected

    def test_a_stop_with_an_older_checkpoint_is(self) -> None:
        assert ending(evidence(stopped=PREEMPTED, told=True, unsaved=True)) == "resumable"

    @pytest.mark.parametrize(
        ("step", "checkpoint_step", "expected"),
        [
            (None, None, "resumable"),
            (0, None, "resumable"),
            (5, None, "ended"),
            (5, 0, "resumable"),
            (5, 4, "resumable"),
        ],
    )
    def test_ranks_that_did_not_get_to_save_are_resumable_if_something_is_there_or_nothing_is_lost(
        self, step: int | None, checkpoint_step: int | None, expected: str
    ) -> None:
        assert ending(evidence(told=True, status=-9, step=step, checkpoint_step=checkpoint_step)) == expected

    @pytest.mark.parametrize(
        ("stopped", "told", "status", "expected"),
        [
            (STRUCTURAL, False, 0, "structural"),
            (STRUCTURAL, True, 1, "structural"),
            (WITHOUT, False, 0, "no_checkpoint"),
            (PREEMPTED, True, 0, "resumable"),
            (PREEMPTED, True, -9, "resumable"),
            (PREEMPTED, False, 0, "resumable"),
            (None, False, 0, "left"),
            (None, True, 0, "resumable"),
            (None, True, 1, "resumable"),
            (PREEMPTED, False, -9, "failed"),
            (None, False, 1, "failed"),
            (None, False, -9, "failed"),
        ],
    )
    def test_every_row_of_the_table(self, stopped: Stopped | None, told: bool, status: int, expected: str) -> None:
        assert ending(evidence(stopped=stopped, told=told, status=status)) == expected

    @pytest.mark.parametrize(
        ("told", "status", "expected"),
        [(True, 0, "ended"), (True, 1, "ended"), (False, 0, "done"), (False, 1, "failed"), (False, -9, "failed")],
    )
    def test_a_script_without_a_guard_is_never_resumable(self, told: bool, status: int, expected: str) -> None:
        without = replace(evidence(told=told, attached=False), left=HostOutcome(status=status, guarded=False))
        assert ending(without) == expected

    @pytest.mark.parametrize("told", [False, True])
    def test_done_is_who_was_trained_to_the_end_with_the_final_state_kept_or_holds_no_guard(self, told: bool) -> None:
        assert ending(evidence(finished=True, told=told)) == "done"
        assert ending(evidence(attached=False, told=told)) == "done"
        assert ending(evidence(lost=True, told=told)) == "unkept"
        assert ending(evidence(finished=True, status=1)) == "failed", "the script failed behind its training"

    @pytest.mark.parametrize("told", [False, True])
    @pytest.mark.parametrize("attached", [False, True])
    def test_who_was_trained_to_the_end_on_a_full_disk_has_not_left_his_loop(self, told: bool, attached: bool) -> None:
        """Also where it was full when the ranks attached, so that the journal does not even have that."""
        unrecorded = replace(evidence(told=told, attached=attached), unrecorded="no space left")
        assert ending(unrecorded) == "unkept"
        assert ending(replace(unrecorded, left=HostOutcome(status=1), told_to_stop=False)) == "failed"

    @given(st.sampled_from([None, PREEMPTED, STRUCTURAL]), st.booleans(), st.sampled_from([0, 1, -9]))
    def test_a_refusal_comes_first(self, stopped: Stopped | None, told: bool, status: int) -> None:
        refusal = Refusal(exit_code=78, message="another model")
        assert ending(evidence(refusal=refusal, stopped=stopped, told=told, status=status)) == "refused"

    @pytest.mark.parametrize(
        ("refuses", "reached", "of_script"),
        [("script", 0, True), ("command", 99, True), ("script", 100, False), ("data", 0, False)],
    )
    def test_a_script_may_be_started_without_protection_while_there_is_not_much_to_lose(
        self, refuses: RefusalKind, reached: int, of_script: bool
    ) -> None:
        error = Refusal(exit_code=2, message="two loaders", hint="one", refuses=refuses).as_error(reached)
        assert isinstance(error, ScriptRefused) == of_script
        assert (error.exit_code, error.hint) == (2, "one")
        assert ("What the run has trained is kept" in error.message) == (reached == 100)


@pytest.mark.parametrize(
    ("end", "given", "lacking", "reason"),
    [
        ("done", evidence(finished=True, step=9), None, "training is complete at step 9"),
        ("unkept", evidence(finished=True), "not there", "training is complete, but its final state is not there"),
        (
            "failed",
            evidence(finished=True),
            None,
            "the script failed behind its training: X. .* final state .* is kept: .*",
        ),
        ("failed", evidence(finished=True), "not there", ".* final state c000001-s00000009 is not there"),
        ("resumable", evidence(stopped=PREEMPTED, step=84, checkpoint_step=75), None, "saved"),
        ("resumable", evidence(step=84, checkpoint_step=75), None, "goes on at step 75 of at least 84: X"),
        ("resumable", evidence(step=84, checkpoint_step=84), None, "X"),
        ("ended", evidence(stopped=PREEMPTED), None, "saved; no checkpoints are taken, so there is none to go on from"),
        ("ended", evidence(step=5), None, "told to stop; X; there is no checkpoint to go on from"),
    ],
)
def test_the_reason_of_an_end_is_what_the_ranks_said_or_how_the_attempt_ended(
    end: AttemptEnding, given: AttemptEvidence, lacking: str | None, reason: str
) -> None:
    assert re.fullmatch(reason, reason_of(end, given, lacking, "X"))


class TestBudget:
    def test_the_first_restart_is_at_once_and_repeats_wait_longer_and_longer(self) -> None:
        budget, delays = Budget.full(9), []
        while True:
            budget, decision = budget.after_failure(progressed=False, attached=True, killed=False)
            if isinstance(decision, GiveUp):
                break
            delays.append(decision.delay)
        assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_DELAY, LONGEST_DELAY]
        assert decision.reason == "9 restarts brought no progress"

    def test_a_budget_of_thousands_is_used_up(self) -> None:
        budget = Budget.full(2000)
        for _ in range(2000):
            budget, decision = budget.after_failure(progressed=False, attached=True, killed=False)
            assert isinstance(decision, Restart)
        assert decision.delay == LONGEST_DELAY

    def test_progress_refills_the_budget_and_makes_the_next_restart_immediate(self) -> None:
        budget = Budget.full(2)
        for _ in range(2):
            budget, _ = budget.after_failure(progressed=False, attached=True, killed=False)
        assert budget.left == 0
        budget, decision = budget.after_failure(progressed=True, attached=True, killed=False)
        assert decision == Restart(0.0, "it got further than all before it")
        assert budget.left == 1

    def test_what_is_left_out_from_now_on_needs_no_wait_and_takes_a_restart_of_the_budget(self) -> None:
        budget = Budget.full(3)
        for _ in range(2):
            budget, _ = budget.after_failure(progressed=False, attached=True, killed=False)
        budget, decision = budget.after_failure(progressed=False, attached=True, killed=False, blamed=True)
        assert decision == Restart(0.0, "what is to blame is left out from now on; no progress, restart 3")
        assert budget.left == 0

    def test_two_failures_in_a_row_before_attaching_are_enough(self) -> None:
        budget, decision = Budget.full(10).after_failure(progressed=False, attached=False, killed=False)
        assert isinstance(decision, Restart)
        _, decision = budget.after_failure(progressed=False, attached=False, killed=False)
        assert isinstance(decision, GiveUp)

    def test_two_mistakes_of_the_script_in_a_row_are_enough_unless_there_was_progress(self) -> None:
        def fail(budget: Budget, progressed: bool) -> tuple[Budget, Restart | GiveUp]:
            return budget.after_failure(progressed=progressed, attached=True, killed=False, mistake="at a wrong call")

        budget, decision = fail(Budget.full(10), False)
        assert isinstance(decision, Restart)
        assert fail(budget, False)[1] == GiveUp("2 attempts in a row failed at a wrong call, which no restart mends")
        assert isinstance(fail(budget, True)[1], Restart)

    def test_a_mistake_after_which_the_ranks_hung_and_were_killed_is_one_all_the_same(self) -> None:
        """Else each of ten restarts would wait for the hang's limit."""
        budget, how = Budget.full(10), {"progressed": False, "attached": True, "killed": True, "mistake": "at a call"}
        budget, decision = budget.after_failure(**how)  # type: ignore[arg-type]
        assert isinstance(decision, Restart)
        _, decision = budget.after_failure(**how)  # type: ignore[arg-type]
        assert decision == GiveUp("2 attempts in a row failed at a call, which no restart mends")

    def test_being_killed_while_starting_is_no_reason_to_give_up_early(self) -> None:
        budget = Budget.full(10)
        for _ in range(10):
            budget, decision = budget.after_failure(progressed=False, attached=False, killed=True)
            assert isinstance(decision, Restart)

    def test_an_attempt_that_attached_lies_between_two_that_did_not(self) -> None:
        budget = Budget.full(10)
        for attached in (False, True, False):
            budget, decision = budget.after_failure(progressed=False, attached=attached, killed=False)
            assert isinstance(decision, Restart)

    def test_no_restarts_may_be_allowed(self) -> None:
        _, decision = Budget.full(0).after_failure(progressed=True, attached=True, killed=False)
        assert decision == GiveUp("no restarts are allowed")

    @given(st.integers(0, 6), st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans())))
    def test_without_progress_there_are_never_more_restarts_than_the_limit(
        self, limit: int, attempts: list[tuple[bool, bool, bool]]
    ) -> None:
        budget, in_a_row = Budget.full(limit), 0
        for progressed, attached, killed in attempts:
            budget, decision = budget.after_failure(progressed=progressed, attached=attached, killed=killed)
            if isinstance(decision, GiveUp):
                return
            in_a_row = 1 if progressed else in_a_row + 1
            assert in_a_row <= limit
            assert 0 <= budget.left < limit


@pytest.mark.parametrize(("restarts", "allowed", "again"), [(0, 0, False), (0, 3, True), (2, 3, True), (3, 3, False)])
def test_without_a_guard_max_restarts_is_what_counts(restarts: int, allowed: int, again: bool) -> None:
    decision = after_unguarded(restarts, allowed)
    assert decision == (
        Restart(0.0, f"restart {restarts + 1} of {allowed} by --max-restarts")
        if again
        else GiveUp(f"--max-restarts allows {allowed} restarts of a script without a guard")
    )


@pytest.mark.parametrize(
    ("status", "exitcodes", "killed"),
    [
        (-9, None, True), (-15, None, True), (1, None, False), (-11, None, False), (1, [-9], True), (1, [1, -9], True),
        (1, [1], False), (1, [1, -15], False), (1, [-15, 1], True), (1, [-11, -15], False), (1, [], False),
    ],
)  # fmt: skip
def test_who_was_killed_did_not_fail_by_himself(status: int, exitcodes: list[int] | None, killed: bool) -> None:
    failures = None
    if exitcodes is not None:
        ranks = (RankFailure(rank=n, pid=n + 1, exitcode=code, message=None) for n, code in enumerate(exitcodes))
        failures = Failures(error="ChildFailedError", failures=tuple(ranks))
    assert evidence(status=status, failures=failures).killed == killed
    if failures is not None:
        assert evidence(status=status, failures=failures.model_copy(update={"shortage": True})).killed


class TestProgress:
    @staticmethod
    def record(*facts: Fact) -> AttemptRecord:
        record = AttemptRecord()
        for seq, fact in enumerate(facts):
            record.take(JournalEntry(seq=seq, at="", attempt=1, fact=fact))
        return record

    attached = attached_at(50)

    @staticmethod
    def committed(step: int) -> Committed:
        return Committed(checkpoint="c", step=step, batch=step, timeline=0, bytes=1, seconds=0.0)

    @pytest.mark.parametrize(
        ("step", "best", "expected"),
        [(None, None, False), (0, None, False), (1, None, True), (9, 9, False), (10, 9, True)],
    )
    def test_a_step_counts_where_no_attempt_was_before(
        self, step: int | None, best: int | None, expected: bool
    ) -> None:
        assert got_further(AttemptRecord(), step, best, AttemptRecord()) is expected

    def test_a_checkpoint_beyond_the_one_it_began_with_counts_also_after_a_rollback(self) -> None:
        assert got_further(self.record(self.attached, self.committed(100)), 110, 500, AttemptRecord())

    def test_the_checkpoint_that_it_began_with_does_not_count(self) -> None:
        assert not got_further(self.record(self.attached, self.committed(50)), 60, 500, AttemptRecord())

    def test_a_checkpoint_that_the_next_attempt_could_not_begin_with_does_not_count_again(self) -> None:
        """A script whose evaluation fails behind an epoch's end would else be started for ever."""
        record = self.record(self.attached, self.committed(100))
        assert got_further(record, 100, None, AttemptRecord())
        assert not got_further(record, 100, 100, record)
        elsewhere = self.record(self.attached.model_copy(update={"step": 40}), self.committed(50))
        assert got_further(record, 100, 100, elsewhere)

    def test_how_it_ended_counts_from_when_its_ranks_attached_last(self) -> None:
        first, second = (Finished(step=step, batch=step, checkpoint="c", by="the loop") for step in (10, 20))
        assert self.record(self.attached, first, self.attached).finished is None
        assert self.record(self.attached, first, self.attached, second).finished == second

    def test_a_launch_of_thousands_of_attempts_keeps_the_records_of_two(self, tmp_path: Path) -> None:
        path, kept = tmp_path / "journal" / "train.jsonl", {}
        found = TrainJournal(path)
        for attempt in range(1, 6):
            journal = Journal(path, attempt)
            journal.append(self.committed(attempt))
            journal.close()
            assert found.of_attempt(attempt).furthest == attempt
            kept = {other: found.of_attempt(other).furthest for other in range(1, attempt + 1)}
        assert kept == {1: None, 2: None, 3: None, 4: 4, 5: 5}

    def test_what_a_long_attempt_has_told_is_read_while_it_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "journal" / "train.jsonl"
        journal = Journal(path, 1)
        journal.append(self.attached)
        found = TrainJournal(path)
        assert found.of_attempt(1).attached
        journal.append(self.committed(60))
        read: list[int] = []
        new = JournalTail.new

        def noted(tail: JournalTail) -> list[JournalEntry]:
            entries = new(tail)
            read.extend(entry.seq for entry in entries)
            return entries

        monkeypatch.setattr(JournalTail, "new", noted)
        found.keep_up()
        assert read == [], "it has been read a moment ago"
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        found.keep_up()
        assert read == [1]
        journal.close()

    def test_a_contradiction_that_was_met_in_passing_is_told_at_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "journal" / "train.jsonl"
        journal = Journal(path, 1)
        journal.append(self.attached)
        gone_back = {"checkpoint": "c", "step": 40, "batch": 40, "steps_lost": 1, "seconds": 0.1, "route": "in_process"}
        journal.append(Restored(incident=7, **gone_back))  # type: ignore[arg-type]
        journal.close()
        found = TrainJournal(path)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        found.keep_up()
        for _ in range(2):
            with pytest.raises(JournalDamaged, match="contradicts"):
                found.of_attempt(1)


class TestCommand:
    def test_flags_go_as_they_stand_and_torchrun_restarts_nothing(self) -> None:
        job = LaunchedJob({"nproc-per-node": "2", "module": True, "tee": "3"}, "pkg.train", ["--lr", "0.1"])
        flags = ["--max-restarts=0", "--nproc-per-node=2", "--module", "--tee=3", "--standalone"]
        expected = [*program("rollback.agent.entry"), *flags, "--", "pkg.train", "--lr", "0.1"]
        assert torchrun_command(job) == expected

    def test_a_given_rendezvous_is_left_alone(self) -> None:
        job = LaunchedJob({"rdzv-endpoint": "host:1"}, "train.py", [])
        assert "--standalone" not in torchrun_command(job)

    def test_of_a_range_of_nodes_torchrun_is_told_how_many_there_are(self) -> None:
        command = torchrun_command(
            LaunchedJob({"nnodes": "1:4", "rdzv-endpoint": "host:1"}, "train.py", []), NodeGroup(3, 0, "host:5")
        )
        assert "--nnodes=3" in command
        assert "--nnodes=1:4" not in command
        job = LaunchedJob({"nnodes": "1:4", "rdzv-backend": "c10d"}, "train.py", [])
        given = {"--rdzv-backend=static", "--rdzv-endpoint=head:5", "--node-rank=2", "--master-port=5"}
        assert given < {*torchrun_command(job, NodeGroup(3, 2, "head:5"))}

    def test_flags_that_only_the_installed_torchrun_knows_are_handed_on(self) -> None:
        command = torchrun_command(LaunchedJob({}, "train.py", ["-x"], ["--brand-new=1"]))
        assert command[-4:] == ["--brand-new=1", "--", "train.py", "-x"]

    @pytest.mark.parametrize("arguments", [["--run", "7", "--log=x"], ["--nproc", "3"], ["--run-path"], ["-m"], []])
    def test_options_of_the_script_are_none_of_torchrun_s(self, arguments: list[str]) -> None:
        command = torchrun_command(LaunchedJob({}, "train.py", arguments))
        read = get_args_parser().parse_args(command[len(program("rollback.agent.entry")) :])
        assert (read.training_script, read.training_script_args) == ("train.py", arguments)
        assert (read.run_path, read.module) == (False, False)

    def test_two_dashes_among_the_script_s_arguments_are_torchrun_s_to_take_out_as_ever(self) -> None:
        command = torchrun_command(LaunchedJob({}, "train.py", ["a", "--", "--lr"]))
        assert command[-4:] == ["train.py", "a", "--", "--lr"]

    def test_ranks_learn_only_the_settings_that_were_given(self) -> None:
        options = launched(RunPaths(Path("runs/x")), LaunchedJob({}, "train.py", []), settings=Settings(rewind=7))
        environment = {"HOME": "/root", "ROLLBACK_ATTEMPT": "77"}
        with contextlib.closing(Host(options, environment, Path("/p"), SimpleNamespace())) as host:  # type: ignore[arg-type]
            found = host._rank_environment(4)
        told = json.loads(found.pop("ROLLBACK_TORCHRUN"))
        assert (told["supervisor"], told["failures"], told["restarts"]) == (os.getpid(), "/p/failures.json", 0)
        assert found.pop("ROLLBACK_HEARTBEATS").startswith(f"/proc/{os.getpid()}/fd/")
        assert found == {
            "HOME": "/root",
            "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x200000",
            "ROLLBACK_HOST": THIS_HOST,
            "ROLLBACK_RUN": str(Path.cwd() / "runs/x"),
            "ROLLBACK_ATTEMPT": "4",
            "ROLLBACK_SETTINGS": '{"rewind":7}',
            "ROLLBACK_SUPERVISOR": name_process(os.getpid()),
            "ROLLBACK_REFUSAL": "/p/refusal.json",
        }


class TestInsistence:
    @pytest.mark.parametrize(
        ("came", "expected"),
        [
            ([("SIGTERM", 0.0)], False),
            ([("SIGINT", 0.0), ("SIGINT", 0.5)], True),
            ([("SIGINT", 0.0), ("SIGINT", 0.01)], False),  # of a terminal, and of a program that hands it on
            ([("SIGINT", 0.0), ("SIGTERM", 0.01), ("SIGINT", 0.5)], True),
            ([("SIGUSR1", 0.0), ("SIGTERM", 0.5)], False),
            ([("SIGUSR1", 0.0), ("SIGTERM", 0.5), ("SIGTERM", 1.0)], True),
            ([("SIGHUP", 0.0), ("SIGHUP", 0.5)], False),
        ],
    )
    def test_only_a_repeated_term_or_interrupt_ends_at_once(
        self, came: list[tuple[str, float]], expected: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with StopSignals() as signals:
            for name, at in came:
                monkeypatch.setattr(time, "monotonic", partial(float, at))
                signal.raise_signal(signal.Signals[name])
        assert signals.insistent is expected

    def test_further_signals_may_be_named_and_those_that_do_not_exist_are_passed_over(self) -> None:
        before = signal.getsignal(signal.SIGXCPU)
        with StopSignals("SIGTERM, SIGXCPU,SIGNIX,SIGKILL") as signals:
            signal.raise_signal(signal.SIGXCPU)
            assert signals.take() == [signal.SIGXCPU]
        assert signal.getsignal(signal.SIGXCPU) is before

    def test_a_launch_that_is_told_to_stop_before_it_begins_names_no_url_where_it_has_none(
        self, tmp_path: Path
    ) -> None:
        job = LaunchedJob({}, "train.py", [])
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(RollbackError, match="told to stop while the job was looked at") as stopped:
                supervise(launched(RunPaths(tmp_path / "run"), job), SimpleNamespace(say=print), signals)  # type: ignore[arg-type]
        assert stopped.value.exit_code is ExitCode.RESUMABLE
        assert not (tmp_path / "run").exists()

    def test_signals_are_taken_once_and_the_former_handlers_come_back(self) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGUSR1)
            assert signals.take() == [signal.SIGUSR1]
            assert signals.take() == []
            assert signals.received == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is before

    def test_a_signal_that_was_ignored_at_the_start_stays_ignored(self) -> None:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with StopSignals() as signals:
                signal.raise_signal(signal.SIGHUP)
                assert signals.received == []
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_a_signal_that_was_blocked_at_the_start_is_heard_here_and_in_what_is_started_from_here(self) -> None:
        blocked = {signal.SIGTERM, signal.SIGUSR1}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            with StopSignals() as signals:
                assert not blocked & signal.pthread_sigmask(signal.SIG_BLOCK, ())
                signal.raise_signal(signal.SIGTERM)
                assert signals.received == [signal.SIGTERM]
                ended = subprocess.run(["sh", "-c", "kill -TERM $$; echo deaf"], stdout=subprocess.PIPE, check=False)
                assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, b"")
            assert blocked <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_what_cannot_be_removed_below_tmp_at_the_end_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: str, **_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", path)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _private_directory() as private:
        (private / "open-on-nfs").touch()
        monkeypatch.setattr(os, "unlink", busy)
    monkeypatch.undo()
    assert list(tmp_path.rglob("*")) == [private, private / "open-on-nfs"]
