"""Describes a map-style loader. The description is kept with the run, so that another data set or split is refused."""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

from rollback.train.data.cursor.digest import hex_digest_of
from rollback.train.data.cursor.epoch_setters import parts_of


def description_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """JSON. With a hash of the samples of each subset (`random_split`), also of one that is wrapped: without a seed it
    is another one each time, and where the wrapper augments, no batch could be compared. With the number of shares that
    the data are dealt out in where that is not the number of ranks: several read the same batches then, as with tensor
    parallelism."""
    batching = loader.batch_sampler
    index_sampler: Any = loader.sampler if batching is None else batching
    sampler = getattr(index_sampler, "sampler", index_sampler)
    shares = sampler.num_replicas if isinstance(sampler, DistributedSampler) else None
    alone = not torch.distributed.is_initialized()
    subsets = [hex_digest_of(list(part.indices)) for part in parts_of([loader.dataset]) if isinstance(part, Subset)]
    return {
        "length": length_of(loader.dataset),
        "batch_size": getattr(batching, "batch_size", None),
        "drop_last": getattr(batching, "drop_last", None),
        "sampler": type(sampler).__name__,
        "batches": length_of(loader),
        **({} if alone or shares in (None, torch.distributed.get_world_size()) else {"shares": shares}),
        **({"subset": "-".join(map(str, subsets))} if subsets else {}),
    }


def samplers_of(index_sampler: Any) -> list[Any]:
    """The sampler and the samplers that it wraps, outermost first."""
    found: list[Any] = []
    pending = [index_sampler]
    while pending:
        sampler = pending.pop()
        if sampler is None or any(sampler is known for known in found):
            continue
        found.append(sampler)
        pending += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


def length_of(sized: Any) -> int | None:
    """Its length; None if it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def other_length(index_sampler: Any, data: Any, before: int | None) -> str | None:
    """In words, where a data set has another number of samples than before, and a sampler may go by that: it has the
    data set. One of indices alone, as of a subset, gives what it gave, whatever comes behind these."""
    attributes = (getattr(item, "__dict__", {}).values() for item in samplers_of(index_sampler))
    knows = any(value is data for held in attributes for value in held)
    if not knows or (now := length_of(data)) == before:
        return None
    return f"the data set has another number of samples ({now}, not {before})"
