"""What a beat carries: the table of its fields, and the vector that is reduced.

`HostFields` and `GaugeFields` are the one table of its content. What a rank sends (`Signs`, `Gauges`), the vector, and
what is read (`Beat`) follow from this table. A new field is one line there.

Layout of the vector (float64, summed): loss, gradient norm and gauges; the number of ranks that have each; the number
of ranks whose loss and norm were NaN and Inf; the host's fields; shard reports, if there are some. Values that are not
finite are left out of the sums (`without_ill`).
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

from torch import Tensor

SHARD_REPORT = 9
"""Numbers of a shard report."""


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
    clip_factor: Scalar | None = None
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

    shard_report: tuple[int, ...] | None = None
    """`SHARD_REPORT` whole numbers that all ranks read. All ranks send one, or none does."""


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
    """Mean over the ranks, NaN or Inf if any rank's was; None if no rank had one."""
    nonfinite_ranks: tuple[int, ...] = ()
    """The ranks whose loss was not finite; if there are none, the ranks whose gradient norm was not (after DDP's
    all-reduce these are all ranks)."""
    shard_reports: Tensor | None = None
    """A row of `SHARD_REPORT` whole numbers for each rank (int64, on the host); None on most beats."""


_HOST: dict[str, Callable[[float], float]] = {name: type(value) for name, value in vars(HostFields()).items()}
_MEANS = tuple(name for name, kind in _HOST.items() if kind is float)
_GAUGES = tuple(field.name for field in fields(GaugeFields))
SCALER_SKIPPED = list(_HOST).index("scaler_skipped")
_host_values, gauge_values = attrgetter(*_HOST), attrgetter(*_GAUGES)
_SCALARS = ("loss", "grad_norm", *_GAUGES)
SCALARS = len(_SCALARS)
CLIP_FACTOR = 2 + _GAUGES.index("clip_factor")
JUDGED = 2  # of these: where one is not finite, it is told whether it is NaN or Inf
AILMENTS_AT = 2 * SCALARS
HOST_AT = AILMENTS_AT + 2 * JUDGED
FIELDS = HOST_AT + len(_HOST)
"""Numbers of the vector before the shard reports."""

NO_GAUGES = Gauges()


def row_of(given: Sequence[Tensor | float | None], signs: Signs) -> list[float]:
    """The vector of these scalars of the host, as they are."""
    row = [0.0] * FIELDS
    for place, scalar in enumerate(given):
        if scalar is not None:
            row[place] = scalar if type(scalar) is float else scalar.item()  # type: ignore[union-attr]
            row[SCALARS + place] = 1.0
    row[HOST_AT:] = _host_values(signs)
    return row


def without_ill(row: list[float]) -> list[float]:
    """A rank's vector without the scalars that are not finite, and with what is told of them instead."""
    if math.isfinite(sum(row[:SCALARS])):
        return row
    row = row.copy()
    for place, value in enumerate(row[:SCALARS]):
        if not math.isfinite(value):
            row[place] = row[SCALARS + place] = 0.0
            if place < JUDGED:
                row[AILMENTS_AT + 2 * place + math.isinf(value)] = 1.0
    return row


def beat_of(sent: Sequence[bytes]) -> Beat | None:
    """The beat of the ranks by what each has put into it (`Pulse.sent`), without `nonfinite_ranks` and reports.

    None: in another order of the ranks the sums might be rounded otherwise, so they may not be what the group computes.
    """
    columns = zip(*(without_ill(array("d", own).tolist()) for own in sent), strict=True)
    sums: list[Any] = [_exact_sum(column) for column in columns]
    return None if None in sums else read_beat(sums, len(sent))


def _exact_sum(column: Sequence[float]) -> float | None:
    """The sum, if it is the same in whatever order: of two values at most, or where all partial sums are exact. They
    are if all values are whole multiples of one power of two, and together below 2**53 of it. Too large a one is
    infinite, as it is for the group."""
    ratios = [value.as_integer_ratio() for value in column]
    finest = max(below for _, below in ratios)
    total = sum(abs(above) * (finest // below) for above, below in ratios)
    common = math.gcd(*(above for above, _ in ratios)) or 1  # odd where one is no whole number
    power = common & -common
    return sum(column) if len(column) <= 2 or total // power < 1 << 53 else None


def read_beat(vector: Tensor | list[float], world_size: int) -> Beat:
    """All of a beat but `nonfinite_ranks`. vector: on the host."""
    reports: Tensor | None = None
    if isinstance(vector, Tensor):
        row: list[float] = (vector if vector.numel() == FIELDS else vector[:FIELDS]).tolist()
        reports = vector[FIELDS:].long().view(-1, SHARD_REPORT) if vector.numel() > FIELDS else None
    else:
        row = vector
    table: dict[str, Any] = {}
    for place, name in enumerate(_SCALARS):
        count = row[SCALARS + place]
        table[name] = row[place] / count if count else None
    for place, (name, kind) in enumerate(_HOST.items(), HOST_AT):
        table[name] = kind(row[place])
    for name in _MEANS:
        table[name] /= world_size
    if table["squares"] is not None:
        table["grad_norm"] = math.sqrt(table["squares"])
    if table["measured_squares"] is not None:
        table["measured"] = math.sqrt(table["measured_squares"])
    if any(row[AILMENTS_AT:HOST_AT]):
        for name, at in ("loss", AILMENTS_AT), ("grad_norm", AILMENTS_AT + 2):
            nan, inf = row[at : at + 2]
            if nan or inf:
                table[name] = math.nan if nan else math.inf
    return Beat(shard_reports=reports, **table)
