"""Record marks: how far the ranks' journal was when a slot was committed.

    TIER/slot-00/record.json      of the checkpoint in it, on rank 0's host

Slots outlive the run directory's content. Where an older copy of it was put back, they hold checkpoints of steps whose
skips and rollbacks no journal has. By its mark such a checkpoint is told from one that a crash left without its
`committed` line. A mark holds only lines that are in the file: what a full disk has kept from the journal is not in it.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, Field

from rollback.system import files
from rollback.system.durable import end_of_lines, open_regular, write_file
from rollback.system.small_json import sound_model

RECORD = "record.json"
_LIMIT = 1 << 12
_TAIL = 1 << 8  # bytes: of a line's end, with its chain and its seal
_ENDS = re.compile(rb'"chain":"(\w{32})"(?:,"seal":"\w{64}")?\}\n\Z')


class JournalMark(BaseModel, frozen=True):
    """Where a line of a journal ends, and the chain up to there, which no other record has."""

    end: int = Field(ge=1)
    chain: str


class _RecordMark(BaseModel, frozen=True):
    checkpoint: str
    journal: JournalMark


def write_mark(slot: Path, checkpoint: str, journal: Path | None) -> None:
    """Before a slot is committed. journal: None on hosts that do not write it, whose copy may be another's.

    Where no mark can be had there is none, and nothing is told by it. Raises OSError where the slot refuses.
    """
    mark = None
    if journal is not None:
        with contextlib.suppress(OSError, ValueError), open_regular(journal) as file:
            mark = _mark_at(file, end_of_lines(file))
    if mark is None:
        files.unlink(slot / RECORD)
    else:
        body = _RecordMark(checkpoint=checkpoint, journal=mark)
        write_file(slot / RECORD, body.model_dump_json().encode(), durable=False)


def is_ahead_of(slot: Path, checkpoint: str, journal: Path) -> bool:
    """Whether a slot's checkpoint was committed after lines that the journal does not have.

    No where that cannot be told: without a mark of this checkpoint, without a journal, or where a disk refuses.
    """
    mark = sound_model(slot / RECORD, _RecordMark, _LIMIT)
    if mark is None or mark.checkpoint != checkpoint:
        return False
    with contextlib.suppress(OSError, ValueError), open_regular(journal) as file:
        return _mark_at(file, mark.journal.end) != mark.journal  # it has that line, and so all before it
    return False


def _mark_at(file: BinaryIO, end: int) -> JournalMark | None:
    """The mark of the line that ends there; None: there is none."""
    if not 0 < end <= os.fstat(file.fileno()).st_size:
        return None
    file.seek(max(0, end - _TAIL))
    found = _ENDS.search(file.read(min(end, _TAIL)))
    return JournalMark(end=end, chain=found[1].decode()) if found else None
