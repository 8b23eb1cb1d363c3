"""The attempts of one launch: watches an attempt, judges how it ended, starts the next one or ends the run."""

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from rollback.checkpoints.fast_tier import end_marks
from rollback.errors import ExitCode, JournalDamaged, RollbackError, RunDirectoryError
from rollback.facts import training as facts
from rollback.rundir.journal.journal import read_journal
from rollback.supervisor.budget import Budget, GiveUp, Restart, after_unguarded
from rollback.supervisor.claim import EarlierAttempts
from rollback.supervisor.diagnosis.attempt_record import got_further
from rollback.supervisor.diagnosis.blamed_data import blame, comes_again
from rollback.supervisor.diagnosis.evidence import TrainJournal, furthest_step, gather, newest_there, rank_ends
from rollback.supervisor.diagnosis.first_cause import FirstCause, cause, first_cause
from rollback.supervisor.diagnosis.outcome import EXIT_CODES, AttemptEnding, AttemptEvidence, ending, reason_of
from rollback.supervisor.draining import Draining
from rollback.supervisor.hang_watch import HangWatcher
from rollback.supervisor.journal import SupervisorJournal
from rollback.supervisor.last_snapshot import last_snapshot_on_host, note_last_snapshot
from rollback.supervisor.nodes.nodes import Nodes
from rollback.supervisor.nodes.protocol import RecordPlace, RunResult
from rollback.supervisor.patience import patiently
from rollback.supervisor.preflight import require_free_port
from rollback.supervisor.signals import StopRequests, StopSignals
from rollback.supervisor.torchrun.command import LaunchOptions
from rollback.supervisor.torchrun.host import Host, Running
from rollback.supervisor.torchrun.redaction import new_salt, redacted
from rollback.supervisor.torchrun.start_conditions import differences, job_digest

_POLL = 0.1
_T = TypeVar("_T")


