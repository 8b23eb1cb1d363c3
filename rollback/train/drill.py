"""The ranks' part of `rollback drill`: injects one planned fault, and records the state at the end of the run.

A guard checks once, when it is made, whether its run directory has an exercise. If so, this module gets each batch on
its way to the script (`StepInProgress.batch_filters`) and is called at the end (`TrainingEnd.on_complete`). It uses
only what any script can use: hooks on the model's forward, a batch, a weight, a signal. So a drill tests the code that
runs without it.

The exercise defines the update that the fault strikes. The fault is recorded on disk before it strikes, so that a
restarted rank does not inject it again. Only a corrupted batch stays corrupted, as in a real data set.
"""

import dataclasses
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from rollback.environment import ENV_SUPERVISOR
from rollback.rundir.exercise import EndState, Exercise, FaultName, Folder, Injected, exercise_of, read_note
from rollback.system.files import WRITES
from rollback.train.data import rng
from rollback.train.loop import TrainingLoop
from rollback.train.sharded import copies_of, detached
from rollback.train.state import tree
from rollback.train.state.module_buffers import all_of

_SIGNAL_PATIENCE = 60.0  # seconds that a rank waits for its own SIGTERM, which the supervisor sends
_BIT_OF = {1: (torch.int8, 1 << 5), 2: (torch.int16, 1 << 6), 4: (torch.int32, 1 << 22), 8: (torch.int64, 1 << 51)}
"""By element size: the integer type to view it as, and a bit whose flip leaves the value finite."""


def take_part(loop: TrainingLoop) -> None:
    """Put the drill between this loop and its script, if there is an exercise."""
    if (found := exercise_of(loop.run.paths.root)) is None:
        return
    rank, end, steps = _DrilledRank(loop, *found), loop.training_end, found[0].steps
    end.max_steps = steps if end.max_steps is None else min(steps, end.max_steps)
    end.on_complete.append(rank.leave)
    loop.step_in_progress.batch_filters.append(rank.handed_out)


class _When(Enum):
    """Whether the drilled update is still to come in this process."""

    AHEAD = "ahead"
    NOW = "now"  # its batches are being handed out for the first time
    OVER = "over"


