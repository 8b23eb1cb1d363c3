"""What ended an attempt: the class of the first cause, the rank with which it began, and what only followed. Pure.

The first row that holds gives the class of a rank's failure. Of several ranks, the rank whose class comes first in the
table is the first cause: a rank that dies makes its peers raise, and a rank that is stopped or hangs makes the
*healthy* ranks raise first. Within a class, the earliest failure counts. The order is that of
`rollback.facts.supervisor.Why`.

| class         | evidence                                                                                   |
|---------------|--------------------------------------------------------------------------------------------|
| stopped       | the process was stopped (SIGSTOP) when it was last looked at                                |
| hang          | the supervisor called a hang; the suspect                                                   |
| hardware      | an exception whose message names ECC, Xid, a lost GPU, or a system error of NCCL            |
| oom_kill      | SIGKILL, and the kernel counted (or named in its log) an OOM kill; of a loader worker too   |
| signal        | ended by a signal that torchrun did not send; of a loader worker too                        |
| out_of_memory | an exception that says that an allocation failed, on CUDA or CPU                            |
| disk          | an exception that says that a disk is full, over its quota, or read-only                    |
| exception     | any other exception                                                                        |
| exit          | a status other than 0, and no word                                                         |
| aborted       | SIGABRT: how native code ends that lost its peers, among other things                      |
| timeout       | an exception of torch.distributed that says that it waited too long                        |
| lost_peer     | an exception of torch.distributed that says that a peer is gone                            |

`node_lost`: the supervisor of a node fell silent or was started anew; what ranks of other nodes raised is a
consequence. `launcher`: torchrun failed, and no rank did. `told_to_stop`: the attempt was ended on request. `left`: the
script ended without an error before its loop did, also where it was told to stop. Only `exception` may blame a batch,
where one was in hand, and where the code of rollback has not raised itself.
"""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rollback.errors import ExitCode
from rollback.facts.ending import SCRIPT_LEFT
from rollback.facts.supervisor import Why
from rollback.facts.training import Finished, Hung
from rollback.rundir.failures import NOTICED, PRECEDENCE, FailureRecord, class_of_exception
from rollback.rundir.heartbeats import END_OF_DATA, LEAVING, READING, SAVING_AT, Heartbeat
from rollback.supervisor.diagnosis.outcome import AttemptEvidence, RankFailure
from rollback.wording import ranks_in_words

_NAMED = 4  # ranks
_OF_CODE = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")
"""Exceptions that no data bring about."""


@dataclass(frozen=True)
class RankEnd:
    rank: int
    failure: RankFailure | None = None
    """What torchrun saw; None: nothing."""
    record: FailureRecord | None = None
    stopped: bool = False
    """Whether the rank was SIGSTOPped when it was last looked at."""
    oom_hosts: Collection[str] = ()
    """The hosts of the attempt on which the kernel says that its OOM killer struck."""
    beat: Heartbeat | None = None
    """The last heartbeat; None: the rank gave none."""
    last_snapshot_step: int | None = None
    """The step at which the state was kept, which every rank had come to; None: none was kept."""

    @property
    def exitcode(self) -> int:
        return self.failure.exitcode if self.failure else 0

    @property
    def message(self) -> str:
        """What the rank raised, as it told torchrun; empty: it told nothing."""
        return (self.failure.message or "").strip() if self.failure else ""

    @property
    def ended_by_torchrun(self) -> bool:
        return self.failure is not None and (self.failure.ended or self.failure.exitcode == -signal.SIGTERM)

    @property
    def left_well(self) -> bool:
        """Whether the rank is known to have left the script by itself, and without an error."""
        return self.failure is None and self.record is None and self.beat is not None and self.beat.doing == LEAVING

    @property
    def seconds(self) -> float:
        """When the rank failed, in seconds since the epoch. torchrun's time is in whole seconds, and later."""
        if self.record is not None:
            return self.record.seconds
        return self.failure.at + 1 if self.failure and self.failure.at else float("inf")

    @property
    def host(self) -> str | None:
        return self.record.host if self.record else self.beat.host if self.beat else None

    @property
    def oom_killed(self) -> bool:
        """Whether the OOM killer struck on this rank's host; on any, where nobody knows which one that is."""
        return bool(self.oom_hosts) if self.host is None else self.host in self.oom_hosts


