"""Which versions of the libraries the modules of this room were written for."""

from __future__ import annotations

import importlib.metadata
import re

from rollback.errors import UsageError

SUPPORTED = {
    "transformers": ("5.3", "6"), "accelerate": ("1.3", "2"), "lightning": ("2.6", "3"),
    "pytorch-lightning": ("2.6", "3"), "torchtitan": ("0.3", "0.4"),
}  # fmt: skip
"""From the first of the two on, and below the second. transformers has `_run_epoch` since 5.3, and cannot do without
what accelerate has since 1.3."""


def require_version(library: str) -> None:
    """Raises UsageError, with both numbers, where the installed version is not one that is supported."""
    first, below = SUPPORTED[library]
    installed = importlib.metadata.version(library)
    if not _numbers(first) <= _numbers(installed) < _numbers(below):
        raise UsageError(
            f"rollback.protect knows the loop of {library} {first} and later, below {below}; installed is {installed}",
            hint=f"pip install '{library}>={first},<{below}'",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that it begins with: those of a version before its release are the release's own."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
