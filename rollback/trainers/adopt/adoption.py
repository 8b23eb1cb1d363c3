"""What becomes of a script that is watched: whether it is under guard, of what the guard is made, what is refused.

    loader iterated      if it is trained on, the guard is made here, before the first batch is drawn
    its batches          the guard's
    backward             its scalar is the loss of the batch
    clip_grad_norm_      the norm before clipping, of the losses told since the last one
    optimizer updates    those of another optimizer than the guard's are a sign that the guard does not see all
    end of the script    the guard ends with it

A refusal goes the way of all refusals to the supervisor, which starts the script again without us (`--adopt`), or ends
(`--adopt=strict`). Signs that come between two trainings, and those that come late, when starting again would lose more
than it mends, are only said where `--adopt` is not strict.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from rollback.errors import UsageError
from rollback.source.loops import COUNT, EPOCHS, MOVED
from rollback.train import attach
from rollback.train.comm.recorder import say
from rollback.train.events import RollbackCause
from rollback.train.guard import Guard
from rollback.trainers.adopt.epochs import EpochLoop, EpochMoved
from rollback.trainers.adopt.objects import gradients_kept, trained_objects
from rollback.trainers.adopt.sources import ScriptSources
from rollback.trainers.protect import module_of

_EARLY = 100  # updates: a script that is found out by then is started again


class Adoption:
    """Of the script in this rank. strict: late signs end it too. Methods are called by `hooks`, on every rank alike."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._made: list[weakref.ref[Any]] = []
        self._sources = ScriptSources()
        self._guard: Guard | None = None
        self._given_up = False
        """Whether the script goes on without us."""
        self._reading = False
        """Whether it is the guard that iterates, not the script."""
        self._in_backward = False
        self._loader: Any = None
        self._prepared: Any = None  # what hands out the guard's batches where Accelerate has prepared the loader
        self._optimizer: Optimizer | None = None
        self._model: nn.Module | None = None
        self._loop: EpochLoop | None = None
        self._steered: EpochLoop | None = None
        self._stranger: Any = None
        """The loader that the last batch came from, where it is not ours."""
        self._untold: list[Tensor] = []
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._updated = False
        self._said: set[str] = set()

    # The script ------------------------------------------------------------------------------------------------------

    def read_script(self, source: bytes, filename: str) -> CodeType:
        """Compile it, with its loops over epochs steered. Raises SyntaxError as Python does."""
        vars(builtins).update({EPOCHS: self.epochs, MOVED: EpochMoved, COUNT: self.count})
        return self._sources.compiled(source, filename)

    def epochs(self, numbers: Any) -> Any:
        """What the script goes over in place of `numbers`."""
        return EpochLoop(numbers, self._begin_epochs) if type(numbers) is range and len(numbers) else numbers

    def count(self, number: int, start: int) -> int:
        """What the script counts its batches as, in place of `number`."""
        if self._guard is None or self._given_up or self._stranger is not None:
            return number
        return self._guard.batch_in_epoch + start

    def _begin_epochs(self, loop: EpochLoop) -> None:
        self._loop = loop

    def end(self) -> None:
        """The script is through, or leaves its process group. Collective; nothing where it raised."""
        guard = self._guard
        raised = sys.exc_info()[1]
        leaves = raised is None or (isinstance(raised, SystemExit) and not raised.code)
        if guard is None or self._given_up or not leaves:
            return
        self._given_up = True
        if not guard._passes.over and not (self._steered and self._steered.over):
            self._tell_losses()
            stays = self._with_guard(guard.finish, "the script's own end of its loop")
            left = f"the script has left its loop by itself, at step {guard.step}"
            if not stays:
                say(f"{left}; its last update was judged to demand a return. The next attempt goes on from there")
                raise SystemExit(1)
            self._say(f"{left}. If a count of its own told it to: a rollback and a resume leave that count behind")
        guard.close()

    def leave_group(self, original: Callable[..., Any], *given: Any, **others: Any) -> Any:
        self.end()
        return original(*given, **others)

    # Objects ---------------------------------------------------------------------------------------------------------

    def made(self, thing: Any) -> None:
        self._made.append(weakref.ref(thing))

    def _alive(self) -> list[Any]:
        """What was made and is there still, in the order in which it was made: the same on all ranks."""
        gc.collect()
        found = [thing for reference in self._made if (thing := reference()) is not None]
        self._made = [weakref.ref(thing) for thing in found]
        return found

    # Loaders ---------------------------------------------------------------------------------------------------------

    def iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        """`iter(loader)` of a torch DataLoader."""
        return original(loader) if self._reading else self._iterate(original, loader)

    def iterate_prepared(self, original: Callable[..., Any], loader: Any) -> Any:
        """`iter(loader)` of a loader that Accelerate has prepared."""
        return self._iterate(original, loader)

    def _iterate(self, original: Callable[..., Any], loader: Any) -> Any:
        if self._given_up or not torch.is_grad_enabled():
            return original(loader)
        if self._guard is not None and loader is not self._loader:
            return _Strangers(self, original(loader), loader)
        if not self._is_trained_on():
            return original(loader)
        if self._guard is None:
            self._adopt(loader)
        elif self._steered is not None and (self._steered.over or self._loop is not self._steered):
            self._sign("trains on its loader again, behind its loop over epochs", between=True)
            return original(loader)
        elif self._prepared is None and len(_optimizers(self._alive())) > 1:
            self._sign("trains on its loader again, with another optimizer", between=True)
            return original(loader)
        assert self._guard is not None
        if self._steered is None and self._loop is not None and self._loop.at_first and not self._guard._passes.count:
            self._steered = self._loop
            self._loop.steer(self._places(self._guard, len(self._loop)))
        return self._pass(original)

    def _is_trained_on(self) -> bool:
        """Whether the loader that is being iterated is to be trained on, as far as source and model tell."""
        return self._sources.trains() is not False and self._in_training_mode()

    def _in_training_mode(self) -> bool:
        """Whether a module is that an optimizer trains."""
        made = self._alive()
        trained = {
            id(p) for optimizer in _optimizers(made) for group in optimizer.param_groups for p in group["params"]
        }
        modules = (thing for thing in made if isinstance(thing, nn.Module) and "_parameters" in vars(thing))
        return any(module.training and any(id(p) in trained for p in module._parameters.values()) for module in modules)

    def _adopt(self, loader: Any) -> None:
        """Make the guard, of all that there is. Collective; ends this rank where it cannot be."""
        try:
            if type(loader).__module__.partition(".")[0] == "accelerate":
                self._with_guard(self._adopt_prepared, loader)
            else:
                self._adopt_plain(loader)
        except UsageError as error:
            attach.refuse(_named(error))
        assert self._guard is not None
        self._loader = loader
        for counter in self._sources.counters():
            self._say(
                f"the script counts with `{counter.name}` by itself (line {counter.line})"
                + (", and ends its loop by it" if counter.ends else "")
                + ": a rollback and a resume leave that count behind. guard.keep is for such values"
            )

    def _adopt_plain(self, loader: Any) -> None:
        if isinstance(loader.dataset, IterableDataset) and not hasattr(loader.dataset, "load_state_dict"):
            raise UsageError(
                f"the script trains on a {type(loader.dataset).__name__}, which is only read in order: what it keeps "
                "for itself while it is read cannot be put back",
                hint="a data set with len() and __getitem__, or one with state_dict and load_state_dict",
            )
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise UsageError(
                f"the script trains on a {type(loader).__name__}, which iterates in its own way",
                hint="a torch DataLoader; other loaders can be handed to a rollback.Guard",
            )
        model, optimizer, objects = trained_objects(self._alive())
        self._model, self._optimizer = model, optimizer
        self._guard = self._with_guard(Guard, model=model, optimizer=optimizer, loader=loader, **objects)

    def _adopt_prepared(self, loader: Any) -> None:
        accelerators = [thing for thing in gc.get_objects() if type(thing).__name__ == "Accelerator"]
        if len(accelerators) != 1:
            raise UsageError(
                f"the script has {len(accelerators)} objects of class Accelerator, and --adopt goes by one",
                hint="rollback.protect(accelerator, ...) takes what one of them has prepared",
            )
        accelerator = accelerators[0]
        prepared = [*accelerator._models, *accelerator._optimizers, loader, *accelerator._schedulers]
        given = module_of((accelerator,)).protect(accelerator, *prepared)
        self._prepared = given[next(place for place, item in enumerate(prepared) if item is loader)]
        self._guard = self._prepared.guard
        self._model, self._optimizer = prepared[0], accelerator._optimizers[0].optimizer

    def _places(self, guard: Guard, epochs: int) -> Iterator[int]:
        """Of the epochs to come in a steered loop. Collective."""
        places = guard.epochs(epochs)
        try:
            while (place := self._with_guard(next, places, None)) is not None:
                yield place
        except UsageError as error:
            attach.refuse(error, status=1)

    def _pass(self, original: Callable[..., Any]) -> Iterator[Any]:
        """A pass over the guard."""
        guard = self._guard
        assert guard is not None
        if self._prepared is not None and self._steered is not None:
            self._loader.iteration = self._steered.place
        batches = iter(self._prepared if self._prepared is not None else self._with_guard(iter, guard))
        if self._prepared is None and self._steered is not None and all_is_skipped(guard):
            # The code behind the script's loop stands on what its body has left.
            with gradients_kept(guard._state.optimizer):
                yield self._with_guard(lambda: next(original(self._loader)))
            self._untold.clear()
            self._with_guard(guard._rewinder.restore_again, RollbackCause.EPOCH_START)
        while True:
            self._tell_losses()
            try:
                batch = self._with_guard(next, batches)
            except StopIteration:
                if guard._passes.interrupted:
                    raise EpochMoved from None
                return
            self._stranger = None
            yield batch

    def _with_guard(self, call: Callable[..., Any], *given: Any, **others: Any) -> Any:
        """What the guard iterates meanwhile is its own."""
        before, self._reading = self._reading, True
        try:
            return call(*given, **others)
        except SystemExit:
            self._given_up = True  # the ranks stop together, and the guard is closed
            raise
        finally:
            self._reading = before

    # Losses and updates ----------------------------------------------------------------------------------------------

    def scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """GradScaler.scale: the loss is what is handed to it, not what it returns."""
        scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and isinstance(outputs, Tensor):
            self._scaled = weakref.ref(scaled), outputs.detach()
        return scaled

    def backward(self, original: Callable[..., Any], tensors: Any, *given: Any, **others: Any) -> Any:
        """torch.autograd.backward, by which all calls of backward go."""
        if self._in_backward or self._guard is None or self._given_up:
            return original(tensors, *given, **others)
        if self._stranger is not None:
            self._sign(f"trains on two loaders: one of {_described(self._loader)}, one of {_described(self._stranger)}")
        self._in_backward = True
        try:
            result = original(tensors, *given, **others)
        finally:
            self._in_backward = False
        if isinstance(tensors, Tensor) and tensors.numel() == 1 and self._prepared is None:
            scaled = self._scaled is not None and self._scaled[0]() is tensors
            self._untold.append(self._scaled[1] if scaled and self._scaled else tensors.detach())
        return result

    def clip(self, original: Callable[..., Any], parameters: Any, *given: Any, **others: Any) -> Any:
        """clip_grad_norm_: the norm before clipping, where it is that of all gradients, is the update's."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = original(parameters, *given, **others)
        kind = given[1] if len(given) > 1 else others.get("norm_type", 2.0)
        if self._untold and self._optimizer is not None and float(kind) == 2.0:
            clipped = {id(parameter) for parameter in parameters}
            groups = self._optimizer.param_groups
            if all(id(p) in clipped for group in groups for p in group["params"] if p.grad is not None):
                self._tell_losses(norm)
        return norm

    def before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make an update."""
        if self._given_up or optimizer is self._optimizer:
            return
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            return
        if self._guard is not None:
            self._sign(f"trains with a second optimizer, {type(optimizer).__name__}, which was not there at the start")
            return
        attach.refuse(
            UsageError(
                f"the script updates a model ({self._sources.caller()}) with a batch that came from no DataLoader",
                hint="--adopt knows batches of a torch DataLoader; with a callable or an iterator of your own make a "
                "rollback.Guard",
            )
        )

    def _tell_losses(self, grad_norm: Tensor | None = None) -> None:
        losses, self._untold = self._untold, []
        for loss in losses:
            assert self._guard is not None
            last = loss is losses[-1]
            self._guard.observe(loss, grad_norm=grad_norm if last else None)

    # Signs -----------------------------------------------------------------------------------------------------------

    def script_makes_guard(self, original: Callable[..., Any], guard: Guard, **given: Any) -> None:
        """Guard.__init__: a script that has a guard of its own is not adopted."""
        if not self._reading:
            self._given_up = True
            self._say("the script makes a guard by itself: --adopt has nothing to do")
        original(guard, **given)

    def strange_batch(self, loader: Any) -> None:
        """The script takes a batch of another loader. Whether it trains on it, backward says."""
        if torch.is_grad_enabled() and self._model is not None and self._model.training:
            self._stranger = loader

    def _sign(self, what: str, *, between: bool = False) -> None:
        """The script does what the guard cannot keep exact. between: two trainings; the guarded one is over."""
        guard = self._guard
        assert guard is not None
        error = UsageError(
            f"the script {what}: what a guard of the first alone keeps would not be exact",
            hint="`rollback adopt` shows how a guard is written into a script, which then says what it is to keep",
        )
        over = between or guard._passes.over
        if self._strict or not (over or guard.step >= _EARLY):
            attach.refuse(error, status=1)
        if over:
            self._given_up = True
            guard.close()
            self._say(f"not protected from here on: {error.message}")
        else:
            self._say(f"{error.message}. It goes on under guard; from here on a rollback or a resume is not exact")

    def _say(self, text: str) -> None:
        if text not in self._said and os.environ.get("RANK", "0") == "0":
            say(text)
        self._said.add(text)


