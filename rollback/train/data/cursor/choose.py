"""Chooses the cursor for a loader."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from rollback.errors import UsageError
from rollback.train.data.cursor.base import Cursor
from rollback.train.data.cursor.drawn import DrawnCursor
from rollback.train.data.cursor.mapstyle import MapStyleCursor
from rollback.train.data.cursor.nodes import require_a_way_back
from rollback.train.data.cursor.reiterated import ReiteratedCursor
from rollback.train.data.cursor.stateful import HuggingFaceStream, StatefulCursor

_ACCEPTED = (
    "accepted are: a torch DataLoader; an iterable with state_dict and load_state_dict; a callable without arguments "
    "or an iterator that draws its batches from the global random states; an iterable that begins anew each time"
)


def cursor_for(loader: Any) -> Cursor:
    """The cursor for `loader`. Raises UsageError, with what is accepted, if it offers no way to go back."""
    if isinstance(loader, type):
        raise UsageError(
            f"cannot read batches from the class {loader.__name__}",
            hint=f"hand over an instance of it; {_ACCEPTED}",
        )
    kind = type(loader)
    if kind.__module__.partition(".")[0] == "accelerate":  # isinstance would say that it is a torch DataLoader
        raise UsageError(
            f"cannot go back in the batches of {kind.__module__}.{kind.__name__}: it reads a batch ahead and shuffles "
            "anew whenever it is iterated",
            hint="model, optimizer, loader, scheduler = rollback.protect(accelerator, model, optimizer, loader, "
            "scheduler) hands out its batches under a guard; or hand over a DataLoader with a DistributedSampler",
        )
    require_a_way_back(loader)
    if _is_torchdata_loader(loader) and not _keeps_state(loader):
        # By index, or else read again from the start, as the loader itself does it where its parts keep no state.
        return ReiteratedCursor(loader) if _is_iterable_style(loader) else MapStyleCursor(loader)
    if (stream := HuggingFaceStream.of(loader)) is not None and stream.loses_its_place():  # so it is read again
        return ReiteratedCursor(loader)
    if hasattr(loader, "__iter__") and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulCursor(loader)
    if _is_plain_map_style(loader):
        return MapStyleCursor(loader)
    if hasattr(loader, "__next__"):
        return DrawnCursor(loader.__next__, name=type(loader).__name__, once=True)
    if hasattr(loader, "__iter__") and not isinstance(loader, (str, bytes, dict)):
        return ReiteratedCursor(loader)
    if callable(loader):
        return DrawnCursor(loader, name=getattr(loader, "__name__", type(loader).__name__))
    raise UsageError(f"cannot read batches from loader=, which is of the type {type(loader).__name__}", hint=_ACCEPTED)


def _is_plain_map_style(loader: Any) -> bool:
    """Whether the loader reads by index as torch does. A subclass with an iterator of its own does not."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
        and not _is_iterable_style(loader)
    )


def _is_iterable_style(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, (IterableDataset, MapDataPipe))


def _keeps_state(loader: Any) -> bool:
    """Whether the data set of torchdata's StatefulDataLoader, or a sampler of the user's, has a state: then it may go
    on where it stands whenever it is iterated, and only the loader's own state leads to a position.

    Without any, such a loader reads as torch does. Going back by index is then exact where its own state is not: that
    state lacks its workers' random states and a generator that was handed to it.
    """
    samplers = [loader.batch_sampler, loader.sampler]
    own = [item for item in samplers if type(item).__module__.partition(".")[0] not in ("torch", "torchdata")]
    return any(hasattr(item, "state_dict") for item in [loader.dataset, *own])


def _is_torchdata_loader(loader: Any) -> bool:
    return type(loader).__name__ == "StatefulDataLoader" and type(loader).__module__.startswith("torchdata.")
