"""The requests of operators, and their results."""

from collections.abc import Iterable

from rollback.facts.training import Answered, JournalEntry, Requested
from rollback.inspect.audit.report import RequestEntry
from rollback.inspect.document import Point
from rollback.rundir.journal.journal import of_kinds
from rollback.rundir.requests import Request, order_in_words


def request_entries(records: Iterable[JournalEntry], handed_in: Iterable[tuple[str, Request]]) -> list[RequestEntry]:
    """All requests that the ranks have taken up or refused, in that order; then those that only lie there.

    handed_in: requests in the run directory, by name.
    """
    entries: dict[str, RequestEntry] = {}
    for record in of_kinds(records, {Requested, Answered}):
        match record.fact:
            case Requested() as fact:
                entries.setdefault(
                    fact.request,
                    RequestEntry.of(fact, at=record.at, taken_up=Point.of(fact), state="open", answer=None),
                )
            case Answered() as fact:
                known = entries.get(fact.request) or RequestEntry(
                    request=fact.request, order=None, to=None, skip=None, who=None, why=None, at=record.at,
                    taken_up=None, state="open", answer=None,
                )  # fmt: skip
                state = "carried_out" if fact.carried_out else "refused"
                entries[fact.request] = known.model_copy(update={"state": state, "answer": fact.text})
    for name, request in handed_in:
        entries.setdefault(
            name, RequestEntry.of(request, request=name, taken_up=None, state="open", answer="no rank has seen it yet")
        )
    return list(entries.values())


def asked_in_words(entry: RequestEntry) -> str:
    """What was asked for."""
    return "unreadable" if entry.order is None else order_in_words(entry.order, entry.to, entry.skip, entry.samples)


def fate_in_words(entry: RequestEntry) -> str:
    """What became of it."""
    at = f" at step {entry.taken_up.step}" if entry.taken_up else ""
    answer = (entry.answer or "").removeprefix(f"{entry.state}: ")
    return f"{entry.state.replace('_', ' ')}{at}" + (f"; {answer}" if answer else "")
