"""What the pipelines of torchdata.nodes do otherwise than other loaders with a state, and which of them have no way
back."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from rollback.errors import UsageError
from rollback.train.data import rng
from rollback.train.data.cursor.description import samplers_of

_PACKAGE, _BEGINS_ANEW = "torchdata.nodes", "restart_on_stop_iteration"
_SHUFFLING = RandomSampler, SubsetRandomSampler, WeightedRandomSampler
_CYCLING = frozenset(("CYCLE_FOREVER", "CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED"))
_BATCHES_WATCHED = 4
_THREADS_DRAW_WITHIN = 0.05  # seconds behind a batch that has made room in their queues


def nodes_of(loader: Any) -> list[Any]:
    """`loader` and the nodes below it, if it is one of torchdata.nodes; else none."""
    return _below(loader, lambda node: False)


def nodes_in_step(loader: Any) -> list[Any]:
    """Those that are read when a batch is asked for, and not ahead of that by a thread."""
    return _below(loader, _has_threads)


def _below(loader: Any, is_left_out: Callable[[Any], bool]) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = [loader]
    while waiting:
        node = waiting.pop()
        if id(node) in found or not _is_of_nodes(node) or is_left_out(node):
            continue
        found[id(node)] = node
        for held in vars(node).values():
            waiting += held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else [held]
    return [*found.values()]


def _is_of_nodes(thing: Any) -> bool:
    return any(kind.__module__.startswith(_PACKAGE) for kind in type(thing).__mro__)


def require_a_way_back(loader: Any) -> None:
    """Raises UsageError for nodes whose own state does not lead to a position."""
    found = nodes_of(loader)
    if any(getattr(node, "in_order", True) is False and getattr(node, "num_workers", 0) > 1 for node in found):
        raise UsageError(
            "cannot go back in the batches of ParallelMapper(in_order=False) of torchdata.nodes: it hands them out as "
            "its workers finish, so no start would get them in the same order again",
            hint="take in_order=False out: its workers still work side by side, and each item waits for its turn",
        )
    for node in found:
        if type(node).__name__ == "MultiNodeWeightedSampler":
            _refuse_shuffling(node, _MIXED, own_generators_too=str(node.stop_criteria) in _CYCLING, others_too=True)
        elif _has_threads(node):
            _refuse_shuffling(node, _AHEAD, own_generators_too=True, others_too=False)


_MIXED = (
    "a MultiNodeWeightedSampler of torchdata.nodes over a {}: each of its parts draws its order when its first item is "
    "due, and again where it begins anew, and its state does not tell from what random numbers"
)
_AHEAD = (
    "a Prefetcher or ParallelMapper of torchdata.nodes over a {} with a generator of its own: its threads read ahead, "
    "so that nobody knows which batch that generator's state is of"
)


def _refuse_shuffling(root: Any, where: str, *, own_generators_too: bool, others_too: bool) -> None:
    """Raises UsageError for torch's shuffling samplers below `root`, those with generators of their own and the others.
    What is told the epoch, or keeps a state, has it from its node."""
    samplers = [node.sampler for node in nodes_of(root) if hasattr(node, "sampler")]
    for sampler in samplers:
        if hasattr(sampler, "set_epoch") or hasattr(sampler, "state_dict"):
            continue
        for part in samplers_of(sampler):
            if isinstance(part, _SHUFFLING) and (others_too if part.generator is None else own_generators_too):
                raise UsageError(
                    f"cannot go back in {where.format(type(part).__name__)}",
                    hint="give it a sampler whose order follows from seed and epoch, as DistributedSampler(data, "
                    "num_replicas=1, rank=0, seed=0), or one with state_dict and load_state_dict",
                )


def require_no_drawing_threads(loader: Any, batch: int) -> None:
    """To be called when a batch has been read, while nothing draws. Raises UsageError where the random states of the
    process go on all the same: then threads of the nodes draw from them, beside the model. Looks at the first batches
    of a run alone, since it waits."""
    if batch >= _BATCHES_WATCHED or not any(map(_has_threads, nodes_of(loader))):
        return
    before, until = rng.cpu_states(), time.monotonic() + _THREADS_DRAW_WITHIN
    while time.monotonic() < until:
        time.sleep(_THREADS_DRAW_WITHIN / 10)
        if rng.drawn_since(before):
            raise UsageError(
                "cannot go back in the batches of these torchdata.nodes: a thread of a Prefetcher or ParallelMapper "
                "draws from the random states of the process, at the same time as the model does, so no start would "
                "draw the same numbers again",
                hint="draw in a Mapper above all Prefetchers and ParallelMappers, which works in the training's own "
                "thread; or draw from the sample's index, as by random.Random(index)",
            )


def _has_threads(node: Any) -> bool:
    """A ParallelMapper of processes has one that reads what they get."""
    return hasattr(node, "prefetch_factor") or getattr(node, "num_workers", 0) > 0


@contextmanager
def reading_nothing_ahead(loader: Any) -> Iterator[None]:
    """Within it, the loader's `iter` goes to its position and no further. Else it would also read the next batch there,
    to begin anew at an epoch's end: with the random states of the epoch's opening, and not with those of the batch."""
    begins_anew = _is_of_nodes(loader) and getattr(loader, _BEGINS_ANEW, False)
    if begins_anew:
        setattr(loader, _BEGINS_ANEW, False)
    try:
        yield
    finally:
        if begins_anew:
            setattr(loader, _BEGINS_ANEW, True)
