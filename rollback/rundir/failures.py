"""What a rank records when an exception ends it: the rank, the place in the data, and the traceback. One file, one
writer.

The fingerprint tells whether two exceptions are the same: type, frames of the user's code, and the message with its
numbers blanked. Frames of torch and of rollback are left out: which of their lines a data loader's error passes through
depends on timing.

The class of the exception tells which of several records names the first cause: `rollback.supervisor.diagnosis` has the
table of all classes.
"""

import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import xxhash
from pydantic import BaseModel, Field

from rollback.errors import encodable
from rollback.facts.supervisor import Why
from rollback.facts.training import Window
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import sound_models

_LIMIT = 4 << 20
_TEXT_LIMIT = 64 << 10
_FRAMES = 50
_FILE = re.compile(r'^ *File "(.+)", line \d+', re.MULTILINE)
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")

PRECEDENCE: dict[Why, int] = {why: place for place, why in enumerate(get_args(Why))}
"""Of several ranks, the one whose class has the lowest number is the first cause."""
NOTICED: tuple[Why, ...] = ("timeout", "lost_peer")
"""What a healthy rank raises because of its peers."""

_DISTRIBUTED = re.compile(
    r"(builtins\.)?RuntimeError|torch\.distributed\..*|torch\._C\._distributed_c10d\..*|.*Dist\w*Error"
)
_OUT_OF_MEMORY_TYPES = re.compile(r"MemoryError|.*OutOfMemoryError")
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: "
    r"|not enough memory|[Cc]annot allocate memory|unable to (mmap|write|open).*shared memory|std::bad_alloc"
)
_DISK = re.compile(
    r"No space left on device|[Dd]isk quota exceeded|Read-only file system|\d+ requested and \d+ written"
    r"|inline_container.*(unexpected pos \d+ vs \d+|PytorchStreamWriter failed)|basic_ios::clear: iostream error"
)
"""The last of them are what `numpy.save` and `torch.save` raise on a full disk."""
_HARDWARE = re.compile(
    r"\bECC\b|\bXid\b|fallen off the bus|GPU is lost|hardware stack error|[Uu]ncorrectable|unhandled system error"
    r"|ncclSystemError|NVLink|cudaErrorDevicesUnavailable|no longer accessible"
)
_WORKER_DIED = re.compile(
    r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (is killed by signal: (?P<name>\w+)|exited unexpect)"
)
_TIMEOUT = re.compile(
    r"[Tt]imed out waiting|[Ss]ocket [Tt]imeout|[Ww]ait timeout after|caught collective operation timeout"
    r"|Application timeout caused pair closure|NCCL operation timed out"
)
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|recvValue failed|sendBytes failed|failed to recv|Socket closed"
    r"|communicator was aborted|remote process exited|ncclRemoteError|ncclInternalError|process group.*abort"
    r"|internal error - please report this issue to the NCCL"
)
"""With NCCL's own words for its internal error: not every backend of torch tells its name beside them."""


class Frame(BaseModel, frozen=True):
    """A line of a traceback, innermost last."""

    file: str = Field(description="its base name")
    function: str
    line: int


class FailureRecord(BaseModel, frozen=True):
    """failures/attempt-AAAA/rank-NNNNN.json."""

    rank: int
    pid: int
    host: str
    attempt: int
    at: str = Field(description="wall clock, UTC, ISO 8601: for people")
    seconds: float = Field(description="the same as seconds since the epoch; orders the ranks")
    step: int
    batch: int = Field(description="in hand, or being read")
    whole_step: Window = Field(description="the batches of its update: what must be skipped to be rid of it")
    doing: str
    error: str = Field(description="qualified name of the exception's type")
    message: str
    traceback: str
    frames: list[Frame] = Field(description="of the user's code; of all code where there is none of it")
    fingerprint: str
    samples: list[int] = Field([], description="data set indices of the batch in hand, as that rank has it")
    unreadable: list[int] = Field([], description="of these, those that raised when they were read once more, singly")
    in_hand: bool = Field(True, description="whether there is a batch; not so between epochs and behind the training")
    empty_epoch: int | None = Field(None, description="the epoch without a batch of which the exception comes")
    ours: bool = Field(False, description="whether the code of rollback itself raised")


