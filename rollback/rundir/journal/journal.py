"""Append-only journals: one writer each, a fact a line, a hash chain through the lines.

The rules for torn tails and damage are those of docs/format.md, "Journals".
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from rollback.errors import BEGIN_ANEW, LINKED, MOVED, RESTORE_THE_JOURNAL, JournalDamaged, RunDirectoryError, reporting
from rollback.facts.fact import drop_fields_set, escape_surrogates
from rollback.facts.training import AnyFact, Fact, JournalEntry, parse_fact
from rollback.rundir import seal
from rollback.rundir.journal.journal_index import IndexedLines, Indexing, read_index, write_index
from rollback.system import files
from rollback.system.durable import append_lines, open_regular, sync_directory
from rollback.system.small_json import fault_of, parse_json

GENESIS = "0" * 32
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
    """All entries, or those from where the reader began."""
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
    indexing: Indexing = field(default_factory=Indexing, repr=False, compare=False)
    """The blocks of the index that hold, and those that it lacks."""
    before: int = 0
    """Number of lines that are not in `records`: those before them, or of other kinds."""

    @property
    def lines(self) -> int:
        """Number of sound lines of the file."""
        return self.before + len(self.records)


_NOTHING = JournalContent([], 0, 0, GENESIS)
"""Of a journal of which nothing has been read."""
_SPELT = re.compile(
    rb'\{"seq":(\d+),"at":"([^"\\]*)","attempt":(\d{1,15}),("kind":.*)'
    rb',"chain":"\w{32}"(?:,"seal":"\w{64}")?\}\n'
)
"""A line as `journal_line` spells it: `seq`, `at`, `attempt`, and the fact's fields."""
_NOT_SEALED = "its seal is missing, or not of this key"
_facts = TypeAdapter(list[AnyFact]).validate_json
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False).encode


def _chain(previous: str, body: dict[str, Any]) -> str:
    text = previous + _canonical(body)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read_journal(path: Path) -> JournalContent:
    """All entries of a journal; an absent file is an empty journal. What its index vouches for is not verified again.

    Raises JournalDamaged where a line that is not the last is unreadable, out of sequence or breaks the chain, and
    RunDirectoryError where the file cannot be read.
    """
    return _sound(path, _read(path, index=read_index(path)))


def read_entries(path: Path, kinds: Collection[type[Fact]], blocks: int | None = None) -> list[JournalEntry]:
    """The entries of some kinds. Of the lines that the index vouches for, others are not parsed: of rare kinds it takes
    a tenth of the time, and no memory for the others. Raises as `read_journal`.

    blocks: of the index, behind which nothing is wanted; None: all is.
    """
    names = b"|".join(sorted(kind.model_fields["kind"].default.encode() for kind in kinds))
    only, index = re.compile(rb'"kind"\s*:\s*"(?:%b)"' % names), read_index(path)
    end = None if blocks is None else sum(block.bytes for block in index[:blocks])
    return of_kinds(_sound(path, _read(path, index=index, only=only, end=end)).records, kinds)


def read_journal_after(path: Path, index: Sequence[IndexedLines], known: int) -> JournalContent | None:
    """As `read_journal`, without the entries of the first `known` blocks of the index; None if these do not hold."""
    reading = _read(path, index=index, known=known)
    return _sound(path, reading) if len(reading.indexing.blocks) >= known else None


def require_sealed(content: bytes, what: str) -> None:
    """Raise JournalDamaged unless each line of a journal, read elsewhere, bears the seal of the present key, if any."""
    reading = _scan(BytesIO(content), _NOTHING, len(content), what)
    if seal.present() is not None and (reading.damage is not None or reading.torn_bytes):
        raise JournalDamaged(f"a line of the {what} journal is not what was written and sealed")


