"""The guard behind the objects that Accelerate's `prepare` returns, in a loop that is the script's own.

The loop stays as it is: it iterates over the loader, which hands out the guard's batches, and calls
`accelerator.backward`, by which the guard is told the loss. `accelerator.accumulate` counts batches; that count goes
back with a rollback, and that a batch is the last of its epoch is known from the position, not by reading ahead.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from rollback.errors import UsageError
from rollback.train.guard import Guard
from rollback.train.start import attach
from rollback.train.state.stateful import trained_by
from rollback.train.updates.optimizer import applies_gradients
from rollback.train.updates.wrappers import ddp_inside, unwrap
from rollback.trainers.evaluated_loaders import EvaluatedLoaders
from rollback.trainers.guarded_trainer import made_guard, named
from rollback.trainers.prepared_loader import begin_pass, hand_out, require_known_loader, require_known_ranks
from rollback.trainers.saved_files import SavedAt, SavedFiles
from rollback.wording import Calls

_KINDS: dict[str, tuple[type, ...]] = {
    "model": (nn.Module,),
    "optimizer": (AcceleratedOptimizer,),
    "loader": (DataLoader,),  # for which a prepared one passes itself off
    "scheduler": (AcceleratedScheduler, LRScheduler),
}
_NUMBERED = "checkpoint_"
_DONE_BY_GUARD = {
    "load_state": "the guard puts back what was trained when it is made, and later whenever it must be",
    "skip_first_batches": "the guard goes on in the data where the run was, and reads nothing to get there",
}
"""Methods of Accelerator for resuming by hand."""


def protect(accelerator: Any, *prepared: Any, **settings: Any) -> tuple[Any, ...]:
    """Put a guard into a loop over Accelerate: `rollback.protect(accelerator, ...)`. Returns `prepared`, with a loader
    that hands out guarded batches."""
    require_known_ranks(accelerator)
    found = _sorted(prepared)
    loader, scheduler = found["loader"], found.get("scheduler")
    require_known_loader(loader)
    _rewind_stateful_loaders(accelerator)
    optimizer = found["optimizer"].optimizer
    known = [*map(_inside, (*prepared, *settings.values()))]
    besides = _trained_besides(accelerator, known)
    guard = made_guard(
        settings, model=found["model"], optimizer=optimizer, loader=loader.base_dataloader,
        scheduler=_inside(scheduler), scaler=accelerator.scaler, **besides,
    )  # fmt: skip
    guard.without_probes("the loop counts the batches of Accelerate's loader")
    guard.name_calls(Calls("rollback.protect(accelerator, ..., ", "loader.guard.step", "loader.guard.keep"))
    folders = _NumberedFolders(accelerator, guard)
    counts = _AcceleratorCounts(accelerator, loader, folders)
    guard.keep(accelerator=counts, accelerator_evaluated=_watch_evaluated_loaders(accelerator, loader))
    accelerator.save_state = folders.save_state
    guarded = GuardedLoader(loader, guard, counts)
    optimizer.register_step_pre_hook(lambda *_: _require_guarded(guarded, optimizer))
    optimizer.register_step_pre_hook(lambda *_: _require_averaged(found["model"], guard))
    accelerator.backward = partial(_backward, accelerator.backward, guard)
    register = accelerator.register_for_checkpointing
    accelerator.register_for_checkpointing = partial(_register, register, [*known, *besides.values()])
    for name in _DONE_BY_GUARD:
        setattr(accelerator, name, partial(_refuse_while_training, getattr(accelerator, name), guard, name))
    return tuple(guarded if item is loader else item for item in prepared)


def _sorted(prepared: tuple[Any, ...]) -> dict[str, Any]:
    """The objects by what they are. Raises UsageError where one is missing, twice, or of no use here."""
    found: dict[str, Any] = {}
    for item in prepared:
        name = next((name for name, kinds in _KINDS.items() if isinstance(item, kinds)), None)
        if name is None or name in found:
            raise UsageError(
                f"rollback.protect got a {type(item).__name__}"
                + (f" besides another {name}" if name else ", of which it does not know what to do with it"),
                hint="after the Accelerator it takes what prepare() has returned: one model, its optimizer, the loader "
                "that is trained on, and the scheduler. Other models, optimizers and schedulers that prepare() has "
                "returned are kept as well. Further objects go by a name: rollback.protect(..., ema=ema)",
            )
        found[name] = item
    if missing := [name for name in ("model", "optimizer", "loader") if name not in found]:
        raise UsageError(
            f"rollback.protect got an Accelerator, but no {' and no '.join(missing)}",
            hint="model, optimizer, loader, scheduler = rollback.protect(accelerator, model, optimizer, loader, "
            "scheduler), behind accelerator.prepare",
        )
    return found


def _inside(item: Any) -> Any:
    """What Accelerate has wrapped, or was to wrap; anything else as it is."""
    if isinstance(item, AcceleratedOptimizer):
        return item.optimizer
    if isinstance(item, AcceleratedScheduler):
        return item.scheduler
    return unwrap(item) if isinstance(item, nn.Module) else item


def _trained_besides(accelerator: Any, known: list[Any]) -> dict[str, Any]:
    """What Accelerate itself would save of the training besides what is `known`, by a name for the guard.

    As the critic of a GAN, or a scheduler that was not handed over. Models that no optimizer trains stay as they are.
    """

    def others(items: Iterable[Any]) -> list[Any]:
        return [item for item in map(_inside, items) if not _is_among(known, item)]

    trained = {id(item) for each in accelerator._optimizers for item in trained_by(each)}
    models = [each for each in others(accelerator._models) if not trained.isdisjoint(map(id, each.parameters()))]
    return {
        **named("other_model", models),
        **named("other_optimizer", others(accelerator._optimizers)),
        **named("other_scheduler", others(accelerator._schedulers)),
        **named("registered", others(accelerator._custom_objects)),
    }


def _rewind_stateful_loaders(accelerator: Any) -> None:
    """Let the first pass over a loader draw from the random states what all others draw.

    What `use_stateful_dataloader` makes has drawn its first pass's seed in `prepare`. Of a loader of an evaluation that
    pass comes again in a process that resumes, and comes no more where a rollback repeats the evaluation.
    """
    for loader in accelerator._dataloaders:
        if getattr(loader, "use_stateful_dataloader", False):
            loader.base_dataloader.load_state_dict({})  # to its beginning; what it had begun with is dropped


def _watch_evaluated_loaders(accelerator: Any, trained: Any) -> EvaluatedLoaders:
    """Told before each pass over another loader that was prepared before `protect`, as that of an evaluation.

    Not over a dispatcher, which reads on rank 0 alone, nor over torchdata's, whose iterators begin otherwise.
    """
    others = {
        str(number): loader
        for number, loader in enumerate(accelerator._dataloaders)
        if loader is not trained and isinstance(loader, DataLoaderShard) and type(loader.base_dataloader) is DataLoader
    }
    evaluated = EvaluatedLoaders({name: loader.base_dataloader for name, loader in others.items()})
    for name, loader in others.items():
        loader.begin = partial(_begin_evaluated, loader.begin, evaluated, name, loader.base_dataloader)
    return evaluated


def _begin_evaluated(
    original: Callable[[], None], evaluated: EvaluatedLoaders, name: str, loader: DataLoader[Any]
) -> None:
    original()
    evaluated.begin(name, loader)


def _backward(original: Callable[..., Any], guard: Guard, loss: Any, *more: Any, **others: Any) -> Any:
    result = original(loss, *more, **others)
    guard.observe(loss)
    return result


def _require_guarded(loader: "GuardedLoader", optimizer: Optimizer) -> None:
    """At an update. What the function `skip_first_batches` makes of a guarded loader reads its data past the guard."""
    if loader.was_iterated or not applies_gradients(optimizer):
        return
    error = UsageError(
        "the script updates the model on batches that are not the guard's: it has not yet iterated the loader that "
        "rollback.protect has returned",
        hint="iterate that loader itself, from the first update on. Leave out accelerate.skip_first_batches: "
        + _DONE_BY_GUARD["skip_first_batches"],
    )
    loader.guard.refuse(error)


def _require_averaged(model: nn.Module, guard: Guard) -> None:
    """At an update. In `no_sync()` each rank has gradients of its own, so weights and optimizers drift apart.

    Accelerate's LocalSGD averages the weights every few updates, so that they may look alike in a snapshot. What the
    optimizers remember is then still each rank's own, and a checkpoint has that of one.
    """
    averaging = ddp_inside(model)
    if averaging is None or averaging.require_backward_grad_sync:
        return
    error = UsageError(
        "the script updates the model inside of no_sync(), as LocalSGD does: each rank then has weights and an "
        "optimizer of its own, of which a checkpoint has those of one rank",
        hint="take out LocalSGD (accelerate.local_sgd), or switch it off (enabled=False); to exchange gradients less "
        "often, accumulate more batches for each update (gradient_accumulation_steps)",
    )
    guard.refuse(error)


def _is_among(known: Iterable[Any], item: Any) -> bool:
    return any(_inside(item) is other for other in known)


def _register(original: Callable[..., None], known: list[Any], *objects: Any) -> None:
    """What the script registers for Accelerate's checkpoints is part of its training: the guard has to keep it too."""
    if late := [type(item).__name__ for item in objects if not _is_among(known, item)]:
        attach.refuse(
            UsageError(
                f"accelerator.register_for_checkpointing() of a {late[0]} behind rollback.protect, which keeps what "
                "was registered before it",
                hint="register it in front of rollback.protect, or hand it over by a name: rollback.protect(..., "
                "ema=ema)",
            )
        )
    original(*objects)


