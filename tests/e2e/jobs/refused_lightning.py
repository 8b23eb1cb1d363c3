"""What `rollback.protect` refuses of Lightning: `refused_lightning.py CASE ...`, as refused_by_protect.py."""

import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import rollback
from rollback.errors import RollbackError

DATA = TensorDataset(torch.zeros(8, 2))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(ByHand):  # Lightning takes several in no other way
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.layer.weight], 0.1), torch.optim.SGD([self.layer.bias], 0.1)]


class NoOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return None


class TakesItsBatches(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.layer(next(dataloader_iter)[0][0]).sum()  # type: ignore[no-any-return]


class Averaged(Module):
    def configure_callbacks(self) -> Any:
        return EMAWeightAveraging()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Odd(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("somewhere")}


def trainer(**given: Any) -> lightning.Trainer:
    return lightning.Trainer(
        **{
            "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tempfile.mkdtemp(),
            **given,
        }
    )  # fmt: skip


def protected(**given: Any) -> Any:
    return rollback.protect(trainer(**given))


def fit(data: Any = DATA, module: type[Module] = Module, **given: Any) -> None:
    protected(**given).fit(
        module(), data if isinstance(data, CombinedLoader | list) else DataLoader(data, batch_size=2)
    )


def of_version(library: str, version: str) -> None:
    made = trainer() if library == "lightning" else twin()
    with mock.patch.object(importlib.metadata, "version", return_value=version):
        rollback.protect(made)


def twin() -> Any:
    import pytorch_lightning

    return pytorch_lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )


def with_strategy(kind: type, **given: Any) -> None:
    made = trainer()
    strategy = object.__new__(kind)
    strategy.__dict__.update({"_launcher": None, **given})
    with mock.patch.object(type(made), "strategy", strategy):
        rollback.protect(made)


def spawning() -> None:
    made = trainer()
    launcher = type("_MultiProcessingLauncher", (), {})()
    with mock.patch.object(type(made.strategy), "launcher", launcher):
        rollback.protect(made)


def alone_in_each_rank() -> None:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}):  # of the ranks of a launch
        fit()


def behind_fit() -> None:
    made = trainer()
    made.fit(Module(), DataLoader(DATA))
    rollback.protect(made)


def fitted_twice() -> None:
    made = protected()
    made.fit.__self__.guard = None  # as after its first training
    made.fit(Module(), DataLoader(DATA))


def own_strategy() -> type:
    return type("MyStrategy", (SingleDeviceStrategy,), {})


CASES: dict[str, Callable[[], object]] = {
    "an older lightning": lambda: of_version("lightning", "2.5.6"),
    "a newer lightning": lambda: of_version("lightning", "3.0.0"),
    "an older pytorch-lightning": lambda: of_version("pytorch-lightning", "2.5.6"),
    "FSDP": lambda: with_strategy(FSDPStrategy),
    "DeepSpeed": lambda: with_strategy(type("DeepSpeedStrategy", (DDPStrategy,), {})),
    "tensor parallel": lambda: with_strategy(ModelParallelStrategy, _tensor_parallel_size="auto"),
    "a strategy of one's own": lambda: with_strategy(own_strategy()),
    "spawned ranks": spawning,
    "one device in each of several ranks": alone_in_each_rank,
    "fast_dev_run": lambda: protected(fast_dev_run=True),
    "overfit_batches": lambda: protected(overfit_batches=2),
    "reloaded loaders": lambda: protected(reload_dataloaders_every_n_epochs=1),
    "validation by time": lambda: protected(val_check_interval=timedelta(minutes=5)),
    "averaged weights": lambda: protected(callbacks=StochasticWeightAveraging(0.1)),
    "weights that the module averages": lambda: fit(module=Averaged),
    "groups in mid-run": lambda: protected(callbacks=BackboneFinetuning(1)),
    "ckpt_path": lambda: protected().fit(Module(), DataLoader(DATA), ckpt_path="out/last.ckpt"),
    "by hand": lambda: fit(module=ByHand),
    "two optimizers": lambda: fit(module=TwoOptimizers),
    "no optimizer": lambda: fit(module=NoOptimizer),
    "dataloader_iter": lambda: fit(module=TakesItsBatches),
    "a combined loader": lambda: fit(CombinedLoader({"a": DataLoader(DATA), "b": DataLoader(DATA)})),
    "a list of loaders": lambda: fit([DataLoader(DATA), DataLoader(DATA)]),
    "a stream": lambda: fit(Stream()),
    "an odd callback": lambda: fit(callbacks=Odd()),
    "behind fit": behind_fit,
    "fitted twice": fitted_twice,
    "protected twice": lambda: rollback.protect(protected()),
    "no setting": lambda: protected_with(polcy="palm"),
}


def protected_with(**settings: Any) -> None:
    rollback.protect(trainer(), **settings).fit(Module(), DataLoader(DATA))


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    if len(sys.argv) == 2:
        CASES[sys.argv[1]]()
        return
    for name in sys.argv[1:]:
        try:
            CASES[name]()
            answer: dict[str, Any] = {"exit_code": 0, "message": "was not refused"}
        except RollbackError as error:
            answer = {"exit_code": int(error.exit_code), "message": str(error)}
        except Exception as error:  # noqa: BLE001 - told with its case
            answer = {"exit_code": -1, "message": repr(error)}
        print("CASE", json.dumps({"name": name, "left": sorted(map(str, Path().iterdir())), **answer}))


if __name__ == "__main__":
    main()
