"""Marks of a journal: how far it was when something was made, and whether a journal has come so far.

What is kept outside of the run directory outlives its content: somebody may put an older copy back. A mark that lies
outside, too, tells then that the journal lacks lines that were there before.
"""

import os
import re
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, Field

from rollback.system.durable import end_of_lines, open_regular

_TAIL = 1 << 8  # bytes: of a line's end, with its chain and its seal
_ENDS = re.compile(rb'"chain":"(\w{32})"(?:,"seal":"\w{64}")?\}\n\Z')


class JournalMark(BaseModel, frozen=True):
    """Where a line of a journal ends, and the chain up to there, which no other record has."""

    end: int = Field(ge=1)
    chain: str


def mark_of(journal: Path) -> JournalMark | None:
    """The mark of the last whole line, as the file is now; None: there is no line. Raises OSError, and ValueError for
    what is no journal."""
    try:
        with open_regular(journal) as file:
            return _mark_at(file, end_of_lines(file))
    except FileNotFoundError:
        return None


def has_come_to(journal: Path, mark: JournalMark) -> bool:
    """Whether a journal has the line of a mark, and so all before it. Raises as `mark_of`."""
    with open_regular(journal) as file:
        return _mark_at(file, mark.end) == mark


def _mark_at(file: BinaryIO, end: int) -> JournalMark | None:
    if not 0 < end <= os.fstat(file.fileno()).st_size:
        return None
    file.seek(max(0, end - _TAIL))
    found = _ENDS.search(file.read(min(end, _TAIL)))
    return JournalMark(end=end, chain=found[1].decode()) if found else None
