"""Python, torch, cores, limits, temporary files and the clock of this machine."""

import ctypes
import json
import re
import resource
import subprocess
import sys
import tempfile
from typing import Any

from rollback.doctor.findings import Finding, fail, ok, size, warn

_OLDEST_TORCH = (2, 10)
_SOUND_FORK = {10: 15, 11: 10}
"""Of these Pythons 3, the first release whose forked processes do not wait for a lock that nobody holds any more. Later
ones never did."""
_FILES = 4096
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_PROBE_LIMIT = 180.0
_SIZE_OF_TIMEX = 512  # it has 208 bytes

# Runs in a process of its own: importing torch takes seconds and memory, and may fail. Python looks in the working
# directory first there, where a `json.py` of the user's is not meant.
_PROBE = """
import sys; sys.path[0] or sys.path.pop(0)
import json, torch
import torch.distributed as dist
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None),
    "devices": [[torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory]
                for i in range(torch.cuda.device_count())] if cuda else [],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
    "distributed": dist.is_available(), "gloo": dist.is_available() and dist.is_gloo_available(),
}))
"""


def judge_python(version: tuple[int, ...]) -> Finding:
    """version: of Python, its first three numbers."""
    _, minor, micro = version
    name = ".".join(map(str, version))
    sound = _SOUND_FORK.get(minor, 0)
    if micro >= sound:
        return ok("python", f"Python {name}")
    found = f"Python {name}: once in a great while a loader's worker hangs as it starts (python/cpython issue 112275)"
    return warn("python", found, f"take 3.{minor}.{sound} or later; rollback launch finds such a hang and goes on")


def look_at_torch() -> Finding:
    """Import torch elsewhere and say what it has."""
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROBE_LIMIT, check=False
        )
    except OSError as error:
        fix = "raise the limit of processes (ulimit -u, or the container's pids), or that of memory"
        return fail("torch", f"no process can be started to import it: {error.strerror}", fix)
    except subprocess.TimeoutExpired:
        found = f"importing torch takes more than {_PROBE_LIMIT:.0f} s"
        return fail("torch", found, "see what python -X importtime -c 'import torch' waits for")
    try:
        return judge_torch(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        missing = why.startswith(("ModuleNotFoundError", "ImportError"))
        fix = "install torch 2.10 or later" if missing else "see to it that `python -c 'import torch'` ends well"
        return fail("torch", f"torch cannot be imported: {why}", fix)


def judge_torch(told: dict[str, Any]) -> Finding:
    devices = told["devices"]
    gpus = f"{len(devices)} x {devices[0][0]} ({size(devices[0][1])})" if devices else "no GPU"
    parts = [f"torch {told['torch']}", gpus]
    parts += [f"{name} {told[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "hip"), ("NCCL", "nccl")) if told[key]]
    found = ", ".join(parts)
    version = tuple(int(part) for part in re.findall(r"\d+", told["torch"])[:2])
    if version < _OLDEST_TORCH:
        fix = "install torch 2.10 or later: what is older was not tested"
        return fail("torch", found, fix)
    if not told["distributed"]:
        found = f"{found}; built without torch.distributed: one rank only"
        return warn("torch", found, "install a build with torch.distributed")
    if devices and not told["nccl"]:
        fix = "install a build with NCCL: gloo copies through the host"
        return warn("torch", f"{found}; GPUs, but no NCCL", fix)
    return ok("torch", found)


def judge_cores(count: float, ranks: int | None) -> Finding:
    found = f"{count:g} processors"
    if ranks is None:
        return ok("cores", f"{found}; --nproc would tell whether that suffices")
    found = f"{found} for {ranks} ranks and the supervisor"
    if count < ranks:
        fix = "fewer ranks, or more processors for the container; OMP_NUM_THREADS=1 keeps ranks out of each other's way"
        return warn("cores", found, fix)
    return ok("cores", found)


def look_at_limits() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_limits(soft, hard, resource.getrlimit(resource.RLIMIT_FSIZE)[0])


def judge_limits(soft: int, hard: int, largest_file: int) -> Finding:
    """soft, hard: of open files; largest_file: bytes; each may be RLIM_INFINITY."""
    unlimited = resource.RLIM_INFINITY
    if largest_file != unlimited:
        found = f"a file may have {size(largest_file)} at most (ulimit -f): larger shards fail"
        return fail("limits", found, "ulimit -f unlimited")
    found = f"{'unlimited' if soft == unlimited else soft} open files"
    if soft != unlimited and soft < _FILES:
        more = f"ulimit -n {_FILES}" if hard == unlimited or hard >= _FILES else "raise the hard limit of open files"
        return warn("limits", f"{found}: loader workers and sockets add up", more)
    return ok("limits", found)


def look_at_temporary_files() -> Finding:
    try:
        return ok("temporary files", f"in {tempfile.gettempdir()}")
    except OSError as error:
        fix = "make room there, or set TMPDIR to a directory that can be written"
        return fail("temporary files", f"none can be made: {error.strerror}", fix)


def look_at_clock() -> Finding:
    """Ask the kernel whether something keeps the clock right. Needs no privilege."""
    buffer = ctypes.create_string_buffer(_SIZE_OF_TIMEX)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        state = -1
    return judge_clock(state)


def judge_clock(state: int) -> Finding:
    """state: what adjtimex(2) returns; -1: it cannot be asked."""
    if state == -1:
        return ok("clock", "whether it is synchronised cannot be asked here; no order depends on it")
    if state == _TIME_ERROR:
        found = "not synchronised: no order or deadline depends on it, but people will compare the times in the record"
        return warn("clock", found, "run chrony or systemd-timesyncd on the host")
    return ok("clock", "synchronised")
