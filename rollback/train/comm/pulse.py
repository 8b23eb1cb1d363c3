"""The pulse: one small all-reduce a step, started when the step ends and read when the next one does.

Everything on which ranks must agree rides on it. The reduced vector is the same on every rank, and ranks act on nothing
else, so they act alike. Rank-local values never decide anything.

Layout of the vector (float64, summed): `PulseField`s, then one code for each rank that says what was not finite there,
then, on a beat before which all ranks have agreed that each has one to send, a letter of `LETTER` numbers from each.
Non-finite values themselves are left out of the sums: a NaN would blot out who sent it. A rank's own place is zero on
all others, so a code or a word of a letter arrives exactly: whole numbers below 2**53.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch
import torch.distributed as dist
from torch import Tensor

from rollback.train.comm.ranks import Handed, Ranks


class PulseField(IntEnum):
    """Places in the vector. Those from STOP to MISSED are known to the host, the others read on the device."""

    LOSS = 0
    GRAD = 1
    LOSS_COUNT = 2
    GRAD_COUNT = 3
    STOP = 4
    SCALER_SKIPPED = 5
    SHARD_WRITTEN = 6
    SHARD_FAILED = 7
    COMMITTED = 8
    ANNOUNCED = 9
    ASKED = 10
    TORN = 11
    READY = 12
    TIER_FAILED = 13
    OUTGROWN = 14
    STALL = 15
    STEP_SECONDS = 16
    MISSED = 17
    SCALE = 18
    KEPT = 19
    MEASURED = 20
    SCALE_COUNT = 21
    KEPT_COUNT = 22
    MEASURED_COUNT = 23


LETTER = 6
"""Words of a letter."""


_PATIENCE, _POLL = 2.0, 0.001


class Ailment(IntFlag):
    """What was not finite on a rank."""

    LOSS_NAN = 1
    LOSS_INF = 2
    GRAD_NAN = 4
    GRAD_INF = 8


@dataclass
class Signs:
    """What one rank puts on the pulse besides loss and gradient norm: facts that only its host knows.

    ready: what the next snapshot is copied into is. outgrown: the state had no room in the last one. stall: seconds
    that the last snapshot held up the loop.
    step_seconds: what a step takes. missed: a checkpoint that is about to become good is not there any more. letter:
    `LETTER` whole numbers for all ranks to read, on all ranks or on none.
    """

    stop: bool = False
    scaler_skipped: bool = False
    shard_written: bool = False
    shard_failed: bool = False
    committed: bool = False
    announced: bool = False
    asked: bool = False
    torn: bool = False
    ready: bool = False
    tier_failed: bool = False
    outgrown: bool = False
    stall: float = 0.0
    step_seconds: float = 0.0
    missed: bool = False
    letter: tuple[int, ...] | None = None

    def row(self) -> list[float]:
        """In the order of the fields from STOP on."""
        return [
            float(value)
            for value in (
                self.stop,
                self.scaler_skipped,
                self.shard_written,
                self.shard_failed,
                self.committed,
                self.announced,
                self.asked,
                self.torn,
                self.ready,
                self.tier_failed,
                self.outgrown,
                self.stall,
                self.step_seconds,
                self.missed,
            )
        ]

    def letter_row(self, ranks: Ranks) -> list[float]:
        """This rank's letter at its place among those of all ranks; nothing where none is sent."""
        if self.letter is None:
            return []
        row = [0.0] * (LETTER * ranks.world_size)
        row[LETTER * ranks.rank : LETTER * (ranks.rank + 1)] = map(float, self.letter)
        return row


@dataclass(frozen=True)
class Gauges:
    """Scalars of one rank that are read on the device; None where there is no such thing.

    scale: of a gradient scaler. kept: share of the gradient that clipping left. measured: gradient norm as the guard
    measured it, whatever the script says. found_inf: above zero if a fused optimizer is told to drop the update.
    """

    scale: Tensor | None = None
    kept: Tensor | None = None
    measured: Tensor | None = None
    found_inf: Tensor | None = None

    def row(self, device: torch.device) -> Tensor:
        """In the order of the fields from SCALE on: values, then whether each is there. What is not finite is not."""
        given = (self.scale, self.kept, self.measured)
        values = torch.stack([_on(device, gauge) for gauge in given])
        present = torch.tensor([gauge is not None for gauge in given]).to(device, non_blocking=True)
        present &= torch.isfinite(values)
        return torch.cat([torch.where(present, values, 0.0), present.double()])


def _on(device: torch.device, value: Tensor | None) -> Tensor:
    if value is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    return value.detach().to(device, torch.float64, non_blocking=True).reshape(())


