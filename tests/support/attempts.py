"""The test's end of forker.py: attempts of a toy job that may be killed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from toy import Toy
from warm_server import WarmPopen

FORKER = Path(__file__).parent / "forker.py"
DIED = 99  # the exit code of an attempt that was told to die around a fact


class Forker:
    """Starts attempts, one at a time. Use as a context manager. program: what is to fork them, forker.py or like it."""

    def __init__(self, program: Path = FORKER) -> None:
        self._program = program

    def __enter__(self) -> "Forker":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = WarmPopen(
            [sys.executable, str(self._program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def status(self, toy: Toy, run: Path, **request: Any) -> int:
        """Run one attempt of a toy job: its exit code, or minus the signal that ended it."""
        return self.ask({"toy": toy.to_json(), "run": str(run), "output": str(run) + ".txt", **request})

    def ask(self, request: dict[str, Any]) -> int:
        """Run one attempt: its exit code, or minus the signal that ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline())["status"])

    def finish(self, toy: Toy, run: Path, *, log: Path | None = None) -> dict[str, str]:
        """Run an attempt that must end by itself: its portrait."""
        portrait = run.with_name(f"{run.name}-portrait.json")
        status = self.status(toy, run, portrait=str(portrait), log=str(log) if log else None)
        assert status == 0, Path(str(run) + ".txt").read_text()
        return dict(json.loads(portrait.read_text()))
