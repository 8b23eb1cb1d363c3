"""The table of how an attempt can have ended. Pure.

torchrun's status says almost nothing (it is 1 whatever a rank did), so the facts of the ranks come first.

| refusal | stopped    | told to stop | torchrun's status | training           | outcome                       |
|---------|------------|--------------|-------------------|--------------------|-------------------------------|
| yes     |            |              |                   |                    | refused, with its exit code   |
| no guard was made    | yes          |                   |                    | ended: 1, as torchrun         |
|         | structural |              |                   |                    | structural (76)               |
|         | no good checkpoint |      |                   |                    | no_checkpoint (65)            |
|         | preempted, with a checkpoint, told to stop or status 0 |  | resumable (75)                |
|         | the same, without one, because the last save failed    |  | unsaved (74)                  |
|         | the same, without one: none are taken                  |  | ended: 1                      |
|         |            |              | 0                 | final state lost   | unkept (74)                   |
|         |            |              | 0                 | complete, which the journal could not take | unkept (74) |
|         |            |              | 0                 | finished           | done (0)                      |
|         |            |              | 0                 | without a guard    | done (0)                      |
|         |            | yes          | 0                 | not finished       | resumable (75), or as below   |
|         |            | no           | 0                 | not finished       | left (1)                      |
|         |            | yes          | not 0             | something to go on from | resumable (75)           |
|         |            | yes          | not 0             | no checkpoint is there  | ended: 1                 |
|         | preempted  | no           | not 0             |                    | failed: another attempt, or 1 |
|         |            | no           | not 0             |                    | failed: another attempt, or 1 |

*left*: a script that ends in the middle of its loop without an error would do so again, so no attempt follows. The last
row but one: if torchrun died, the supervisor ends the ranks with SIGTERM, and they may save. Nobody told the job to
stop, so it goes on.
"""

import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.errors import EARLY, ExitCode, RefusalKind, RollbackError, ScriptRefused
from rollback.facts.ending import SCRIPT_LEFT, GivingUp
from rollback.facts.training import FinalStateLost, Finished, Hung, LastSaveFailed, Stopped
from rollback.rundir.heartbeats import UnrecordedEnd

AttemptEnding = Literal["refused", "ended", "resumable", "unsaved", "unkept", "done", "left", "failed"] | GivingUp

EXIT_CODES: dict[AttemptEnding, ExitCode] = {
    "ended": ExitCode.FAILED,
    "structural": ExitCode.STRUCTURAL,
    "no_checkpoint": ExitCode.NO_CHECKPOINT,
    "resumable": ExitCode.RESUMABLE,
    "unsaved": ExitCode.IO,
    "unkept": ExitCode.IO,
    "done": ExitCode.DONE,
    "left": ExitCode.FAILED,
    "failed": ExitCode.FAILED,
}


class Refusal(BaseModel, frozen=True):
    """The reason why the ranks refused a job, as rank 0 wrote it."""

    exit_code: int
    message: str
    hint: str | None = None
    refuses: RefusalKind = "job"

    def as_error(self, reached: int) -> RollbackError:
        """What ranks are told wrongly, the script says. reached: the run's furthest step. A script that is refused
        after many is not started from nothing without protection."""
        of_script = self.refuses in ("command", "script")
        if of_script and reached < EARLY:
            return ScriptRefused(self.message, hint=self.hint, exit_code=self.exit_code)
        message = f"{self.message}. What the run has trained is kept" if of_script else self.message
        return RollbackError(message, hint=self.hint, exit_code=self.exit_code)


class RankFailure(BaseModel, frozen=True):
    """A rank that failed, as torchrun saw it."""

    rank: int
    pid: int
    exitcode: int
    """-N for a rank that signal N ended."""
    message: str | None
    ended: bool = False
    """Whether torchrun ended this rank because another one had failed, or the supervisor with the attempt."""
    at: float | None = None
    """When torchrun saw the failure, in whole seconds since the epoch."""


class Failures(BaseModel, frozen=True):
    """What torchrun raised, and the ranks that failed, the first failure first."""

    error: str
    failures: tuple[RankFailure, ...]
    shortage: bool = False
    """Whether the system refused a process or a thread to torchrun or to one of its ranks."""

    def with_ended(self, ranks: Collection[int]) -> "Failures":
        """The same, where the supervisor has ended these ranks: what SIGKILL did to them is no failure of theirs."""
        failures = [
            each.model_copy(update={"ended": each.ended or (each.rank in ranks and each.exitcode == -signal.SIGKILL)})
            for each in self.failures
        ]
        return self.model_copy(update={"failures": tuple(failures)})


class HostOutcome(BaseModel, frozen=True):
    """What an attempt left on one host, or (merged) on all hosts."""

    status: int
    """torchrun's exit status; -N where signal N ended torchrun."""
    guarded: bool = True
    """Whether the script is known to have a guard. A script without one runs as under torchrun."""
    refusal: Refusal | None = None
    failures: Failures | None = None
    stopped: tuple[int, ...] = ()
    """The ranks that were SIGSTOPped when they were last looked at."""
    oom_hosts: tuple[str, ...] = ()
    """The hosts on which the kernel's OOM killer struck in the memory cgroups of their ranks."""
    torchrun_oom_killed: bool = False
    """Whether torchrun itself was killed on one of these hosts, and not by its supervisor."""
    lost_nodes: tuple[str, ...] = ()
    """The nodes that left no account: they fell silent, or were started anew while the attempt ran."""
    kept: LastSnapshotResult | None = None
    """What became of the last snapshot; None: nobody has tried to make one."""
    unrecorded: UnrecordedEnd | None = None
    """As rank 0 showed on its host's board."""


