"""Do jobs end? Launches a tiny job of two ranks again and again on a machine that has too much to do.

    PYTHONPATH=tests/support python tests/crash/endings.py --launches 50 --busy 8 --at-once 5

A rank that is through but never ends (its interpreter waits for a thread of the backend, which waits for the
interpreter) would keep its supervisor waiting; the supervisor ends it. Both are counted: no launch may hang, and how
often the supervisor had to step in is told.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rollback.facts.training import AttemptEnded, Finished, StuckAtExit
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths

TINY = Path(__file__).parents[1] / "e2e" / "jobs" / "tiny.py"
LIMIT = 300.0  # a launch that lasts longer hangs


@dataclass(frozen=True)
class Ended:
    """A launch. code: None where it hung. leaving: seconds from the end of training to that of the last process. stuck:
    the supervisor had to end a rank that was through."""

    code: int | None
    seconds: float
    leaving: float | None
    stuck: bool


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def launch(folder: Path) -> Ended:
    """One launch to its end, in a folder of its own."""
    command = [sys.executable, "-m", "rollback", "launch", "--nproc", "2", "--run", str(folder / "run"), str(TINY)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    folder.mkdir()
    began = time.monotonic()
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            code: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    paths = RunPaths(folder / "run")
    facts = [*read_journal(paths.train_journal).records, *read_journal(paths.supervisor_journal).records]
    at = {type(record.fact): datetime.fromisoformat(record.at) for record in facts}
    known = Finished in at and AttemptEnded in at
    leaving = (at[AttemptEnded] - at[Finished]).total_seconds() if known else None
    return Ended(code, time.monotonic() - began, leaving, StuckAtExit in at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=1, help="so many of them at the same time")
    parser.add_argument("--busy", type=int, default=8, help="processes that compute beside them")
    options = parser.parse_args()
    ended = []
    with tempfile.TemporaryDirectory(prefix="rollback-endings-") as root, busy(options.busy):
        folders = [Path(root, str(number)) for number in range(options.launches)]
        with ThreadPoolExecutor(options.at_once) as threads:
            for folder, one in zip(folders, threads.map(launch, folders), strict=True):
                ended.append(one)
                print(f"{len(ended)}: {one}", flush=True)
                if one.code != 0:
                    print((folder / "output.txt").read_text(), flush=True)
    well, stuck = sum(item.code == 0 for item in ended), sum(item.stuck for item in ended)
    leaving = [item.leaving for item in ended if item.leaving is not None]
    print(
        f"{well} of {len(ended)} launches ended with 0 beside {options.busy} busy processes; {stuck} needed the "
        f"supervisor's hand; from the end of training to that of the last process {statistics.median(leaving):.1f} s "
        f"(median), {max(leaving):.1f} s (most)"
    )
    return int(well < len(ended) or stuck > 0)


if __name__ == "__main__":
    sys.exit(main())