def write_failure(path: Path, record: FailureRecord) -> None:
    """Write a rank's failure record, durable on return. Raises OSError."""
    files.make_directory(path.parent)
    write_file(path, record.model_dump_json().encode())


def read_failures(directory: Path) -> dict[int, FailureRecord]:
    """The readable records of an attempt, by rank. One that is absent, damaged or about another rank is left out."""
    found = sound_models(directory, "rank-*.json", FailureRecord, _LIMIT)
    return {record.rank: record for name, record in found.items() if name == f"rank-{record.rank:05d}.json"}


def class_of_exception(error: str, message: str, *, oom_killed: bool = False) -> Why:
    """The class of an exception. error: its qualified name. oom_killed: the kernel ended a process of this rank."""
    if worker := _WORKER_DIED.search(message):
        return "oom_kill" if oom_killed and worker["name"] in (None, "Killed") else "signal"
    if _OUT_OF_MEMORY_TYPES.fullmatch(error) or _OUT_OF_MEMORY.search(message):
        return "out_of_memory"
    if _HARDWARE.search(message):
        return "hardware"
    if _DISK.search(message):
        return "disk"
    if _DISTRIBUTED.fullmatch(error):
        if _LOST_PEER.search(message):
            return "lost_peer"
        if _TIMEOUT.search(message):
            return "timeout"
    return "exception"


def _class_of(record: FailureRecord) -> Why:
    return class_of_exception(record.error, record.message)


def merely_noticed(record: FailureRecord) -> bool:
    """Whether a rank raised because of another one."""
    return _class_of(record) in NOTICED


def in_order_of_blame(records: Iterable[FailureRecord]) -> list[FailureRecord]:
    """Failure records, the first cause first; within a class, the earliest first."""
    return sorted(records, key=lambda record: (PRECEDENCE[_class_of(record)], record.seconds))


def qualified_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def formatted(error: BaseException) -> str:
    """The traceback as Python would print it; the middle of a very long one is left out. Runs the error's `__str__`."""
    text = encodable("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def text_of(error: BaseException) -> str:
    """`str(error)`, shortened; an exception in its own `__str__` must not hide the error."""
    try:
        return encodable(str(error))[:_TEXT_LIMIT]
    except Exception as another:  # noqa: BLE001 - the user's code, at the worst of times
        return f"(its __str__ raised {type(another).__name__})"


def frames_of(error: BaseException, libraries: Sequence[Path]) -> list[Frame]:
    """The innermost frames outside of `libraries` (folders); all frames where none is outside."""
    summary = traceback.extract_tb(error.__traceback__)
    own = [item for item in summary if not _is_in(item.filename, libraries)]
    return [
        Frame(file=encodable(Path(item.filename).name), function=item.name, line=item.lineno or 0)
        for item in (own or list(summary))[-_FRAMES:]
    ]


def raised_in(error: BaseException, library: Path) -> bool:
    """Whether the innermost frame is in this folder; of an error in a loader's worker, the worker's innermost frame."""
    *_, innermost = ["", *(frame.filename for frame in traceback.extract_tb(error.__traceback__))]
    if "Original Traceback" in (message := text_of(error)):
        *_, innermost = [innermost, *_FILE.findall(message)]
    return _is_in(innermost, [library])


def fingerprint(error: str, message: str, frames: Iterable[Frame]) -> str:
    """16 hex digits that are equal for the same exception, whatever numbers its message quotes."""
    lines = [f"{frame.file}:{frame.function}:{frame.line}" for frame in frames]
    text = "\n".join([error, *lines, _NUMBER.sub("#", message)])
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "backslashreplace"))


def _is_in(filename: str, libraries: Sequence[Path]) -> bool:
    return any(Path(filename).is_relative_to(library) for library in libraries)