class _DrilledRank:
    """One rank's part in an exercise."""

    def __init__(self, loop: TrainingLoop, exercise: Exercise, folder: Folder) -> None:
        self._loop = loop
        self._exercise = exercise
        self._folder = folder
        self._rank = loop.run.ranks.rank
        self._mine = self._rank == exercise.rank
        self._struck = read_note(folder.injected(self._rank), Injected)
        self._when = _When.OVER if self._struck else _When.AHEAD
        self._last = -1
        self._hooks: list[Any] = []
        self._disk = _FullDisk(str(loop.run.paths.root))
        self._strike: dict[FaultName | None, Callable[[Any], Any]] = {
            None: lambda batch: batch,
            "nan-loss": self._make_loss_nan,
            "gradient-x10": lambda batch: self._multiply_gradient(batch, 10.0),
            "gradient-x1e4": lambda batch: self._multiply_gradient(batch, 1e4),
            "corrupt-batch": self._corrupt,
            "weight-bit": self._flip_bit,
            "killed-rank": lambda batch: self._once(
                batch, "SIGKILL to itself", lambda: os.kill(os.getpid(), signal.SIGKILL)
            ),
            "hung-rank": lambda batch: self._once(batch, "it stands still before it uses the batch", self._hang),
            "sigterm": lambda batch: self._once(batch, "SIGTERM to the supervisor", self._be_told_to_stop),
            "full-disk": self._fill_disk,
        }

    def handed_out(self, batch: Any) -> Any:
        """A batch is about to reach the script."""
        step, position = self._loop.state.counters.step, self._loop.step_in_progress.batch
        self._note_sample(position, batch)
        while self._hooks:
            self._hooks.pop().remove()
        # A snapshot in flight then meets the full disk too. And quick steps wait for its thread, so that training does
        # not end before the disk has room again.
        if self._disk.full:
            self._loop.checkpoints.snapshots.wait()
        if step >= self._exercise.step + self._exercise.lasts and not self._loop.checkpoints.snapshots.in_flight:
            self._disk.full = False
        if self._when is not _When.OVER:
            on = step == self._exercise.step and position > self._last
            self._when = _When.NOW if on else self._when if self._when is _When.AHEAD else _When.OVER
            self._last = position
        still_corrupt = self._exercise.fault == "corrupt-batch" and self._struck and position in self._struck.batches
        return self._strike[self._exercise.fault](batch) if self._when is _When.NOW or still_corrupt else batch

    def _note(self, what: str) -> None:
        """Record that the fault strikes now. Durable on return."""
        position, step = self._loop.step_in_progress.batch, self._loop.state.counters.step
        now = datetime.now(timezone.utc)
        struck = self._struck or Injected(rank=self._rank, step=step, at=now, batches=(), what=what)
        if position not in struck.batches:
            self._struck = struck.model_copy(update={"batches": (*struck.batches, position), "what": what})
            self._folder.write(self._folder.injected(self._rank), self._struck)

    # What can strike -----------------------------------------------------------------------------------------------

    def _make_loss_nan(self, batch: Any) -> Any:
        def spoil(value: Tensor) -> Tensor:
            return value * float("nan")

        return self._on_output(batch, spoil, "the model's output is NaN") if self._mine else batch

    def _multiply_gradient(self, batch: Any, factor: float) -> Any:
        def tap(value: Tensor) -> Tensor:
            if value.requires_grad:
                value.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
            return value

        return self._on_output(batch, tap, f"the gradient of the model's output is {factor:g} times as large")

    def _on_output(self, batch: Any, change: Callable[[Tensor], Tensor], what: str) -> Any:
        """Change the model's output for this batch. The next batch removes the hook."""

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return None  # the script evaluates something
            changed, count = _mapped(output, change, lambda value: value.is_floating_point())
            if count:
                self._note(what)
            return changed

        self._hooks.append(self._loop.model.register_forward_hook(hook))
        return batch

    def _corrupt(self, batch: Any) -> Any:
        if not self._mine:
            return batch
        source = torch.Generator().manual_seed(self._exercise.seed + self._loop.step_in_progress.batch)
        changed, count = _mapped(batch, lambda value: _noise(value, source), lambda value: value.numel() > 0)
        if count:
            self._note(f"{count} tensors of the batch are noise")
        return changed

    def _flip_bit(self, batch: Any) -> Any:
        weights = self._weights()
        if self._mine and self._struck is None and weights:
            _, weight = max(weights, key=lambda item: (item[0], item[1].numel()))
            kind, bit = _BIT_OF[weight.element_size()]
            place = self._exercise.seed % weight.numel()
            self._note(f"bit {bit.bit_length() - 1} of element {place} of a weight of {weight.numel()} is flipped")
            with torch.no_grad():
                element = weight[tuple(map(int, np.unravel_index(place, tuple(weight.shape))))].view(kind)
                element ^= bit
        return batch

    def _weights(self) -> list[tuple[int, Tensor]]:
        """This rank's parts of the weights, each with the number of ranks that have the same."""
        size = self._loop.run.ranks.world_size
        trained = (p for p in self._loop.model.parameters() if p.requires_grad and p.is_floating_point())
        parts = ((copies_of(parameter, size), detached(parameter)) for parameter in trained)
        return [(copies, part) for copies, part in parts if part.numel()]

    def _once(self, batch: Any, what: str, strike: Callable[[], object]) -> Any:
        if self._mine and self._struck is None:
            self._note(what)
            strike()
        return batch

    def _hang(self) -> None:
        while True:
            time.sleep(3600)

    def _be_told_to_stop(self) -> None:
        os.kill(int(os.environ[ENV_SUPERVISOR].partition(":")[0]), signal.SIGTERM)
        deadline = time.monotonic() + _SIGNAL_PATIENCE
        while not self._loop.requests.stop.requested and time.monotonic() < deadline:
            time.sleep(0.01)  # else a short job could end before the signal arrives

    def _fill_disk(self, batch: Any) -> Any:
        if self._struck is None:
            self._note("every file opened for writing in the run directory is refused: no space left on device")
            self._disk.fill()
        return batch

    # What it ends with ---------------------------------------------------------------------------------------------

    def _note_sample(self, position: int, batch: Any) -> None:
        tensors: dict[str, Tensor] = {}
        digest = xxhash.xxh3_128()
        _mapped(batch, lambda value: tensors.setdefault(str(len(tensors)), value), lambda value: True)
        for value in tensors.values():
            _add(digest, value)
        if not tensors:
            digest.update(repr(batch).encode())
        with open(self._folder.samples(self._rank), "a", encoding="utf-8") as file:
            file.write(json.dumps([position, digest.hexdigest()]) + "\n")

    def leave(self) -> None:
        """Record the end state and end this rank, without the code after the script's loop."""
        state = self._loop.state
        self._disk.full = False
        self._folder.write(
            self._folder.end(self._rank),
            EndState(
                rank=self._rank,
                step=state.counters.step,
                batch=state.cursor.batch,
                parts=self._parts(),
                replicas=max((copies for copies, _ in self._weights()), default=1),
            ),
        )
        self._loop.run.ranks.barrier()
        self._loop.close()
        sys.stdout.flush()
        raise SystemExit(0)

    def _parts(self) -> dict[str, str]:
        """Hashes of everything that an exact recovery must restore."""
        state = self._loop.state
        buffers = all_of(state.model)
        model = state.model.state_dict()
        parts = {
            "model": {name: value for name, value in model.items() if name not in buffers},
            "buffers": dict(state.model.named_buffers()),
            "optimizer": state.optimizer.state_dict(),
            "objects": {name: item.state_dict() for name, item in state.objects.items()},
            "counters": vars(state.counters),
            "kept": state.kept.state_dict(),
            # By stream: a stream that the script never seeds differs in every process, and is not compared.
            **_flat("random", rng.capture()),
            **_flat("cursor", state.cursor.state_dict()),
        }
        return {**{name: _digest(value) for name, value in parts.items()}, "data": self._data()}

    def _data(self) -> str:
        """A hash of the batches that count: at each position the last one handed out, without skipped positions."""
        with open(self._folder.samples(self._rank), encoding="utf-8") as file:
            handed_out = dict(json.loads(line) for line in file if line.endswith("\n"))
        end, windows = self._loop.state.cursor.batch, self._loop.batches.skips.windows
        kept = [
            (position, held)
            for position, held in sorted(handed_out.items())
            if position < end and not any(position in window for window in windows)
        ]
        return xxhash.xxh3_128(json.dumps(kept).encode()).hexdigest()


