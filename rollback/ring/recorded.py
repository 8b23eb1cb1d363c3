"""The contents of a ring at a URL according to the run's journals. Pure: a plan never waits for a network.

The journals may be out of date: a checkpoint may have left since, or an object may be lost. The fetch finds out.
"""

from rollback.facts.history import History, in_durable_ring
from rollback.policy import PolicyCheckpoint
from rollback.ring.schedule import of_present


def good_ones_at(url: str, ranks: History, supervisor: History) -> list[PolicyCheckpoint]:
    """The good checkpoints of the present timeline at a URL, oldest first. ranks, supervisor: what their journals
    amount to.

    A checkpoint that was found damaged in the run directory is included: its copy may be sound.
    """
    there = in_durable_ring(ranks, supervisor, place=url.rstrip("/"))
    return [
        PolicyCheckpoint(item.name, item.step, ranks.committed[item.name].batch, True)
        for item in of_present(ranks, there)
        if item.name in ranks.good or item.name in ranks.spoiled
    ]
