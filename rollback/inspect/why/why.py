"""Why an attempt ended, from the records of its ranks and of the supervisor. Takes no lock and writes nothing.

The supervisor classified the end when it had all the evidence. This module reads its result from the journal, and the
records of the ranks: exceptions with their tracebacks, stacks, and positions.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from rollback.errors import UsageError
from rollback.facts import training as facts
from rollback.facts.ending import SCRIPT_LEFT
from rollback.facts.supervisor import ABOUT_NODES, Why
from rollback.inspect.document import Document, ReportItem, fields_of
from rollback.inspect.record.cost import Death
from rollback.inspect.record.ending import NO_END, ended_together, script_left
from rollback.inspect.record.reading import NODES_IN_WORDS, REMARKS, REMARKS_IN_WORDS, by_attempt
from rollback.inspect.status.report import RunStatus
from rollback.inspect.status.status import StatusReader
from rollback.rundir.failures import FailureRecord, in_order_of_blame, read_failures
from rollback.rundir.heartbeats import read_all_heartbeats
from rollback.rundir.journal.journal import last_fact, of_kind
from rollback.rundir.paths import RunPaths
from rollback.rundir.stacks import ProcessSeen, read_processes, read_stacks
from rollback.system.durable import read_tail

_LAST_WORDS = 8 << 10


class RankStood(ReportItem):
    rank: int
    doing: str
    step: int
    batch: int
    collectives: int | None = Field(description="begun by its default process group; null where there is none")


class ProcessStacks(ReportItem):
    """A process of a rank, before it was killed for a hang."""

    rank: int
    pid: int
    command: str
    is_rank: bool
    state: str | None = Field(description="as in /proc: R, S, D, T, Z")
    waits_in: str | None = Field(description="the kernel function that it waits in")
    stacks: str | None = Field(description="of all its Python threads, most recent call first")
    why_none: str | None


class LastOutput(ReportItem):
    """The end of a process's stderr."""

    path: str
    text: str


class Blame(ReportItem):
    """The data that this failure is blamed on."""

    batch: int
    window: facts.Window
    attempts: list[int]
    samples: list[int] = Field(description="that are left out from then on; empty: the window is skipped")
    answer: str = Field(description="what is done about it, in words")


class AttemptReport(Document):
    """Schema of `rollback why --json`, version 1; conventions as in the audit."""

    directory: str
    state: str = Field(description="of the run now, as in `rollback status`")
    attempt: int | None = Field(description="that this account is about; null: no attempt has failed")
    why: Why | None = Field(description="class of the first cause; null: none was called")
    rank: int | None = Field(description="with which it began; null where that cannot be told")
    host: str | None = Field(description="where that rank ran; null where that is not on record")
    cause: str | None
    began: str | None
    ended: str | None
    step: int | None = Field(description="the furthest that the attempt reached")
    batch: int | None = Field(description="that the rank had in hand")
    followed: list[int] = Field(description="ranks whose failure is a consequence")
    hung: facts.Hung | None
    blamed: Blame | None
    last_snapshot: str | None = Field(description="how the state was kept, and the steps lost; null: nobody tried")
    death: Death | None = Field(None, description="the steps that it has undone; null: none are on record")
    decision: str | None = Field(description="what the supervisor did then")
    nodes: list[str] = Field(default_factory=list, description=NODES_IN_WORDS)
    remarks: list[str] = Field(default_factory=list, description=REMARKS_IN_WORDS)
    signals: list[str] = Field(description="that the supervisor was told to stop with")
    failures: list[FailureRecord] = Field(description="exceptions as ranks wrote them down, first cause first")
    last_words: LastOutput | None = Field(
        description="of that rank, or of torchrun, where it began with that: if it left no exception itself"
    )
    processes: list[ProcessStacks]
    ranks: list[RankStood]
    earlier: dict[int, str] = Field(description="what ended the other attempts that failed, by attempt")
    notices: list[str]


