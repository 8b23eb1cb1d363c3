"""Which versions of a library a module of this room was written for."""

from __future__ import annotations

import importlib.metadata
import re

from rollback.errors import UsageError


def require_version(library: str, first: str, below: str) -> None:
    """Raises UsageError, with both numbers, where the installed version is not `first` or later, and below `below`."""
    installed = importlib.metadata.version(library)
    if not _numbers(first) <= _numbers(installed) < _numbers(below):
        raise UsageError(
            f"rollback.protect knows the loop of {library} {first} and later, below {below}; installed is {installed}",
            hint=f"pip install '{library}>={first},<{below}'",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: `5.23.0.dev0` is before none of 5.23's, which is as exact as is needed here."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
