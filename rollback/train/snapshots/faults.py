"""What can fail about checkpoints, as this rank knows it. `str` of a fault is what people are told."""

from __future__ import annotations

from dataclasses import dataclass

from rollback.facts.training import Tier


@dataclass(frozen=True)
class SnapshotFault:
    """A snapshot became no checkpoint."""

    checkpoint: str
    """The name that it would have had."""
    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class TierFault:
    """No snapshot can be written to a tier any more."""

    tier: Tier
    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class RestoreFault:
    """A checkpoint cannot be restored: from any place, or from one."""

    checkpoint: str
    words: str

    def __str__(self) -> str:
        return self.words
