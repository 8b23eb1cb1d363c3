"""Record marks: how far the ranks' journal was when a slot was committed.

    TIER/slot-00/record.json      of the checkpoint in it, on rank 0's host

Slots outlive the run directory's content. Where an older copy of it was put back, they hold checkpoints of steps whose
skips and rollbacks no journal has. By its mark such a checkpoint is told from one that a crash left without its
`committed` line. A mark holds only lines that are in the file: what a full disk has kept from the journal is not in it.
"""

import contextlib
from pathlib import Path

from pydantic import BaseModel

from rollback.rundir.journal.journal_mark import JournalMark, has_come_to, mark_of
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import sound_model

RECORD = "record.json"
_LIMIT = 1 << 12


class _RecordMark(BaseModel, frozen=True):
    checkpoint: str
    journal: JournalMark


def write_mark(slot: Path, checkpoint: str, journal: Path | None) -> None:
    """Before a slot is committed. journal: None on hosts that do not write it, whose copy may be another's.

    Where no mark can be had there is none, and nothing is told by it. Raises OSError where the slot refuses.
    """
    mark = None
    with contextlib.suppress(OSError, ValueError):
        mark = mark_of(journal) if journal is not None else None
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
    with contextlib.suppress(OSError, ValueError):
        return not has_come_to(journal, mark.journal)
    return False