class _Strangers:
    """An iterator over another loader than the one that is trained on, as far as is known."""

    def __init__(self, adoption: Adoption, batches: Any, loader: Any) -> None:
        self._adoption, self._batches, self._loader = adoption, batches, loader

    def __iter__(self) -> _Strangers:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._adoption.strange_batch(self._loader)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def all_is_skipped(guard: Guard) -> bool:
    """Whether no batch is left of the epoch that the guard was put back into: it is over, or its rest is skipped."""
    cursor, batches = guard._state.cursor, guard._state.cursor.epoch_batches
    if guard._rewinder._source is None or not cursor.opened or batches is None:
        return guard._passes.over and guard._rewinder._source is not None
    end = cursor.batch - cursor.offset + batches
    return any(window.first <= cursor.batch and end - 1 <= window.last for window in guard._batches.skips.windows)


def _optimizers(made: list[Any]) -> list[Optimizer]:
    """Torch's own: what wraps one, as Accelerate's does, has not begun one itself."""
    return [thing for thing in made if isinstance(thing, Optimizer) and "param_groups" in vars(thing)]


def _described(loader: Any) -> str:
    try:
        return f"{len(loader)} batches of a {type(loader.dataset).__name__}"
    except (TypeError, AttributeError):
        return f"a {type(loader).__name__}"


def _named(error: UsageError) -> UsageError:
    return UsageError(error.message.replace("rollback.protect got", "the script has"), hint=error.hint)
