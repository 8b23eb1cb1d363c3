"""The pulse: one small all-reduce in each step. It starts when the step ends, and is read when the next step ends.

It carries everything on which ranks must agree (see `beat`). The reduced vector is the same on every rank, and ranks
act on it alone, so they act in the same way. Values of one rank decide nothing.

A beat costs a host the same for any number of ranks. Three things cost more, and are rare. If a value was not finite
anywhere, `read` asks by another all-reduce on which ranks. On a device, which composes a beat without a look at its
values, it first adds up what is finite by one more. And if all ranks have agreed before that each has one to send, a
shard report of `SHARD_REPORT` numbers of each rank follows in the vector. A rank's own place is zero on all others, so
reports arrive exactly: whole numbers below 2**53. They stay one tensor: no Python object is made for a rank, but where
all are on one host and their rows lie in shared memory: there Python adds up a few rows sooner than torch does.
"""

import contextlib
import math
import time
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollback.train.comm.beat import (
    AILMENTS_AT,
    CLIP_FACTOR,
    FIELDS,
    HOST_AT,
    NO_GAUGES,
    SCALARS,
    SCALER_SKIPPED,
    SHARD_REPORT,
    Beat,
    Gauges,
    Signs,
    gauge_values,
    read_beat,
    row_of,
    without_ill,
)
from rollback.train.comm.host_sums import share
from rollback.train.comm.ranks import InCollective, Ranks

_PATIENCE, _POLL = 2.0, 0.001


