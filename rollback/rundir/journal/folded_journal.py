"""A journal as the history that it amounts to. The writer keeps the history of its beginning beside it, so that a start
reads what came after, however long the run is. docs/format.md, "Indexes", says when it is believed.
"""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from rollback.facts.history import History, fold, history_as_json
from rollback.rundir import seal
from rollback.rundir.journal.journal import JournalContent, read_journal, read_journal_after
from rollback.rundir.journal.journal_index import IndexedLines, read_index
from rollback.system.collector import no_collection
from rollback.system.durable import read_small_file, write_file

_LIMIT = 1 << 30
_FORMAT = 11


@dataclass
class FoldedJournal:
    """What a journal amounts to. reading: its state as a file, and the entries that were read one by one.
    folded_blocks: number of blocks before these, of which there was a history."""

    history: History
    reading: JournalContent
    folded_blocks: int
    _path: Path
    _beginning: bytes | None = None

    def keep(self) -> None:
        """The journal's writer: keep the history of the complete blocks for the next start, if there are new ones."""
        if self._beginning is not None:
            with contextlib.suppress(OSError):  # it costs time at the next start, and nothing else
                write_file(history_path(self._path), self._beginning, durable=False)
            self._beginning = None


def history_path(journal: Path) -> Path:
    return journal.with_suffix(".history")


def fold_journal(path: Path, *, to_keep: bool = False) -> FoldedJournal:
    """A journal as its history. Raises as `read_journal`, and JournalDamaged if facts contradict each other.

    to_keep: `keep` will be called.
    """
    index = read_index(path)
    with no_collection():
        history, known = _kept_history(path, index)
        reading = read_journal_after(path, index, known) if known else None
        if reading is None:
            history, known, reading = History(), 0, read_journal(path)
    blocks = reading.indexing.blocks
    covered = sum(block.lines for block in blocks) - reading.before
    fold(reading.records[:covered], history)
    beginning = _body(path, blocks, history) if to_keep and len(blocks) > known else None
    fold(reading.records[covered:], history)
    return FoldedJournal(history, reading, known, path, beginning)


def _kept_history(path: Path, index: tuple[IndexedLines, ...]) -> tuple[History, int]:
    """The history of the first blocks, and their number: 0 where nothing can be believed."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        head, _, body = read_small_file(history_path(path), _LIMIT).partition(b"\n")
        said = json.loads(head)
        known = said["blocks"]
        sound = (
            said["format"] == _FORMAT and type(known) is int and 0 < known <= len(index)
            and said["chain"] == index[known - 1].chain and said["check"] == _check(known, said["chain"], body)
        )  # fmt: skip
        key = seal.present()
        if sound and (key is None or key.is_on(f"{path.stem} history", said["check"], said.get("seal"))):
            return history_as_json.validate_json(body), known
    return History(), 0


def _body(path: Path, blocks: tuple[IndexedLines, ...], history: History) -> bytes:
    body = history_as_json.dump_json(history)
    check = _check(len(blocks), blocks[-1].chain, body)
    key = seal.present()
    sealed = {"seal": key.of(f"{path.stem} history", check)} if key else {}
    head = {"format": _FORMAT, "blocks": len(blocks), "chain": blocks[-1].chain, "check": check, **sealed}
    return json.dumps(head).encode() + b"\n" + body


def _check(blocks: int, chain: str, body: bytes) -> str:
    return hashlib.sha256(f"{blocks} {chain} ".encode() + body).hexdigest()