def _refuse_while_training(original: Callable[..., Any], guard: Guard, name: str, *given: Any, **others: Any) -> Any:
    """Until the training is over: a script may load its best folder then, for a test."""
    if not guard.finished:
        attach.refuse(
            UsageError(
                f"accelerator.{name}() behind rollback.protect",
                hint=f"take it out: {_DONE_BY_GUARD[name]}. Behind the training it may be called if the guard knows "
                "that this is over: for epoch in loader.guard.epochs(n)",
            )
        )
    return original(*given, **others)


class _NumberedFolders:
    """The folders that `save_state` gives numbers to (`automatic_checkpoint_naming`), one after another.

    The number of the next one says by itself which of them are undone, wherever in an epoch or between two epochs they
    were saved. But it says so only of this run's: others may lie there as well. Undone ones leave the folder, of which
    Accelerate counts all that is in it against its `total_limit`, and takes the one with the highest number to load.
    """

    def __init__(self, accelerator: Any, guard: Guard) -> None:
        self._accelerator, self._guard = accelerator, guard
        self._saved = SavedFiles(guard.run, accelerator.process_index)
        self._save: Callable[..., Any] = accelerator.save_state

    def save_state(self, *given: Any, **others: Any) -> Any:
        folder = self._folder
        if folder is not None and self._accelerator.is_local_main_process:
            path = os.path.join(folder, f"{_NUMBERED}{self._accelerator.save_iteration}")
            if not os.path.lexists(path):  # else it is not this run's, and Accelerate refuses it
                self._saved.note(path, SavedAt(self._guard.step, self._guard.batch))
        return self._save(*given, **others)

    def set_aside(self, first: int) -> None:
        """Those from number `first` on are to be saved anew."""
        folder = self._folder
        if folder is None or not self._accelerator.is_local_main_process:
            return
        known = Path(os.path.realpath(folder))

        def is_undone(path: Path) -> bool:
            number = path.name.removeprefix(_NUMBERED)
            return path.parent == known and number.isdecimal() and int(number) >= first

        self._saved.move_aside(is_undone)

    @property
    def _folder(self) -> str | None:
        """None: the script says where each is saved."""
        named = self._accelerator.project_configuration.automatic_checkpoint_naming and self._accelerator.project_dir
        return os.path.join(self._accelerator.project_dir, "checkpoints") if named else None


