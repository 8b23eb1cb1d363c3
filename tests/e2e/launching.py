"""Starting `rollback launch` from a test and looking at what it leaves."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from waiting import LIMIT, wait_for
from warm_server import WarmPopen, run_warm

from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths

RANK = Path(__file__).parent / "rank.py"

# One rank in torchrun's place, for tests that are not about torchrun: it takes seconds to import.
WITHOUT_TORCHRUN = """
import sys
from rollback import cli
from rollback.supervisor.torchrun import host

host.torchrun_command = lambda job, *_: [sys.executable, job.script, *job.arguments]
cli.main()
"""


class Launch:
    """A supervised job in its own folder, and what is left of it. cold: its processes are started as users do."""

    def __init__(self, folder: Path, with_torchrun: bool, script: Path = RANK, cold: bool = False) -> None:
        self.folder, self.cold = folder, cold
        self.script = script
        self.program = ["-m", "rollback"] if with_torchrun else ["-c", WITHOUT_TORCHRUN]
        self.run = folder / "runs" / script.stem
        self.paths = RunPaths(self.run)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, arguments: str, *flags: str, ranks: int = 1) -> subprocess.Popen[str]:
        """Start the script with `arguments`, separated by blanks, under `rollback launch` with `flags`."""
        flags = ("--nproc", str(ranks), *flags)
        command = [sys.executable, *self.program, "launch", *flags, str(self.script), *arguments.split()]
        environment = {**os.environ, "NOTES": str(self.folder), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        environment |= {"RANK": "0", "WORLD_SIZE": "1"}  # torchrun sets its own
        popen = subprocess.Popen[str] if self.cold else WarmPopen[str]
        process = popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.started.append(process)
        return process

    def finish(self, arguments: str, *flags: str, ranks: int = 1) -> tuple[int, str]:
        """Start and wait: the exit code, and what was printed."""
        process = self.start(arguments, *flags, ranks=ranks)
        output, _ = process.communicate(timeout=LIMIT)
        return process.returncode, output

    def why(self, *arguments: str) -> str:
        """What `rollback why` prints of the run, as wide as it likes."""
        return self._read("why", *arguments)

    def audit(self) -> str:
        """What `rollback audit` prints of it."""
        return self._read("audit")

    def _read(self, command: str, *arguments: str) -> str:
        done = run_warm(
            [sys.executable, "-m", "rollback", command, str(self.run), *arguments],
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "500"}, stdout=subprocess.PIPE, check=True, timeout=LIMIT,
        )  # fmt: skip
        return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())

    def account(self, attempt: int | None = None) -> dict[str, Any]:
        """The same as an object."""
        which = () if attempt is None else ("--attempt", str(attempt))
        return dict(json.loads(self.why("--json", *which)))

    def facts(self, *kinds: type) -> list[object]:
        return [
            record.fact
            for record in read_journal(self.paths.supervisor_journal).records
            if isinstance(record.fact, kinds)
        ]

    def wait_for_heartbeats(self, count: int) -> list[psutil.Process]:
        wait_for(lambda: len(read_heartbeats(self.paths.ranks)) == count)
        return [psutil.Process(beat.pid) for beat in read_heartbeats(self.paths.ranks).values()]

    def torchrun(self) -> psutil.Process:
        (torchrun,) = psutil.Process(self.started[-1].pid).children()
        return torchrun


@contextmanager
def launching(folder: Path, *, with_torchrun: bool, script: Path = RANK, cold: bool = False) -> Iterator[Launch]:
    """A `Launch` whose supervisors are gone at the end, however the test ended."""
    launch = Launch(folder, with_torchrun, script, cold)
    try:
        yield launch
    finally:
        for process in launch.started:
            if process.poll() is None:
                process.kill()
                process.wait()


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has gone between these two
        return True
