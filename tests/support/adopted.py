"""Plain scripts as `rollback launch --adopt` starts them, and as they are started without it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from job_results import LAUNCH
from toy import flat, require_same
from warm_server import ENV_MODULES, run_torch_alone, run_warm

PLAIN = Path(__file__).parents[1] / "e2e" / "trainers" / "plain"
LIMIT = 600.0
WARM = {"by_trainer.py": "transformers.modeling_utils datasets peft"}
"""By script: what its library imports, but for the module that is watched when a script imports it."""
SETTINGS = ("--snapshot-every", "5", "--rewind", "5", "--skip-after", "3", "--probation", "8", "--max-skipped", "100%")
OWN_POLICY = ("--snapshot-every", "5", "--probation", "8", "--max-skipped", "100%")


@dataclass(frozen=True)
class Case:
    """bad: the place in the data, counted in batches over all epochs, of a NaN on the last rank."""

    bad: int | None = None
    script: str = "epochs.py"
    words: tuple[str, ...] = ()
    settings: tuple[str, ...] = SETTINGS


class Job:
    """A plain script in a folder, started in several ways. What rank r ends with is `<name>-<r>.pt`."""

    def __init__(self, folder: Path, case: Case, ranks: int) -> None:
        self.folder, self.case, self.ranks = folder, case, ranks
        folder.mkdir(exist_ok=True)
        warm = WARM.get(case.script, "")
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", ENV_MODULES: warm}
        self.spoilt: tuple[str, ...] = ()

    def plain(self, name: str) -> None:
        several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}")
        command = [sys.executable, *(several if self.ranks > 1 else ())]
        self._start(command, PLAIN / self.case.script, name, by=run_torch_alone)

    def launched(self, name: str, *flags: str, script: Path | None = None, words: tuple[str, ...] = ()) -> str:
        command = [*LAUNCH, "--nproc", str(self.ranks), "--restart-budget", "2", "--run", name]
        command += [*self.case.settings, *flags]
        return self._start(command, script or PLAIN / self.case.script, name, *words)

    def spoil(self, log: str) -> None:
        """Put the NaN at a batch of the last rank, by what that has consumed in a clean run."""
        assert self.case.bad is not None
        lines = (self.folder / f"{log}-{self.ranks - 1}.log").read_text().splitlines()
        epoch, sample, *_ = lines[self.case.bad].split()
        self.spoilt = ("--bad", f"{epoch}:{sample}")

    def require_same(self, one: str, other: str) -> None:
        for rank in range(self.ranks):
            require_same(self._portrait(one, rank), self._portrait(other, rank), f"{one} and {other}, rank {rank}")

    def _portrait(self, name: str, rank: int) -> dict[str, str]:
        found: dict[str, Any] = torch.load(self.folder / f"{name}-{rank}.pt", weights_only=True)
        return flat(found)

    def _start(self, command: list[str], script: Path, name: str, *words: str, by: Any = run_warm) -> str:
        done = by(
            [*command, str(script), name, *self.case.words, *self.spoilt, *words], cwd=self.folder, timeout=LIMIT,
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:]
        return str(done.stdout)


def refused(folder: Path, *words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return run_warm(
        [*LAUNCH, "--nproc", str(ranks), *words], cwd=folder, timeout=LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
    )  # fmt: skip
