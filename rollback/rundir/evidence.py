"""What the ranks saw of an incident: a record beside the journal. The run does not depend on it."""

import heapq
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from rollback.system.durable import write_file
from rollback.system.small_json import read_model

_LIMIT = 16 << 20
MOST_WITNESSES = 64
"""Ranks that write down what they saw of an incident. Of tens of thousands, nobody reads more, and each has files."""

Where = Literal["loss", "gradients", "parameters", "buffers"]
"""Places that are searched for non-finite values, in this order; the first one found counts as the origin."""
Explosion = Literal["large", "overflow", "nonfinite"]
"""Kinds of gradient explosion: a large norm; finite elements whose norm overflows; non-finite elements."""


class _Part(BaseModel, frozen=True, ser_json_inf_nan="strings"):
    """Base of what a rank's record is made of."""


class NamedNorm(_Part):
    """L2 norm of one tensor of the model."""

    name: str
    norm: float


class Norms(_Part):
    """L2 norms of tensors (gradients or weights), one for each parameter, in the model's order."""

    tensors: int
    total: float | None = Field(description="over all of them; null where there are none")
    largest: list[NamedNorm] = Field(description="finite ones, largest first")
    smallest: list[NamedNorm]
    vanishing: list[str] = Field(description="norm below 1e-8")
    exploding: dict[Explosion, list[str]] = Field(description="by kind; leading first")
    each: list[NamedNorm] = Field(description="all of them, up to a limit")


class StepSeen(_Part):
    """One update as this rank saw it."""

    step: int
    losses: list[float] = Field(description="of its batches, before backward")
    grad_norm: float | None
    kind: Explosion | None = Field(description="null: the gradient is neither large nor broken")


class Origin(_Part):
    """Where the first non-finite value was found."""

    where: Where
    step: int | None = Field(description="null: found in the state after the incident")
    name: str | None = Field(description="of several tensors the one nearest to the output; null where not known")
    local: bool | None = Field(
        description="whether this rank's own gradient, looked at near the model's input, was not finite before the "
        "ranks' gradients were averaged; null: not known"
    )


class KeptTensor(_Part):
    """A tensor of the batch, kept in the safetensors file beside the record."""

    name: str = Field(description="in the file: batch position, then the path inside the batch")
    dtype: str
    shape: list[int]
    altered: bool = Field(description="the script has written into it since it was handed out")


class LeftOut(_Part):
    """A part of the batch that was not kept, and why."""

    name: str
    reason: str


class BatchKept(_Part):
    """What is kept of the batch of the suspected step."""

    step: int | None = Field(description="the onset step, or the first one after it that was still held")
    file: str | None = Field(description="beside the record; null where no tensor was kept")
    tensors: list[KeptTensor]
    left_out: list[LeftOut]


class RankEvidence(_Part):
    """incidents/NNNN/rank-NNNNN.json."""

    incident: int
    rank: int
    attempt: int
    timeline: int
    onset_step: int
    detection_step: int
    origin: Origin | None = Field(description="null: everything that this rank looked at is finite")
    steps: list[StepSeen] = Field(description="updates from the onset on that were still held, oldest first")
    gradients: Norms | None = Field(description="of the first of these whose gradient exploded, else of the first")
    gradients_step: int | None
    weights: Norms = Field(description="as they are when the incident is called")
    nonfinite_buffers: list[str]
    batch: BatchKept


def witnesses(harm: Sequence[float]) -> list[int]:
    """The ranks whose evidence of an incident is kept, by what each of them saw of it: the half that saw most, and as
    many of the others, evenly spread, for comparison. All of them, where they are few.

    harm: by rank; NaN counts as infinite.
    """
    if len(harm) <= MOST_WITNESSES:
        return list(range(len(harm)))
    seen = [math.inf if math.isnan(value) else value for value in harm]
    most = set(heapq.nsmallest(MOST_WITNESSES // 2, range(len(seen)), key=lambda rank: (-seen[rank], rank)))
    others, places = [rank for rank in range(len(seen)) if rank not in most], MOST_WITNESSES - len(most)
    return sorted(most | {others[place * len(others) // places] for place in range(places)})


def write_evidence(path: Path, evidence: RankEvidence) -> None:
    """Write a rank's record, durable on return. Raises OSError."""
    write_file(path, evidence.model_dump_json().encode())


def read_evidence(path: Path) -> RankEvidence:
    """A rank's record. Raises OSError, or ValueError (pydantic's included) where it fails validation."""
    return read_model(path, RankEvidence, _LIMIT)
