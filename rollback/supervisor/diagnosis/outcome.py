"""How an attempt can have ended, as a table from what is known to what follows. Pure.

A status tells next to nothing (torchrun exits with 1 whatever a rank did), so what the ranks wrote comes first.

| refusal | stopped    | told to stop | torchrun's status | training           | outcome                       |
|---------|------------|--------------|-------------------|--------------------|-------------------------------|
| yes     |            |              |                   |                    | refused, with its exit code   |
| no guard was made    | yes          |                   |                    | ended: 1, as torchrun         |
|         | structural |              |                   |                    | structural (76)               |
|         | preempted, with a checkpoint, told to stop or status 0 |  | resumable (75)                |
|         | the same, without one, because the last save failed    |  | unsaved (74)                  |
|         | the same, without one: none are taken                  |  | ended: 1                      |
|         |            |              | 0                 | final state lost   | unkept (74)                   |
|         |            |              | 0                 | finished           | done (0)                      |
|         |            |              | 0                 | without a guard    | done (0)                      |
|         |            | yes          | 0                 | not finished       | resumable (75), or as below   |
|         |            | no           | 0                 | not finished       | left (1)                      |
|         |            | yes          | not 0             | something to go on from | resumable (75)           |
|         |            | yes          | not 0             | no checkpoint is there  | ended: 1                 |
|         | preempted  | no           | not 0             |                    | failed: another attempt, or 1 |
|         |            | no           | not 0             |                    | failed: another attempt, or 1 |

Left: a script that ends in the middle of its loop as if all were well would do so again, so it is not started again.
The last but one: ranks whose torchrun died are ended by the supervisor with SIGTERM and may save on the way out.
Nobody asked the job to stop, so it goes on.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from rollback.errors import ExitCode, RollbackError
from rollback.facts.training import FinalStateLost, Finished, Hung, LastSaveFailed, Stopped

Ending = Literal["refused", "ended", "structural", "resumable", "unsaved", "unkept", "done", "left", "failed"]

EXIT_CODES: dict[Ending, ExitCode] = {
    "ended": ExitCode.FAILED,
    "structural": ExitCode.STRUCTURAL,
    "resumable": ExitCode.RESUMABLE,
    "unsaved": ExitCode.IO,
    "unkept": ExitCode.IO,
    "done": ExitCode.DONE,
    "left": ExitCode.FAILED,
    "failed": ExitCode.FAILED,
}


class Refusal(BaseModel, frozen=True):
    """What rank 0 wrote before the ranks left a job alone that they must not touch."""

    exit_code: int
    message: str
    hint: str | None = None

    def as_error(self) -> RollbackError:
        return RollbackError(**self.model_dump())


class RankFailure(BaseModel, frozen=True):
    """A rank that failed, as torchrun saw it. `exitcode` is -N for a rank that signal N ended.

    ended: by torchrun, because another one had failed. at: when torchrun saw it, in whole seconds since the epoch.
    """

    rank: int
    pid: int
    exitcode: int
    message: str | None
    ended: bool = False
    at: float | None = None


class Failures(BaseModel, frozen=True):
    """What torchrun raised, and the ranks that failed, the first one first."""

    error: str
    failures: tuple[RankFailure, ...]


class Left(BaseModel, frozen=True):
    """What an attempt left on one host. status: torchrun's, -N where signal N ended it.

    guarded: the script is known to have a guard. stopped: ranks that were SIGSTOPped when last looked at. oom_kills:
    how often the kernel's OOM killer struck in the memory cgroups of this host's ranks. lost_nodes: in the account of
    all nodes, those that left none.
    """

    status: int
    guarded: bool = True
    refusal: Refusal | None = None
    failures: Failures | None = None
    stopped: tuple[int, ...] = ()
    oom_kills: int = 0
    lost_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttemptEvidence:
    """What is known of an attempt once all its processes are gone.

    status: torchrun's, -N where signal N ended it. told_to_stop: the supervisor was signalled.
    attached: the ranks had agreed on where to begin. stopped: their last word, if they stopped together. finished: it,
    if training came to its end; final_state_lost: if that could not be kept.
    step: the furthest one that any rank is known to have reached. hung: the hang that the supervisor called, if any.
    lost_nodes: nodes that fell silent or were started anew while the attempt ran. guarded: the script is known to have
    a guard; one that has none runs as under torchrun. save_failed: their word of it, if the ranks stopped without their
    last state. kept: the step of the newest checkpoint that is there; None where there is none.
    """

    status: int
    told_to_stop: bool
    attached: bool
    refusal: Refusal | None
    stopped: Stopped | None
    failures: Failures | None
    step: int | None
    hung: Hung | None = None
    lost_nodes: tuple[str, ...] = ()
    guarded: bool = True
    finished: Finished | None = None
    final_state_lost: FinalStateLost | None = None
    save_failed: LastSaveFailed | None = None
    kept: int | None = None

    @property
    def killed(self) -> bool:
        """Whether somebody ended torchrun or a rank, which then did not fail by a fault of its own.

        A rank whose peer was killed often fails in the same moment, so a SIGKILL counts wherever it stands. torchrun
        itself ends the others with SIGTERM, so that counts for the first one only.
        """
        if self.lost_nodes:
            return True
        codes = [item.exitcode for item in self.failures.failures if not item.ended] if self.failures else []
        first = codes[0] if codes else self.status
        return -signal.SIGKILL in codes or -first in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def ending(evidence: AttemptEvidence) -> Ending:
    """The row of the table above that holds."""
    if evidence.refusal is not None:
        return "refused"
    if evidence.told_to_stop and not evidence.guarded:
        return "ended"
    if evidence.stopped is not None and evidence.stopped.reason == "structural":
        return "structural"
    if evidence.stopped is not None and (evidence.told_to_stop or evidence.status == 0):
        if evidence.stopped.checkpoint is not None:
            return "resumable"
        return "unsaved" if evidence.save_failed is not None else "ended"
    if evidence.status == 0 and evidence.final_state_lost is not None:
        return "unkept"
    if evidence.status == 0 and (evidence.finished is not None or not evidence.attached):
        return "done"
    if evidence.status == 0 and not evidence.told_to_stop:
        return "left"
    if not evidence.told_to_stop:
        return "failed"
    nothing_lost = not evidence.attached or not evidence.step  # the next start begins anew, and so did this one
    return "resumable" if evidence.kept is not None or nothing_lost else "ended"


def account_of(end: Ending, evidence: AttemptEvidence) -> str | None:
    """For people: how a job ended by itself; None where it did not."""
    at = "" if evidence.step is None else f" at step {evidence.step}"
    match end:
        case "done" if evidence.finished is None:
            return "the job ended by itself"
        case "done":
            return f"training is complete{at}"
        case "unkept" if evidence.final_state_lost is not None:
            lost = evidence.final_state_lost
            return f"training is complete{at}, but its last {lost.steps} updates are in no checkpoint: {lost.reason}"
        case "unkept":
            return f"training is complete{at}, but its final state is in memory only; the lines above say why"
        case "left":
            return f"the script ended{at} as if all were done, but its loop over the guard was not over"
        case _:
            return None
