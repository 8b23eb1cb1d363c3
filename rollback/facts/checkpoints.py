"""What became of snapshots and checkpoints, from the ranks' point of view."""

from __future__ import annotations

from typing import Literal

from rollback.facts.fact import Fact

Tier = Literal["fast", "durable"]


class Committed(Fact):
    """A checkpoint exists: all shards and the manifest are there."""

    kind: Literal["committed"] = "committed"
    checkpoint: str
    step: int
    batch: int
    timeline: int
    bytes: int
    seconds: float
    tier: Tier = "durable"
    """In a slot (`fast`) or in the ring (`durable`)."""


class BecameGood(Fact):
    """A candidate has passed its probation."""

    kind: Literal["good"] = "good"
    checkpoint: str
    step: int


class Dropped(Fact):
    """A snapshot was dropped and is no checkpoint; training went on."""

    kind: Literal["dropped"] = "dropped"
    checkpoint: str
    step: int
    reason: str


class Evicted(Fact):
    """A checkpoint left a tier. One that left the fast tier may still be in the durable ring."""

    kind: Literal["evicted"] = "evicted"
    checkpoint: str
    reason: str
    tier: Tier = "durable"


class CheckpointLost(Fact):
    """A committed checkpoint is not where it was: somebody or something has removed it, or part of it."""

    kind: Literal["checkpoint_lost"] = "checkpoint_lost"
    checkpoint: str
    tier: Tier
    reason: str = "somebody else has removed it, or part of it"


class Saving(Fact):
    """How snapshots are taken from now on, and the reason."""

    kind: Literal["saving"] = "saving"
    slots: int
    """Slots of the fast tier, on each host; 0: snapshots go straight to the ring."""
    slot_bytes: int
    """Size of a slot."""
    capture: Literal["overlapped", "at_once", "held"]
    """Either `at_once`, or `overlapped` with the next forward and backward, or `held`: the loop also waits for the
    digest."""
    reason: str


class Paced(Fact):
    """The number of steps between two snapshots was fitted to their cost."""

    kind: Literal["paced"] = "paced"
    every: int
    stall: float
    """Seconds that the loop waited for the last snapshot, the mean over the ranks."""
    step_seconds: float
    """Seconds that a step takes, the mean over the ranks."""


class Drifted(Fact):
    """The parameters of the ranks differ, although the ranks are replicas: the snapshot was dropped."""

    kind: Literal["drifted"] = "drifted"
    checkpoint: str
    step: int
    ranks: tuple[int, ...]
    """The ranks that differ from the majority; all ranks, where there is no majority."""


class Quarantined(Fact):
    """A checkpoint failed verification and was moved to quarantine."""

    kind: Literal["quarantined"] = "quarantined"
    checkpoint: str
    reason: str
