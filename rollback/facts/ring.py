"""What happens between a run and its durable ring.

The drainer says what it does in the journal of the process in which it runs: the supervisor's, or else the ranks'.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollback.facts.fact import Fact, Writer


class Drained(Fact):
    """A checkpoint was copied to the durable ring; `seconds` is how long that took."""

    writer: ClassVar[Writer] = "either"
    kind: Literal["drained"] = "drained"
    checkpoint: str
    step: int
    place: str
    bytes: int
    seconds: float


class DrainFailed(Fact):
    """The durable ring took nothing; it is tried again, and the next `drained` ends it. Said once for each trouble."""

    writer: ClassVar[Writer] = "either"
    kind: Literal["drain_failed"] = "drain_failed"
    checkpoint: str | None
    place: str
    error: str


class LeftDurableRing(Fact):
    """A checkpoint left the durable ring."""

    writer: ClassVar[Writer] = "either"
    kind: Literal["left_durable_ring"] = "left_durable_ring"
    checkpoint: str
    place: str
    reason: str


class Fetched(Fact):
    """A checkpoint that a rollback needs and that was only at the URL was brought into the run directory's ring."""

    kind: Literal["fetched"] = "fetched"
    checkpoint: str
    step: int
    place: str
    bytes: int
    seconds: float