@dataclass(frozen=True)
class AttemptEvidence:
    """What is known of an attempt when all its processes are gone."""

    left: HostOutcome
    """What it left on all hosts."""
    told_to_stop: bool
    attached: bool
    """Whether the ranks had agreed where to begin."""
    stopped: Stopped | None
    step: int | None
    """The furthest step that a rank is known to have reached since the last rollback."""
    furthest: int | None = None
    """The same, with what a rollback has undone."""
    hung: Hung | None = None
    finished: Finished | None = None
    final_state_lost: FinalStateLost | None = None
    save_failed: LastSaveFailed | None = None
    checkpoint_step: int | None = None
    """The step of the newest checkpoint that exists; None: there is none."""
    unrecorded: str | None = None
    """Training is complete, and the ranks' journal does not have it: the journal's path and why."""

    @property
    def goes_on_at(self) -> int | None:
        """The step with which the next start goes on, where it is known and costs steps. With a host its part of the
        newest checkpoint may be lost."""
        if self.finished is not None or self.left.lost_nodes or self.checkpoint_step is None or self.step is None:
            return None
        return self.checkpoint_step if self.checkpoint_step < self.step else None

    @property
    def killed(self) -> bool:
        """Whether somebody ended torchrun or a rank, or the system gave it no process or thread: others may give some
        back, and it says nothing of the job.

        A rank whose peer was killed often fails at the same moment, so SIGKILL counts for any rank. torchrun itself
        ends ranks with SIGTERM, so SIGTERM counts only for the first one.
        """
        if self.left.lost_nodes or (self.left.failures is not None and self.left.failures.shortage):
            return True
        failures = self.left.failures.failures if self.left.failures else ()
        codes = [failure.exitcode for failure in failures if not failure.ended]
        first = codes[0] if codes else self.left.status
        return -signal.SIGKILL in codes or -first in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def ending(evidence: AttemptEvidence) -> AttemptEnding:
    """The row of the table above that holds."""
    if evidence.left.refusal is not None:
        return "refused"
    if evidence.told_to_stop and not evidence.left.guarded:
        return "ended"
    if evidence.stopped is not None and evidence.stopped.reason != "preempted":
        return evidence.stopped.reason
    if evidence.stopped is not None and (evidence.told_to_stop or evidence.left.status == 0):
        if evidence.stopped.checkpoint is not None:
            return "resumable"
        return "unsaved" if evidence.save_failed is not None else "ended"
    if evidence.left.status == 0 and (evidence.final_state_lost is not None or evidence.unrecorded is not None):
        return "unkept"
    if evidence.left.status == 0 and (evidence.finished is not None or not evidence.attached):
        return "done"
    if evidence.left.status == 0 and not evidence.told_to_stop:
        return "left"
    if not evidence.told_to_stop:
        return "failed"
    nothing_lost = not evidence.attached or not evidence.step  # the next start begins anew, and so did this one
    return "resumable" if evidence.checkpoint_step is not None or nothing_lost else "ended"


def reason_of(end: AttemptEnding, evidence: AttemptEvidence, lacking: str | None, cause: str) -> str:
    """Why the run ends, in words.

    end: `failed` is a failure behind the training. lacking: see `Draining.lacks`. cause: how the last attempt ended.
    """
    at = "" if evidence.step is None else f" at step {evidence.step}"
    finished, stopped, lost = evidence.finished, evidence.stopped, evidence.final_state_lost
    match end:
        case "failed" if finished is not None:
            kept = lacking or "kept: the same command does only what comes behind it"
            return (
                f"the script failed behind its training: {cause}. Training is complete at step {finished.step}, and "
                f"its final state {finished.checkpoint} is {kept}"
            )
        case "done" if finished is None:
            return "the job ended by itself, and no rank made a rollback.Guard"
        case "done":
            return f"training is complete{at}"
        case "unkept" if lost is not None:
            return f"training is complete{at}, but its last {lost.steps} updates are in no checkpoint: {lost.reason}"
        case "unkept" if evidence.unrecorded is not None:
            return (
                f"training is complete{at}, but the run directory could not take that ({evidence.unrecorded}): a start "
                "goes on from the checkpoint before that, and trains again what follows it"
            )
        case "unkept":
            return f"training is complete{at}, but its final state is {lacking}"
        case "left":
            return f"{SCRIPT_LEFT}{at and f', last seen{at}'}"  # further, where the ranks left by `os._exit`
        case "ended" if stopped is not None:
            return f"{stopped.account}; no checkpoints are taken, so there is none to go on from"
        case "ended":
            none = "; there is no checkpoint to go on from" if evidence.left.guarded else ""
            return f"told to stop; {cause}{none}"
        case _ if stopped is not None:
            return stopped.account
        case _:
            goes_on = evidence.goes_on_at
            return cause if goes_on is None else f"goes on at step {goes_on} of at least {evidence.step}: {cause}"
