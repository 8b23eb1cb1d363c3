"""One attempt of a tiny training on a loader of the zoo. As a program: forks one for each request, see `forker`.

Request: `kind`, `log` (a file that each batch trained on is appended to); optional `run` (none: train without a guard),
`again` (the script is not started for the first time), `epochs`, `settings`, `nan` (a batch whose loss is not finite,
`nan_once`: the first time that it comes), `kill` and `stop` (send itself SIGKILL or SIGTERM at that batch), `output`.
"""

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forker import serve
from torch import Tensor, nn
from zoo import iterable, mapstyle, stateful  # noqa: F401 - they enter their kinds
from zoo.kinds import BATCHES, EPOCHS, KINDS, Fed

import rollback
from rollback.errors import RollbackError

SETTINGS = {"snapshot_every": BATCHES, "probation": 6, "policy": "surgical", "keep": 12}
LIMIT = 120  # seconds until an attempt is held to hang, on a busy machine


def attempt(request: dict[str, Any]) -> int:
    output = os.open(request.get("output") or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(LIMIT)
    try:
        _Training(request).run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except RollbackError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except Exception:  # noqa: BLE001 - the forked child must not run on in its parent's loop
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stderr.flush()
    return 0


class _Training:
    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        kind = KINDS[request["kind"]]
        # A script that does not seed draws other numbers in each process; here they are the same in each first one.
        seed = 7 if kind.seeded else 1000 + bool(request.get("again"))
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.fed: Fed = kind.fed(bool(request.get("again")))
        self.number_of_epochs = request.get("epochs", EPOCHS)
        if self.fed.steps is not None:
            self.fed.steps = BATCHES * self.number_of_epochs
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.guard: rollback.Guard | None = None
        if request.get("run"):
            self.guard = rollback.Guard(
                model=self.model, optimizer=self.optimizer, loader=self.fed.loader, max_steps=self.fed.steps,
                run=Path(request["run"]), **{**SETTINGS, **request.get("settings", {})},
            )  # fmt: skip
        self.log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.step, self.batch = 0, -1
        self.came_by = False

    def run(self) -> None:
        try:
            for epoch in self.epochs():
                if self.fed.at_epoch is not None:
                    self.fed.at_epoch(epoch)
                for batch in self.batches():
                    self.train_on(batch, epoch)
        finally:
            if self.guard is not None:
                self.guard.close()
        weights = b"".join(value.numpy().tobytes() for value in self.model.state_dict().values())
        self.note({"weights": hashlib.sha256(weights).hexdigest()[:12]})

    def epochs(self) -> Any:
        if self.fed.steps is not None:
            return [0]
        count = self.number_of_epochs
        return range(count) if self.guard is None or self.fed.counted else self.guard.epochs(count)

    def batches(self) -> Iterator[Any]:
        guard, loader = self.guard, self.fed.loader
        if guard is not None:
            for batch in guard:
                self.step, self.batch = guard.step, guard.batch
                # A step is shorter than a sync: else the disk's speed decided what there is.
                guard._loop.checkpoints.snapshots.wait()
                yield batch
            return
        for batch in loader if hasattr(loader, "__iter__") else iter(loader, self):
            if self.step == self.fed.steps:
                return
            self.batch += 1
            yield batch
            self.step += 1

    def train_on(self, batch: Any, epoch: int) -> None:
        request = self.request
        for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGTERM)):
            if self.batch == request.get(name):
                os.kill(os.getpid(), number)
        x, ids = self.fed.read(batch)
        numbers = [int(i) for i in ids]
        values = hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:12]
        line = {"step": self.step, "batch": self.batch, "epoch": epoch, "ids": numbers, "values": values}
        if self.fed.counted:
            del line["epoch"]  # the script's own count: a rollback cannot turn it back
        self.note(line)
        loss: Tensor = ((self.model(x).reshape(-1) - x.reshape(-1, 8).sum(1).sin()) ** 2).mean()
        if self.batch == request.get("nan") and not (self.came_by and request.get("nan_once")):
            self.came_by = True
            loss = loss * float("nan")
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.guard is not None:
            self.guard.observe(loss.detach())
        if self.fed.after is not None:
            self.fed.after(numbers)

    def note(self, line: dict[str, Any]) -> None:
        os.write(self.log, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    serve(attempt)