class JournalTail:
    """Reads a journal piece by piece while it grows. Each line is read once.

    after: what has been read of it already; None: nothing.
    """

    def __init__(self, path: Path, after: JournalContent | None = None) -> None:
        self._path = path
        self._read = after or _NOTHING

    @property
    def seals(self) -> int:
        """Number of sealed lines among those that the last call read."""
        return self._read.seals

    @property
    def torn_bytes(self) -> int:
        """Bytes after the last whole line: torn by a crash, or just being written."""
        return self._read.torn_bytes

    def new(self) -> list[JournalEntry]:
        """The entries after those of the last call. Raises as `read_journal`; RunDirectoryError also where the file is
        shorter than the part already read: a disk that refused to sync a line has lost it, and gets it again."""
        index = () if self._read.sound_bytes else read_index(self._path)
        self._read = _read(self._path, self._read, index)
        return _sound(self._path, self._read).records


def of_kind(records: Iterable[JournalEntry], kind: type[_F]) -> list[tuple[JournalEntry, _F]]:
    """The lines that hold a fact of that kind, with it."""
    return [(record, cast(_F, record.fact)) for record in records if type(record.fact) is kind]


def of_kinds(records: Iterable[JournalEntry], kinds: Collection[type]) -> list[JournalEntry]:
    """The lines that hold a fact of one of these kinds. To ask for the type is several times as fast as `isinstance`,
    which pydantic answers in Python."""
    return [record for record in records if type(record.fact) in kinds]


def last_fact(records: Iterable[JournalEntry], kind: type[_F]) -> _F | None:
    """The last fact of that kind."""
    return next((fact for _, fact in reversed(of_kind(records, kind))), None)


def _sound(path: Path, reading: JournalContent) -> JournalContent:
    """What was read, unless it is damaged: then raise JournalDamaged."""
    if (damage := reading.damage) is None:
        return reading
    wrong_key = "name the key that the run was begun with; if it is this one, " if damage.reason == _NOT_SEALED else ""
    raise JournalDamaged(
        f"reading the journal {path}: line {damage.line} is not what was written: {damage.reason}",
        hint=f"{wrong_key}{RESTORE_THE_JOURNAL}",
    )


def examine_journal(path: Path) -> JournalContent:
    """As `read_journal`, but every line is verified, and the result describes a damaged line and holds all entries
    before it.

    Raises RunDirectoryError where the file cannot be read, JournalDamaged where it cannot be a journal at all.
    """
    return _read(path)


def _read(
    path: Path, after: JournalContent = _NOTHING, index: Sequence[IndexedLines] = (), known: int = 0,
    only: re.Pattern[bytes] | None = None, end: int | None = None,
) -> JournalContent:  # fmt: skip
    """The content of a journal behind what was read of it; an absent file is empty. index: of the lines from there on.
    known: number of its blocks whose entries are not wanted; if one of these does not hold, the result lacks it, and
    means nothing. only: in which lines of the index's blocks entries are wanted; None: in all. end: the byte at which
    to stop; None: the file's end. Raises as `examine_journal`."""
    start = after.sound_bytes
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < start:
                raise RunDirectoryError(f"reading the journal {path}: it has {size} bytes, and had {start}")
            if size - start > _LIMIT:  # of a journal that grows, what is new: a launch that passes the limit goes on
                raise JournalDamaged(
                    f"reading the journal {path}: it has {size} bytes; at most {_LIMIT} are believed", hint=BEGIN_ANEW
                )
            return _scan(file, after, size if end is None else min(size, end), path.stem, index, known, only)
    except FileNotFoundError:
        if start == 0:
            return JournalContent([], 0, 0, GENESIS)
        hint = MOVED.format(path.parent.parent)
        raise RunDirectoryError(f"reading the journal {path}: it is gone", hint=hint) from None
    except OSError as error:
        raise RunDirectoryError(f"reading the journal {path}: {error.strerror or error}") from error
    except ValueError as error:
        linked = LINKED.format(root) if (root := path.parent.parent).is_symlink() else None
        raise JournalDamaged(f"reading the journal: {error}", hint=linked) from error


