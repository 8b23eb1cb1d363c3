"""Ranges of batches as they are written on a command line."""

from __future__ import annotations

from rollback.errors import UsageError
from rollback.events import Window


def parse_window(text: str, where: str) -> Window:
    """`A:B`, both included. Raises UsageError naming `where` it stood."""
    first, separator, last = text.partition(":")
    try:
        if not separator:
            raise ValueError("no colon")
        return Window(first=int(first), last=int(last))
    except ValueError as error:
        raise UsageError(
            f"{where}: {text!r} is not a range of batches", hint="write FIRST:LAST, both included, as in 120:139"
        ) from error
