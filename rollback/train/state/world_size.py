"""Goes on with another number of ranks: what a rank takes from a checkpoint that had fewer or more ranks.

The shared part is read as usual. Of the local parts (buffers, random states, cursor), rank r takes that of rank r
modulo the number of ranks then. Without a rank of its number it would draw the same as its source, so its random states
are derived from the source's and from its number; generators of the script's own are as the script makes them. Local
parts of ranks beyond the present number are not used.

The position in the data is the same number on all ranks. `rollback.rundir.identity` checks that a batch has as many
samples as before, and the cursor checks the order.
"""

from collections.abc import Mapping
from typing import Any

import xxhash

from rollback.train.data import rng
from rollback.train.state.kept_values import GENERATOR


def source_of(rank: int, ranks_then: int) -> int:
    """The rank of the checkpoint whose local part a rank takes."""
    return rank % ranks_then


def adopt(local: Mapping[str, Any], rank: int, ranks_then: int) -> dict[str, Any]:
    """The `local` part of a checkpoint for `rank`; unchanged if the checkpoint has a rank of this number.

    The cursor is that of a map-style loader; other loaders refuse another number of ranks.
    """
    if rank < ranks_then:
        return dict(local)
    cursor = dict(local["cursor"])
    # Data workers are seeded from the epoch's opening; those that outlive an epoch, from a seed that is kept.
    cursor["base_seed"] = _derived_seed(cursor["base_seed"], rank)
    if (opening := cursor["opening"]) is not None:
        random, seed = rng.derived(opening["rng"], f"rank {rank}, data"), _derived_seed(opening["base_seed"], rank)
        cursor["opening"] = {**opening, "rng": random, "base_seed": seed}
    kept = {name: value for name, value in local.get("kept", {}).items() if not name.startswith(GENERATOR)}
    return {**local, "random": rng.derived(local["random"], f"rank {rank}"), "cursor": cursor, "kept": kept}


def _derived_seed(seed: int | None, rank: int) -> int | None:
    return None if seed is None else int(xxhash.xxh3_64_intdigest(f"{seed}/{rank}".encode()) >> 1)
