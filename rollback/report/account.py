"""Where the wall-clock time of a run went, in parts that add up to the whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollback.audit.ledger import Ledger
from rollback.events import Record
from rollback.supervisor_facts import Hung


@dataclass(frozen=True)
class Part:
    """A part of the time. key: for the style; what: in words; steps: updates done in it, where the record tells."""

    key: str
    what: str
    seconds: float
    steps: int | None


@dataclass(frozen=True)
class Account:
    """All parts, and the whole that they add up to. unknown: events whose price the record does not tell."""

    parts: list[Part]
    seconds: float
    unknown: int


def account(ledger: Ledger, records: Iterable[Record]) -> Account | None:
    """The account of a run; None where there is no time on record.

    Prices are those of `rollback.audit.cost`. What a hang kept waiting is told apart from what its restart undid; it is
    taken from the price of the death that it became, or, where none followed, from the time that counts.
    """
    totals = ledger.totals
    if totals.seconds is None:
        return None
    silent: dict[int, float] = {}
    for record in records:
        if isinstance(record.fact, Hung):
            silent[record.attempt] = max(silent.get(record.attempt, 0.0), record.fact.silent)
    deaths = {entry.attempt: entry.seconds_lost or 0.0 for entry in ledger.attempts}
    rewinds = sum(entry.seconds_lost or 0.0 for entry in ledger.incidents)
    of_deaths = sum(min(deaths.get(attempt, 0.0), seconds) for attempt, seconds in silent.items())
    restarts = sum(deaths.values()) - of_deaths
    rest = max(0.0, totals.seconds - rewinds - sum(deaths.values()) - totals.seconds_down)
    of_rest = min(rest, sum(seconds for attempt, seconds in silent.items() if not deaths.get(attempt)))
    undone = sum(entry.steps_lost or 0 for entry in ledger.incidents)
    lost = sum(entry.steps_lost or 0 for entry in ledger.attempts)
    parts = [
        Part("healthy", "training that counts", rest - of_rest, totals.steps),
        Part("rewinds", "undone by rewinds", rewinds, undone),
        Part("restarts", "undone by restarts", restarts, lost),
        Part("stalled", "stalled: no rank made progress", of_deaths + of_rest, None),
        Part("down", "down between attempts", totals.seconds_down, None),
    ]
    unknown = sum(e.restored is not None and e.seconds_lost is None for e in ledger.incidents)
    unknown += sum(bool(e.steps_lost) and e.seconds_lost is None for e in ledger.attempts)
    return Account(parts, sum(part.seconds for part in parts), unknown)