def _scan(
    file: BinaryIO, after: JournalContent, size: int, what: str, index: Sequence[IndexedLines] = (), known: int = 0,
    only: re.Pattern[bytes] | None = None,
) -> JournalContent:  # fmt: skip
    """The entries behind what was read, up to byte `size`, line by line. what: which journal it is."""
    records: list[JournalEntry] = []
    indexing = Indexing()
    position, lines, chain, seals, key = after.sound_bytes, after.lines, after.chain, 0, seal.present()
    for number, block in enumerate(index):
        text = file.read(block.bytes) if position + block.bytes <= size else b""
        if hashlib.sha256(text).hexdigest() != block.sha256:
            if number < known:
                return JournalContent([], position, 0, chain, indexing=indexing)
            break
        try:
            records += _entries(text, range(lines, lines + block.lines), only) if number >= known else []
        except ValueError:  # it vouches for what is no fact: the lines themselves tell which
            break
        lines += block.lines
        position, chain, seals = position + block.bytes, block.chain, seals + block.seals
        indexing.keep(block)
    file.seek(position)
    while position < size:
        line = file.readline(min(_LINE_LIMIT, size - position))
        last = position + len(line) >= size
        chain_before, vouched = chain, False
        try:
            if not line.endswith(b"\n"):
                raise ValueError("the line has no end" if last else f"it has more than {_LINE_LIMIT} bytes")
            body, stated = _parse(line, lines)
            chain = _verified(body, chain)
            if key is not None and not key.is_on(what, chain, stated):
                raise ValueError(_NOT_SEALED)
            vouched = True  # by the chain: it is whole, whatever it says
            plain = line.isascii() and b"\\ud" not in line.lower()  # nearly every line
            record = _record(body if plain else escape_surrogates(body))
        except ValueError as error:
            torn = (last or not line) and not vouched
            damage = None if torn else Damage(lines + 1, position, str(error))
            others = lines - len(records)
            rest = size - position if torn else 0
            return JournalContent(records, position, rest, chain_before, damage, seals, indexing, others)
        records.append(record)
        lines += 1
        seals += stated is not None
        indexing.add(line, chain, sealed=stated is not None)
        position += len(line)
    return JournalContent(records, position, 0, chain, None, seals, indexing, lines - len(records))


def _entries(text: bytes, numbers: Sequence[int], only: re.Pattern[bytes] | None) -> list[JournalEntry]:
    """The entries of lines that have been verified. numbers: their `seq`. only: as in `_read`. Raises ValueError where
    one is not as `journal_line` spells it, or says what no line can.

    The facts are made in one call, of the text: to parse each line first takes half as long again.
    """
    if only is not None:
        wanted = [(seq, line) for seq, line in zip(numbers, text.split(b"\n"), strict=False) if only.search(line)]
        numbers, text = [seq for seq, _ in wanted], b"".join([line + b"\n" for _, line in wanted])
    spelt = _SPELT.findall(text)
    seqs, ats, attempts, fields = zip(*spelt, strict=True) if spelt else ((), (), (), ())
    if list(map(int, seqs)) != list(numbers):
        raise ValueError("not the lines of our writer")
    facts = _facts(b"[{" + b"},{".join(fields) + b"}]") if fields else []
    if len(facts) != len(fields):
        raise ValueError("a line with more than one fact")
    drop_fields_set(facts)
    return list(map(JournalEntry, numbers, map(bytes.decode, ats), map(int, attempts), facts))


def _parse(line: bytes, seq: int) -> tuple[dict[str, Any], object]:
    """The content of a line, and its seal (None: it has none). Raises ValueError."""
    body = parse_json(line)
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    on_it = body.pop("seal", None)
    if body.get("seq") != seq:
        raise ValueError(f"sequence number {body.get('seq')!r} where {seq} should stand")
    return body, on_it