@dataclass(frozen=True)
class FirstCause:
    why: Why
    text: str
    rank: int | None = None
    """The rank with which it began; None: this cannot be told."""
    record: FailureRecord | None = None
    followed: tuple[int, ...] = ()
    """The ranks whose failure is a consequence."""
    host: str | None = None
    alike: tuple[int, ...] = ()
    """The ranks that raised the same exception, or ended by the same signal or status, by themselves."""
    noticed_by: int | None = None
    """The rank whose failure the text tells, where it has only noticed that of another one."""
    data_end_apart: bool = False
    """Whether a rank stood at the end of its data, and another one had gone on to a further batch."""

    @property
    def described(self) -> int | None:
        """The rank whose failure the text tells; None: it tells of none."""
        return self.noticed_by if self.rank is None else self.rank

    def is_account_of(self, rank: int | None) -> bool:
        """Whether what this rank raised is itself the account, and no consequence."""
        return rank in (self.described, *self.alike)

    @property
    def may_blame_the_batch(self) -> bool:
        if self.why != "exception" or self.record is None:
            return False
        return self.record.in_hand and not (self.record.ours or self.record.error.startswith("rollback."))

    @property
    def mistake(self) -> str:
        """Where the script fails for a reason that no restart mends, in words; empty: it may be another one."""
        if self.data_end_apart:
            return "where one rank's data end and another's go on"
        if self.why != "exception" or self.record is None:
            return ""
        if self.record.error == "rollback.errors.UsageError":
            return "at a wrong call of rollback"
        if self.record.empty_epoch is not None:
            return f"behind epoch {self.record.empty_epoch}, which had no batch"
        if self.record.error == "StopIteration" and not self.record.in_hand:
            return "with StopIteration where the script takes its batches"
        if self.record.error in _OF_CODE:
            return f"with {self.record.error}"
        # Behind a first update such code works, and it may be the data. Those that cannot be read are told apart.
        behind_update = self.record.doing == "training" and not self.record.in_hand  # as in an evaluation there
        if self.record.step == 0 and not (self.record.in_hand or self.record.ours or behind_update):
            return "before the first update of the run"
        in_first_update = self.may_blame_the_batch and self.record.doing == "training" and self.record.step == 0
        return "in the first update of the run" if in_first_update and not self.record.unreadable else ""

    @property
    def next_start(self) -> str | None:
        """What the next start does, where nothing has to be mended before it: only a process that has gone back ends by
        this error. At its start the job would have been refused by it, and no attempt would have failed."""
        if self.record is None or self.record.error != "rollback.errors.RunDoesNotFit":
            return None
        return (
            "the same command starts the script anew, which may fit where a process that had gone back did not; if it "
            f"does not, it is refused with exit code {ExitCode.UNFIT:d}"
        )

    def is_behind(self, finished: Finished | None) -> bool:
        """Whether the script raised behind its training, whose final state is kept: it would raise there again."""
        if finished is None or finished.checkpoint is None or self.record is None or self.record.in_hand:
            return False
        return self.why in ("exception", "disk") and self.record.step == finished.step


def why_of(end: RankEnd) -> Why | None:
    """The class of a rank's end; None: it did not fail, or torchrun ended it because of another rank."""
    if end.stopped:
        return "stopped"
    if end.record is not None:
        return class_of_exception(end.record.error, end.record.message, oom_killed=end.oom_killed)
    if end.message:  # also of a rank that torchrun ended while it was leaving
        error, _, text = end.message.partition(":")
        return class_of_exception(error, text.strip(), oom_killed=end.oom_killed)
    if end.ended_by_torchrun or end.exitcode == 0:
        return None
    if end.exitcode < 0:
        if end.exitcode == -signal.SIGABRT:
            return "aborted"
        return "oom_kill" if end.oom_killed and end.exitcode == -signal.SIGKILL else "signal"
    return "exit"


