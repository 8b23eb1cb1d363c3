"""Going on with another number of ranks: what a rank takes over from a checkpoint that had fewer ranks, or more.

What all ranks have in common they read as ever. Of what was each rank's own, rank r takes that of rank r modulo the
number of ranks then: buffers, random states and cursor. A rank that has no rank of its number to follow would draw what
its source draws, so its random states are derived from those and from its number. What ranks beyond the present
number kept for themselves (buffers that DDP had let drift apart, their random states) is not taken over.

Where each is in the data is the same number on all ranks. That it means the same samples is checked by
`rollback.rundir.identity` (as many samples a batch as before) and by the cursor (in the same order).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from rollback.train.data import rng


def source_of(rank: int, ranks_then: int) -> int:
    """The rank of the checkpoint whose own state a rank takes over."""
    return rank % ranks_then


def adopt(local: Mapping[str, Any], rank: int, ranks_then: int) -> dict[str, Any]:
    """The `local` part of a checkpoint as `rank` takes it over; as it is where there was such a rank.

    The cursor is that of a map-style loader: with any other, another number of ranks is refused.
    """
    if rank < ranks_then:
        return dict(local)
    cursor = dict(local["cursor"])
    # Data workers are seeded from the epoch's opening; those that outlive an epoch, from a seed that is kept.
    cursor["base_seed"] = _derived_seed(cursor["base_seed"], rank)
    if (opening := cursor["opening"]) is not None:
        random, seed = rng.derived(opening["rng"], f"rank {rank}, data"), _derived_seed(opening["base_seed"], rank)
        cursor["opening"] = {**opening, "rng": random, "base_seed": seed}
    return {**local, "random": rng.derived(local["random"], f"rank {rank}"), "cursor": cursor}


def _derived_seed(seed: int | None, rank: int) -> int | None:
    return None if seed is None else int(xxhash.xxh3_64_intdigest(f"{seed}/{rank}".encode()) >> 1)