NO_GAUGES = Gauges()


@dataclass(frozen=True)
class Beat:
    """A reduced pulse: the same on every rank.

    loss, grad_norm: mean over the ranks, NaN or Inf if any rank's was; None if no rank had one.
    ailing: ranks whose loss was not finite; failing that, those whose gradient norm was not (DDP's all-reduce
    makes that everybody's). The counts are numbers of ranks. stall, step_seconds: means over the ranks; see `Signs`.
    scale, kept, measured: means over the ranks that have one; see `Gauges`. letters: by rank; none on most beats.
    """

    loss: float | None
    grad_norm: float | None
    ailing: tuple[int, ...]
    stop: bool
    scaler_skipped: bool
    shards_written: int
    shards_failed: int
    commits: int
    announced: bool = False
    asked: bool = False
    torn: int = 0
    ready: int = 0
    tiers_failed: int = 0
    outgrown: int = 0
    stall: float = 0.0
    step_seconds: float = 0.0
    missed: int = 0
    letters: tuple[tuple[int, ...], ...] = ()
    scale: float | None = None
    kept: float | None = None
    measured: float | None = None


class Pulse:
    """At most one beat is under way. `send` and `read` are collective; `send` does not wait, `read` waits for the sum.

    `read` costs no more than the wait for a collective that was started a whole step ago. On CUDA neither makes the
    computing stream wait: the sum goes to pinned host memory on a stream of its own.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device if device.type == "cuda" and ranks.device.type == "cuda" else ranks.device
        if not ranks.distributed:
            self._device = device
        size = len(PulseField) + ranks.world_size * (1 + LETTER)
        self._cuda = self._device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=self._cuda)
        self._side = torch.cuda.Stream(self._device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]
        self._weights = torch.tensor([1.0, 4.0], dtype=torch.float64, device=self._device)
        self._work: dist.Work | None = None
        self._vector: Tensor | None = None
        self._handed: Handed | None = None  # the last one that a collective was given

    @property
    def under_way(self) -> bool:
        return self._vector is not None

    def send(self, loss: Tensor | None, grad_norm: Tensor | None, signs: Signs, gauges: Gauges = NO_GAUGES) -> None:
        """Start a beat. loss, grad_norm: scalars of this rank (any float dtype and device), or None."""
        compose = self._compose_on_device if self._cuda else self._compose_on_host
        self._vector = compose(loss, grad_norm, signs, gauges)
        if self._ranks.distributed:
            self._handed = Handed(self._vector)
            self._work = dist.all_reduce(self._vector, async_op=True)
        if self._side is not None and self._arrived is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                if self._work is not None:
                    self._work.wait()
                self._vector.record_stream(self._side)
                self._host[: len(self._vector)].copy_(self._vector, non_blocking=True)
                self._arrived.record(self._side)

    def read(self) -> Beat:
        """The beat that is under way, reduced."""
        if self._vector is None:
            raise RuntimeError("no beat is under way")
        if self._arrived is not None:
            self._arrived.synchronize()
        else:
            if self._work is not None:
                self._work.wait()
            self._host[: len(self._vector)].copy_(self._vector)
        vector = self._host[: len(self._vector)].tolist()
        self._work = self._vector = None
        return _beat(vector, self._ranks.world_size)

    def close(self) -> None:
        """Nothing of a beat is under way any more, nor held by the backend's threads. Not collective.

        A thread of gloo that lets go of a tensor needs the interpreter's lock for it. An interpreter that ends holds
        that lock for good, and waits for the thread. So what is left is waited for here, for as long as peers may
        take to send their part; where they do not, they have died, and their connections with them.
        """
        deadline = time.monotonic() + _PATIENCE
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(_POLL)
        self._work = self._vector = None
        if self._handed is not None:
            self._handed.take_back()

    def _compose_on_host(
        self, loss: Tensor | None, grad_norm: Tensor | None, signs: Signs, gauges: Gauges = NO_GAUGES
    ) -> Tensor:
        values, counts, ailment = [0.0, 0.0], [0.0, 0.0], 0.0
        for place, (tensor, weight) in enumerate(((loss, 1.0), (grad_norm, 4.0))):
            if tensor is None:
                continue
            value = tensor.item()
            if math.isfinite(value):
                values[place], counts[place] = value, 1.0
            else:
                ailment += weight * (1.0 if math.isnan(value) else 2.0)
        codes = [0.0] * self._ranks.world_size
        codes[self._ranks.rank] = ailment
        known = signs.row()
        if gauges.found_inf is not None:
            known[PulseField.SCALER_SKIPPED - PulseField.STOP] += gauges.found_inf.item() > 0
        read, there = [0.0] * 3, [0.0] * 3
        for place, gauge in enumerate((gauges.scale, gauges.kept, gauges.measured)):
            if gauge is not None and math.isfinite(gauge.item()):
                read[place], there[place] = gauge.item(), 1.0
        letters = signs.letter_row(self._ranks)
        return torch.tensor([*values, *counts, *known, *read, *there, *codes, *letters], dtype=torch.float64)

    def _compose_on_device(
        self, loss: Tensor | None, grad_norm: Tensor | None, signs: Signs, gauges: Gauges = NO_GAUGES
    ) -> Tensor:
        values = torch.stack([_on(self._device, value) for value in (loss, grad_norm)])
        present = torch.tensor([float(loss is not None), float(grad_norm is not None)], dtype=torch.float64)
        finite = torch.isfinite(values)
        # 1 for NaN and 2 for Inf, in the digits of Ailment: the loss has weight 1, the gradient weight 4.
        ailment = ((~finite).double() * (2.0 - torch.isnan(values).double()) * self._weights).sum()
        codes = torch.zeros(self._ranks.world_size, dtype=torch.float64, device=self._device)
        codes[self._ranks.rank] = ailment
        known = torch.tensor(signs.row(), dtype=torch.float64).to(self._device, non_blocking=True)
        if gauges.found_inf is not None:
            known[PulseField.SCALER_SKIPPED - PulseField.STOP] += (_on(self._device, gauges.found_inf) > 0).double()
        return torch.cat([
            torch.where(finite, values, 0.0),
            present.to(self._device, non_blocking=True) * finite,
            known,
            gauges.row(self._device),
            codes,
            torch.tensor(signs.letter_row(self._ranks), dtype=torch.float64).to(self._device, non_blocking=True),
        ])  # fmt: skip


def _beat(vector: list[float], world_size: int) -> Beat:
    fields, letters = vector[: len(PulseField)], list(map(int, vector[len(PulseField) + world_size :]))
    codes = [Ailment(int(code)) for code in vector[len(PulseField) : len(PulseField) + world_size]]
    anywhere = Ailment(0)
    for code in codes:
        anywhere |= code
    return Beat(
        loss=_mean(
            fields[PulseField.LOSS], fields[PulseField.LOSS_COUNT], anywhere, Ailment.LOSS_NAN, Ailment.LOSS_INF
        ),
        grad_norm=_mean(
            fields[PulseField.GRAD], fields[PulseField.GRAD_COUNT], anywhere, Ailment.GRAD_NAN, Ailment.GRAD_INF
        ),
        ailing=_having(codes, Ailment.LOSS_NAN | Ailment.LOSS_INF) or _having(codes, anywhere),
        stop=fields[PulseField.STOP] > 0,
        scaler_skipped=fields[PulseField.SCALER_SKIPPED] > 0,
        shards_written=int(fields[PulseField.SHARD_WRITTEN]),
        shards_failed=int(fields[PulseField.SHARD_FAILED]),
        commits=int(fields[PulseField.COMMITTED]),
        announced=fields[PulseField.ANNOUNCED] > 0,
        asked=fields[PulseField.ASKED] > 0,
        torn=int(fields[PulseField.TORN]),
        ready=int(fields[PulseField.READY]),
        tiers_failed=int(fields[PulseField.TIER_FAILED]),
        outgrown=int(fields[PulseField.OUTGROWN]),
        stall=fields[PulseField.STALL] / world_size,
        step_seconds=fields[PulseField.STEP_SECONDS] / world_size,
        missed=int(fields[PulseField.MISSED]),
        letters=tuple(tuple(letters[start : start + LETTER]) for start in range(0, len(letters), LETTER)),
        scale=_over(fields[PulseField.SCALE], fields[PulseField.SCALE_COUNT]),
        kept=_over(fields[PulseField.KEPT], fields[PulseField.KEPT_COUNT]),
        measured=_over(fields[PulseField.MEASURED], fields[PulseField.MEASURED_COUNT]),
    )


def _over(total: float, count: float) -> float | None:
    return total / count if count else None


def _having(codes: list[Ailment], ailment: Ailment) -> tuple[int, ...]:
    return tuple(rank for rank, code in enumerate(codes) if code & ailment)


def _mean(total: float, count: float, anywhere: Ailment, nan: Ailment, inf: Ailment) -> float | None:
    if anywhere & nan:
        return math.nan
    if anywhere & inf:
        return math.inf
    return total / count if count else None
