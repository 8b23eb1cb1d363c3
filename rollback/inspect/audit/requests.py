"""The requests of operators, and their results."""

from collections.abc import Collection, Iterable

from rollback.facts.training import Answered, JournalEntry, Requested
from rollback.inspect.audit.report import Point, RequestEntry
from rollback.rundir import requests
from rollback.rundir.journal.journal import of_kinds
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Request

_SHOWN = 8


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


def handed_in(paths: RunPaths, answered: Collection[str]) -> list[tuple[str, Request]]:
    """The requests without an answer, by name, oldest first."""
    try:
        names = [name for name in requests.names(paths) if name not in answered]
    except OSError:
        return []
    return list(requests.sound_requests(paths, names))


def open_requests(paths: RunPaths, answered: Collection[str]) -> list[str]:
    """The oldest of them in words, with who asked."""
    return [
        f"{request.in_words()} ({request.who}{': ' + request.why if request.why else ''})"
        for _, request in handed_in(paths, answered)[:_SHOWN]
    ]
