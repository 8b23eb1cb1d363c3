"""The state that a new run begins with, from a checkpoint that others have written (the setting `init`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollback.checkpoints.format.parts import whole
from rollback.checkpoints.outside.fitting import Fitting, JobTensors, OutsideCheckpoint, fit, hash_file, hash_together
from rollback.checkpoints.outside.fitting import open_outside as open_it
from rollback.config import spelt
from rollback.errors import CheckpointUnusable, NoUsableCheckpoint, RollbackError, WrongSetting
from rollback.facts.fact import InitialState
from rollback.train.comm.ranks import Ranks
from rollback.train.restore.reads import Reads, reading
from rollback.train.sharded import is_sharded, local_of, part_of, sharded_like
from rollback.train.state import tree
from rollback.train.state.state import TrainingState
from rollback.wording import AdviceText

INIT_NOT_READ = AdviceText(
    "init-not-read",
    "the run goes on from its checkpoints: what `init` names ({names}) is not read, since only a new run reads it",
)
_T = TypeVar("_T")
_HINT = "nothing was written; mend the files, or leave `init` out, and run the same command again"


def begin_with(place: str, state: TrainingState, ranks: Ranks) -> InitialState:
    """Collective: read a model, and its optimizer's state if it is there, into the live objects.

    Each rank reads the rows that it has a part of. The hyperparameters (learning rate and so on) stay the script's.
    Nothing is touched before all ranks have found that everything fits. Raises WrongSetting where it does not, and
    NoUsableCheckpoint where it cannot be read, the same on all ranks.
    """
    path = Path(place).absolute()
    found = _agreed(ranks, WrongSetting, lambda: open_it(path))
    try:
        job = _tensors_of(state)
        fitting = _agreed(ranks, WrongSetting, lambda: fit(found, job))
        sizes = _agreed(ranks, NoUsableCheckpoint, lambda: found.sizes)
        if any(other != sizes for other in ranks.from_each(sizes)):
            raise WrongSetting(
                f"{spelt('init')}: the hosts of this job have different files at {path}",
                hint="give all of them the same files",
            )
        _agreed(ranks, NoUsableCheckpoint, lambda: _load(found, fitting, state, ranks))
        own = found.files[ranks.rank :: ranks.world_size]
        hashes = _agreed(ranks, NoUsableCheckpoint, lambda: {file.name: hash_file(file) for file in own})
    finally:
        found.close()
    digest = hash_together({name: text for some in ranks.from_each(hashes) for name, text in some.items()})
    return InitialState(
        path=str(path), layout=found.layout, files=len(found.files), bytes=sum(sizes.values()), hash=digest,
        tensors=len(fitting.model), optimizer=sum(map(len, fitting.optimizer.values())), left_aside=fitting.left_aside,
    )  # fmt: skip


def _agreed(ranks: Ranks, kind: type[RollbackError], act: Callable[[], _T]) -> _T:
    """Collective: as `Ranks.agreed`. Raises `kind`, whatever it was."""

    def act_in_words() -> _T:
        try:
            return act()
        except RollbackError as error:
            raise kind(f"{spelt('init')}: {error.message}", hint=error.hint or _HINT) from error
        except OSError as error:
            why = f"{error.filename or 'a file'} cannot be read: {error.strerror or error}"
            raise kind(f"{spelt('init')}: {why}", hint=_HINT) from error

    return ranks.agreed(act_in_words)


def _tensors_of(state: TrainingState) -> JobTensors:
    live = {name: item for name, item in state.model.state_dict().items() if isinstance(item, Tensor)}
    first: dict[Any, str] = {}
    # A rank's empty parts share an address with each other: their names tell them apart.
    same = {
        name: first.setdefault(tree.memory_of(item) if local_of(item).numel() else name, name)
        for name, item in live.items()
    }
    kinds = {name: (tree.DTYPE_CODE[item.dtype], tuple(item.shape)) for name, item in live.items()}
    trained = {name: item for name, item in zip(state.trained_names(), state.trained, strict=True) if name is not None}
    return JobTensors(kinds, same, [*trained], {name for name, item in trained.items() if not item.requires_grad})


def _load(found: OutsideCheckpoint, fitting: Fitting, state: TrainingState, ranks: Ranks) -> None:
    live = state.model.state_dict()
    by_name = dict(zip(state.trained_names(), enumerate(state.trained), strict=True))
    try:
        with reading(ranks) as reads:
            for name, full in fitting.model.items():
                into = local_of(live[name]).detach()
                reads.want_part(found.tensors[full], part_of(live[name], name), into, into)
            optimizer: dict[int, dict[str, Any]] = {}
            for name, kept in fitting.optimizer.items():
                number, parameter = by_name[name]
                optimizer[number] = {
                    key: _of_state(found, full, parameter, reads) for key, full in kept.items()
                }  # fmt: skip
    except CheckpointUnusable as error:
        raise NoUsableCheckpoint(error.message) from error
    state.begin_with({name: live[name] for name in fitting.model}, optimizer)


def _of_state(found: OutsideCheckpoint, full: str, parameter: Tensor, reads: Reads) -> Tensor:
    """A tensor of the optimizer's state: a part like the parameter's where it has its shape, else all of it."""
    stored = found.tensors[full]
    shape = stored[0][0].shape
    if shape != tuple(parameter.shape):
        return reads.want_part(stored, whole(shape), None, torch.empty(0))
    local = reads.want_part(stored, part_of(parameter, full), None, local_of(parameter))
    return sharded_like(local, parameter) if is_sharded(parameter) else local
