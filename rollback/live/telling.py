"""Facts as lines for the person who watches. Pure."""

from __future__ import annotations

from rollback.facts.ring import DrainFailed
from rollback.facts.training import (
    Attached,
    AttemptEnded,
    AttemptStarted,
    Concluded,
    Dropped,
    Incident,
    JournalEntry,
    Planned,
    Quarantined,
    RestartScheduled,
    Restored,
    RunEnded,
    Signalled,
    Stopped,
)
from rollback.terminal.quantities import number


def line_of(record: JournalEntry) -> str | None:
    """What a fact says to someone who watches; None for what happens all the time. Words in it are not ours."""
    match record.fact:
        case AttemptStarted() as fact:
            changed = f"; other than at the last start: {'; '.join(fact.changed)}" if fact.changed else ""
            return f"attempt {record.attempt} starts on {fact.host}{changed}"
        case Attached() as fact if fact.checkpoint:
            return f"resumed at step {fact.step} from {fact.checkpoint}"
        case Attached() as fact if fact.init:
            return f"began with {fact.init.in_words()}"
        case Incident() as fact:
            threshold = "" if fact.threshold is None else f", threshold {number(fact.threshold)}"
            return f"incident {fact.incident}: {fact.explanation} ({fact.rule}: {number(fact.value)}{threshold})"
        case Planned() as fact if fact.goes_back:
            return f"rewind to step {fact.step} ({fact.checkpoint}){fact.skips_in_words()}"
        case Planned() as fact:
            return f"{fact.action}: {fact.reason}"
        case Restored() as fact:
            return f"back at step {fact.step}; {fact.steps_lost} steps are undone"
        case Concluded() as fact:
            return f"incident {fact.incident}: {fact.outcome.replace('_', ' ')}"
        case DrainFailed() as fact:
            return f"nothing can be copied to the durable ring {fact.place}: {fact.error}"
        case Dropped() | Quarantined() as fact:
            return f"{fact.checkpoint} {fact.kind}: {fact.reason}"
        case _:
            return _line_of_the_end(record)


def _line_of_the_end(record: JournalEntry) -> str | None:
    match record.fact:
        case AttemptEnded() as fact if fact.status:
            return f"attempt {record.attempt} is over: {fact.cause}"
        case RestartScheduled() as fact:
            return f"another attempt follows in {fact.delay:.0f} s ({fact.budget_left} restarts left)"
        case Signalled() as fact:
            return f"{fact.signal}: the ranks are told to stop and save"
        case Stopped() as fact:
            return f"stopped at step {fact.step}: {fact.account}"
        case RunEnded() as fact:
            return f"the run has ended: {fact.reason}"
        case _:
            return None
