"""Facts as lines for the person who watches. Pure."""

from rollback.facts import training as facts
from rollback.facts.ring import DrainFailed
from rollback.terminal.quantities import number
from rollback.wording import counted


def line_of(record: facts.JournalEntry) -> str | None:
    """What a fact says to someone who watches; None for what happens all the time. Words in it are not ours."""
    match record.fact:
        case facts.AttemptStarted() as fact:
            changed = f"; other than at the last start: {'; '.join(fact.changed)}" if fact.changed else ""
            return f"attempt {record.attempt} starts on {fact.host}{changed}"
        case facts.Attached() as fact if fact.checkpoint:
            return f"resumed at step {fact.step} from {fact.checkpoint}"
        case facts.Attached() as fact if fact.init:
            return f"began with {fact.init.in_words()}"
        case facts.Incident() as fact:
            threshold = "" if fact.threshold is None else f", threshold {number(fact.threshold)}"
            return f"incident {fact.incident}: {fact.explanation} ({fact.rule}: {number(fact.value)}{threshold})"
        case facts.Planned() as fact if fact.goes_back:
            return f"rewind to step {fact.step} ({fact.checkpoint}){fact.skips_in_words()}"
        case facts.Planned() as fact:
            return f"{fact.action}: {fact.reason}"
        case facts.Restored() as fact:
            return f"back at step {fact.step}; {counted(fact.steps_lost, 'step')} undone"
        case facts.Concluded() as fact:
            return f"incident {fact.incident}: {fact.outcome.replace('_', ' ')}"
        case DrainFailed() as fact:
            return f"nothing can be copied to the durable ring {fact.place}: {fact.error}"
        case facts.Dropped() | facts.Quarantined() as fact:
            return f"{fact.checkpoint} {fact.kind}: {fact.reason}"
        case _:
            return _line_of_the_end(record)


def _line_of_the_end(record: facts.JournalEntry) -> str | None:
    match record.fact:
        case facts.AttemptEnded() as fact if fact.status:
            return f"attempt {record.attempt} is over: {fact.cause}"
        case facts.RestartScheduled() as fact:
            return f"another attempt follows in {fact.delay:.0f} s ({fact.budget_left} restarts left)"
        case facts.NodeReplaced() | facts.PartBroughtBack() | facts.NoBuddyCopy() as fact:
            return fact.in_words()
        case facts.Signalled() as fact:
            return f"{fact.signal}: the ranks are told to stop and save"
        case facts.Stopped() as fact:
            return f"stopped at step {fact.step}: {fact.account}"
        case facts.RunEnded() as fact:
            return f"the run has ended: {fact.reason}"
        case _:
            return None
