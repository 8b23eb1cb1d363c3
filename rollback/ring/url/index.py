"""index-N.json: the checkpoints of a ring at a URL, and the pieces of the run's record."""

import json
import re
from collections.abc import Iterable
from datetime import datetime, timezone

import xxhash
from pydantic import BaseModel, Field, field_validator

from rollback.checkpoints.format.manifest import FrozenRecord, check_of, parse_checked
from rollback.errors import CheckpointDamaged, IndexDamaged, RunDoesNotFit
from rollback.ring.url.store import Store
from rollback.rundir.paths import FORMAT, FORMATS, MANIFEST, READS, CheckpointName, RunPaths
from rollback.system.small_json import fault_of

PIECE = 4 << 20
_LIMIT = 16 << 20
_EVIDENCE = 1 << 14  # files in incidents/: an index with all those of thousands of incidents would exceed its limit
# Paths that a record may hold. What is fetched is written into the run directory, so nothing else is believed.
_PATHS = re.compile(
    r"run\.json|saved-files(-\d{5,9})?\.jsonl|journal/(train|supervisor)\.jsonl|metrics/train\.jsonl"
    r"|skips/rank-\d{5,9}\.jsonl|pins/c\d{6,12}-s\d{8,15}|incidents/\d{4,9}/rank-\d{5,9}\.(json|safetensors)"
)
_DAMAGED = "restore the index from a copy, or name another URL; nothing was changed"
_ANOTHER_ANSWERS = (
    "a proxy or a login page seems to answer in the ring's place, which may be sound: look at that page from this "
    "machine, and at the proxy's settings (HTTPS_PROXY, NO_PROXY); nothing was changed"
)


class RecordPiece(BaseModel, frozen=True, extra="forbid"):
    """A piece of a file; every piece of a file except the last has PIECE bytes."""

    size: int = Field(ge=1, le=PIECE)
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class RecordFile(BaseModel, frozen=True, extra="forbid"):
    """A file of the record: its path in the run directory and its pieces in order."""

    path: str
    pieces: tuple[RecordPiece, ...]

    @field_validator("path")
    @classmethod
    def _of_a_record(cls, path: str) -> str:
        if not _PATHS.fullmatch(path):
            raise ValueError(f"{path!r} is no file of a record")
        return path

    @field_validator("pieces")
    @classmethod
    def _full_but_the_last(cls, pieces: tuple[RecordPiece, ...]) -> tuple[RecordPiece, ...]:
        if any(piece.size != PIECE for piece in pieces[:-1]):
            raise ValueError("a piece before the last is not full")
        return pieces

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def keys(self) -> list[str]:
        return [piece_key(self.path, number * PIECE, piece) for number, piece in enumerate(self.pieces)]


class Index(BaseModel, frozen=True, extra="forbid"):
    """Content of index-N.json; the fields are those of docs/format.md."""

    format: int = FORMAT
    generation: int = Field(ge=1)
    writer: str
    run_id: str
    written: str
    checkpoints: tuple[str, ...]
    frozen: tuple[FrozenRecord, ...] = ()
    record: tuple[RecordFile, ...]

    @field_validator("checkpoints")
    @classmethod
    def _names_of_checkpoints(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if CheckpointName.parse(name) is None:
                raise ValueError(f"{name!r} is no name of a checkpoint")
        return tuple(CheckpointName.sorted({*names}))

    @property
    def keys(self) -> set[str]:
        """The keys of all pieces of the record."""
        return {key for kept in self.record for key in kept.keys}

    def record_file(self, path: str) -> RecordFile | None:
        return next((kept for kept in self.record if kept.path == path), None)

    def to_json(self) -> bytes:
        body = self.model_dump(mode="json")
        return json.dumps({**body, "check": check_of(body)}, separators=(",", ":")).encode()


def first_index(run_id: str, writer: str) -> Index:
    """The index of a ring that has none; generation 1 follows it."""
    return Index.model_construct(
        format=FORMAT, generation=0, writer=writer, run_id=run_id, written="", checkpoints=(), frozen=(), record=()
    )


def next_index(
    index: Index, writer: str, checkpoints: Iterable[str], frozen: Iterable[FrozenRecord], record: Iterable[RecordFile]
) -> Index:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Index(
        generation=index.generation + 1, writer=writer, run_id=index.run_id, written=now,
        checkpoints=tuple(checkpoints), frozen=tuple(frozen),
        record=tuple(sorted(record, key=lambda kept: kept.path)),
    )  # fmt: skip


def index_key(generation: int) -> str:
    return f"index-{generation % 2}.json"


def piece_key(path: str, offset: int, piece: RecordPiece) -> str:
    return f"record/{path}/{offset:012d}-{piece.xxh3_128}"


def checkpoint_key(name: str, file: str = MANIFEST) -> str:
    return f"{checkpoint_folder(name)}/{file}"


def checkpoint_folder(name: str) -> str:
    return f"ring/{name}"


def frozen_key(record: FrozenRecord) -> str:
    return f"frozen/{record.file}"


def describe(data: bytes) -> RecordPiece:
    """What an index would say of these bytes, to be compared with what it says: also of none, which no index has."""
    return RecordPiece.model_construct(size=len(data), xxh3_128=xxhash.xxh3_128(data).hexdigest())


def read_indexes(store: Store) -> list[Index]:
    """The sound indexes at a URL, newest first; none where there is no ring yet.

    Raises RingUnavailable where the URL cannot be read; IndexDamaged where its content fails verification;
    RunDoesNotFit where another version of the format wrote it.
    """
    found, faults, hint = [], [], _DAMAGED
    for slot in (0, 1):
        data: bytes | None = None
        try:
            data = store.get(index_key(slot), _LIMIT)
            if data is not None:
                found.append(_parse(data, store.url))
        except (CheckpointDamaged, ValueError) as error:
            fault = f"damaged ({fault_of(error)})"
            if data is not None and data.lstrip()[:1] == b"<":
                fault, hint = "a web page", _ANOTHER_ANSWERS
            faults.append(f"{index_key(slot)} is {fault}")
    if faults and not found:
        raise IndexDamaged(f"reading the ring {store.url}: {'; '.join(faults)}", hint=hint)
    return sorted(found, key=lambda index: index.generation, reverse=True)


def _parse(data: bytes, url: str) -> Index:
    body = parse_checked(data)
    found = body.get("format")
    if isinstance(found, int) and found not in FORMATS:
        raise RunDoesNotFit(
            f"the ring {url} has format {found}; this version of rollback reads {READS}",
            hint="use the version of rollback that wrote it, or another URL",
        )
    return Index.model_validate(body)


def record_paths(paths: RunPaths) -> list[str]:
    """The files of a run directory that are its record, as relative paths: of what the ranks saw of incidents, the
    newest. Raises OSError."""
    patterns = ("run.json", "saved-files*", "journal/*", "metrics/*", "skips/*", "pins/*")
    incidents = sorted(_of_a_record(paths, "incidents/*/*"), key=lambda path: (int(path.split("/")[1]), path))
    return sorted([*(path for pattern in patterns for path in _of_a_record(paths, pattern)), *incidents[-_EVIDENCE:]])


def _of_a_record(paths: RunPaths, pattern: str) -> list[str]:
    found = (path.relative_to(paths.root).as_posix() for path in paths.root.glob(pattern) if path.is_file())
    return [path for path in found if _PATHS.fullmatch(path)]
