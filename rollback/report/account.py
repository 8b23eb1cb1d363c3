"""Where the wall-clock time of a run went, in parts that add up to the whole. Pure."""

from dataclasses import dataclass

from rollback.inspect.audit.report import AuditReport


@dataclass(frozen=True)
class TimePart:
    """A part of the time. key: for the style; what: in words; steps: updates done in it, where the record tells."""

    key: str
    what: str
    seconds: float
    steps: int | None


@dataclass(frozen=True)
class TimeAccount:
    """All parts, and the whole that they add up to. unknown: events whose price the record does not tell."""

    parts: list[TimePart]
    seconds: float
    unknown: int


def account(ledger: AuditReport) -> TimeAccount | None:
    """The account of a run, at the prices of `rollback.inspect.audit.cost`; None where there is no time on record."""
    totals = ledger.totals
    if totals.seconds is None:
        return None
    rewinds = sum(entry.seconds_lost or 0.0 for entry in ledger.incidents)
    restarts = sum(entry.seconds_lost or 0.0 for entry in ledger.attempts)
    rest = max(0.0, totals.seconds - rewinds - restarts - totals.seconds_hung - totals.seconds_down)
    undone = sum(entry.steps_lost or 0 for entry in ledger.incidents)
    lost = sum(entry.steps_lost or 0 for entry in ledger.attempts)
    parts = [
        TimePart("healthy", "training that counts", rest, totals.steps),
        TimePart("rewinds", "undone by rewinds", rewinds, undone),
        TimePart("restarts", "undone by restarts", restarts, lost),
        TimePart("stalled", "hung: no rank made progress", totals.seconds_hung, None),
        TimePart("down", "down between attempts", totals.seconds_down, None),
    ]
    unknown = sum(e.restored is not None and e.seconds_lost is None for e in ledger.incidents)
    unknown += sum(bool(e.steps_lost) and e.seconds_lost is None for e in ledger.attempts)
    return TimeAccount(parts, sum(part.seconds for part in parts), unknown)
