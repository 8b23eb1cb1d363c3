"""The loop around torchrun: start an attempt, pass on signals, clear up after it, and decide what follows.

Order matters in three places:

- The run directory is read before it is locked and locked before anything is started; a job that its ranks refuse
  leaves it as it was. Hence the ledger that holds facts back until the ranks have attached.
- Every process of an attempt is gone before its evidence is read, and before another one starts.
- What will be done is journalled before it is done.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollback.config import Settings
from rollback.errors import ExitCode, RollbackError
from rollback.events import AttemptEnded, AttemptStarted, RestartScheduled, RunEnded, Signalled
from rollback.rundir.paths import RunPaths
from rollback.supervisor.budget import Budget, GiveUp
from rollback.supervisor.claim import Claim, read_past
from rollback.supervisor.command import Job, rank_environment, torchrun_command
from rollback.supervisor.evidence import TrainJournal, cause, furthest_step, gather, got_further
from rollback.supervisor.ledger import Ledger
from rollback.supervisor.outcome import EXIT_CODES, Ending, Evidence, ending
from rollback.supervisor.processes import (
    become_subreaper,
    descendants,
    end_all,
    leftovers,
    living_ranks,
    name_process,
    reap,
    send,
    start,
)
from rollback.supervisor.signals import StopSignals

_POLL = 0.1
# After an attempt: what is still there has lost its peers and has nothing to save.
_PATIENCE = 2.0
# Ranks of a killed supervisor find out by themselves that it is gone, which takes them a few seconds.
_PATIENCE_WITH_LEFTOVERS = 5.0


@dataclass(frozen=True)
class Order:
    """What `rollback launch` was asked to do.

    restart_budget: restarts without progress. grace: seconds that ranks have to stop and save when told to.
    """

    paths: RunPaths
    job: Job
    settings: Settings
    restart_budget: int
    grace: float


@dataclass(frozen=True)
class Result:
    """How a run ended: what `rollback launch` exits with, and why, in words."""

    exit_code: ExitCode
    reason: str


def supervise(order: Order, say: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> Result:
    """Run the job to its end, over as many attempts as it takes and the budget allows.

    `say` shows one line to the person who watches. Raises RollbackError, with the run directory unchanged, where the
    directory cannot be used or the ranks refuse it; and where processes of an attempt cannot be ended.
    """
    past = read_past(order.paths)
    claim = Claim(order.paths)
    ledger = Ledger(order.paths, say)
    released = False
    try:
        with tempfile.TemporaryDirectory(prefix="rollback-") as private, StopSignals() as signals:
            supervisor = _Supervisor(order, say, environment, ledger, signals, Path(private))
            try:
                return supervisor.run(past.last_attempt)
            except RollbackError:
                if not ledger.opened:
                    claim.undo()
                    released = True
                raise
    finally:
        ledger.close()
        if not released:
            claim.release()


class _Supervisor:
    """One launch: from the first attempt that it starts to the last."""

    def __init__(
        self,
        order: Order,
        say: Callable[[str], None],
        environment: Mapping[str, str],
        ledger: Ledger,
        signals: StopSignals,
        private: Path,
    ) -> None:
        self._order = order
        self._paths = order.paths
        self._say = say
        self._environment = environment
        self._ledger = ledger
        self._signals = signals
        self._refusal = private / "refusal.json"
        self._failures = private / "failures.json"
        self._journal = TrainJournal(order.paths.train_journal)
        self._before_us: list[psutil.Process] = []

    def run(self, last_attempt: int) -> Result:
        become_subreaper()
        self._before_us = descendants()
        if remains := leftovers(self._paths):
            self._say(f"ending {len(remains)} processes that an earlier supervisor left behind")
            end_all(lambda: leftovers(self._paths), patience=_PATIENCE_WITH_LEFTOVERS)
        best = furthest_step(self._paths, self._journal.records())
        budget = Budget.full(self._order.restart_budget)
        attempt = last_attempt
        while True:
            attempt += 1
            evidence = self._attempt(attempt)
            end = ending(evidence)
            if evidence.refusal is not None:
                raise self._refused(evidence)
            self._ledger.open()
            if end != "failed":
                return self._finish(end, evidence)
            progressed = got_further(self._journal.records(attempt), evidence.step, best)
            best = max((step for step in (best, evidence.step) if step is not None), default=None)
            budget, decision = budget.after_failure(
                progressed=progressed, attached=evidence.attached, killed=evidence.killed
            )
            if isinstance(decision, GiveUp):
                self._say(f"attempt {attempt} failed: {cause(evidence)}")
                return self._end(ExitCode.FAILED, f"{cause(evidence)}; {decision.reason}")
            self._ledger.note(
                RestartScheduled(delay=decision.delay, budget_left=budget.left, reason=decision.reason),
            )
            when = f"in {decision.delay:.0f} s" if decision.delay else "at once"
            self._say(
                f"attempt {attempt} failed: {cause(evidence)}; starting another {when} ({decision.reason}; "
                f"{budget.left} of {budget.limit} restarts left)"
            )
            if self._stopped_while_waiting(decision.delay):
                return self._end(ExitCode.RESUMABLE, "told to stop between two attempts")

    def _attempt(self, attempt: int) -> Evidence:
        """Run torchrun once, and return what is known when all that it started is gone."""
        self._refusal.unlink(missing_ok=True)
        self._failures.unlink(missing_ok=True)
        self._ledger.attempt = attempt
        command = torchrun_command(self._order.job, self._environment)
        environment = rank_environment(
            self._environment,
            run=self._paths.root,
            attempt=attempt,
            settings=self._order.settings,
            supervisor=name_process(psutil.Process()),
            refusal=self._refusal,
            failures=self._failures,
        )
        began = time.monotonic()
        torchrun = start(command, environment)
        try:
            host = socket.gethostname()
            self._ledger.note(AttemptStarted(command=tuple(command), host=host, pid=torchrun.pid))
            status = self._watch(torchrun, attempt)
        finally:
            # Also when we fail ourselves: nothing that we started may go on writing to the run directory.
            torchrun.kill()
            torchrun.wait()
            end_all(lambda: descendants(apart_from=self._before_us), patience=_PATIENCE)
            reap()
        evidence = gather(
            self._paths,
            self._journal,
            attempt,
            status=status,
            told_to_stop=bool(self._signals.received),
            refusal=self._refusal,
            failures=self._failures,
        )
        self._ledger.note(
            AttemptEnded(
                status=status,
                cause=cause(evidence),
                step=evidence.step,
                seconds=time.monotonic() - began,
            )
        )
        return evidence

    def _watch(self, torchrun: subprocess.Popen[bytes], attempt: int) -> int:
        """Torchrun's status once it has ended, by itself or because we were told to stop and its time is up."""
        told: set[psutil.Process] = set()
        deadline: float | None = None
        while (status := torchrun.poll()) is None:
            if not self._ledger.opened and self._journal.has_attached(attempt):
                self._ledger.open()
            for signum in self._signals.take():
                self._ledger.note(Signalled(signal=signum.name))
                if deadline is None:
                    deadline = time.monotonic() + self._order.grace
                    self._say(f"{signum.name}: telling the ranks to stop and save (again to end now)")
            if deadline is not None:
                # torchrun gets no signal: it would pass it on and kill the ranks soon after.
                ranks = set(living_ranks(self._paths, attempt).values())
                send(ranks - told, signal.SIGTERM)
                told |= ranks
                if not told or self._signals.insistent or time.monotonic() > deadline:
                    torchrun.kill()
                    return torchrun.wait()
            time.sleep(_POLL)
        return status

    def _stopped_while_waiting(self, delay: float) -> bool:
        """Wait before another attempt; True, at once, if a stop signal comes or has come."""
        until = time.monotonic() + delay
        while not self._signals.received and time.monotonic() < until:
            time.sleep(_POLL)
        for signum in self._signals.take():
            self._ledger.note(Signalled(signal=signum.name))
        return bool(self._signals.received)

    def _refused(self, evidence: Evidence) -> RollbackError:
        """The ranks' refusal as our own error. Journalled only if earlier attempts of this launch already were."""
        assert evidence.refusal is not None
        error = RollbackError(evidence.refusal.message, hint=evidence.refusal.hint)
        error.exit_code = ExitCode(evidence.refusal.exit_code)
        if self._ledger.opened:
            self._end(error.exit_code, evidence.refusal.message)
        return error

    def _finish(self, end: Ending, evidence: Evidence) -> Result:
        """End a run whose last attempt did not fail."""
        if end == "done":
            return self._end(EXIT_CODES[end], "training ended by itself")
        if evidence.stopped is not None:
            return self._end(EXIT_CODES[end], evidence.stopped.account)
        return self._end(EXIT_CODES[end], cause(evidence))

    def _end(self, exit_code: ExitCode, reason: str) -> Result:
        self._ledger.note(RunEnded(exit_code=exit_code, reason=reason))
        return Result(exit_code, reason)
