"""The loader that reads in place of a user's map-style loader, from any position on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from rollback.train.data.cursor.feed import Feed
from rollback.train.data.cursor.workers import KeyedDataset
from rollback.train.data.workers import LeavesStoppingToTheRank


def clone_of(loader: DataLoader[Any], feed: Feed, seeding: torch.Tensor | None) -> DataLoader[Any]:
    """A loader that reads what `feed` says, otherwise as `loader`. Its workers persist: whoever made it ends them.

    seeding: state of the generator from which the loader would draw its base seed, so that workers have the seeds that
    they would have without us, and that drawing it costs no one a draw.
    """
    dataset: Any = loader.dataset
    in_workers: dict[str, Any] = {}
    if loader.num_workers > 0:
        dataset = KeyedDataset(dataset)
        in_workers = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": True,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    batches: dict[str, Any] = {"batch_sampler": feed}
    if loader.batch_sampler is None:
        batches = {"sampler": feed, "batch_size": None}
    generator = torch.Generator()
    if seeding is not None:
        generator.set_state(seeding)
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=LeavesStoppingToTheRank(loader.worker_init_fn),
        generator=generator,
        **batches,
        **in_workers,
    )
