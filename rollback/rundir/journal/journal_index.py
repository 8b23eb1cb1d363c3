"""The index of a journal: which of its lines have been verified, so that nobody has to verify them again.

It holds no facts. docs/format.md, "Indexes", says when it is believed.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, Field

from rollback.rundir import seal
from rollback.system.durable import write_file
from rollback.system.small_json import sound_model

LINES = 4096
"""In a block."""
_LIMIT = 16 << 20
_FORMAT = 1


class IndexedLines(BaseModel, frozen=True, extra="forbid"):
    """Lines that have been verified."""

    bytes: int = Field(gt=0)
    """Their length."""
    lines: int = Field(gt=0)
    sha256: str
    chain: str
    """Of the last one."""
    seals: int = Field(ge=0)


class _Index(BaseModel, frozen=True, extra="forbid"):
    format: int
    blocks: tuple[IndexedLines, ...]
    check: str
    seal: str | None = None


def index_path(journal: Path) -> Path:
    return journal.with_suffix(".index")


def read_index(journal: Path) -> tuple[IndexedLines, ...]:
    """The blocks of a journal from its first line on; none where there is no index that can be believed."""
    found = sound_model(index_path(journal), _Index, _LIMIT)
    if found is None or found.format != _FORMAT or found.check != _check(found.blocks):
        return ()
    key = seal.present()
    sealed = key is None or key.is_on(f"{journal.stem} index", found.check, found.seal)
    return found.blocks if sealed else ()


def write_index(journal: Path, blocks: tuple[IndexedLines, ...]) -> None:
    """Replace the index. A disk that refuses costs time at the next start, and nothing else."""
    check = _check(blocks)
    key = seal.present()
    sealed = key.of(f"{journal.stem} index", check) if key else None
    index = _Index(format=_FORMAT, blocks=blocks, check=check, seal=sealed)
    with contextlib.suppress(OSError):
        write_file(index_path(journal), index.model_dump_json(exclude_none=True).encode(), durable=False)


def _check(blocks: Iterable[IndexedLines]) -> str:
    text = json.dumps([block.model_dump() for block in blocks], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Indexing:
    """Makes blocks of lines as they are verified or written. blocks: those that are there."""

    def __init__(self) -> None:
        self.blocks: tuple[IndexedLines, ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._hash, self._bytes, self._lines, self._seals = hashlib.sha256(), 0, 0, 0

    def keep(self, block: IndexedLines) -> None:
        """A block was read and found to be what it says."""
        self.blocks += (block,)

    def add(self, line: bytes, chain: str, *, sealed: bool) -> bool:
        """Whether the line completes a block."""
        self._hash.update(line)
        self._bytes += len(line)
        self._lines += 1
        self._seals += sealed
        if self._lines < LINES:
            return False
        self.blocks += (
            IndexedLines(
                bytes=self._bytes, lines=self._lines, sha256=self._hash.hexdigest(), chain=chain, seals=self._seals
            ),
        )  # fmt: skip
        self._begin()
        return True
