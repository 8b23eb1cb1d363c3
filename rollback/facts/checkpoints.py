"""What became of snapshots and checkpoints, from the ranks' point of view."""

from typing import ClassVar, Literal

from rollback.facts.fact import Count, Fact, Writer

Tier = Literal["fast", "durable"]
CaptureMode = Literal["overlapped", "at_once", "held"]
"""What the loop waits for: nothing; the copy, while a thread digests; both.

The last is for scripts that change parameters outside of the optimizer's step: it is found out, not chosen.
"""


class Committed(Fact):
    """A checkpoint exists: all shards and the manifest are there."""

    kind: Literal["committed"] = "committed"
    checkpoint: str
    step: Count
    batch: Count
    timeline: Count
    bytes: Count
    seconds: float
    tier: Tier = "durable"
    """In a slot (`fast`) or in the ring (`durable`)."""


class BecameGood(Fact):
    """A candidate has passed its probation."""

    kind: Literal["good"] = "good"
    checkpoint: str
    step: Count


class Dropped(Fact):
    """A snapshot was dropped and is no checkpoint; training went on."""

    kind: Literal["dropped"] = "dropped"
    checkpoint: str
    step: Count
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
    capture: CaptureMode
    """Either `at_once`, or `overlapped` with the next forward and backward, or `held`: the loop also waits for the
    digest."""
    reason: str


class NoLastSnapshot(Fact):
    """If a rank dies, the others will keep nothing: the newest checkpoint serves."""

    kind: Literal["no_last_snapshot"] = "no_last_snapshot"
    reason: str

    def in_words(self) -> str:
        return f"no last snapshots: {self.reason}"


class LastSnapshotMade(Fact):
    """When an attempt was about to end, its ranks tried to keep the state that they still held."""

    writer: ClassVar[Writer] = "either"
    kind: Literal["last_snapshot"] = "last_snapshot"
    reason: str
    """Why the attempt was about to end, in words."""
    checkpoint: str | None
    """The checkpoint of that state; null: none was made."""
    step: Count | None
    """Its step; null as above."""
    rank: int | None = None
    """The rank that wrote it; of several hosts, one of those that did."""
    seconds: float = 0.0
    """From the moment when that rank knew of the reason."""
    why_not: str | None = None
    """Why none was made."""
    steps_lost: Count | None = None
    """Completed updates that are in no checkpoint and have to be done again; null: not known."""

    def in_words(self) -> str:
        lost = {None: "", 0: "; no step is lost", 1: "; one step is lost"}
        told = lost.get(self.steps_lost, f"; {self.steps_lost} steps are lost")
        if self.checkpoint is not None:
            return f"the ranks that were left have kept the state of step {self.step} ({self.reason}){told}"
        return f"the state of the last step could not be kept ({self.reason}): {self.why_not}{told}"


class Paced(Fact):
    """The number of steps between two snapshots was fitted to their cost."""

    kind: Literal["paced"] = "paced"
    every: int
    stall: float
    """Seconds that the loop waited for the last snapshot, the mean over the ranks."""
    step_seconds: float
    """Seconds that a step takes, the mean over the ranks."""


class Drifted(Fact):
    """The parameters of the ranks differ, or what is kept in plain tensors beside those of a sharded model, or the
    tensors of named objects, although the ranks are replicas: the snapshot was dropped."""

    kind: Literal["drifted"] = "drifted"
    checkpoint: str
    step: Count
    ranks: tuple[int, ...]
    """The ranks that differ from the majority; all ranks, where there is no majority."""


class Quarantined(Fact):
    """A checkpoint failed verification and was moved to quarantine; or it is from behind a rollback or
    other lines that the journal lacks, and lost its slot."""

    kind: Literal["quarantined"] = "quarantined"
    checkpoint: str
    reason: str
