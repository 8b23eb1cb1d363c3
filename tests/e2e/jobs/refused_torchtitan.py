"""What `rollback.protect` refuses of torchtitan: `refused_torchtitan.py CASE ...`, as refused_by_protect.py."""

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from torchtitan_loop import alone, configuration  # isort: skip - before torchtitan
from torchtitan.trainer import Trainer
from trainer_job import TrainerJob

import rollback
from rollback.errors import RollbackError


class Own(Trainer):
    def train(self) -> None:
        pass


def trainer(stream: str = "", kind: type[Trainer] = Trainer, **changes: Any) -> Any:
    """changes: attributes of its configuration's parts, as `training__steps`."""
    job: Any = SimpleNamespace(job=TrainerJob(samples=40, max_steps=4, stream=stream), ranks=1, output=Path("assets"))
    config = configuration(job)
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part), field, value)
    return kind(config)


def of(part: str, field: str, value: object) -> Callable[[], None]:
    """A Trainer that says so of itself: where one would need other ranks, or a GPU, to be made."""

    def refused() -> None:
        made = trainer()
        setattr(getattr(made, part), field, value)
        rollback.protect(made)

    return refused


def with_torchft() -> None:
    made = trainer()
    made.ft_manager = None
    rollback.protect(made)


def trained_twice() -> None:
    made = rollback.protect(trainer(), run="trained")
    made.train()
    made.train()


def resumed() -> None:
    made = trainer()
    made.step = 5  # as its load leaves it
    rollback.protect(made).train()


def of_another_version() -> None:
    made = trainer()
    with mock.patch.object(importlib.metadata, "version", return_value="0.2.2"):
        rollback.protect(made)


def ending(stream: str) -> None:
    made = trainer(stream)
    for dataset in getattr(made.dataloader.dataset, "_datasets", [made.dataloader.dataset]):
        dataset.infinite = False
    rollback.protect(made)


CASES: dict[str, Callable[[], object]] = {
    "twice": lambda: rollback.protect(rollback.protect(trainer())),
    "trained twice": trained_twice,
    "its checkpoints": lambda: rollback.protect(trainer(checkpoint__enable=True)),
    "resumed from its checkpoints": resumed,
    "CUDA graphs": of("config", "training", SimpleNamespace(disable_cuda_graphs=False)),
    "pipeline": of("parallel_dims", "pp", 2),
    "tensors": of("parallel_dims", "tp", 2),
    "context": of("parallel_dims", "cp", 2),
    "experts": of("parallel_dims", "ep", 2),
    "float8": of("metrics_processor", "has_quantization", True),
    "states in bfloat16": lambda: rollback.protect(trainer(optimizer__implementation="fused_opt_states_bf16")),
    "documents that end": lambda: ending(""),
    "interleaved documents that end": lambda: ending("interleaved"),
    "torchft": with_torchft,
    "a loop of its own": lambda: rollback.protect(trainer(kind=Own)),
    "fake ranks": of("config", "comm", SimpleNamespace(mode="fake_backend")),
    "another version": of_another_version,
}


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    alone()
    if len(sys.argv) == 2:
        CASES[sys.argv[1]]()
        return
    for name in sys.argv[1:]:
        try:
            CASES[name]()
            answer: dict[str, Any] = {"exit_code": 0, "message": "was not refused"}
        except RollbackError as error:
            answer = {"exit_code": int(error.exit_code), "message": str(error)}
        left = [str(path) for path in Path().iterdir() if path.name not in ("assets", "trained")]
        print("CASE", json.dumps({"name": name, "left": left, **answer}))


if __name__ == "__main__":
    main()
