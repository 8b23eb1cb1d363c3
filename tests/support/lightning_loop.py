"""The loop `lightning` of trainer_job.py: a GPT-2 in a LightningModule, with all that Lightning logs and saves."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import rollback

if TYPE_CHECKING:
    from trainer_job import Job


class Module(lightning.LightningModule):
    def __init__(self, job: "Job") -> None:
        super().__init__()
        self.watched = [job]  # in a list: no part of its state
        self.model = job.model()
        self.mean = MeanMetric()
        self.validated: list[float] = []
        self.losses: list[Tensor] = []
        """Of the epoch so far, as scripts have them."""

    def configure_model(self) -> None:
        model, mesh = cast(Any, self.model), cast(Any, self.device_mesh)
        for part in (*model.transformer.h, model) if self.watched[0].job.sharded else ():
            fully_shard(part, mesh=mesh["data_parallel"])

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> int | None:
        return -1 if batch_idx >= self.watched[0].job.more.get("leave_at", batch_idx + 1) else None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        job, accumulate = self.watched[0], self.trainer.accumulate_grad_batches
        position, job.micro = None, batch_idx % accumulate
        if job.run is not None:
            fit: Any = self.trainer.fit.__self__  # type: ignore[attr-defined]
            job.guard = fit.guard
            position, job.micro = job.guard.batch, fit._micro - 1
        job.take(self.trainer.global_step, batch["input_ids"], position)
        if batch_idx % accumulate in job.job.more.get("left_out", ()):
            return None
        loss: Tensor = self(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        self.losses.append(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("first", loss.detach(), on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.losses:
            self.log("mean of losses", torch.stack(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("evaluated", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        job = self.watched[0].job
        if job.more.get("optimizer") == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), 0.01, max_iter=3)
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        match job.more.get("scheduler", "step"):
            case "plateau":
                scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "evaluated"}}
            case "both":
                by_step = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), by_step]
            case interval:
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
                how = {"interval": interval, "frequency": job.more.get("frequency", 1)}
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **how}}


class Stopping(Callback):
    def __init__(self, at: int, told: Callable[[], bool]) -> None:
        self.at, self.told, self.ends = at, told, 0
        self.began = float("inf")

    def on_train_start(self, *_: Any) -> None:
        self.began = min(self.began, time.monotonic())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.at > 0 or self.told()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.ends += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ends": self.ends, "began": self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ends, self.began = state["ends"], state["began"]


class Dying(Callback):
    """Kills its rank in that event, behind so many updates."""

    def __init__(self, event: str, updates: int) -> None:
        setattr(self, event, lambda trainer, *_: self.die(trainer.global_step == updates))

    def die(self, now: bool) -> None:
        if now:
            os.kill(os.getpid(), signal.SIGKILL)


class Config:
    """What a LightningCLI parses its config with, as far as that is saved."""

    def save(self, config: str, path: str, **_: Any) -> None:
        Path(path).write_text(config)


def train(job: "Job") -> dict[str, str]:
    from trainer_job import Text

    given, more = job.job, job.job.more
    lightning.seed_everything(7, verbose=False)
    saving = {"every_n_train_steps": given.save} if given.save else {"every_n_epochs": 1}
    stopping, timer = Stopping(given.stop_at, lambda: job.was_told), Timer()
    callbacks: list[Any] = [
        stopping,
        *([timer] if more.get("timer", True) else []),
        LearningRateMonitor("epoch"),  # a row at each epoch's start
        ModelCheckpoint(job.output / "saved", save_last=True, **{"save_top_k": -1, **saving, **more.get("saving", {})}),
    ]
    if job.dies is not None and job.dies[0] == job.rank:
        callbacks.append(Dying(*job.dies[1:]))
    if "patience" in more:
        callbacks.append(EarlyStopping("evaluated", min_delta=more.get("delta", 0.0), patience=more["patience"]))
    scaled: Any = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if more.get("scaled") else []
    if more.get("config"):
        callbacks.append(SaveConfigCallback(cast("Any", Config()), cast("Any", "epochs: 2")))
    logger = CSVLogger(job.output, name="log", version="one" if more.get("config") else None)
    strategy: Any = "ddp" if job.ranks > 1 else "auto"
    if given.sharded:
        strategy = ModelParallelStrategy(job.ranks, 1, save_distributed_checkpoint=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=job.ranks if job.ranks > 1 else 1, strategy=strategy,
        logger=logger, callbacks=callbacks, max_epochs=int(given.epochs),
        max_steps=given.max_steps, accumulate_grad_batches=given.accumulate, gradient_clip_val=more.get("clip", 1.0),
        enable_progress_bar=False, enable_model_summary=False, plugins=scaled,
        **{"log_every_n_steps": 5, "val_check_interval": given.evaluate or 1.0, **more.get("trainer", {})},
    )  # fmt: skip
    if job.run is not None:
        rollback.protect(trainer, **job.settings())
    generator = torch.Generator().manual_seed(3) if more.get("generator") else None
    persistent = more.get("persistent", False)
    training, validation = (
        DataLoader(
            data, given.batch_size, shuffle, num_workers=given.workers if shuffle or persistent else 0,
            generator=generator if shuffle else None, persistent_workers=persistent,
        )
        for data, shuffle in ((Text(given.samples * job.ranks), True), (Text(8), False))
    )  # fmt: skip
    module = Module(job)
    last = job.output / "saved" / "last.ckpt"
    newest = last if last.exists() else None  # as many scripts look for it
    trainer.fit(module, training, validation, ckpt_path=newest)
    scheduler = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return job.portrait(
        module, trainer.optimizers[0], Kept(scheduler), trainer.global_step, epoch=trainer.current_epoch,
        ends=stopping.ends, batches=trainer.fit_loop.total_batch_idx,
        timed_once=timer.time_elapsed() <= time.monotonic() - stopping.began,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        log=Path(logger.log_dir, "metrics.csv").read_text() if job.rank == 0 else "",
        saved=saved(job.output / "saved") if job.rank == 0 else {},
    )  # fmt: skip


class Kept:
    """What schedulers were, as one with a `state_dict`."""

    def __init__(self, states: list[dict[str, Any]]) -> None:
        self.states = states

    def state_dict(self) -> dict[str, Any]:
        return {str(number): state for number, state in enumerate(self.states)}


def saved(folder: Path) -> dict[str, Any]:
    """What is in each file that was not renamed."""
    kept = {}
    for path in sorted(folder.glob("*.ckpt")):
        if not path.name.startswith("undone-"):
            content = torch.load(path, weights_only=False)
            kept[path.name] = {name: content[name] for name in ("epoch", "global_step", "state_dict", "lr_schedulers")}
    return kept
