"""The pulse: one small all-reduce in each step. It starts when the step ends, and is read when the next step ends.

It carries everything on which ranks must agree. The reduced vector is the same on every rank, and ranks act on it
alone, so they act in the same way. Values of one rank decide nothing.

`HostFields` and `GaugeFields` are the one table of its content. What a rank sends (`Signs`, `Gauges`), the vector, and
what is read (`Beat`) follow from this table. A new field is one line there.

Layout of the vector (float64, summed): loss, gradient norm and gauges; the number of ranks that have each; the number
of ranks whose loss and norm were NaN and Inf; the host's fields. Values that are not finite are left out of the sums.
So a beat costs a host the same for any number of ranks. Two things cost more, and are rare. If a value was not finite
anywhere, `read` asks by a second all-reduce on which ranks. And if all ranks have agreed before that each has one to
send, a letter of `LETTER` numbers from each rank follows in the vector. A rank's own place is zero on all other ranks,
so letters arrive exactly: whole numbers below 2**53. They stay one tensor: no Python object is made for a rank.
"""

import contextlib
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollback.train.comm.host_sums import Rows, share
from rollback.train.comm.ranks import Handed, Ranks

LETTER = 8
"""Numbers of a letter."""


_PATIENCE, _POLL = 2.0, 0.001


@dataclass
class HostFields:
    """Values that only the rank's host knows.

    The type of a field says how it is reduced: bool: true on any rank; int: the sum over the ranks (of a yes or no: the
    number of ranks with yes); float: the mean over the ranks. `Snapshots.signs` fills the fields about snapshots,
    `Judge.end_step` the others.
    """

    stop: bool = False
    """The rank was told to stop."""
    scaler_skipped: bool = False
    """The gradient scaler dropped the update."""
    shard_written: int = 0
    """The rank's shard of the snapshot in flight is written."""
    shard_failed: int = 0
    """The rank's part of the snapshot in flight has failed."""
    committed: int = 0
    """The rank has committed the snapshot in flight."""
    announced: bool = False
    """The script has announced a phase that begins with this step."""
    asked: bool = False
    """An operator has asked for something."""
    torn: int = 0
    """Tensors of the snapshot in flight were changed while they were read."""
    ready: int = 0
    """The buffer for the next snapshot is ready."""
    tier_failed: int = 0
    """The tier of the next snapshot cannot be written."""
    outgrown: int = 0
    """The state did not fit into the buffer of the last snapshot."""
    stall: float = 0.0
    """Seconds that the loop waited for the last snapshot."""
    step_seconds: float = 0.0
    """Seconds that a step takes."""
    missed: int = 0
    """A checkpoint that is about to become good is missing."""


Scalar = TypeVar("Scalar", Tensor | float, float)


@dataclass
class GaugeFields(Generic[Scalar]):
    """Scalars on the device, or numbers of the host. Reduced to the mean over the ranks with a finite value; None: no
    rank has one."""

    scale: Scalar | None = None
    """The factor of a gradient scaler."""
    kept: Scalar | None = None
    """Share of the gradient that clipping left."""
    measured: Scalar | None = None
    """The gradient norm that the guard measured."""
    squares: Scalar | None = None
    """Of sharded gradients, where the script reports no norm: the sum of this rank's squares, times the number of
    ranks, with replicas weighted so that each element counts once. The mean over the ranks is the norm's square."""
    measured_squares: Scalar | None = None
    """The same, whether the script reports a norm or not: for `measured`."""


@dataclass
class Signs(HostFields):
    """What one rank sends besides scalars."""

    letter: tuple[int, ...] | None = None
    """`LETTER` whole numbers that all ranks read. All ranks send one, or none does."""


@dataclass
class Gauges(GaugeFields[Tensor | float]):
    """Scalars of one rank besides loss and gradient norm."""

    found_inf: Tensor | None = None
    """Above zero if a fused optimizer drops the update: the same as `Signs.scaler_skipped`."""