def first_cause(evidence: AttemptEvidence, ends: Sequence[RankEnd]) -> FirstCause | None:
    """What ended an attempt, by the table above; None: it ended as it should."""
    classed = [(why, end) for end in ends if (why := why_of(end)) is not None]
    classed.sort(key=lambda item: (PRECEDENCE[item[0]], item[1].seconds, item[1].rank))
    if evidence.hung is not None:
        return _of_hang(evidence.hung, classed, ends)
    if evidence.left.lost_nodes:
        followed = tuple(sorted(end.rank for _, end in classed))
        were = "was" if len(evidence.left.lost_nodes) == 1 else "were"
        return FirstCause("node_lost", f"{', '.join(evidence.left.lost_nodes)} {were} lost", followed=followed)
    if evidence.left.status == 0:
        return FirstCause("left", SCRIPT_LEFT) if _script_left(evidence) else None
    if evidence.told_to_stop:
        if evidence.finished is not None:
            where = "behind the training, which is complete"
        else:  # a rank that has stopped and is about to exit dies of the signal like any other process
            where = f"{'before' if evidence.stopped is None else 'after'} the ranks had stopped together"
        return FirstCause("told_to_stop", f"ended on request, {where}")
    if not classed:
        return FirstCause("launcher", _of_torchrun(evidence))
    why, first = classed[0]
    alike = [end for other, end in classed[1:] if other == why and _ended_alike(why, end, first)]
    others = [end for _, end in classed[1:] if end not in alike]
    text = _describe(why, first)
    if alike:
        how = "raised the same" if why == "exception" else "in the same way"
        text += f"; {ranks_in_words(sorted(end.rank for end in alike), _NAMED)} {how}"
    if others:
        text += f"; then {ranks_in_words(sorted(end.rank for end in others), _NAMED)} failed too"
    text += (apart := _data_end_apart(ends) if why in (*NOTICED, "aborted") else "")
    nobody = why in NOTICED  # also where one alone did: its peer may be killed and not yet seen by its own torchrun
    followed = tuple(sorted(end.rank for end in ([first, *others] if nobody else others)))
    if nobody:
        text += _left_before(ends)
        return FirstCause(why, text, None, first.record, followed, noticed_by=first.rank, data_end_apart=bool(apart))
    alike_ranks = tuple(end.rank for end in alike)
    return FirstCause(
        why, text, first.rank, first.record, followed, first.host, alike_ranks, data_end_apart=bool(apart)
    )  # fmt: skip


def _script_left(evidence: AttemptEvidence) -> bool:
    """Of an attempt without an error."""
    complete = evidence.finished or evidence.final_state_lost or evidence.unrecorded
    return evidence.attached and not (complete or evidence.stopped or evidence.left.refusal)


def _left_before(ends: Sequence[RankEnd]) -> str:
    """The ranks that left without an error, in words: their peers know no more than that a connection was lost.

    No class of its own: where all are through, it is no mistake that one leaves first.
    """
    left = {end.rank: end.beat.step for end in ends if end.left_well and end.beat is not None}
    if not left:
        return ""
    who = ranks_in_words(sorted(left), _NAMED)
    return f"; {who} had left the script at step {min(left.values())}, without an error"


def _data_end_apart(ends: Sequence[RankEnd]) -> str:
    """The ranks that stood at the end of their data, in words, where others were at a further batch: they have met in
    different collectives. Empty: there are no such."""
    standing = {end.rank: it for end in ends if (it := end.record or end.beat) is not None}
    ended = {rank: it for rank, it in standing.items() if it.doing == SAVING_AT.format(END_OF_DATA)}
    last = max((it.batch for it in ended.values()), default=None)
    got = {rank: it.batch for rank, it in standing.items() if it.doing != READING}  # who reads may find no more
    further = [rank for rank, batch in got.items() if last is not None and batch > last]
    if not further:
        return ""
    who, others = (ranks_in_words(sorted(ranks), _NAMED) for ranks in (ended, further))
    return (
        f"; the data of {who} had ended with batch {last}, and {others} had more: give all ranks as many batches, or "
        "end the training before that by max_steps="
    )


def _ended_alike(why: Why, end: RankEnd, other: RankEnd) -> bool:
    """Whether two ranks of one class have failed each by itself: what killed the one has killed the other."""
    if end.record is None or other.record is None:
        alone = why in ("signal", "oom_kill", "exit") and end.record is other.record
        return alone and (end.exitcode, end.message) == (other.exitcode, other.message)
    return why == "exception" and end.record.fingerprint == other.record.fingerprint


