"""Writing scenarios for job.py and reading what its ranks left."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toy import Toy
from warm_server import ENV_MODULES, WarmPopen, run_warm

if TYPE_CHECKING:
    from probed import Case
    from trainer_job import TrainerJob

JOB = Path(__file__).parent / "job.py"
LAUNCH = [sys.executable, "-m", "rollback", "launch"]
"""What starts warm where `warm_server` cannot fork it: in namespaces of its own."""
LIMIT = 300.0  # seconds; a machine with all cores busy takes minutes to start what is not warm


class Scenarios:
    """Scenarios of one job in a folder of its own, in the order in which they are added. warm: modules that `script`
    imports, besides torch. limit: seconds for all of them."""

    def __init__(self, folder: Path, script: Path = JOB, warm: str = "", limit: float = LIMIT) -> None:
        self.folder = folder
        self.script = script
        self.limit = limit
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", ENV_MODULES: warm}
        self.path = folder / "scenarios.json"
        self._listed: list[dict[str, Any]] = []

    def add(self, name: str, toy: "Toy | TrainerJob | Case", **more: Any) -> None:
        """Run `toy` under a guard in the run directory `<name>`, unless `more` says otherwise."""
        self._listed.append({"name": name, "toy": toy.to_json(), "run": str(self.run(name)), **more})
        self.path.write_text(json.dumps(self._listed))

    def run(self, name: str) -> Path:
        return self.folder / name

    def torchrun(self, ranks: int, *, warm: bool = True) -> str:
        """Start it all under torchrun, wait for the end, and return what it printed.

        warm: by a fork of what is imported already. Many ranks come to torch's store at one instant then, and it may
        leave one of them waiting for ever; ranks that import torch themselves come one after the other. So that is what
        a job does whose ranks have not begun.
        """
        program = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
        try:
            return self._start(*program, warm=warm)
        except subprocess.TimeoutExpired:
            if not warm or [*self.folder.iterdir()] != [self.path]:
                raise
            return self._start(*program, warm=False)

    def python(self) -> str:
        """The same in one process."""
        return self._start()

    def _start(self, *program: str, warm: bool = True) -> str:
        given = [*program, str(self.script), str(self.path)]
        done = (run_warm if warm else subprocess.run)(
            [sys.executable, *given], env=self.environment, timeout=self.limit, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:]
        return done.stdout

    def start_launch(
        self, run: Path, *flags: str, ranks: int = 2, program: Sequence[str] = LAUNCH
    ) -> subprocess.Popen[str]:
        """Start it all under `rollback launch`, with this run directory."""
        command = [*program, "--nproc", str(ranks), "--run", str(run), *flags, str(self.script), str(self.path)]
        return WarmPopen(
            command, cwd=self.folder, env={**self.environment, "NO_COLOR": "1"}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def launch(self, run: Path, *flags: str, ranks: int = 2) -> tuple[int, str]:
        """The same to its end: the exit code, and what was printed."""
        with self.start_launch(run, *flags, ranks=ranks) as job:
            try:
                output, _ = job.communicate(timeout=self.limit)
            except BaseException:
                job.kill()
                raise
        return job.returncode, output

    def result(self, name: str, rank: int) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"{name}-{rank}.json").read_text()))

    def portrait(self, name: str, rank: int) -> dict[str, str]:
        result = self.result(name, rank)
        assert "portrait" in result, result
        return dict(result["portrait"])
