"""One run: an arm meets a trouble. The loop is the same for all arms; only who hands out the batches differs."""

import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import rollback
from rollback.errors import ExitCode
from rollback.facts.training import Incident
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from stability.arms import ARMS, SNAPSHOT_EVERY, Restart, Watch
from stability.model import GPT, GrowingAdamW
from stability.text import batches, code, prose
from stability.troubles import BASE_RATE, STEPS, TROUBLES, grow

EVALUATE_EVERY = 40  # updates made
End = Literal["done", "structural", "no_checkpoint", "given up"]
_ENDS: dict[int, End] = {ExitCode.STRUCTURAL: "structural", ExitCode.NO_CHECKPOINT: "no_checkpoint"}


@dataclass
class RunResult:
    """What a run came to."""

    seed: int
    trouble: str
    arm: str
    end: End
    loss: float | None
    """Held-out loss at the end; None: not finite, or the run was stopped."""
    made: int
    """Updates made, also those that were undone or dropped."""
    kept: int
    """Updates that the final model has."""
    incidents: int
    """Incidents, or restarts."""
    seconds: float
    """Processor time."""
    curve: list[tuple[int, float | None]]
    """Updates made, and the held-out loss then; None: not finite."""
    code: str = ""
    """The commit of rollback that ran it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Training:
    """The objects of a training and its loop's body."""

    def __init__(self, arm: str, trouble: str, seed: int) -> None:
        self.arm, self.trouble = ARMS[arm], TROUBLES[trouble]
        torch.manual_seed(seed)
        self.model = GPT(half=self.arm.half)
        self.optimizer = GrowingAdamW(
            self.model.parameters(), lr=BASE_RATE, weight_decay=0.1, fused=not self.arm.scaler
        )
        self.scaler = torch.amp.GradScaler("cpu") if self.arm.scaler else None
        self.rate = 1.0  # a factor, where a restart lowers it
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate_at)
        self.rule = self.arm.rule() if self.arm.rule else None
        self.data = batches(STEPS, seed)
        if self.trouble.corrupt is not None:
            self.trouble.corrupt(self.data, np.random.default_rng(1000 + seed))
        windows = prose(held_out=True) if self.trouble.new_domain else code(held_out=True)
        self._held_out = torch.from_numpy(windows.astype(np.int64))
        self.made = self.dropped = 0
        self.curve: list[tuple[int, float | None]] = []

    def _rate_at(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.arm.warmup) if self.arm.warmup else 1.0
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / STEPS))
        return self.rate * warm * cosine * (self.trouble.rate(step) if self.trouble.rate else 1.0)

    def update(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """One batch, one update. Returns its loss and the gradient's norm before clipping."""
        trouble, optimizer, scaler = self.trouble, self.optimizer, self.scaler
        if trouble.weigh is not None:
            weights = trouble.weigh(weights, self.made)
        loss = (weights * self.model(inputs, targets)).mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if trouble.gradient is not None and (factor := trouble.gradient(self.made)) != 1.0:
            torch._foreach_mul_(gradients, factor)
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm(gradients)
        limit = self.arm.clip if self.rule is None else self.rule.limit(loss.item(), norm.item())
        if limit is not None and limit < math.inf:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        grow(self.model, optimizer, trouble, self.scheduler.last_epoch)
        if scaler is not None:
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            self.dropped += scaler.get_scale() < scale
        elif limit is not None:
            optimizer.step()
        else:
            self.dropped += 1
        self.scheduler.step()
        optimizer.zero_grad()
        if trouble.strike is not None:
            trouble.strike(self.model, self.made)
        self.made += 1
        if self.made % EVALUATE_EVERY == 0:
            self.evaluate()
        return loss.detach(), norm

    @torch.no_grad()
    def evaluate(self) -> float | None:
        loss = self.model(self._held_out[:, :-1], self._held_out[:, 1:]).mean().item()
        kept = round(loss, 5) if math.isfinite(loss) else None
        self.curve.append((self.made, kept))
        return kept

    # Who hands out the batches -------------------------------------------------------------------------------------

    def plainly(self) -> tuple[End, int]:
        """In order. Returns how the run ended, and the number of restarts."""
        for number in range(STEPS):
            self.update(*map(torch.from_numpy, self.data[number]))
        return "done", 0

    def with_restarts(self, restart: Restart) -> tuple[End, int]:
        """In order, and again from a checkpoint when a watch stops the run."""
        saved, watch, restarts, number = dict[int, Any](), Watch(), 0, 0
        while number < STEPS:
            if number % SNAPSHOT_EVERY == 0:
                saved[number] = copy.deepcopy([part.state_dict() for part in self._parts()])
            loss, _ = self.update(*map(torch.from_numpy, self.data[number]))
            number += 1
            if not watch.stops(loss.item()):
                continue
            if restarts == restart.most:
                return "given up", restarts
            restarts += 1
            number = ([0, *saved])[-restart.back] if len(saved) >= restart.back else 0
            saved = {at: state for at, state in saved.items() if at <= number}
            for part, state in zip(self._parts(), copy.deepcopy(saved[number]), strict=True):
                part.load_state_dict(state)
            self.rate *= restart.rate
            for group in self.optimizer.param_groups:
                group["lr"] = BASE_RATE * self._rate_at(self.scheduler.last_epoch)
            watch = Watch()
        return "done", restarts

    def guarded(self, settings: dict[str, Any], run: Path) -> tuple[End, int]:
        """By a guard, in a run directory of its own. Returns how the run ended, and the number of incidents."""
        loader: Any = DataLoader(self.data, batch_size=None)  # type: ignore[arg-type]
        objects: dict[str, Any] = {"scheduler": self.scheduler, "scaler": self.scaler, **settings}
        memory = run / "memory"
        memory.mkdir(parents=True)
        guard = rollback.Guard(
            model=self.model, optimizer=self.optimizer, loader=loader, run=run / "run", fast_tier=str(memory),
            **objects,
        )  # fmt: skip
        end: End = "done"
        try:
            for batch in guard:
                loss, norm = self.update(*batch)
                guard.observe(loss, grad_norm=norm)
            guard.close()
        except SystemExit as stopped:
            end = _ENDS[int(stopped.code or 0)]
        journal = read_journal(RunPaths(run / "run").train_journal).records
        return end, sum(isinstance(record.fact, Incident) for record in journal)

    def _parts(self) -> Iterator[Any]:
        yield from (self.model, self.optimizer, self.scheduler)


def run_one(seed: int, trouble: str, arm: str, directory: Path) -> RunResult:
    """One run, in this process. directory: empty, for the guard's run directory."""
    began = time.process_time()
    training = Training(arm, trouble, seed)
    if training.arm.guard is not None:
        end, incidents = training.guarded(dict(training.arm.guard), directory)
    elif training.arm.restart is not None:
        end, incidents = training.with_restarts(training.arm.restart)
    else:
        end, incidents = training.plainly()
    loss = training.evaluate() if end == "done" else None
    kept = training.scheduler.last_epoch - training.dropped
    return RunResult(
        seed, trouble, arm, end, loss, training.made, kept, incidents, round(time.process_time() - began, 2),
        training.curve,
    )  # fmt: skip