class _AcceleratorCounts:
    """How far Accelerate has counted: batches for `accumulate`, passes over the loader, and the folders it has saved.

    The loader tells its samplers and data set at each pass how many it has had, and a process that resumes has had
    none. That number is not always the epoch's: a pass that the script broke off does not count, and `set_epoch` says
    any other. So how many fewer there were is kept, and the epoch where training was put is the guard's.

    How many batches an update has is a setting of the script, until training changes it.
    """

    def __init__(self, accelerator: Any, loader: Any, folders: _NumberedFolders) -> None:
        self._accelerator, self._loader, self._folders = accelerator, loader, folders
        self._accumulated = accelerator.gradient_accumulation_steps
        """As the script has set it for the training's begin."""
        self._fewer = 0
        self._moved = False

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        accumulated = [self._accumulated, accelerator.gradient_accumulation_steps]
        return {
            "step": accelerator.step, "fewer": self._fewer, "saved": accelerator.save_iteration,
            "accumulated": accumulated,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        own = self._accumulated
        first, changed = state.get("accumulated", (own, own))  # an earlier version kept none
        self._accelerator.gradient_accumulation_steps = changed if first == own else own  # else it is set anew
        self._fewer = state.get("fewer", 0)  # an earlier version kept none
        if (saved := state.get("saved")) is not None:
            self._accelerator.project_configuration.iteration = saved
            self._folders.set_aside(saved)
        self._moved = True

    def begin_pass(self, epoch: int) -> None:
        if self._moved:
            self._loader.set_epoch(max(0, epoch - self._fewer))  # a pass of a resume that is over has no epoch yet
        else:
            self._fewer = epoch - self._loader.iteration

    def go_on(self) -> None:
        """There is a batch: a pass that began since training was put elsewhere has been told which one it is."""
        self._moved = False


class GuardedLoader:
    """The loader that Accelerate has prepared, but for its batches, which are the guard's. Each `iter` begins an epoch.

    guard: the `rollback.Guard` behind it.
    """

    def __init__(self, loader: Any, guard: Guard, counts: _AcceleratorCounts) -> None:
        self._loader = loader
        self._counts = counts
        self.guard = guard
        self.was_iterated = False

    def __iter__(self) -> Iterator[Any]:
        self.was_iterated = True
        begin_pass(self._loader)
        batches = iter(self.guard)
        self._counts.begin_pass(self.guard.epoch)
        for batch in batches:
            self._counts.go_on()
            yield hand_out(self._loader, batch, last=self.guard.last_in_epoch)
        self._loader.iteration += 1
        self._loader.end()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of an object that is being made anew, by copy or pickle
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._loader.base_dataloader)