def read_attempt_report(root: Path, attempt: int | None = None) -> AttemptReport:
    """Why `attempt` ended (default: the last one that failed).

    Raises UsageError for an attempt that there was not, and as `StatusReader.read`.
    """
    reader = StatusReader(root)
    status = reader.read()
    paths, notices = RunPaths(root), list(status.notices)
    attempts = by_attempt(reader.news)
    newest = max(attempts, default=0)
    causes = {
        number: _failure(paths, number, own, status if number == newest else None)
        for number, own in sorted(attempts.items())
    }
    failed = {number: cause for number, cause in causes.items() if cause is not None}
    if attempt is not None and attempt not in attempts:
        raise UsageError(
            f"there is no attempt {attempt} in {root}",
            hint=f"it has the attempts {min(attempts)} to {max(attempts)}" if attempts else "it has none",
        )
    number = attempt if attempt is not None else max(failed, default=None)
    own = attempts.get(number, []) if number is not None else []
    told_of = own or attempts.get(newest, [])  # where none has failed: how the last one ended
    ended, fact = next(reversed(of_kind(own, facts.AttemptEnded)), (None, None))
    started, _ = next(reversed(of_kind(own, facts.AttemptStarted)), (None, None))
    culprit = last_fact(own, facts.Blamed)
    first = fact.rank if fact else None
    last = last_fact(own, facts.LastSnapshotMade)
    failures = read_failures(paths.failures(number)) if number is not None else {}
    return AttemptReport(
        directory=str(root),
        state=status.state,
        attempt=number,
        **fields_of(fact, "why", "rank", "host", "step", "batch"),
        cause=failed.get(number, fact.cause if fact else None) if number is not None else None,
        began=started.at if started else own[0].at if own else None,
        ended=ended.at if ended else None,
        followed=list(fact.followed) if fact else [],
        hung=last_fact(own, facts.Hung),
        blamed=Blame.of(culprit, answer=culprit.answer) if culprit else None,
        last_snapshot=last.in_words() if last else None,
        death=reader.deaths.get(number) if number is not None else None,
        decision=_decision(told_of) or _went_on(number, attempts),
        nodes=[r.fact.in_words() for r in told_of if isinstance(r.fact, ABOUT_NODES)],
        remarks=[r.fact.in_words() for r in told_of if isinstance(r.fact, REMARKS)],
        signals=[signalled.signal for _, signalled in of_kind(told_of, facts.Signalled)],
        failures=sorted(in_order_of_blame(failures.values()), key=lambda item: item.rank != first),
        last_words=_last_words(paths, number, fact, failures) if number is not None and fact else None,
        processes=read_process_stacks(paths, number, notices) if number is not None else [],
        ranks=[
            RankStood.of(beat, rank=rank)
            for rank, beat in sorted(read_all_heartbeats(paths).items())
            if beat.attempt == number and beat.step >= (last.step or 0 if last else 0)  # older ones are stale
        ],
        earlier={other: cause for other, cause in failed.items() if other != number},
        notices=notices,
    )


def _failure(paths: RunPaths, attempt: int, own: Sequence[facts.JournalEntry], now: RunStatus | None) -> str | None:
    """What ended an attempt that failed, in words; None: it did not fail, or still runs.

    now: of the newest attempt, whose state is that of the run. None: of an earlier one nothing is alive any more.
    """
    if script_left(own):
        return SCRIPT_LEFT
    ended = last_fact(own, facts.AttemptEnded)
    if ended is not None:
        well = ended.why is None and ended.status == 0
        return None if well or ended.why == "told_to_stop" else ended.cause
    supervised, together = last_fact(own, facts.AttemptStarted) is not None, ended_together(own)
    if (run_ended := last_fact(own, facts.RunEnded)) is not None and run_ended.exit_code:
        return run_ended.reason  # as where the record could not be read when the attempt was over
    by_itself = isinstance(together, facts.Finished | facts.FinalStateLost) and not supervised
    if isinstance(together, facts.Stopped):
        orphaned = now is None or (now.ending is not None and now.ending.orphaned)  # ranks that stopped may have had to
        return NO_END if supervised and orphaned and together.reason == "preempted" else None
    if by_itself or (now is not None and now.state in ("running", "starting")):
        return None
    records = in_order_of_blame(read_failures(paths.failures(attempt)).values())
    if records:
        return f"rank {records[0].rank} raised {records[0].error} (no supervisor was there to judge)"
    if now is not None and now.state == "unknown":
        return None
    return NO_END if supervised else "no end is on record: its ranks were killed"


def _decision(own: Sequence[facts.JournalEntry]) -> str | None:
    for record in reversed(own):
        match record.fact:
            case facts.RunEnded() as fact:
                return f"the run was ended with exit code {fact.exit_code}: {fact.reason}"
            case facts.RestartScheduled() as fact:
                when = f"after {fact.delay:.0f} s" if fact.delay else "at once"
                return f"another attempt was started {when}: {fact.reason}; {fact.budget_left} restarts were left"
            case _:
                continue
    return None


def _went_on(attempt: int | None, attempts: Collection[int]) -> str | None:
    later = min((number for number in attempts if attempt is not None and number > attempt), default=None)
    return None if later is None else f"a later launch went on with attempt {later}"


def _last_words(
    paths: RunPaths, attempt: int, ended: facts.AttemptEnded, failures: Mapping[int, FailureRecord]
) -> LastOutput | None:
    """The end of stderr, if there is no failure record: an error in native code, or what the script printed."""
    if ended.rank in failures or ended.why in (None, "stopped", "hang", "told_to_stop", "left", "node_lost"):
        return None
    path = paths.rank_log(attempt, ended.rank, "err") if ended.rank is not None else paths.torchrun_log(attempt, "err")
    try:
        text = read_tail(path, _LAST_WORDS).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None  # kept elsewhere (--redirects, --log-dir), or nothing was said
    return LastOutput(path=str(path), text=text) if text.strip() else None


def read_process_stacks(paths: RunPaths, attempt: int, notices: list[str]) -> list[ProcessStacks]:
    """The processes of an attempt that hung, with their stacks; none of another. notices: gets what cannot be read."""
    try:
        seen = read_processes(paths.all_processes(attempt))
    except (OSError, ValueError) as error:
        notices.append(f"{paths.stacks(attempt)} cannot be read ({error}); whose stacks are whose is not known")
        return []
    return [_with_stacks(paths.rank_stacks(attempt, item.rank), item, notices) for item in seen]


def _with_stacks(path: Path, item: ProcessSeen, notices: list[str]) -> ProcessStacks:
    stacks = None
    if item.offset is not None:
        try:
            stacks = read_stacks(path, item.offset, item.size)
        except (OSError, ValueError) as error:
            notices.append(f"{os.fspath(path)} cannot be read ({error}); stacks are missing here")
    return ProcessStacks.of(item, stacks=stacks)
