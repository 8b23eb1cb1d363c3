"""Append-only journals: one writer each, a fact a line, a hash chain through the lines.

The rules for torn tails and damage are those of docs/format.md, "Journals".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import ValidationError

from rollback.errors import JournalDamaged, RunDirectoryError, reporting
from rollback.facts.fact import READ
from rollback.facts.training import Fact, JournalEntry, parse_fact
from rollback.rundir import seal
from rollback.system import files
from rollback.system.durable import append_line, open_regular, sync_directory
from rollback.system.small_json import parse_json

_GENESIS = "0" * 32
_LIMIT = 1 << 30  # no journal of a sane run comes near it
_LINE_LIMIT = 16 << 20
_F = TypeVar("_F", bound=Fact)


@dataclass(frozen=True)
class Damage:
    """The first damaged line of a journal."""

    line: int
    """Its number, from 1."""
    byte: int
    """Where in the file it begins."""
    reason: str


@dataclass(frozen=True)
class JournalContent:
    """The content of a journal file."""

    records: list[JournalEntry]
    sound_bytes: int
    """Size of the sound part."""
    torn_bytes: int
    """Size of a torn last line, which a crash left."""
    chain: str
    damage: Damage | None = None
    """Where the sound part ends because of damage that no crash explains. None except in a damaged journal, which only
    `examine_journal` returns."""
    seals: int = 0
    """Number of sealed lines; where the key is there, the seals are verified."""


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False).encode


def _chain(previous: str, body: dict[str, Any]) -> str:
    text = previous + _canonical(body)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read_journal(path: Path) -> JournalContent:
    """All entries of a journal; an absent file is an empty journal.

    Raises JournalDamaged where a line that is not the last is unreadable, out of sequence or breaks the chain, and
    RunDirectoryError where the file cannot be read.
    """
    reading = examine_journal(path)
    if reading.damage is not None:
        raise _damaged(path, reading.damage)
    return reading


def require_sealed(content: bytes, what: str) -> None:
    """Raise JournalDamaged unless each line of a journal, read elsewhere, bears the seal of the present key, if any."""
    reading = _scan(BytesIO(content), 0, len(content), 0, _GENESIS, what)
    if seal.present() is not None and (reading.damage is not None or reading.torn_bytes):
        raise JournalDamaged(f"a line of the {what} journal is not what was written and sealed")


class JournalTail:
    """Reads a journal piece by piece while it grows. Each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = JournalContent([], 0, 0, _GENESIS)
        self._lines = 0

    @property
    def seals(self) -> int:
        """Number of sealed lines among those that the last call read."""
        return self._read.seals

    @property
    def torn_bytes(self) -> int:
        """Bytes after the last whole line: torn by a crash, or just being written."""
        return self._read.torn_bytes

    def new(self) -> list[JournalEntry]:
        """The entries after those of the last call. Raises as `read_journal`; also where the file has become shorter
        than the part already read, which no writer causes."""
        self._read = _read(self._path, self._read.sound_bytes, self._lines, self._read.chain)
        if self._read.damage is not None:
            raise _damaged(self._path, self._read.damage)
        self._lines += len(self._read.records)
        return self._read.records


def of_kind(records: Iterable[JournalEntry], kind: type[_F]) -> list[tuple[JournalEntry, _F]]:
    """The lines that hold a fact of that kind, with it."""
    return [(record, record.fact) for record in records if isinstance(record.fact, kind)]


def last_fact(records: Iterable[JournalEntry], kind: type[_F]) -> _F | None:
    """The last fact of that kind."""
    return next((fact for _, fact in reversed(of_kind(records, kind))), None)


def _damaged(path: Path, damage: Damage) -> JournalDamaged:
    return JournalDamaged(
        f"reading the journal {path}: line {damage.line} is not what was written: {damage.reason}",
        hint="restore the file from a copy; if there is none, move the run directory aside and start anew "
        "from a checkpoint in its ring",
    )


def examine_journal(path: Path) -> JournalContent:
    """As `read_journal`, but the result describes a damaged line and holds all entries before it.

    Raises RunDirectoryError where the file cannot be read, JournalDamaged where it cannot be a journal at all.
    """
    return _read(path, 0, 0, _GENESIS)


