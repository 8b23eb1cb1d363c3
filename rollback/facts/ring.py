"""What happens between a run and its durable ring.

The drainer writes these facts into the journal of its own process: the supervisor's journal, or the ranks' journal
where there is no supervisor.
"""

from typing import ClassVar, Literal

from rollback.facts.fact import Count, Fact, Writer


class Drained(Fact):
    """A checkpoint was copied to the durable ring."""

    writer: ClassVar[Writer] = "either"
    kind: Literal["drained"] = "drained"
    checkpoint: str
    step: Count
    place: str
    bytes: Count
    seconds: float
    """How long the copy took."""


class DrainFailed(Fact):
    """A copy to the durable ring failed. The drainer tries again; the next `drained` ends the trouble. Journalled once
    for each trouble."""

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
    """A rollback needed a checkpoint that was only at the URL: it was copied into the run directory's ring."""

    kind: Literal["fetched"] = "fetched"
    checkpoint: str
    step: Count
    place: str
    bytes: Count
    seconds: float

    def in_words(self) -> str:
        return f"checkpoint {self.checkpoint} was fetched from {self.place} in {self.seconds:.2f} s"
