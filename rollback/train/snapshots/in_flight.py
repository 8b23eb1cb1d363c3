"""The snapshot in flight: its stages, the table that moves it, and the reports that ranks send each other about it."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import Written
from rollback.facts.training import Tier
from rollback.train.snapshots.capture import Capture
from rollback.train.state.nonfinite import NonFiniteKind

_WORDS = (slice(0, 12), slice(12, 22), slice(22, 32))  # hexadecimal digits of a hash in each word of a shard report
_HASH = "%012x%010x%010x"


class SnapshotStage(Enum):
    """How far a rank is with its part of the snapshot. Each beat of the pulse carries it."""

    WRITING = "writing"  # its thread copies, hashes, writes
    WRITTEN = "written"  # says so
    TELLING = "telling"  # its shard report goes out (`ShardReport`)
    COMMITTING = "committing"  # its thread commits
    COMMITTED = "committed"  # says so
    WAITING = "waiting"  # others commit
    FAILED = "failed"  # says so
    ENDED = "ended"


class SnapshotEvent(Enum):
    """What happens to a snapshot. All ranks learn of it in the same step, except for the first two."""

    THREAD_DONE = "thread-done"
    FAULT = "fault"
    """Something failed on this rank: its thread's work, for want of space, or tensors changed while they were read."""
    ALL_WRITTEN = "all-written"
    TO_COMMIT = "to-commit"
    """All shard reports are read and agree, and this rank is one of those that commit: its thread does."""
    OTHERS_COMMIT = "others-commit"
    """All shard reports are read and agree, and this rank has nothing to commit."""
    ALL_COMMITTED = "all-committed"
    """It is a checkpoint."""
    REFUSED = "refused"
    """A rank has said that it failed, or the reports do not agree: it becomes none, what was written is removed."""


TRANSITIONS: dict[tuple[SnapshotStage, SnapshotEvent], SnapshotStage] = {
    (SnapshotStage.WRITING, SnapshotEvent.THREAD_DONE): SnapshotStage.WRITTEN,
    (SnapshotStage.WRITING, SnapshotEvent.FAULT): SnapshotStage.FAILED,
    (SnapshotStage.WRITTEN, SnapshotEvent.ALL_WRITTEN): SnapshotStage.TELLING,
    (SnapshotStage.TELLING, SnapshotEvent.TO_COMMIT): SnapshotStage.COMMITTING,
    (SnapshotStage.TELLING, SnapshotEvent.OTHERS_COMMIT): SnapshotStage.WAITING,
    (SnapshotStage.COMMITTING, SnapshotEvent.THREAD_DONE): SnapshotStage.COMMITTED,
    (SnapshotStage.COMMITTING, SnapshotEvent.FAULT): SnapshotStage.FAILED,
    (SnapshotStage.COMMITTED, SnapshotEvent.ALL_COMMITTED): SnapshotStage.ENDED,
    (SnapshotStage.WAITING, SnapshotEvent.ALL_COMMITTED): SnapshotStage.ENDED,
    **{(at, SnapshotEvent.REFUSED): SnapshotStage.ENDED for at in SnapshotStage if at is not SnapshotStage.ENDED},
}
"""(stage, event) -> next stage. What is not there cannot happen, or is our mistake.

Ranks land it, or drop it, in the same step: what ends it is read by all of them.
"""


@dataclass
class SnapshotInFlight:
    """The snapshot in flight, on this rank."""

    manifest: Manifest
    """Without shards until the thread has made them of the shard reports."""
    slot: int | None
    """Of the fast tier; None where it is written to the run directory."""
    began: float
    stage: SnapshotStage = SnapshotStage.WRITING
    job: Future[None] | None = None
    capture: Capture | None = None
    """Under way, where it overlaps with training, until the fence."""
    copied: Future[None] | None = None
    """The work of its thread."""
    shard_report: "ShardReport | None" = None
    fault: str | None = None
    """This rank's own, for its log; whether the snapshot failed is decided by pulse."""
    torn: bool = False
    """Tensors changed while they were read."""
    outgrown: bool = False
    """The state had no room on this rank, or weights are no longer frozen."""
    nonfinite: dict[str, NonFiniteKind] = field(default_factory=dict)
    """Tensors of this rank in which something is not finite that was before."""

    @property
    def tier(self) -> Tier:
        return "durable" if self.slot is None else "fast"

    @property
    def thread_works(self) -> bool:
        """Whether a thread works on it; the end of that work is the next event."""
        return (self.stage, SnapshotEvent.THREAD_DONE) in TRANSITIONS

    def move(self, event: SnapshotEvent) -> None:
        self.stage = TRANSITIONS[self.stage, event]

    def fail(self, words: str) -> None:
        self.fault = words
        self.move(SnapshotEvent.FAULT)

    def outgrow(self, words: str) -> None:
        self.outgrown = True
        self.fail(words)


@dataclass(frozen=True)
class Landing:
    """The end of a flight. All ranks know it in the same step."""

    manifest: Manifest
    tier: Tier
    seconds: float
    fault: str | None = None
    """Why it became no checkpoint, None where it did; with what this rank has to say of it."""
    drifted: tuple[int, ...] = ()
    """Ranks whose parameters differ."""
    nonfinite_ranks: tuple[int, ...] = ()
    """Ranks where something is not finite that was before."""
    nonfinite: Mapping[str, NonFiniteKind] = field(default_factory=dict)
    """What on this one."""

    @property
    def committed(self) -> bool:
        return self.fault is None


@dataclass(frozen=True)
class ShardReport:
    """What a rank has written, digests of what must be alike, and how many tensors have values that are not finite."""

    written: Written
    digest: int
    nonfinite: int = 0
    part: tuple[int, int] = (0, 0)
    """Digests of its part of sharded parameters: where it lies, what it holds."""
    spot_check: int = 0
    """The digest of the sample of what other objects keep."""

    def words(self) -> tuple[int, ...]:
        """The shard report as whole numbers below 2**53."""
        digits = (int(self.written.digest[word], 16) for word in _WORDS)
        return (self.written.size, *digits, self.spot_check, self.digest, self.nonfinite, *self.part)


class ShardReports:
    """The shard reports of all ranks, by rank. Only `shards` makes an object for each of them.

    words: a row of `ShardReport.words` for each rank (int64). spot_checks, digests, nonfinite: a column of each. parts:
    the two digests of each rank's part.
    """

    def __init__(self, words: Tensor) -> None:
        self._written, columns = words[:, : 1 + len(_WORDS)], words[:, 1 + len(_WORDS) :]
        self.spot_checks, self.digests, self.nonfinite = columns[:, :3].unbind(1)
        self.parts = columns[:, 3:]

    @property
    def of_parts(self) -> bool:
        """Whether the model is sharded."""
        return bool(self.parts.any())

    def shards(self) -> tuple[ShardRecord, ...]:
        """What the ranks have written. It takes microseconds for each rank: not for the training thread."""
        rows = enumerate(self._written.tolist())
        return tuple(ShardRecord.of(rank, Written(size, _HASH % tuple(pieces))) for rank, (size, *pieces) in rows)