def _read(path: Path, start: int, lines: int, chain: str) -> JournalContent:
    """The content of a journal from byte `start` on, after `lines` lines that end with `chain`; an absent file is
    empty. Raises as `examine_journal`."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not start <= size <= _LIMIT:
                raise ValueError(f"{path} has {size} bytes; at least {start} and at most {_LIMIT} are believed")
            file.seek(start)
            return _scan(file, start, size, lines, chain, path.stem)
    except FileNotFoundError:
        if start == 0:
            return JournalContent([], 0, 0, chain)
        raise RunDirectoryError(f"reading the journal {path}: it is gone") from None
    except OSError as error:
        raise RunDirectoryError(f"reading the journal {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise JournalDamaged(f"reading the journal: {error}") from error


def _scan(file: BinaryIO, start: int, size: int, lines: int, chain: str, what: str) -> JournalContent:
    """The entries from byte `start` up to `size`, line by line. what: which journal it is."""
    records: list[JournalEntry] = []
    seals, key = 0, seal.present()
    position = start
    while position < size:
        line = file.readline(min(_LINE_LIMIT, size - position))
        last = position + len(line) >= size
        chain_before = chain
        try:
            if not line.endswith(b"\n"):
                raise ValueError("the line has no end" if last else f"it has more than {_LINE_LIMIT} bytes")
            body, chain, stated = _parse(line, lines + len(records), chain)
            if key is not None and not key.is_on(what, chain, stated):
                raise ValueError("its seal is missing, or not of this key")
            record = _record(body, READ if line.isascii() and b"\\ud" not in line.lower() else None)
        except ValueError as error:
            if last or not line:
                return JournalContent(records, position, size - position, chain_before, seals=seals)
            damage = Damage(lines + len(records) + 1, position, str(error))
            return JournalContent(records, position, 0, chain_before, damage, seals)
        records.append(record)
        seals += stated is not None
        position += len(line)
    return JournalContent(records, position, 0, chain, seals=seals)


def _parse(line: bytes, seq: int, chain: str) -> tuple[dict[str, Any], str, object]:
    """The content of a line, its chain value and its seal (None: it has none). Raises ValueError."""
    body = parse_json(line)
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    stated, on_it = body.pop("chain", None), body.pop("seal", None)
    if body.get("seq") != seq:
        raise ValueError(f"sequence number {body.get('seq')!r} where {seq} should stand")
    expected = _chain(chain, body)
    if stated != expected:
        raise ValueError("the hash chain is broken")
    return body, expected, on_it


def _record(body: dict[str, Any], context: str | None) -> JournalEntry:
    """Raises ValueError. context: see `rollback.facts.fact`."""
    seq, at, attempt = body.pop("seq", None), body.pop("at", None), body.pop("attempt", None)
    if type(seq) is not int or type(attempt) is not int or type(at) is not str:
        raise ValueError("seq, at or attempt is missing, or not what it should be")
    try:
        return JournalEntry(seq, at, attempt, parse_fact.validate_python(body, context=context))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


class Journal:
    """The writing end of a journal. One process holds it at a time: the caller's lock guarantees that.

    Opening truncates a torn last line. Raises JournalDamaged or RunDirectoryError.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self.attempt = attempt
        self._what = path.stem
        reading = read_journal(path)
        self.records = reading.records
        self.torn_bytes = reading.torn_bytes
        self._chain = reading.chain
        self._next = len(reading.records)
        self._backlog: list[bytes] = []
        hint = "check the permissions and free space of the run directory"
        with reporting(RunDirectoryError, f"opening the journal {path}", hint):
            files.make_directory(path.parent)
            self._fd = files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            if reading.torn_bytes:
                os.ftruncate(self._fd, reading.sound_bytes)
            os.fsync(self._fd)
            sync_directory(path.parent)
            sync_directory(path.parent.parent)

    def append(self, fact: Fact) -> None:
        """Append a fact; it is on disk when this returns.

        Raises OSError where the disk refuses. The fact is then kept in memory and written before the next one, so that
        a disk that was full for an hour costs no line.
        """
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        body = {"seq": self._next, "at": at, "attempt": self.attempt, **json.loads(fact.model_dump_json())}
        self._chain = _chain(self._chain, body)
        sealed = {"seal": key.of(self._what, self._chain)} if (key := seal.present()) else {}
        line = json.dumps({**body, "chain": self._chain, **sealed}, ensure_ascii=True, separators=(",", ":")) + "\n"
        record = JournalEntry(seq=self._next, at=at, attempt=self.attempt, fact=fact)  # type: ignore[arg-type]
        self._next += 1
        self.records.append(record)
        self._backlog.append(line.encode())
        self.flush()

    def flush(self) -> None:
        """Write and sync the facts that earlier failures left in memory. Raises OSError."""
        while self._backlog:
            append_line(self._fd, self._backlog[0])
            del self._backlog[0]
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
