"""What the deaths of attempts have undone, and why nothing newer is left. Pure."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from rollback.facts import training as facts
from rollback.inspect.audit.cost import reckon
from rollback.inspect.audit.reading import by_attempt
from rollback.inspect.audit.report import ReportItem
from rollback.rundir.journal.journal import last_fact, of_kind
from rollback.terminal.quantities import at_least

TELLING: frozenset[type[facts.Fact]] = frozenset({
    facts.Attached, facts.Planned, facts.Restored, facts.Stopped, facts.AttemptEnded, facts.LastSnapshotMade,
    facts.NoLastSnapshot,
})  # fmt: skip
"""Facts by which deaths are told, where an attempt's end is on record."""


class Death(ReportItem):
    """The end of an attempt that has undone steps."""

    attempt: int
    steps_lost: int
    at_least: bool = Field(description="how many more it had done is not on record")
    checkpoint: str | None = Field(description="to which the run goes back; null: it begins anew")
    step: int = Field(description="of that checkpoint")
    went_back: bool = Field(description="false: the next start does")
    why_not_kept: str | None = Field(description="null: last_snapshot tells")

    def in_words(self) -> str:
        steps = f"{at_least(str(self.steps_lost), self.at_least)} step{'s' if self.steps_lost != 1 else ''}"
        went = "the run went back" if self.went_back else "the next start goes back"
        where = f"to {self.checkpoint}, step {self.step}" if self.checkpoint else "to the beginning"
        why = f"; nothing newer is left ({self.why_not_kept})" if self.why_not_kept else ""
        return f"{steps} of attempt {self.attempt}: {went} {where}{why}"


def deaths(
    records: Sequence[facts.JournalEntry],
    reached: Mapping[int, int],
    progress: Mapping[int, tuple[int, int]],
    next_start: tuple[str, int] | None,
) -> dict[int, Death]:
    """The deaths that have undone steps, by attempt.

    next_start: the checkpoint, and its step, with which the next start goes on; None: the last attempt still runs, or
    that is not known. The others: as for `reckon`.
    """
    costs, own = reckon(records, reached, progress), by_attempt(records)
    attached = reversed(of_kind(records, facts.Attached))  # the first one of each attempt counts
    trained = {record.attempt: (fact.checkpoint, fact.step) for record, fact in attached}
    kept = {fact.checkpoint for _, fact in of_kind(records, facts.LastSnapshotMade) if fact.checkpoint}
    found, order = {}, sorted(trained)
    for attempt, back in zip(order, [*(trained[later] for later in order[1:]), next_start], strict=False):
        stopped = last_fact(own[attempt], facts.Stopped)
        if back is None or (stopped is not None and stopped.reason != "preempted"):  # given up, which is no death
            continue
        went_back = attempt != order[-1]
        lost = costs.deaths[attempt].steps or 0 if went_back else costs.reached[attempt] - back[1]
        if lost > 0:
            found[attempt] = Death(
                attempt=attempt, steps_lost=lost, at_least=not is_reach_known(own[attempt]), checkpoint=back[0],
                step=back[1], went_back=went_back,
                why_not_kept=None if back[0] in kept else _why_not_kept(own[attempt]),
            )  # fmt: skip
    return found


def is_reach_known(own: Sequence[facts.JournalEntry]) -> bool:
    """Whether it is on record, to the step, how far an attempt that died had come."""
    ended, kept = last_fact(own, facts.AttemptEnded), last_fact(own, facts.LastSnapshotMade)
    # A rank that raised has recorded its step, and its peers cannot have done another one without it. Who counts what
    # is lost at a last snapshot has the marks of all steps.
    raised = ended is not None and ended.fingerprint is not None
    counted = kept is not None and kept.steps_lost is not None
    return raised or counted or last_fact(own, facts.Stopped) is not None


def _why_not_kept(own: Sequence[facts.JournalEntry]) -> str | None:
    if last_fact(own, facts.LastSnapshotMade) is not None:
        return None
    none = last_fact(own, facts.NoLastSnapshot)
    return none.in_words() if none is not None else "no rank was left that could keep it"
