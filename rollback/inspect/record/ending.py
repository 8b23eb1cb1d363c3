"""How a run ended, from its facts. Pure. Every pass over the data ends with a fact that the loop has ended."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from pydantic import Field

from rollback.errors import ExitCode
from rollback.facts import training as facts
from rollback.facts.ending import EndedTogether
from rollback.inspect.document import ReportItem
from rollback.rundir.journal.journal import last_fact, of_kinds

Ended = Literal["finished", "preempted", "structural", "no_checkpoint", "gave_up"]

TURNS: frozenset[type[facts.Fact]] = frozenset({
    facts.AttemptStarted, facts.Attached, *get_args(EndedTogether), facts.AttemptEnded, facts.RestartScheduled,
    facts.RunEnded,
})  # fmt: skip
"""Facts that a run has ended, or that it has not."""
NO_END = "no end is on record: its supervisor was killed, its host went down, or its disk took no more"
"""Of an attempt whose supervisor is gone. Ranks are told to stop then: that they did is not how it ended."""


class RunEnding(ReportItem):
    how: Ended
    at: str
    step: int | None
    exit_code: int | None = Field(description="of the supervisor")
    by_supervisor: bool = Field(description="whether it was a supervisor that saw it; false: the ranks alone said so")
    orphaned: bool = Field(False, description="whether the ranks stopped since their supervisor, or its host, was gone")
    account: str

    @property
    def well(self) -> bool:
        return self.how == "finished" and not self.exit_code

    def in_words(self) -> str:
        at = f" at step {self.step}" if self.step is not None else ""
        return f"{self.how.replace('_', ' ')}{at}: {self.account}"


def ending_of(records: Iterable[facts.JournalEntry]) -> RunEnding | None:
    """How the run ended; None: it is running, or its end is not on record."""
    ending: RunEnding | None = None
    for record in of_kinds(records, TURNS):
        match record.fact:
            case facts.AttemptStarted() | facts.Attached() | facts.RestartScheduled():  # whatever the ranks said
                ending = None
            case facts.Finished() as fact:  # of any pass; later facts show whether it was the last one
                ending = _said(record, "finished", fact.step, "the training loop ended")
            case facts.AttemptEnded() as fact if ending and ending.how == "finished":
                well = fact.status == 0 and fact.why is None
                ending = ending.model_copy(update={"by_supervisor": True}) if well else None
            case (facts.FinalStateLost() | facts.ScriptLeft()) as fact:
                ending = _said(record, "gave_up", fact.step, fact.account)
            case facts.Stopped() as fact:
                ending = _said(record, fact.reason, fact.step, fact.account)
            case facts.RunEnded() as fact if ending:
                account = ending.account
                if ending.how == "finished" and fact.exit_code:  # as where the final state is not where it belongs
                    account += f"; exit code {fact.exit_code}: {fact.reason}"
                how = ending.how
                if how == "gave_up" and fact.exit_code == ExitCode.RESUMABLE:  # it was told to stop, and so left
                    how = "preempted"
                told = {"how": how, "exit_code": fact.exit_code, "by_supervisor": True, "account": account}
                ending = ending.model_copy(update=told)
            case facts.RunEnded() as fact:
                ending = RunEnding(
                    how=_by_exit_code(fact.exit_code), at=record.at, step=None, exit_code=fact.exit_code,
                    by_supervisor=True, account=fact.reason,
                )  # fmt: skip
    return ending


def lacks_its_end(records: Iterable[facts.JournalEntry]) -> bool:
    """Whether a supervisor began the last attempt, and none has recorded its end."""
    lacks = False
    for record in of_kinds(records, TURNS):
        match record.fact:
            case facts.AttemptStarted():
                lacks = True
            case facts.AttemptEnded() | facts.RunEnded():
                lacks = False
            case facts.Attached() as fact if not fact.supervised:
                lacks = False
    return lacks


def ended_together(own: Sequence[facts.JournalEntry]) -> EndedTogether | None:
    """By what the ranks of an attempt ended together, since they attached last: a process may train several times."""
    last = next(reversed(of_kinds(own, {facts.Attached, *get_args(EndedTogether)})), None)
    return last.fact if last is not None and isinstance(last.fact, EndedTogether) else None


def script_left(own: Sequence[facts.JournalEntry]) -> bool:
    """Whether the script of an attempt left its loop over the guard as if all were done. own: its lines."""
    ended = last_fact(own, facts.AttemptEnded)
    if ended is not None and (ended.why is not None or ended.status):
        return ended.why == "left"
    return isinstance(ended_together(own), facts.ScriptLeft)  # all that older supervisors and unsupervised ranks tell


def _by_exit_code(code: int) -> Ended:
    """Of a run whose ranks did not say how it ended: they were not up yet, or were killed."""
    if code == ExitCode.RESUMABLE:
        return "preempted"
    return "gave_up" if code else "finished"


def _said(record: facts.JournalEntry, how: Ended, step: int, account: str) -> RunEnding:
    """An ending that only the ranks recorded."""
    return RunEnding(how=how, at=record.at, step=step, exit_code=None, by_supervisor=False, account=account)


def confirmed(ending: RunEnding | None, *, locked: bool, reached: int | None, orphaned: bool) -> RunEnding | None:
    """The ending; None: it was only the end of one pass over the data.

    locked: somebody holds the run directory, or was killed while holding it. reached: the furthest step of the attempt.
    orphaned: the attempt's end lacks (`lacks_its_end`), and neither who holds the run directory nor a rank is alive.
    """
    if ending is not None and ending.how == "preempted" and orphaned:
        return ending.model_copy(update={"orphaned": True, "account": f"{ending.account}; {NO_END}"})
    if ending is None or ending.how != "finished" or ending.by_supervisor:
        return ending
    return None if locked or (reached or 0) > (ending.step or 0) else ending