class Pulse:
    """At most one beat is under way. The constructor, `send` and `read` are collective. `send` does not wait; `read`
    waits for the sum.

    The collective of `read` was started a whole step before. On CUDA the computing stream never waits: the sum goes to
    pinned host memory on a stream of its own. On the CPU the ranks of one host add up in memory that they share. For
    those of several hosts it is a collective of the default group, and each rank waits for it before its update: who
    has the sums of a step's gradients has the beat before them then, also if a rank dies in its update.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        on_gpu = device.type == ranks.device.type == "cuda"
        self._device = device if on_gpu or not ranks.distributed else ranks.device
        self._cuda = self._device.type == "cuda"
        on_cpu = ranks.distributed and ranks.world_size > 1 and ranks.device.type == "cpu"
        self._shared = share(ranks, FIELDS + SHARD_REPORT) if on_cpu else None
        length = FIELDS + ranks.world_size * SHARD_REPORT if self._cuda else 0
        self._host = torch.zeros(length, dtype=torch.float64, device="cpu", pin_memory=self._cuda)
        self._side = torch.cuda.Stream(self._device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event(blocking=True) if self._cuda else None  # type: ignore[no-untyped-call]
        self._sent: bytes | Tensor = b""
        self._zeros: dict[torch.dtype, Tensor] = {}  # on the device
        self._own: Tensor | list[float] = []  # this rank's vector of the beat that is under way
        self._work: dist.Work | None = None
        self._vector: Tensor | list[float] | None = None  # of the beat that is under way
        self._has_reports = False
        self._handed: InCollective | None = None  # the last vector that a collective got

    @property
    def under_way(self) -> bool:
        return self._vector is not None

    def send(
        self, loss: Tensor | float | None, grad_norm: Tensor | float | None, signs: Signs, gauges: Gauges = NO_GAUGES
    ) -> None:
        """Start a beat. loss, grad_norm: of this rank, of any float dtype and on any device."""
        self._has_reports = signs.shard_report is not None
        compose = self._compose_on_device if self._cuda else self._compose_on_host
        self._vector = vector = compose(loss, grad_norm, signs, gauges)
        if isinstance(vector, list):
            if self._shared is not None:
                self._ranks.sums_in_memory += 1
                self._shared.put([*vector, *(signs.shard_report or ())])
            return
        if self._ranks.distributed:
            self._handed = InCollective(vector)
            self._work = dist.all_reduce(vector, async_op=True)
        if self._side is not None and self._arrived is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.device(self._device), torch.cuda.stream(self._side):  # see `copy_stream.current`
                if self._work is not None:
                    self._work.wait()
                vector.record_stream(self._side)
                self._host[: len(vector)].copy_(vector, non_blocking=True)
                self._arrived.record(self._side)

    def read(self) -> Beat:
        """The reduced beat. Collective: a beat with a value that is not finite is read on all ranks, or on none."""
        if (vector := self._vector) is None:
            raise RuntimeError("no beat is under way")
        if self._shared is not None:
            vector = self._sum_of(self._shared.rows())
        elif self._arrived is not None:
            self._arrived.synchronize()
            vector = self._host[: len(vector)]
            if not math.isfinite(sum(vector[:SCALARS].tolist())):  # nor is a sum that overflows
                vector = self._sum_without_ill(vector)
        elif self._work is not None:
            self._work.wait()
        beat = read_beat(vector, self._ranks.world_size)
        if not (math.isfinite(beat.loss or 0.0) and math.isfinite(beat.grad_norm or 0.0)):
            beat.nonfinite_ranks = self._nonfinite_ranks(beat)
        # Not before: a rank that waits here for one that died has judged nothing.
        self._work = self._vector = None
        return beat

    def await_sum(self) -> None:
        """Before this rank may begin its update: a backend of several threads may sum the gradients, which came later,
        before the beat. If this rank then died in its update, nobody would have that beat, nor the step. CUDA's streams
        keep the order. Raises RuntimeError as `read` does."""
        if self._work is not None and not self._cuda:
            self._work.wait()

    def sent(self) -> bytes | Tensor:
        """What this rank has put into the beat under way; empty: none is under way. On a device where it is composed
        there: then a copy, which nothing changes."""
        return self._sent if self.under_way else b""

    def close(self) -> None:
        """Wait until no beat is under way and the backend's threads hold no tensor. Not collective.

        A thread of gloo needs the interpreter's lock to release a tensor. An ending interpreter keeps the lock and
        waits for the thread. So this method waits first, for the time that peers may need to send their part. Peers
        that do not send it have died, and their connections are closed.
        """
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):  # of a device on which everything fails since an error
            while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
                time.sleep(_POLL)
        if self._shared is not None:
            self._shared.close()
        self._work = self._vector = None
        if self._handed is not None:
            self._handed.take_back()

    def _nonfinite_ranks(self, beat: Beat) -> tuple[int, ...]:
        """Collective: the ranks that `Beat.nonfinite_ranks` tells of, where a value of the beat is not finite."""
        at = AILMENTS_AT + (2 if math.isfinite(beat.loss or 0.0) else 0)
        row = torch.zeros(self._ranks.world_size, dtype=torch.float64, device=self._device)
        row[self._ranks.rank] = sum(self._own[at : at + 2])
        self._ranks.add_up(row)
        return tuple(row.nonzero().flatten().tolist())

    def _compose_on_host(
        self, loss: Tensor | float | None, grad_norm: Tensor | float | None, signs: Signs, gauges: Gauges = NO_GAUGES
    ) -> Tensor | list[float]:
        """The vector; the numbers themselves where no backend adds to them: of a rank alone, or in shared memory."""
        row = without_ill(row_of((loss, grad_norm, *gauge_values(gauges)), signs))
        if gauges.found_inf is not None:
            row[HOST_AT + SCALER_SKIPPED] += gauges.found_inf.item() > 0
        self._own = row
        numbers = array("d", row)
        self._sent = numbers.tobytes()  # the sum will be where the numbers are
        if self._shared is not None or (not self._ranks.distributed and signs.shard_report is None):
            return row
        beat = torch.frombuffer(numbers, dtype=torch.float64)
        return beat if signs.shard_report is None else torch.cat([beat, self._report_row(signs.shard_report)])

    def _sum_of(self, rows: "Sequence[memoryview[float]]") -> Tensor | list[float]:
        """The vector, of what all ranks have put."""
        total: list[float] = [*map(sum, zip(*(row[:FIELDS] for row in rows), strict=True))]
        if not self._has_reports:
            return total
        reports = chain.from_iterable(row[FIELDS:] for row in rows)
        return torch.tensor([*total, *reports], dtype=torch.float64, device="cpu")

    def _compose_on_device(
        self, loss: Tensor | float | None, grad_norm: Tensor | float | None, signs: Signs, gauges: Gauges = NO_GAUGES
    ) -> Tensor:
        """The vector, with values that may not be finite. What the host knows goes there in one piece, and what is
        there already is added: each operation costs the host more than the device."""
        given = [loss, grad_norm, *gauge_values(gauges)]
        on_device = {place: self._on_device(item) for place, item in enumerate(given) if self._is_there(item)}
        row = row_of([None if place in on_device else item for place, item in enumerate(given)], signs)
        for place in on_device:
            row[SCALARS + place] = 1.0
        vector = self._to_device(row)
        if gauges.measured_squares is not None and CLIP_FACTOR in on_device:
            shown = on_device[CLIP_FACTOR]  # a rank's part of a sharded gradient may not show it, in step after step
            on_device[CLIP_FACTOR] = shown.nan_to_num(0.0, math.inf, -math.inf)  # Inf would become the largest number
            vector[SCALARS + CLIP_FACTOR].sub_(shown.isnan().double())
        if on_device:
            vector[:SCALARS].add_(self._stacked(on_device))  # `+=` would copy what it has added once more
        if gauges.found_inf is not None:
            vector[HOST_AT + SCALER_SKIPPED].add_(self._on_device(gauges.found_inf) > 0)
        self._own = self._sent = vector.clone()  # the sum will be where the vector is
        return vector if signs.shard_report is None else torch.cat([vector, self._report_row(signs.shard_report)])

    def _stacked(self, scalars: dict[int, Tensor]) -> Tensor:
        """These at their places, and zeros at the others."""
        kinds = {item.dtype for item in scalars.values()}
        if len(kinds) > 1:  # else torch would round a whole number beside a half one
            scalars, kinds = {place: item.double() for place, item in scalars.items()}, {torch.float64}
        (kind,) = kinds
        if (zero := self._zeros.get(kind)) is None:
            zero = self._zeros[kind] = torch.zeros((), dtype=kind, device=self._device)
        return torch.stack([scalars.get(place, zero) for place in range(SCALARS)])

    def _sum_without_ill(self, vector: Tensor) -> Tensor:
        """Collective, of a device: the sum of vectors without values that are not finite, before the reports that have
        arrived."""
        assert isinstance(self._own, Tensor)
        self._own = own = without_ill(self._own.tolist())
        total = self._to_device(own)
        self._ranks.add_up(total)
        return torch.cat([total.cpu(), vector[FIELDS:]])

    def _report_row(self, report: tuple[int, ...]) -> Tensor:
        """This rank's shard report at its place among those of all ranks."""
        row = torch.zeros(SHARD_REPORT * self._ranks.world_size, dtype=torch.float64, device=self._device)
        place = SHARD_REPORT * self._ranks.rank
        row[place : place + SHARD_REPORT] = self._to_device(list(map(float, report)))
        return row

    def _to_device(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device="cpu").to(self._device, non_blocking=True)

    def _is_there(self, scalar: object) -> bool:
        return isinstance(scalar, Tensor) and scalar.device.type == self._device.type

    def _on_device(self, scalar: Any) -> Tensor:
        """Not that of another device, and without what costs an operation and changes nothing."""
        there: Tensor = scalar.to(self._device, non_blocking=True)
        there = there.detach() if there.requires_grad else there
        return there.reshape(()) if there.dim() else there
