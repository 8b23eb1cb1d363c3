"""What a launch asks of the machine and of the command before anything is started or written."""

import errno
import importlib.util
import math
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from rollback.checkpoints.tiers import base_of
from rollback.config import Settings
from rollback.errors import UsageError, reporting
from rollback.instructions import ADOPTING, path_of
from rollback.source.rank_spawning import line_of_spawn
from rollback.supervisor.torchrun.flags import endpoint_of, names_a_rendezvous

# Files that must be open at once, at the least: by supervisor and torchrun, and for each rank.
_FILES, _FILES_OF_A_RANK = 32, 4
_COMFORTABLE = 4096  # what a limit is to be raised to
_FILE_BYTES = 16 << 10  # of a file, at the least: boards of heartbeats, a journal's first lines, what torchrun writes
_LAUNCHERS = {
    "program": ("torchrun", "accelerate", "accelerate-launch", "deepspeed"),
    "module": ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
}
"""What starts ranks of its own: of these the supervisor knows none, so it could not tell which died, nor end them."""
_STARTS_RANKS = (
    "notice: {script}, line {line}, starts ranks by itself, as processes below its own: what they train is not "
    "protected. Unless they meet over file://, they wait for each other in vain, under torchrun too. Let --nproc N "
    'start the ranks instead: each calls the function itself, as in main(int(os.environ["RANK"]), '
    'int(os.environ["WORLD_SIZE"])), and leaves MASTER_ADDR and MASTER_PORT as they are'
)


def require_folder() -> None:
    """Raise UsageError where the working directory has been removed: all would fail, each thing in words of its own."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory {os.environ.get('PWD', '')} is not there any more ({error.strerror})",
            hint="change to one that is: cd ... (one of the same name may have been made anew since)",
        ) from error


def require_temporary_folder() -> None:
    """Raise UsageError where no temporary file can be made: the supervisor, torchrun and many a script need some.

    Where one can be made, Python asks once in a process: all that comes after gets the same answer."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise UsageError(
            f"no temporary file can be made ({error.strerror}): each of these is full, read-only or not there",
            hint="make room there, or set TMPDIR to a directory that can be written: TMPDIR=DIR rollback launch ...",
        ) from error


