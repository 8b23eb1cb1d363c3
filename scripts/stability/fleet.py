"""Runs many runs: forked from this process, a few at a time, each result a line of one file."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stability.arms import ARMS, QUICK
from stability.job import RunResult, run_one
from stability.text import code, prose
from stability.troubles import TROUBLES

Case = tuple[int, str, str]  # seed, trouble, arm


def cases(seeds: int, *, quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All runs, a seed after the other: a part of them is the table of fewer seeds.

    only: names of arms or troubles; none: all of them.
    """
    arms = [arm for arm in (QUICK if quick else ARMS) if not {*only} & {*ARMS} or arm in only]
    troubles = [trouble for trouble in TROUBLES if not {*only} & {*TROUBLES} or trouble in only]
    return [(seed, trouble, arm) for seed in range(seeds) for trouble in troubles for arm in arms]


def read_results(path: Path) -> list[RunResult]:
    """What is there. The last line may be cut off, where a run of this script was killed."""
    results = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        results.append(RunResult(**{**entry, "curve": [tuple(point) for point in entry["curve"]]}))
    return results


def run_all(todo: Iterable[Case], path: Path, jobs: int, tell: Callable[[RunResult], None]) -> list[str]:
    """Run what is to be done and append the results to `path`. Returns what went wrong: a line for each lost run."""
    torch.set_num_threads(1)
    code(), code(held_out=True), prose()  # read once, before the forks
    waiting, lost, commit = list(todo), list[str](), _commit()
    under_way: dict[int, tuple[Case, tempfile.TemporaryDirectory[str]]] = {}
    with path.open("a") as file:
        try:
            while waiting or under_way:
                while waiting and len(under_way) < jobs:
                    case, place = waiting.pop(0), tempfile.TemporaryDirectory(prefix="stability-")
                    under_way[_fork(case, Path(place.name))] = case, place
                pid, _ = os.wait()
                case, place = under_way.pop(pid)
                result = Path(place.name, "result.json")
                if result.exists():
                    found = replace(read_results(result)[0], code=commit)
                    file.write(found.to_json() + "\n")
                    file.flush()
                    tell(found)
                else:
                    lost.append(f"{case}: {_tail(Path(place.name, 'output'))}")
                place.cleanup()
        finally:
            for pid, (_, place) in under_way.items():
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                place.cleanup()
    return lost


def _commit() -> str:
    """Of this checkout; empty where there is none."""
    command, here = ["git", "describe", "--always", "--dirty"], Path(__file__).parent
    return subprocess.run(command, cwd=here, capture_output=True, text=True, check=False).stdout.strip()


def _fork(case: Case, directory: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with (directory / "output").open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        result = run_one(*case, directory)
        part = directory / "result.part"
        part.write_text(result.to_json())
        part.rename(directory / "result.json")
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, this process is a copy that must not go on as its parent
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _tail(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines() if output.exists() else []
    return " | ".join(lines[-3:]) or "it said nothing"


class Clock:
    """What is left to do, in words."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()

    def tell(self, result: RunResult) -> None:
        self._done += 1
        left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
        loss = f"{result.loss:.3f}" if result.loss is not None else result.end
        print(
            f"{self._done}/{self._total}, {left / 60:.0f} min left: seed {result.seed}, {result.trouble}, "
            f"{result.arm}: {loss}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