@dataclass(kw_only=True)
class Beat(HostFields, GaugeFields[float]):
    """A reduced pulse: the same on every rank."""

    loss: float | None = None
    """Mean over the ranks, NaN or Inf if any rank's was; None if no rank had one."""
    grad_norm: float | None = None
    """As `loss`."""
    ailing: tuple[int, ...] = ()
    """The ranks whose loss was not finite; if there are none, the ranks whose gradient norm was not (after DDP's
    all-reduce these are all ranks)."""
    letters: Tensor | None = None
    """A row of `LETTER` whole numbers for each rank (int64, on the host); None on most beats."""


_HOST: dict[str, Callable[[float], float]] = {name: type(value) for name, value in vars(HostFields()).items()}
_MEANS = tuple(name for name, kind in _HOST.items() if kind is float)
_GAUGES = tuple(field.name for field in fields(GaugeFields))
_SCALER_SKIPPED = list(_HOST).index("scaler_skipped")
_host_values, _gauge_values = attrgetter(*_HOST), attrgetter(*_GAUGES)
_SCALARS = 2 + len(_GAUGES)  # loss and gradient norm come first
_JUDGED = 2  # of these: where one is not finite, it is told whether it is NaN or Inf
_AILMENTS_AT = 2 * _SCALARS
_HOST_AT = _AILMENTS_AT + 2 * _JUDGED
FIELDS = _HOST_AT + len(_HOST)
"""Numbers of the vector before the letters."""

NO_GAUGES = Gauges()