def _verified(body: dict[str, Any], chain: str) -> str:
    """The chain with this line, whose own statement of it leaves `body`. Raises ValueError where that is another."""
    stated = body.pop("chain", None)
    expected = _chain(chain, body)
    if stated != expected:
        raise ValueError("the hash chain is broken")
    return expected


def _record(body: dict[str, Any]) -> JournalEntry:
    """The entry of a line with this content. Raises ValueError."""
    seq, at, attempt = body.pop("seq", None), body.pop("at", None), body.pop("attempt", None)
    if type(seq) is not int or type(attempt) is not int or type(at) is not str or not 0 <= attempt < 1 << 53:
        raise ValueError("seq, at or attempt is missing, or not what it should be")
    try:
        return JournalEntry(seq, at, attempt, parse_fact.validate_python(body))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "union_tag_invalid":
            raise ValueError(f"kind: this version of rollback knows no fact {first['ctx']['tag']!r}") from error
        raise ValueError(fault_of(error)) from error


def journal_line(fact: Fact, seq: int, at: str, attempt: int, chain: str, what: str) -> tuple[bytes, str]:
    """The line of a fact, sealed where there is a key, and the chain with it. chain: up to the line before. what: which
    journal it is."""
    body = {"seq": seq, "at": at, "attempt": attempt, **json.loads(fact.model_dump_json())}
    chain = _chain(chain, body)
    sealed = {"seal": key.of(what, chain)} if (key := seal.present()) else {}
    line = json.dumps({**body, "chain": chain, **sealed}, ensure_ascii=True, separators=(",", ":")) + "\n"
    return line.encode(), chain


def now() -> str:
    """The present time as lines have it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class Journal:
    """The writing end of a journal. One process holds it at a time: the caller's lock guarantees that.

    Opening truncates a torn last line. Raises JournalDamaged or RunDirectoryError. It keeps the journal's index too.

    reading: the content, as just read by the same caller; None: it is read here.
    """

    def __init__(self, path: Path, attempt: int, reading: JournalContent | None = None) -> None:
        self.attempt = attempt
        self._path, self._what = path, path.stem
        reading = reading or read_journal(path)
        self._indexing = reading.indexing
        self._chain = reading.chain
        self._next, self._end = reading.lines, reading.sound_bytes
        self._backlog: list[tuple[bytes, str]] = []
        hint = "check the permissions and free space of the run directory"
        with reporting(RunDirectoryError, f"opening the journal {path}", hint):
            files.make_directory(path.parent)
            self._fd = files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                if reading.torn_bytes:
                    os.ftruncate(self._fd, reading.sound_bytes)
                os.fsync(self._fd)
                sync_directory(path.parent)
                sync_directory(path.parent.parent)
            except BaseException:
                self.close()
                raise
        if self._indexing.blocks != read_index(path):
            write_index(path, self._indexing.blocks)

    def append(self, *facts: Fact, at: str | None = None) -> None:
        """Append facts, with one sync for all of them; they are on disk when this returns. at: when they were noted, as
        `now`; None: this moment.

        Raises OSError where the disk refuses. They are then kept in memory and written before the next one, so that
        a disk that was full for an hour costs no line. Also where another process has written since: the lock of a host
        that is cut off from a shared disk goes to another one, and what the first still says must not break the chain.
        """
        at = at or now()
        for fact in facts:
            line, self._chain = journal_line(fact, self._next, at, self.attempt, self._chain, self._what)
            self._next += 1
            self._backlog.append((line, self._chain))
        self.flush()

    def flush(self) -> None:
        """Write and sync the facts that earlier failures left in memory. Raises OSError."""
        lines = b"".join(line for line, _ in self._backlog)
        append_lines(self._fd, lines, self._end)
        self._end += len(lines)
        sealed = seal.present() is not None
        complete = [self._indexing.add(line, chain, sealed=sealed) for line, chain in self._backlog]
        self._backlog.clear()
        if any(complete):
            write_index(self._path, self._indexing.blocks)

    def close(self) -> None:
        os.close(self._fd)
