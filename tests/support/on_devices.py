"""Toy jobs on a CUDA device, and the same ones on the CPU: there they are soak tests, which show where there is no GPU
that the tests themselves are right."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from job_results import JOB, LAUNCH, Scenarios
from scenarios import BACKEND
from toy import Toy, require_same, supervisor_facts
from warm_server import WarmPopen

from rollback.facts.training import AttemptEnded

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [pytest.param("cuda", marks=NEEDS_GPU), pytest.param("cpu", marks=pytest.mark.soak)]


@dataclass(frozen=True)
class Group:
    """Ranks on one device. NCCL does not let two ranks share a GPU; gloo does."""

    device: str
    backend: str
    ranks: int


GROUPS = [
    pytest.param(Group("cuda", "nccl", 1), marks=NEEDS_GPU, id="one rank over NCCL"),
    pytest.param(Group("cuda", "gloo", 2), marks=NEEDS_GPU, id="two ranks on one GPU"),
    pytest.param(Group("cpu", "gloo", 1), marks=pytest.mark.soak, id="one rank on the CPU"),
    pytest.param(Group("cpu", "gloo", 2), marks=pytest.mark.soak, id="two ranks on the CPU"),
]
WAYS = {
    "plain": Toy(),
    "clipped": Toy(clip=0.5),
    "over frozen weights": Toy(base="frozen"),
    "in bfloat16": Toy(narrow="bfloat16"),
    "in float16, scaled": Toy(narrow="float16", scaler=True, overflow=(12,)),
    "fused": Toy(adamw="fused"),
    "foreach": Toy(adamw="foreach"),
    "recomputed": Toy(recomputed=True),
    "workers and pinned memory": Toy(workers=2, pinned=True),
    "accumulated over epochs": Toy(samples=480, epochs=2, loop="epochs", between=True, accumulate=2),
    "compiled": Toy(compiled="default"),
    "compiled to CUDA graphs": Toy(compiled="reduce-overhead"),
}
LIMIT = 400.0


class Supervised:
    """One toy job under `rollback launch`, in a folder of its own."""

    def __init__(self, folder: Path, toy: Toy, group: Group, **more: object) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run, self.group = folder, folder / "run", group
        self.scenarios = Scenarios(folder)
        self.scenarios.add("job", toy.but(device=group.device), run=str(self.run), **more)

    def start(self, *flags: str) -> subprocess.Popen[str]:
        command = [*LAUNCH, "--nproc", str(self.group.ranks), "--run", str(self.run), *flags]
        return WarmPopen(
            [*command, str(JOB), str(self.scenarios.path)], cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", BACKEND: self.group.backend},
        )  # fmt: skip

    def launch(self, *flags: str, code: int = 0) -> str:
        with self.start(*flags) as job:
            try:
                output, _ = job.communicate(timeout=LIMIT)
            except BaseException:
                job.kill()
                raise
        assert job.returncode == code, output[-8000:]
        return output

    def require(self, other: "Supervised") -> None:
        for rank in range(self.group.ranks):
            one, two = (job.scenarios.portrait("job", rank) for job in (self, other))
            require_same(one, two, f"rank {rank}")

    def ended(self) -> list[AttemptEnded]:
        return supervisor_facts(self.run, AttemptEnded)
