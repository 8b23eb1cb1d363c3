"""Handing requests to a run from within a test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toy import Hook, facts

import rollback
from rollback.facts.training import Answered, Window
from rollback.rundir import requests
from rollback.rundir.lock import launch_of
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Request


def hand_in(run: Path, order: str, *, skip: tuple[int, int] | None = None, **fields: Any) -> str:
    """Hand in a request, a stop for the launch that holds the run, and return its name."""
    window = Window(first=skip[0], last=skip[1]) if skip else None
    if order == "stop":
        fields = {"launch": launch_of(RunPaths(run)), **fields}
    request = Request.model_validate({"order": order, "skip": window, "who": "ann@site", "at": "now", **fields})
    return requests.submit(RunPaths(run), request)


def answers(run: Path) -> dict[str, tuple[bool, str]]:
    """Answers by the request's name: whether it was carried out, and the text."""
    return {fact.request: (fact.carried_out, fact.text) for fact in facts(run, Answered)}


def asking(at: int, *requests: Callable[[], object]) -> Hook:
    """A hook that hands in requests the first time that a batch comes by."""
    waiting = list(requests)

    def hook(guard: rollback.Guard | None, position: int) -> None:
        if position != at or not waiting:
            return
        for request in waiting:
            request()
        waiting.clear()
        assert guard is not None
        if guard._loop.requests._inbox is not None:
            guard._loop.requests._inbox.open(now=True)  # not a quarter of a second later: a toy's step is shorter

    return hook