class Attempts:
    """One launch, from its first attempt to its last."""

    def __init__(
        self,
        options: LaunchOptions,
        say: Callable[[str], None],
        host: Host,
        own_journal: SupervisorJournal,
        signals: StopSignals,
        nodes: Nodes,
        keep_lock: Callable[[], None],
    ) -> None:
        self._options = options
        self._paths = options.paths
        self._say = say
        self._host = host
        self._own_journal = own_journal
        self._signals = signals
        self._nodes, self._keep_lock = nodes, keep_lock
        self._requests = StopRequests(options.paths)
        self._stop_signals: list[signal.Signals] = []
        self._last_start: facts.AttemptStarted | None = None
        self._journal = TrainJournal(options.paths.train_journal)
        self._draining = Draining(options.paths, own_journal, say, nodes.transport)
        self._salt = new_salt()

    def run(self, past: EarlierAttempts) -> RunResult:
        if (last := past.last_start) is not None:
            self._last_start, self._salt = last, last.salt or self._salt
            self._nodes.resume(past.seats)
        self._host.end_leftovers(self._say)
        require_free_port(self._options.job.flags, self._options.spare_nodes)
        self._journal = TrainJournal(self._paths.train_journal, past.train)
        best = furthest_step(self._paths, past.train.history.furthest)
        budget = Budget.full(self._options.restart_budget)
        attempt = earlier = past.last_attempt  # which goes on with the journal
        self._own_journal.attempt = max(earlier, 1)  # of what happens before the first attempt of this launch
        while True:
            attempt += 1
            if not self._gather(attempt):
                return self._end(ExitCode.RESUMABLE, "told to stop while nodes were waited for")
            if attempt == earlier + 1:
                self._patiently(partial(self._tell_what_was_kept, earlier, past))
            evidence, first = self._attempt(attempt)
            end, output = ending(evidence), self._host.output
            if end != "failed" or first is None or first.is_account_of(output.held_of):
                output.release()  # the exception is itself the account
            if evidence.left.refusal is not None:
                self._refuse(evidence, best)
                continue
            if evidence.left.guarded:
                self._begin_record()
            if end != "failed" or (first is not None and first.is_behind(evidence.finished)):
                return self._finish(end, evidence, first)
            record, before = (self._patiently(partial(self._journal.of_attempt, of)) for of in (attempt, attempt - 1))
            told = self._patiently(lambda: read_journal(self._paths.supervisor_journal).records)
            further = got_further(record, evidence.furthest, best, before)
            progressed = further and not comes_again(first, attempt, told)
            best = max((step for step in (best, evidence.furthest) if step is not None), default=None)
            blamed = self._blame(first, attempt, told)
            self._nodes.failed(first.rank if first is not None and not blamed else None, progressed=progressed)
            decision: Restart | GiveUp
            if evidence.left.guarded or evidence.hung is not None:
                budget, decision = budget.after_failure(
                    progressed=progressed, attached=evidence.attached, killed=evidence.killed, blamed=blamed,
                    mistake=first.mistake if first is not None else "",
                )  # fmt: skip
            else:
                decision = after_unguarded(attempt - earlier - 1, self._options.job.max_restarts)
            why = cause(evidence, first)
            if isinstance(decision, GiveUp):
                self._tell_failure(first, why)
                hint = first.next_start if first is not None and not budget.limit else None  # else it was tried
                return self._end(ExitCode.FAILED, f"{why}; {decision.reason}", hint=hint)
            self._own_journal.note(
                facts.RestartScheduled(delay=decision.delay, budget_left=budget.left, reason=decision.reason),
            )
            when = f"in {decision.delay:.0f} s" if decision.delay else "at once"
            left = f"; {budget.left} of {budget.limit} restarts left" if evidence.left.guarded else ""
            self._tell_failure(first, f"{why}; starting another {when} ({decision.reason}{left})")
            if self._stopped_while_waiting(decision.delay):
                return self._end(ExitCode.RESUMABLE, "told to stop between two attempts")

    def _gather(self, attempt: int) -> bool:
        """Wait for all nodes. False: a stop signal came first."""
        with self._its_error_on_record():
            if self._nodes.gather(attempt, lambda: bool(self._signals.received)):
                return True
        self._hear_signals()
        return False

    @contextlib.contextmanager
    def _its_error_on_record(self) -> Iterator[None]:
        """For an attempt, and for what comes before it: what is raised there ends the run."""
        try:
            yield
        except RollbackError as error:
            if self._own_journal.opened:
                self._nodes.end()  # else their ranks wait for ours while the durable ring is filled
                self._end(error.exit_code, error.message)
            raise

    def _tell_what_was_kept(self, attempt: int, past: EarlierAttempts) -> None:
        """Journal what the ranks of the last attempt have kept, where their supervisor was gone before they were."""
        told = (entry.fact for entry in past.supervisor if entry.attempt == attempt)
        if any(isinstance(fact, facts.AttemptEnded | facts.LastSnapshotMade) for fact in told):
            return
        if (kept := self._nodes.last_snapshot(last_snapshot_on_host(self._paths, attempt), attempt)) is not None:
            newest, reached = newest_there(self._paths, past.train.history), furthest_step(self._paths, None, attempt)
            others = len(past.seats) > 1  # which may have been lost with that supervisor
            last = kept.as_fact(newest, reached, host_lost=others)
            note_last_snapshot(last, newest, past.train.history.finished, self._own_journal, self._say)

    def _attempt(self, attempt: int) -> tuple[AttemptEvidence, FirstCause | None]:
        """Run torchrun once. Returns the evidence when all its processes are gone, and the first cause."""
        began = time.monotonic()
        with self._its_error_on_record(), self._host.attempt(attempt, self._nodes.group) as running:
            self._own_journal.attempt = attempt
            self._note_start(running)
            status, ended = self._watch(running)
        left = self._nodes.left(self._host.left(status, running))
        if isinstance(ended, facts.StuckAtExit):  # their work was complete: our kill is no failure
            left = left.model_copy(update={"status": 0, "failures": None})
        hung = ended if isinstance(ended, facts.Hung) else None
        self._hear_signals()
        told = bool(self._stop_signals)
        evidence = self._patiently(
            lambda: gather(self._paths, self._journal, attempt, left=left, told_to_stop=told, hung=hung)
        )
        first = first_cause(evidence, rank_ends(self._paths, attempt, left))
        record = first.record if first else None
        if left.kept is not None:
            last = left.kept.as_fact(evidence.checkpoint_step, evidence.step, host_lost=bool(left.lost_nodes))
            note_last_snapshot(last, evidence.checkpoint_step, evidence.finished, self._own_journal, self._say)
        account = facts.AttemptEnded(
            status=left.status, cause=cause(evidence, first), step=evidence.step, seconds=time.monotonic() - began,
            why=first.why if first else None, rank=first.rank if first else None, host=first.host if first else None,
            followed=first.followed if first else (), batch=record.batch if record else None,
            fingerprint=record.fingerprint if record else None,
            samples=tuple(record.unreadable or record.samples) if record else (),
        )  # fmt: skip
        self._own_journal.note(account)
        return evidence, first

    def _note_start(self, running: Running) -> None:
        """Journal the attempt, and say what differs from the last start."""
        job = self._options.job
        started = facts.AttemptStarted(
            command=redacted(running.command, job.secret_args), host=socket.gethostname(), pid=running.pid,
            nodes=self._nodes.names, job=job_digest(job, self._options.settings, self._salt),
            **self._host.conditions(self._salt),
        )  # fmt: skip
        started = started.model_copy(update={"changed": differences(self._last_start, started)})
        self._last_start = started
        self._own_journal.note(started)
        if started.changed:
            told = "; ".join(started.changed)
            self._say(f"attempt {running.attempt}: other than at the last start: {told}")

    def _watch(self, running: Running) -> tuple[int, facts.Hung | facts.StuckAtExit | None]:
        """Watch until the attempt has ended on all nodes. Returns torchrun's status, and the hang, if there was one.

        This method ends the attempt if the grace is over, if the attempt failed on another node, or if the ranks hang.
        """
        deadline: float | None = None
        attached = False
        ended: facts.Hung | facts.StuckAtExit | None = None
        hang_watcher = HangWatcher(self._paths, self._options.hang, running, self._nodes)
        while (move := self._nodes.move(running.poll())) != "settled":
            attached = self._look_at_journal(running.attempt, attached)
            for name in self._hear_signals():
                if deadline is None:
                    deadline = time.monotonic() + self._options.grace
                    self._nodes.stop()
                    order = "stop and save" if self._host.guarded else "stop"  # without a guard nobody saves
                    self._say(f"{name}: telling the ranks to {order} (again to end now)")
            runs = running.poll() is None
            if move == "end":
                if runs:
                    running.kill()
            elif deadline is not None:
                told = not runs or running.tell_ranks_to_stop(self._stop_signals, guarded=self._host.guarded)
                insistent = self._signals.insistent or self._nodes.insistent
                if not told or insistent or time.monotonic() > deadline:
                    self._end_everywhere(running, None if insistent else end_marks.GRACE_IS_OVER)
            elif ended is None and (ended := hang_watcher.look()) is not None:  # also of other nodes' ranks alone
                self._own_journal.note(ended)
                self._say(ended.in_words())
                self._end_everywhere(running, end_marks.RANKS_HANG, hopeless=True)
            elif runs and hang_watcher.trains and self._options.restart_budget:  # else none would ever be started
                self._host.keep_standby(running.attempt)
            if running.poll() is None or self._nodes.names:
                running.await_end(_POLL)
        status = running.poll()
        assert status is not None
        return status, ended

    def _end_everywhere(self, running: Running, last: bytes | None, *, hopeless: bool = False) -> None:
        """On this node as `Running.kill`, if its torchrun still runs. The other nodes are told before that: for a last
        snapshot, each host has a few seconds to say what it has."""
        self._nodes.end()
        if running.poll() is None:
            running.kill(last, hopeless=hopeless)

    def _look_at_journal(self, attempt: int, attached: bool) -> bool:
        """Whether the ranks have attached. attached: they had before. A disk that fails is looked at again: it has to
        do with who reads the record, and not with the training."""
        try:
            if not attached:
                self._keep_lock()  # before the journal is looked at, which is another one where the run was moved away
            if not attached and self._journal.of_attempt(attempt).attached:
                attached = True
                self._nodes.attached()
                self._begin_record()
            if attached:  # until then the newest settings are those of an earlier launch, and may name another ring
                self._draining.look(lambda: self._journal.history)
                self._journal.keep_up()
        except JournalDamaged:
            raise
        except RunDirectoryError:
            pass  # where it stays so, that is told when the attempt is over
        return attached

    def _patiently(self, read: Callable[[], _T]) -> _T:
        """What the record says where no rank runs any more. Where it cannot be read, the run ends, and that is on
        record: to write it, nothing has to be read."""
        try:
            return patiently(read, self._say, lambda: self._signals.insistent)
        except RollbackError as error:
            self._own_journal.note(facts.RunEnded(exit_code=error.exit_code, reason=error.message))
            raise

    def _hear_signals(self) -> list[str]:
        """The names of the stop signals since the last call, from here and from other nodes."""
        noted = [facts.Signalled(signal=signum.name) for signum in self._signals.take()]
        noted += [facts.Signalled(signal=f"rollback stop by {who}") for who in self._requests.take()]
        noted += [facts.Signalled(signal=name, node=node) for node, name in self._nodes.signals()]
        for fact in noted:
            self._own_journal.note(fact)
        self._stop_signals += [signal.Signals.__members__.get(fact.signal, signal.SIGTERM) for fact in noted]
        return [fact.signal if fact.node is None else f"{fact.signal} on {fact.node}" for fact in noted]

    def _begin_record(self) -> None:
        """The ranks did not refuse the job: from now on, facts and output go to the run directory."""
        self._own_journal.open()
        self._host.output.keep()

    def _tell_failure(self, first: FirstCause | None, account: str) -> None:
        self._say(f"attempt {self._own_journal.attempt} failed: {account}")
        rank = first.described if first is not None else None
        if rank is not None and (words := self._host.output.stderr_tail(rank)) is not None:
            self._say(words)
        self._host.output.tell_consequence()

    def _blame(self, first: FirstCause | None, attempt: int, told: Iterable[facts.JournalEntry]) -> bool:
        """Journal the batch that is to blame, if there is one: the next attempt skips it."""
        found = blame(first, attempt, told)
        if found is None:
            return False
        self._own_journal.note(found)
        self._say(f"the same exception again, at batch {found.batch}: {found.answer}")
        return True

    def _stopped_while_waiting(self, delay: float) -> bool:
        """Wait before the next attempt. True, at once: a stop signal has come."""
        until = time.monotonic() + delay
        while not self._hear_signals() and not self._stop_signals and time.monotonic() < until:
            time.sleep(_POLL)
            self._nodes.look()
        return bool(self._stop_signals)

    def _refuse(self, evidence: AttemptEvidence, best: int | None) -> None:
        """Raise the ranks' refusal, unless the job fits another number of nodes. It is journalled only if this launch
        has a journal already. best: the furthest step of the attempts before."""
        refusal = evidence.left.refusal
        assert refusal is not None
        error = refusal.as_error(reached=max(evidence.furthest or 0, best or 0))
        if refusal.refuses == "ranks" and (told := self._nodes.take_another_number()) is not None:
            self._say(f"{error.message}\n{told}")
            return
        if evidence.attached:
            self._begin_record()
        if self._own_journal.opened:
            self._end(error.exit_code, error.message)
        raise error

    def _finish(self, end: AttemptEnding, evidence: AttemptEvidence, first: FirstCause | None) -> RunResult:
        """End a run whose last attempt did not fail, or failed behind its training."""
        why, lacking = cause(evidence, first), None
        if end == "failed":
            self._tell_failure(first, why)
        if end in ("done", "failed"):
            self._drain_the_rest()
            final = evidence.finished.checkpoint if evidence.finished is not None else None
            lacking = self._patiently(partial(self._draining.lacks, final))
        if end == "done" and lacking is not None:
            end = "unkept"
        protected = end != "done" or evidence.finished is not None
        reason = reason_of(end, evidence, lacking, why)
        return self._end(EXIT_CODES[end], reason, protected=protected, lacking=lacking is not None)

    def _end(
        self,
        exit_code: ExitCode,
        reason: str,
        *,
        protected: bool = True,
        lacking: bool = False,
        hint: str | None = None,
    ) -> RunResult:
        """lacking: the reason is about what the durable ring does not have."""
        self._drain_the_rest()
        hint = self._draining.hint if lacking else hint
        self._own_journal.note(facts.RunEnded(exit_code=exit_code, reason=f"{reason}; {hint}" if hint else reason))
        self._draining.close()
        record = RecordPlace() if self._own_journal.opened else None
        return RunResult(exit_code=exit_code, reason=reason, hint=hint, protected=protected, record=record)

    def _drain_the_rest(self) -> None:
        """Also what an earlier launch has left in memory, where the ranks of this one never came to attach."""
        if self._own_journal.opened:
            try:
                history = patiently(lambda: self._journal.history, self._say, lambda: self._signals.insistent)
                self._draining.follow(history)
            except RollbackError as error:  # a drainer that runs reads for itself; how the run ended is told anyway
                self._say(f"what is in memory may not get to the durable ring: {error.message}")
        self._draining.finish(self._out_of_time)

    def _out_of_time(self) -> bool:
        """Whether the grace is over; what is left of it is for the durable ring."""
        since = self._signals.since
        return self._signals.insistent or (since is not None and time.monotonic() > since + self._options.grace)
