"""A loader that Accelerate has prepared, with the guard's batches in place of its own.

Accelerate's loader reads a batch ahead, to know which one is the last. A guard must not be asked for a batch before the
update of the one before is done, and knows the last one without that. All else that iterating the loader does is done
here too: random states are synchronized, batches moved to their device, and the loader told where it is.
"""

from typing import Any

from accelerate.data_loader import DataLoaderShard, SkipBatchSampler
from accelerate.utils import send_to_device, synchronize_rng_states

from rollback.errors import UsageError
from rollback.train.comm.ranks import announced_ranks

_UNKNOWN = "DEEPSPEED", "MEGATRON_LM", "TP", "XLA"
_SHARED_BATCHES = {"tp": "tensor", "cp": "context", "sp": "sequence"}
"""Ways in which several ranks of Accelerate take one batch together."""


def require_known_loader(loader: Any) -> None:
    """Raises UsageError for a loader of Accelerate's whose batches a guard cannot hand out."""
    kind = type(loader)
    if not issubclass(kind, DataLoaderShard) or kind.__iter__ is not DataLoaderShard.__iter__:
        raise UsageError(
            f"rollback.protect got batches from a {kind.__name__} ({kind.__module__}), in which a rank cannot go back "
            "by itself",
            hint="with DataLoaderConfiguration(dispatch_batches=False), in a Trainer by accelerator_config="
            '{"dispatch_batches": False}, every rank reads its own batches'
            if kind.__name__ == "DataLoaderDispatcher"
            else "hand over the loader that accelerator.prepare has made of a torch DataLoader; in a Trainer, let "
            "get_train_dataloader() end with: return self.accelerator.prepare(loader)",
        )
    if loader.skip_batches or isinstance(loader.batch_sampler, SkipBatchSampler):
        raise UsageError(
            "rollback.protect got what skip_first_batches leaves of an epoch: all other epochs have another loader",
            hint="leave out skip_first_batches, and what loads a snapshot: the same command goes on where the run was. "
            "A new run can begin with the weights of a snapshot, at the start of an epoch",
        )


def require_known_ranks(accelerator: Any) -> None:
    """Raises UsageError where Accelerate trains on its ranks in a way that a guard does not know, or takes each of them
    for the only one, as on a CPU that it was not told to use."""
    kind = accelerator.distributed_type.name
    if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):  # earlier versions of Accelerate have the first
        raise UsageError(
            "rollback.protect cannot guard what the first version of FSDP shards",
            hint="take its second version: FullyShardedDataParallelPlugin(fsdp_version=2), `--fsdp_version 2` of "
            'accelerate launch, or TrainingArguments(fsdp_config={"version": 2})',
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    shared = [name for key, name in _SHARED_BATCHES.items() if getattr(parallelism, f"{key}_enabled", False)]
    if shared:
        raise UsageError(
            f"rollback.protect cannot guard what Accelerate trains with {' and '.join(shared)} parallelism",
            hint="shard the model by the second version of FSDP alone; tensor parallelism a rollback.Guard keeps in a "
            "loop of your own",
        )
    if kind in _UNKNOWN:
        raise UsageError(
            f"rollback.protect cannot guard what Accelerate trains with {kind}",
            hint="train with DistributedDataParallel, the default (accelerate launch --multi_gpu, or torchrun), or by "
            "the second version of FSDP",
        )
    ranks = announced_ranks()
    if accelerator.num_processes != ranks:
        raise UsageError(
            f"Accelerate knows of {accelerator.num_processes} of {ranks} ranks: each would train by itself on all data",
            hint="on a CPU: Accelerator(cpu=True), TrainingArguments(use_cpu=True), or ACCELERATE_USE_CPU=true in the "
            "environment",
        )


def begin_pass(loader: Any) -> None:
    """What iterating the loader does before its first batch."""
    if loader.rng_types is not None:
        synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
    loader.begin()
    loader.set_epoch(loader.iteration)


def hand_out(loader: Any, batch: Any, *, last: bool) -> Any:
    """The batch on its device; `last`: of its epoch."""
    loader.end_of_dataloader = last
    if loader.device is None:
        return batch
    return send_to_device(batch, loader.device, non_blocking=loader._non_blocking)
