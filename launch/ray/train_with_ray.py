"""A guarded training under Ray Train: `python train_with_ray.py`. Fill in `train` and the sizes in `main`."""

import sys
from collections.abc import Callable
from typing import Any

import ray.train
import torch
from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer, prepare_model
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rollback
from rollback.errors import ExitCode, RollbackError

WANTS_A_PERSON = (ExitCode.USAGE, ExitCode.NO_CHECKPOINT, ExitCode.STRUCTURAL, ExitCode.UNFIT)


def train(config: dict[str, Any]) -> None:
    """Your loop, on each worker. Ray has set up the process group."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))  # not through prepare_data_loader
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, run=config["run"])
    device = ray.train.torch.get_device()
    for x, y in guard:
        loss = ((model(x.to(device)) - y.to(device)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss.detach())


def on_each_worker(config: dict[str, Any]) -> Any:
    """The exit code. What the guard ends a process with, Ray would take for a failure, and start all again."""
    try:
        config["train"](config)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # as Python does, whose status is 1 then
            return 1
        return end.code or 0
    return 0


class Refusals(UserCallback):
    """Ends the job where a guard refuses it on any worker: Ray would start all of them again, to be refused again."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(error, RollbackError) and error.exit_code in WANTS_A_PERSON:
                raise error  # Ray tries no such error again


def fit(
    train: Callable[[dict[str, Any]], None], config: dict[str, Any], *, max_failures: int = 100, **more: Any
) -> int:
    """Train until it ends, over as many starts of all workers as it takes. Returns the exit code of `rollback launch`.

    more: for TorchTrainer.
    """
    run_config = RunConfig(
        storage_path=f"{config['run']}-ray", failure_config=FailureConfig(max_failures=max_failures),
        callbacks=[Refusals()],
    )  # fmt: skip
    trainer = TorchTrainer(
        on_each_worker, train_loop_config={**config, "train": train}, run_config=run_config, **more
    )  # fmt: skip
    try:
        code: Any = trainer.fit().return_value
    except ControllerError as error:
        if not isinstance(refused := error.controller_failure, RollbackError):
            raise
        print(f"rollback: error: {refused}", file=sys.stderr)
        code = refused.exit_code
    return int(code)


def main() -> None:
    scaling = ScalingConfig(num_workers=8, use_gpu=True)
    sys.exit(fit(train, {"run": "/shared/runs/llm"}, scaling_config=scaling))  # a directory that all workers share


if __name__ == "__main__":
    main()