class Pulse:
    """At most one beat is under way. The constructor, `send` and `read` are collective. `send` does not wait; `read`
    waits for the sum.

    The collective of `read` was started a whole step before. On CUDA the computing stream never waits: the sum goes to
    pinned host memory on a stream of its own. On the CPU the ranks of one host add up in memory that they share. For
    those of several hosts it is a collective of the default group: who has the sums of a step's gradients has the beat
    before them then, also if a rank dies in that step.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device if device.type == "cuda" and ranks.device.type == "cuda" else ranks.device
        if not ranks.distributed:
            self._device = device
        self._cuda = self._device.type == "cuda"
        on_cpu = ranks.distributed and ranks.world_size > 1 and ranks.device.type == "cpu"
        self._shared = share(ranks, FIELDS + LETTER) if on_cpu else None
        room = FIELDS + ranks.world_size * LETTER if self._cuda else 0
        self._host = torch.zeros(room, dtype=torch.float64, pin_memory=self._cuda)
        self._side = torch.cuda.Stream(self._device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event(blocking=True) if self._cuda else None  # type: ignore[no-untyped-call]
        self._sent: bytes | Tensor = b""
        self._orders: dict[tuple[int, ...], Tensor] = {}
        self._ailments: Tensor | list[float] | None = None  # this rank's, of the beat that is under way
        self._work: dist.Work | None = None
        self._vector: Tensor | list[float] | None = None
        self._has_letters = False
        self._handed: Handed | None = None  # the last vector that a collective got

    @property
    def under_way(self) -> bool:
        return self._vector is not None

    def send(self, loss: Tensor | None, grad_norm: Tensor | None, signs: Signs, gauges: Gauges = NO_GAUGES) -> None:
        """Start a beat. loss, grad_norm: scalars of this rank (any float dtype and device), or None."""
        self._has_letters = signs.letter is not None
        compose = self._compose_on_device if self._cuda else self._compose_on_host
        self._vector = vector = compose(loss, grad_norm, signs, gauges)
        if isinstance(vector, list):
            if self._shared is not None:
                self._ranks.sums_in_memory += 1
                self._shared.put(vector, signs.letter or ())
            return
        if self._ranks.distributed:
            self._handed = Handed(vector)
            self._work = dist.all_reduce(vector, async_op=True)
        if self._side is not None and self._arrived is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
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
        elif self._work is not None:
            self._work.wait()
        self._work = self._vector = None
        beat = _beat(vector, self._ranks.world_size)
        beat.ailing = self._ailing(beat)
        return beat

    @property
    def sent(self) -> bytes | Tensor:
        """What this rank has put into the beat under way; empty: none is under way. On a device where it is composed
        there: then a copy, which nothing changes."""
        return self._sent if self._vector is not None else b""

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

    def _ailing(self, beat: Beat) -> tuple[int, ...]:
        """Collective where a value of the beat is not finite: the ranks that `Beat.ailing` tells of."""
        if _is_finite(beat.loss) and _is_finite(beat.grad_norm):
            return ()
        assert self._ailments is not None
        mine = self._ailments[2:] if _is_finite(beat.loss) else self._ailments[:2]
        row = torch.zeros(self._ranks.world_size, dtype=torch.float64, device=self._device)
        row[self._ranks.rank] = sum(mine)
        if self._ranks.distributed:
            handed = Handed(row)
            dist.all_reduce(row)
            handed.take_back()
        return tuple(row.nonzero().flatten().tolist())

    def _compose_on_host(
        self, loss: Tensor | None, grad_norm: Tensor | None, signs: Signs, gauges: Gauges = NO_GAUGES
    ) -> Tensor | list[float]:
        """The vector; the numbers themselves where no backend adds to them: of a rank alone, or in shared memory."""
        row = _row((loss, grad_norm, *_gauge_values(gauges)), signs)
        if gauges.found_inf is not None:
            row[_HOST_AT + _SCALER_SKIPPED] += gauges.found_inf.item() > 0
        self._ailments = row[_AILMENTS_AT:_HOST_AT]
        numbers = array("d", row)
        self._sent = numbers.tobytes()  # the sum will be where the numbers are
        if self._shared is not None or (not self._ranks.distributed and signs.letter is None):
            return row
        beat = torch.frombuffer(numbers, dtype=torch.float64)
        return beat if signs.letter is None else torch.cat([beat, self._letter_row(signs.letter)])

    def _sum_of(self, rows: Rows) -> Tensor | list[float]:
        """The vector, of what all ranks have put."""
        with np.errstate(all="ignore"):  # a script may have made errors of them
            total: list[float] = rows[:, :FIELDS].sum(0).tolist()
        if not self._has_letters:
            return total
        return torch.cat([torch.tensor(total, dtype=torch.float64), torch.tensor(rows[:, FIELDS:]).flatten()])

    def _compose_on_device(
        self, loss: Tensor | None, grad_norm: Tensor | None, signs: Signs, gauges: Gauges = NO_GAUGES
    ) -> Tensor:
        """The vector. What the host knows goes there in one piece, and what is there already is put in between: each
        operation costs the host more than the device."""
        given = (loss, grad_norm, *_gauge_values(gauges))
        on_device = {place: self._on_device(item) for place, item in enumerate(given) if self._is_there(item)}
        vector = self._to_device(_row([None if at in on_device else item for at, item in enumerate(given)], signs))
        if there := tuple(on_device):
            parts = _parts([*on_device.values()], judged=sum(place < _JUDGED for place in there))
            vector = torch.cat([vector, *parts]).index_select(0, self._order_of(there))
        if gauges.found_inf is not None:
            vector[_HOST_AT + _SCALER_SKIPPED] += (self._on_device(gauges.found_inf) > 0).double()
        self._sent = vector.clone()  # the sum will be where the vector is
        self._ailments = self._sent[_AILMENTS_AT:_HOST_AT]
        return vector if signs.letter is None else torch.cat([vector, self._letter_row(signs.letter)])

    def _order_of(self, there: tuple[int, ...]) -> Tensor:
        """Where each number of the vector is, of the host's row and the `_parts` of the scalars in these places."""
        if (order := self._orders.get(there)) is None:
            places, ill = [*range(FIELDS)], [place for place in there if place < _JUDGED]
            of_parts = [
                *there, *(_SCALARS + place for place in there),
                *(_AILMENTS_AT + 2 * place + kind for kind in range(2) for place in ill),
            ]  # fmt: skip
            for number, place in enumerate(of_parts):
                places[place] = FIELDS + number
            order = self._orders[there] = torch.tensor(places).to(self._device)
        return order

    def _letter_row(self, letter: tuple[int, ...]) -> Tensor:
        """This rank's letter at its place among those of all ranks."""
        row = torch.zeros(LETTER * self._ranks.world_size, dtype=torch.float64, device=self._device)
        place = LETTER * self._ranks.rank
        row[place : place + LETTER] = self._to_device(list(map(float, letter)))
        return row

    def _to_device(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64).to(self._device, non_blocking=True)

    def _is_there(self, scalar: object) -> bool:
        return isinstance(scalar, Tensor) and scalar.device.type == self._device.type

    def _on_device(self, scalar: Any) -> Tensor:
        """Not that of another device."""
        there: Tensor = scalar.detach().to(self._device, non_blocking=True).reshape(())
        return there


