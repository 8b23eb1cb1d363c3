"""The class of an exception that ended a rank, and which of several failure records names the first cause. Pure.

`rollback.supervisor.diagnosis.first_cause` has the table of all classes.
"""

import re
from collections.abc import Iterable
from typing import get_args

from rollback.facts.supervisor import Why
from rollback.rundir.failures import FailureRecord

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
    r"|Application timeout caused pair closure"
)
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|recvValue failed|sendBytes failed|failed to recv|Socket closed"
    r"|communicator was aborted|remote process exited|ncclRemoteError|ncclInternalError|process group.*abort"
)


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


def class_of(record: FailureRecord) -> Why:
    return class_of_exception(record.error, record.message)


def merely_noticed(record: FailureRecord) -> bool:
    """Whether a rank raised because of another one."""
    return class_of(record) in NOTICED


def in_order_of_blame(records: Iterable[FailureRecord]) -> list[FailureRecord]:
    """Failure records, the first cause first; within a class, the earliest first."""
    return sorted(records, key=lambda record: (PRECEDENCE[class_of(record)], record.seconds))
