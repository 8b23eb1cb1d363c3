"""The contents of a ring at a URL according to the run's journals. Pure: a plan never waits for a network.

The journals may be out of date: a checkpoint may have left since, or an object may be lost. The fetch finds out.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollback.facts.history import fold
from rollback.facts.training import BecameGood, Committed, Drained, JournalEntry, LeftDurableRing
from rollback.policy import PolicyCheckpoint
from rollback.ring.schedule import of_present


def good_ones_at(url: str, ranks: Iterable[JournalEntry], supervisor: Iterable[JournalEntry]) -> list[PolicyCheckpoint]:
    """The good checkpoints of the present timeline at a URL, oldest first. ranks, supervisor: their journals.

    A checkpoint that was found damaged in the run directory is included: its copy may be sound.
    """
    ranks, url = list(ranks), url.rstrip("/")
    facts = [record.fact for record in [*ranks, *supervisor]]
    there = {fact.checkpoint for fact in facts if isinstance(fact, Drained) and fact.place == url}
    there -= {fact.checkpoint for fact in facts if isinstance(fact, LeftDurableRing) and fact.place == url}
    good = {fact.checkpoint for fact in facts if isinstance(fact, BecameGood)}
    good |= {fact.checkpoint for fact in facts if isinstance(fact, Committed) and fact.step == 0}
    history = fold(ranks)
    return [
        PolicyCheckpoint(item.name, item.step, history.committed[item.name].batch, True)
        for item in of_present(history)
        if item.name in there & good
    ]