def _of_hang(hung: Hung, classed: list[tuple[Why, RankEnd]], ends: Sequence[RankEnd]) -> FirstCause:
    """The first cause of a hang. The kill caused later failures; only the suspect may have raised before, and then have
    hung while it exited."""
    followed = tuple(sorted(end.rank for _, end in classed if end.rank != hung.suspect))
    for why, end in classed:
        if end.rank == hung.suspect and end.rank in hung.raised:
            after = "and its peers did not end" if end.rank in hung.died else "and did not end"
            return FirstCause(why, f"{_describe(why, end)}, {after}", end.rank, end.record, followed, end.host)
    suspect = next((end for end in ends if end.rank == hung.suspect), None)
    stopped, host = (suspect.stopped, suspect.host) if suspect else (False, None)
    return FirstCause("stopped" if stopped else "hang", f"hang: {hung.reason}", hung.suspect, None, followed, host)


def cause(evidence: AttemptEvidence, first: FirstCause | None) -> str:
    """How an attempt ended, in words, as far as the evidence shows."""
    if first is not None:
        return first.text
    if evidence.left.refusal is not None:
        return f"the ranks refused to go on: {evidence.left.refusal.message}"
    if evidence.stopped is not None:
        return f"the ranks stopped together: {evidence.stopped.account}"
    return "all ranks ended"


def _of_torchrun(evidence: AttemptEvidence) -> str:
    if evidence.left.status < 0:
        memory = evidence.left.torchrun_oom_killed and evidence.left.status == -signal.SIGKILL
        return f"torchrun was killed by {_signal_name(-evidence.left.status)}{_OF_CLASS['oom_kill'] if memory else ''}"
    if evidence.left.failures is None:
        return f"torchrun exited with status {evidence.left.status} and left no account"
    return f"torchrun failed with {evidence.left.failures.error}"


def _describe(why: Why, end: RankEnd) -> str:
    pid = end.failure.pid if end.failure else end.record.pid if end.record else None
    who = f"rank {end.rank}" + (f" (pid {pid})" if pid is not None else "")
    if why == "stopped":
        return f"{who} was stopped (SIGSTOP), and its peers gave up on it{_last_seen(end)}"
    if end.record is not None:
        return f"{who} raised {_last_line(end.record)} at {_where(end.record)}{_OF_CLASS.get(why, '')}"
    if end.message:
        how = "raised" if end.exitcode < 0 else f"exited with status {end.exitcode}:"
        return f"{who} {how} {end.message.splitlines()[-1]}{_OF_CLASS.get(why, '')}{_last_seen(end)}"
    if why == "oom_kill":
        return f"{who} was killed by signal 9 (SIGKILL): the kernel was out of memory{_last_seen(end)}"
    if end.exitcode < 0:
        return f"{who} was killed by {_signal_name(-end.exitcode)}{_last_seen(end)}"
    return f"{who} exited with status {end.exitcode}{_last_seen(end)}"


def _last_seen(end: RankEnd) -> str:
    """For a rank without a failure record: where its last heartbeat was, unless it is known to have been further."""
    if end.beat is None or end.beat.step < (end.last_snapshot_step or 0):
        return ""
    return f", last seen {end.beat.doing} at step {end.beat.step}, batch {end.beat.batch}"


_OF_CLASS: dict[Why, str] = {
    "hardware": " (hardware)",
    "out_of_memory": " (out of memory)",
    "disk": " (a disk that takes no more: make room, or have it written elsewhere)",
    "oom_kill": " (the kernel was out of memory)",
    "signal": " (a loader worker was killed)",
    "timeout": " (it waited too long for its peers)",
    "lost_peer": " (a peer was gone)",
}


def _last_line(record: FailureRecord) -> str:
    """Type and message in one line; for an error of a loader worker, the line with the worker's error."""
    lines = [line.strip() for line in record.message.splitlines() if line.strip()]
    if not lines:
        return record.error
    return lines[-1] if "Original Traceback" in record.message else f"{record.error}: {lines[0]}"


def _where(record: FailureRecord) -> str:
    if not record.in_hand:
        return f"step {record.step}, with no batch in hand"
    return f"step {record.step}, {'reading ' if record.doing == 'reading' else ''}batch {record.batch}"


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
