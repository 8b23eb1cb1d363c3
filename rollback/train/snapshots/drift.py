"""Replica drift: whether ranks that should hold the same parameters still do. It is checked with each snapshot.

Each rank computes a digest of all bits of its parameters, and the digests are compared as whole numbers. DDP gives
every rank the same sum of gradients and the same update. So a difference in any bit is a fault: of a machine, or of a
script that changed the parameters of one rank alone.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from rollback.errors import UsageError
from rollback.train.comm.ranks import Ranks
from rollback.train.state import tree
from rollback.train.state.image import STILL, Image, tensor_in_words
from rollback.wording import AdviceText, ranks_in_words

REPLICAS_DIFFER = AdviceText(
    "replicas-differ",
    "the ranks no longer have the same state, and no checkpoint is taken of that. Stop the job and run the same "
    "command again: all ranks then go on from the last checkpoint, where they agreed. If the same rank is named again, "
    "suspect its machine; if the script changes parameters outside of DDP, or objects that it has handed over, it must "
    "do so alike on all ranks ({guard.keep} keeps what is to be another on each), and step a ReduceLROnPlateau by the "
    "same number (in Lightning: sync_dist=True). Of layers that were frozen when DDP was made, and that the script has "
    "unfrozen since, DDP averages no gradients: freeze them behind it, with find_unused_parameters=True. An optimizer "
    "or object of your own that keeps something for each rank's part of a sharded parameter must keep it in DTensors, "
    "as torch.zeros_like(parameter) makes them",
)
_OWN = (
    "Where each rank has layers or parts of its own (a pipeline, experts, tensor parallelism behind DDP), the guard "
    "cannot keep them: shard the model with torch.distributed.fsdp.fully_shard (FSDP2), alone or over tensor "
    "parallelism"
)
NEVER_ALIKE = (
    "no checkpoint can be taken of that, and it seems to be how the script trains. Where nothing averages gradients, "
    "each rank trains a model of its own: wrap the model in DistributedDataParallel, or average them in front of "
    "optimizer.step(), for what the optimizer keeps must be alike, too; models that are to differ are jobs of their "
    "own, each of one rank. An optimizer or object of your own that keeps something for each rank's part of a sharded "
    f"parameter must keep it in DTensors, as torch.zeros_like(parameter) makes them. {_OWN}. If it is none of these, "
    "suspect a rank's machine"
)
"""The hint, where the ranks have never made an update alike."""
_OPTIMIZER_STATE = STILL[1]
_OF_OPTIMIZER, _OF_OBJECTS = 3, 16  # tensors that are compared with a snapshot: of Adam's, one moment at least
_OF_EACH = 1 << 18  # bytes of each
BITS = 52  # of a digest: a whole number that a float64 of the pulse carries exactly
_MASK = (1 << BITS) - 1


def require_alike(image: Image, ranks: Ranks) -> None:
    """Collective: raise UsageError on all ranks unless all have tensors of the same names, types and shapes, and of the
    same values but for model and optimizer, which `Capture.digest` compares. Of what is shared each rank stores a part,
    and which part follows from these. So it is with the sharded tensors of model and objects, whose shapes are those of
    the whole: rank 0 alone stores which ones there are. (An optimizer may leave out parts without an element.)"""
    shared = image.shared_tensors
    sharded = {name: item for name, item in image.sharded.items() if not name.startswith(_OPTIMIZER_STATE)}
    everywhere = {**shared, **sharded}
    kinds = {name: [tree.DTYPE_CODE[item.dtype], [*item.shape]] for name, item in everywhere.items()}
    fault = None
    if len({*ranks.from_each(xxhash.xxh3_64_hexdigest(json.dumps(kinds, sort_keys=True).encode()))}) > 1:
        of_first = ranks.from_first(kinds)
        name = min((name for name in {**of_first, **kinds} if of_first.get(name) != kinds.get(name)), default=None)
        fault = ranks.first_fault(
            name
            and f"{tensor_in_words(name, (), image.classes)} is {_kind_in_words(kinds.get(name))} on rank "
            f"{ranks.rank}, and {_kind_in_words(of_first.get(name))} on rank 0"
        )
    elif ranks.world_size > 1:
        own = {name: int(on_device([item])) for name, item in shared.items() if not name.startswith(STILL)}
        first = ranks.from_first(own)
        name = next((name for name in own if own[name] != first[name]), None)
        fault = ranks.first_fault(
            name and f"{tensor_in_words(name, (), image.classes)} has other values on rank {ranks.rank} than on rank 0"
        )
    if fault is not None:
        raise UsageError(
            f"model, optimizer and named objects count as the same on all ranks, and they are not: {fault}",
            hint="let an object's state_dict() give what is the same everywhere; parts of sharded tensors as DTensors. "
            "For an average of the weights seed all ranks alike, or make it behind DDP, which hands out rank 0's. "
            f"{_OWN}",
        )


def _kind_in_words(kind: list[Any] | None) -> str:
    return f"{kind[0]}{kind[1]}" if kind is not None else "not there"


def spot_check(tensors: Mapping[str, Tensor], turn: int) -> list[Tensor]:
    """Of what the optimizer and other objects keep, what is compared in that turn: the beginnings of the next few
    tensors. What has begun to differ between ranks does so in all tensors of an object, as an average of the weights
    that is made behind another seed; or the moments of ranks that average parameters from time to time, and no
    gradients: their parameters are alike then."""
    names = sorted(tensors)
    of_optimizer = [name for name in names if name.startswith(STILL)]
    of_objects = [name for name in names if not name.startswith(STILL)]
    chosen = (*_of_turn(of_optimizer, turn, _OF_OPTIMIZER), *_of_turn(of_objects, turn, _OF_OBJECTS))
    flat = (tensors[name].detach().resolve_conj().resolve_neg().reshape(-1) for name in chosen)
    return [item[: max(1, _OF_EACH // item.element_size())] for item in flat]


def _of_turn(names: list[str], turn: int, count: int) -> list[str]:
    start = turn * count % len(names) if names else 0
    return (names[start:] + names[:start])[:count]


def differing(digests: Tensor) -> tuple[int, ...]:
    """Ranks whose digest differs from that of the majority. All ranks if there is no majority, none if all agree.

    digests: one of each rank (int64).
    """
    if bool((digests == digests[0]).all()):
        return ()
    values, counts = torch.unique(digests, return_counts=True)
    if 2 * counts.max() <= len(digests):
        return tuple(range(len(digests)))
    return tuple((digests != values[counts.argmax()]).nonzero().flatten().tolist())


def differing_parts(digests: Tensor) -> tuple[int, ...]:
    """Of sharded parameters: ranks whose values differ from those of the other ranks with the same part.

    digests: a row of two for each rank (int64), as `Capture.part_digest` returns them.
    """
    places, values_of_place = torch.unique(digests, dim=0)[:, 0].unique_consecutive(return_counts=True)
    found: list[int] = []
    for place in places[values_of_place > 1]:
        holders = (digests[:, 0] == place).nonzero().flatten()
        found += holders[list(differing(digests[holders, 1]))].tolist()
    return tuple(sorted(found))


def parts_in_words(ranks: Sequence[int]) -> str:
    who = ranks_in_words(ranks)
    return f"the parameters of {who} are not those of the ranks that have the same part, though they are replicas"


PARAMETERS_IN_WORDS = "the parameters"
PLAIN = "the plain tensors (parameters that are not sharded, the state of the optimizer and of objects)"
"""Of a sharded model."""
OBJECTS = "the tensors of the optimizer or of named objects (an average of the weights, for instance)"


def in_words(ranks: Sequence[int], world_size: int, what: str = PARAMETERS_IN_WORDS) -> str:
    """what: one of the above."""
    how = "differ" if len(ranks) == world_size else "are not those of the other ranks"
    return f"{what} of {ranks_in_words(ranks)} {how}, though they are replicas"


def narrowed(digest: int) -> int:
    """A digest of any width as a number that fits into the pulse."""
    return (digest ^ (digest >> BITS)) & _MASK


def on_device(tensors: Iterable[Tensor]) -> Tensor:
    """A digest (int64, on the tensors' device) that changes with every single changed bit. The host does not wait.

    The bit patterns of each tensor are summed as whole numbers of 64 bits: torch makes a copy of narrower ones first,
    as large as all of them in 64 bits. The sums are multiplied by odd factors and added, modulo 2**64.
    """
    total: Tensor | None = None
    for place, tensor in enumerate(tensors):
        part = _sum_of_bits(tensor.detach().contiguous().reshape(-1).view(torch.uint8)) * (2 * place + 1)
        total = part if total is None else total + part
    return total if total is not None else torch.zeros((), dtype=torch.int64, device="cpu")


def _sum_of_bits(raw: Tensor) -> Tensor:
    """raw: bytes. The same for the same bytes, wherever they lie."""
    if raw.storage_offset() % 8:  # no whole numbers of 64 bits may begin there
        raw = raw.clone()
    whole = len(raw) // 8 * 8
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)
