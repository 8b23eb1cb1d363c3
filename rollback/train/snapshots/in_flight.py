"""The snapshot in flight: its stages, and what ranks write each other about it.

    stage       what the rank does                          what moves it on
    WRITING     its thread copies, hashes, writes           the thread ends
    WRITTEN     says so on every pulse                      all ranks have said so, read by all in the same step
    TELLING     its letter (`Letter`) goes out              the pulse with the letters is read by all in the same step
    COMMITTING  the committing rank's thread commits        the thread ends
    COMMITTED   says so on the next pulse                   all committing ranks have: every rank lands it in that step
    FAILED      says so on the next pulse                   that pulse is read: every rank drops it in the same step

Ranks that have nothing to commit stay in TELLING until the flight ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from rollback.checkpoints.manifest import Manifest
from rollback.checkpoints.shard import Written
from rollback.facts.training import Tier
from rollback.train.snapshots.capture import Capture
from rollback.train.state.nonfinite import NonFiniteKind

_WORDS = (48, 40, 40)  # bits of a hash in each word of a letter, the highest first


class SnapshotStage(Enum):
    WRITING = "writing"
    WRITTEN = "written"
    TELLING = "telling"
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"


@dataclass
class SnapshotInFlight:
    """The snapshot in flight. error: this rank's own, for its log; whether it failed is decided by pulse.

    outgrown: the state had no room on this rank. capture: under way, where it overlaps with training, until the fence;
    copied: its thread's work. nonfinite: tensors of this rank in which something is not finite that was before.
    """

    manifest: Manifest
    tier: Tier
    began: float
    stage: SnapshotStage = SnapshotStage.WRITING
    job: Future[None] | None = None
    capture: Capture | None = None
    copied: Future[None] | None = None
    letter: Letter | None = None
    error: str | None = None
    torn: bool = False
    outgrown: bool = False
    nonfinite: dict[str, NonFiniteKind] = field(default_factory=dict)

    def fail(self, error: str) -> None:
        self.stage, self.error = SnapshotStage.FAILED, error


@dataclass(frozen=True)
class Landing:
    """A flight's end, known to all ranks in the same step. drifted: ranks whose parameters differ. ailing: ranks where
    something is not finite that was before; nonfinite: what on this one."""

    manifest: Manifest
    tier: Tier
    committed: bool
    reason: str
    seconds: float
    drifted: tuple[int, ...] = ()
    ailing: tuple[int, ...] = ()
    nonfinite: Mapping[str, NonFiniteKind] = field(default_factory=dict)


@dataclass(frozen=True)
class Letter:
    """What a rank has written, the digest of its parameters, and in how many tensors something is not finite."""

    written: Written
    digest: int
    nonfinite: int = 0

    def words(self) -> tuple[int, ...]:
        """As whole numbers below 2**53."""
        rest, words = int(self.written.digest, 16), []
        for bits in reversed(_WORDS):
            words.append(rest & ((1 << bits) - 1))
            rest >>= bits
        return (self.written.size, *reversed(words), self.digest, self.nonfinite)

    @classmethod
    def from_words(cls, words: tuple[int, ...]) -> Letter:
        size, *parts, digest, nonfinite = words
        number = 0
        for bits, part in zip(_WORDS, parts, strict=True):
            number = number << bits | part
        return cls(Written(size, f"{number:032x}"), digest, nonfinite)