def require_files(flags: Mapping[str, str | bool]) -> None:
    """Raise UsageError where fewer files may be open, or shorter ones be written, than the supervisor and torchrun need
    to start anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = str(flags.get("nproc-per-node", "1"))
    needed = _FILES + _FILES_OF_A_RANK * (int(ranks) if ranks.isdecimal() else 1)
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted, may = max(_COMFORTABLE, needed), math.inf if hard == resource.RLIM_INFINITY else hard
        raised = f"have the hard limit raised, which is {hard}, then: ulimit -n {wanted}"
        raise UsageError(
            f"a process may have {soft} files open here, and starting {ranks} ranks takes at least {needed}",
            hint=f"ulimit -n {min(wanted, may)}" if may >= needed else raised,
        )
    longest, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if longest != resource.RLIM_INFINITY and longest < _FILE_BYTES:
        may = most == resource.RLIM_INFINITY
        raised = f"have the hard limit raised, which is {most}, then: ulimit -f unlimited"
        raise UsageError(
            f"a file may have {longest} bytes at most here, and starting ranks takes at least {_FILE_BYTES}",
            hint="ulimit -f unlimited; checkpoints need it too" if may else raised,
        )


def require_script(script: str, flags: Mapping[str, str | bool]) -> None:
    """Raise UsageError unless there is something to run. Imports nothing."""
    as_file = bool(flags.get("run-path"))
    is_module = bool(flags.get("module")) and not as_file
    if script in _LAUNCHERS["module" if is_module else "program"] and (is_module or not Path(script).exists()):
        raise UsageError(
            f"{script} starts processes of its own, and rollback launch takes its place",
            hint=f"leave {script} and its flags out: rollback launch --nproc N train.py [ARGUMENTS OF train.py]",
        )
    if flags.get("module") and not as_file:
        if flags.get("no-python"):
            raise UsageError("--module and --no-python exclude each other: a module is run by python")
        top = script.partition(".")[0]
        other_python = "PYTHON_EXEC" in os.environ  # its modules are not ours to look for
        found = other_python or PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
        if not found:
            raise UsageError(f"there is no module {top!r}", hint="the name after -m is that of a module, without .py")
        return
    if flags.get("no-python") and not as_file and os.sep not in script:
        if shutil.which(script) is None:
            raise UsageError(f"there is no program {script!r} on PATH")
        return
    path = Path(script)
    with reporting(UsageError, f"looking for the training script {script}"):
        if script and path.is_dir() and (flags.get("no-python") or not (path / "__main__.py").is_file()):
            raise UsageError(f"{script} is a directory without a __main__.py, not a training script")
        if not script or not path.exists():
            raise UsageError(
                f"there is no training script {script!r}",
                hint="flags come before the script: rollback launch [FLAGS] train.py [ARGUMENTS OF train.py]",
            )
        if not (path.is_file() or path.is_dir()):
            raise UsageError(
                f"{script} is a pipe or a device, not a training script",
                hint="write the script to a file: each rank reads it, at each start",
            )


def require_free_port(flags: Mapping[str, str | bool], spares: int) -> None:
    """Raise UsageError where the only node of a job would have torchrun's store at a port that another process has.

    Call it when no process of an earlier launch is left. With `c10d` that process may have a store for several jobs.
    """
    many = spares or flags.get("nnodes", "1") not in ("1", "1:1")  # then the supervisors meet there themselves
    if many or not names_a_rendezvous(flags) or flags.get("rdzv-backend", "static") != "static":
        return
    if (endpoint := endpoint_of({"master-addr": "127.0.0.1", **flags})) is None:
        return
    _, port = endpoint
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # as torch: either will do
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed lately is free
                probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
        return
    raise UsageError(
        f"another process of this host listens at port {port}, which torchrun would need",
        hint=f"ss -ltnp 'sport = :{port}' shows whose it is; without --rdzv-endpoint, --master-addr and --master-port "
        "(and PET_ variables for them) a launch on one host takes a free port",
    )


def notice_of_spawn(script: str, flags: Mapping[str, str | bool]) -> str | None:
    """What is to be said of a Python script that starts ranks by itself."""
    if flags.get("module") or flags.get("no-python"):
        return None
    try:
        line = line_of_spawn(Path(script).read_bytes())
    except OSError:
        return None  # a folder or an archive, or its rank will say what is wrong with it
    return None if line is None else _STARTS_RANKS.format(script=script, line=line)


def default_run(script: str, flags: Mapping[str, str | bool]) -> Path:
    return Path("runs") / (script if flags.get("module") else Path(script).stem or Path(script).resolve().name)


def adopting_runner(adopt: str | None, flags: Mapping[str, str | bool]) -> list[str]:
    """What runs the script in the ranks in place of Python alone. Raises UsageError for what cannot be adopted."""
    if adopt is None:
        return []
    if adopt not in ("notice", "strict"):
        raise UsageError(f"--adopt={adopt}: it is --adopt or --adopt=strict")
    if taken := [name for name in ("module", "no-python") if flags.get(name)]:
        raise UsageError(
            f"--adopt takes a Python script, and --{taken[0]} says that this is none",
            hint="for a module, a script will do with: runpy.run_module('NAME', run_name='__main__')",
        )
    return [path_of(ADOPTING), adopt]


def require_replicas(given: int | None, settings: Settings) -> int:
    """Raises UsageError for more copies than can be made, or for copies of what is in no memory."""
    if given is not None and given > 2:
        raise UsageError(f"--replicas {given}: a snapshot is kept by its own host, and by one more at most (2)")
    if given == 2 and base_of(settings.fast_tier) is None:
        raise UsageError(
            "--replicas 2 copies snapshots from one host's memory to another's, and --fast-tier is off",
            hint="leave one of the two out",
        )
    return given or 1