def _row(given: Sequence[Tensor | float | None], signs: Signs) -> list[float]:
    """The vector of these scalars of the host."""
    row = [0.0] * FIELDS
    for place, scalar in enumerate(given):
        if scalar is None:
            continue
        value = scalar if type(scalar) is float else scalar.item()  # type: ignore[union-attr]
        if math.isfinite(value):
            row[place], row[_SCALARS + place] = value, 1.0
        elif place < _JUDGED:
            row[_AILMENTS_AT + 2 * place + math.isinf(value)] = 1.0
    row[_HOST_AT:] = _host_values(signs)
    return row


def _parts(scalars: list[Tensor], judged: int) -> list[Tensor]:
    """What scalars of a device add to the vector: the values, and which are finite; of the first ones, that are judged,
    which are NaN, and which are Inf."""
    values = torch.stack(scalars).double()
    first = values[:judged]
    return [values.nan_to_num(0.0, 0.0, 0.0), values - values == 0.0, torch.isnan(first), torch.isinf(first)]


def beat_of(sent: Sequence[bytes]) -> Beat | None:
    """The beat that the ranks have together, by what each has put into it (`Pulse.sent`), without `ailing` and letters.

    None: in another order of the ranks the sums might be rounded otherwise, so they may not be what the group computes.
    """
    columns = zip(*(array("d", own) for own in sent), strict=True)
    sums: list[Any] = [_exact_sum(column) for column in columns]
    return None if None in sums else _beat(sums, len(sent))


def _exact_sum(column: Sequence[float]) -> float | None:
    """The sum, if it is the same in whatever order: of two values at most, or where all partial sums are exact. They
    are if all values are whole multiples of one power of two, and together below 2**53 of it."""
    ratios = [value.as_integer_ratio() for value in column]
    finest = max(below for _, below in ratios)
    total = sum(abs(above) * (finest // below) for above, below in ratios)
    common = math.gcd(*(above * (finest // below) for above, below in ratios)) or 1
    power = common & -common
    return math.fsum(column) if len(column) <= 2 or total // power < 1 << 53 else None


def _beat(vector: Tensor | list[float], world_size: int) -> Beat:
    """All of a beat but `ailing`. vector: on the host."""
    row, letters = vector, None
    if isinstance(vector, Tensor):
        row = (vector if vector.numel() == FIELDS else vector[:FIELDS]).tolist()
        letters = vector[FIELDS:].long().view(-1, LETTER) if vector.numel() > FIELDS else None
    counts, ailments, host = row[_SCALARS:], row[_AILMENTS_AT:], row[_HOST_AT:]
    loss, grad_norm, *gauges = [
        total / count if count else None for total, count in zip(row[:_SCALARS], counts, strict=False)
    ]  # fmt: skip
    table: dict[str, Any] = {name: kind(total) for (name, kind), total in zip(_HOST.items(), host, strict=True)}
    for name in _MEANS:
        table[name] /= world_size
    table.update(zip(_GAUGES, gauges, strict=True))
    if table["squares"] is not None:
        grad_norm = math.sqrt(table["squares"])
    if table["measured_squares"] is not None:
        table["measured"] = math.sqrt(table["measured_squares"])
    return Beat(
        loss=_unless_ill(loss, *ailments[:2]),
        grad_norm=_unless_ill(grad_norm, *ailments[2:4]),
        letters=letters,
        **table,
    )


def _unless_ill(mean: float | None, nan: float, inf: float) -> float | None:
    """nan, inf: the number of ranks with each."""
    if nan:
        return math.nan
    return math.inf if inf else mean


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