class _FullDisk:
    """Refuses to open files for writing below a directory while `full`.

    It is an audit hook of the interpreter, which sees every open and mkdir. Open files can still be written.
    """

    def __init__(self, root: str) -> None:
        self._below = root.rstrip("/") + "/"
        self.full = False

    def fill(self) -> None:
        """Call it once in a process: an audit hook cannot be removed."""
        self.full = True
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.full or event not in ("open", "os.mkdir", WRITES):
            return
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike) or not os.fsdecode(path).startswith(self._below):
            return
        if event in ("os.mkdir", WRITES) or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(path))


def _mapped(value: Any, change: Callable[[Tensor], Any], which: Callable[[Tensor], bool]) -> tuple[Any, int]:
    """The same structure with the tensors that `which` chooses changed, and their number."""
    count = 0

    def visit(item: Any) -> Any:
        nonlocal count
        if isinstance(item, Tensor):
            if not which(item):
                return item
            count += 1
            return change(item)
        if isinstance(item, Mapping):
            changed = {key: visit(inner) for key, inner in item.items()}
            try:
                return type(item)(changed)  # type: ignore[call-arg]
            except TypeError:
                return changed
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            given = (each.name for each in dataclasses.fields(item) if each.init)
            return dataclasses.replace(item, **{name: visit(getattr(item, name)) for name in given})
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*(visit(inner) for inner in item))
        return type(item)(visit(inner) for inner in item) if isinstance(item, list | tuple) else item

    return visit(value), count


def _noise(value: Tensor, source: torch.Generator) -> Tensor:
    """Noise of the same shape and type: whole numbers within the range of the values, others far outside of it."""
    if value.is_floating_point():
        spread = float(value.detach().float().abs().nan_to_num().max()) or 1.0
        noise = torch.randn(value.shape, generator=source) * (1000.0 * spread)
        return noise.to(value.device, value.dtype)
    if value.dtype == torch.bool or value.is_complex():
        return value
    low, high = int(value.min()), int(value.max())
    return torch.randint(low, high + 1, value.shape, generator=source).to(value.device, value.dtype)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """The leaves of nested mappings, each under its path."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {path: leaf for key, inner in value.items() for path, leaf in _flat(f"{name}/{key}", inner).items()}


def _digest(value: Any) -> str:
    tensors: dict[str, Tensor] = {}
    digest = xxhash.xxh3_128(json.dumps(tree.encode(value, "", tensors)).encode())
    for name, item in sorted(tensors.items()):
        digest.update(name.encode())
        _add(digest, item)
    return digest.hexdigest()


def _add(digest: Any, value: Tensor) -> None:
    digest.update(f"{value.dtype}{list(value.shape)}".encode())
    flat = detached(value).cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
