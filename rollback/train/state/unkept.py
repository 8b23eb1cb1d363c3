"""What acts on the training and is in no checkpoint: an optimizer, or a scheduler, that the guard was not handed; the
workers of another loader; a random generator of a module's, of an optimizer's or of the script's own; an average of the
weights that the script makes by hand, and other tensors of its variables, as a queue of features.

Nothing else of rollback sees it: all goes well until a resume or a rollback begins it anew. torch tells of each step of
any optimizer. What it keeps is compared by memory with what a checkpoint would have, so that an optimizer inside of
another is innocent where that one hands out its state. Schedulers that go by a metric and loaders with workers that
persist are looked for among all objects, once.
"""

import functools
import gc
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from rollback.system.frames import is_of_own_file
from rollback.train.data.cursor.digest import Digest
from rollback.train.data.cursor.generators import Generators, is_generator
from rollback.train.data.own_generators import generators_of_script
from rollback.train.sharded import local_of
from rollback.train.state.module_buffers import storage_of
from rollback.train.state.state import TrainingState
from rollback.train.state.tree import memory_of
from rollback.train.updates.own_attributes import OwnAttributes, goes_on, tells_itself
from rollback.train.updates.script_tensors import (
    copies_of_script,
    modules_of_script,
    tensors_in,
    tensors_of,
    tensors_of_script,
)

_LOOKS = 5  # in all of which a count must go on
_BATCHES = 3  # in which it must have stepped: some scripts make an optimizer for a moment

_WATCHING: "list[weakref.ref[Unkept]]" = []
_KEPT_LOADERS: "weakref.WeakSet[DataLoader[Any]]" = weakref.WeakSet()


def keeps_pass_over(loader: DataLoader[Any]) -> None:
    """A checkpoint has whether this loader has been read, so nothing need be said of it."""
    _KEPT_LOADERS.add(loader)


@functools.cache
def _watch_all_steps() -> None:
    """Once in a process, and for good: to remove such a hook while an optimizer goes through all of them, as when the
    garbage collector finds an old guard there, would end its step."""
    register_optimizer_step_post_hook(_tell_of_step)


def _tell_of_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for each in [*_WATCHING]:
        if (watching := each()) is not None:
            watching.stepped(optimizer)


class Unkept:
    """Watches all optimizers of this process, for as long as it lives. Nothing here is collective.

    generators: random generators that nobody has had kept yet, by name. variables: those of the script.
    """

    def __init__(
        self, state: TrainingState, generators: Mapping[str, Any], variables: Sequence[tuple[str, Any]]
    ) -> None:
        self._state = state
        self._seen: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """Positions of the first batches in which an optimizer has stepped that the guard does not have."""
        self._steady: list[weakref.ref[Optimizer]] = []
        """Those that have stepped in `_BATCHES` of them."""
        self._unjudged: list[weakref.ref[Optimizer]] = []
        """Of these the ones at which nobody has looked yet."""
        handed = (state.optimizer, *state.objects.values())
        own = (item for item in handed if isinstance(item, Optimizer) and not tells_itself(item))
        self._own = [OwnAttributes(item) for item in own]
        self._groups = len(state.optimizer.param_groups)
        self._generators = {name: (thing, _state_of(thing)) for name, thing in generators.items()}
        """Each with its state now."""
        self._handed = handed
        self._copies: dict[str, tuple[Any, list[tuple[int, int]]]] = {}
        """Each with what tells of a write to it."""
        self._modules: dict[str, tuple[weakref.ref[nn.Module], dict[str, object]]] = {}
        self._numbers: dict[str, deque[float]] = {}
        """Of the modules, at the last looks."""
        self._tensors: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self.watch(variables)
        _WATCHING.append(weakref.ref(self, _WATCHING.remove))
        _watch_all_steps()

    def watch(self, variables: Sequence[tuple[str, Any]]) -> None:
        """Watch these from now on, too."""
        copies = copies_of_script(self._state.model, self._handed, variables)
        self._copies |= {name: (held, _marks_of(held)) for name, held in copies.items()}
        had = (*self._state.modules.values(), *(value for item in self._handed for value in _attributes(item)))
        modules = modules_of_script(had, variables)
        self._modules |= {name: (weakref.ref(item), _marks_within(item)) for name, item in modules.items()}
        known = {id(item) for held in copies.values() for item in tensors_in(held)}
        others = tensors_of_script((name, item) for name, item in variables if id(item) not in known)
        self._tensors |= {name: (weakref.ref(item), item._version) for name, item in others.items()}

    def stepped(self, optimizer: Optimizer) -> None:
        if optimizer is self._state.optimizer or any(optimizer is item for item in self._state.objects.values()):
            return
        seen = self._seen.setdefault(optimizer, set())
        if len(seen) < _BATCHES:
            seen.add(self._state.cursor.batch)
            if len(seen) == _BATCHES:
                self._steady.append(weakref.ref(optimizer))
                self._unjudged.append(self._steady[-1])

    def optimizers(self) -> Iterator[str]:
        """The kinds of those of which a checkpoint lacks something. Each is looked at once."""
        while self._unjudged:
            optimizer = self._unjudged.pop(0)()
            if optimizer is not None and self._lacks(optimizer):
                yield type(optimizer).__name__

    def attributes(self) -> Iterator[tuple[str, str]]:
        """The kinds of the guard's optimizers that keep state in attributes, which no checkpoint has; and which."""
        for own in self._own:
            if (names := own.found()) and not self._is_within(own.optimizer):
                yield type(own.optimizer).__name__, ", ".join(names)

    def generators(self) -> list[str]:
        """Names of the random generators of modules, of optimizers and of the script that have drawn since."""
        unkept = {name: one for name, one in self._generators.items() if not self._state.kept.is_kept(one[0])}
        return [name for name, (thing, then) in unkept.items() if _state_of(thing) != then]

    def copies(self) -> list[str]:
        """Names of copies of the model's weights, as of an average, and of modules, which the script writes to."""
        written = [name for name, (held, then) in self._copies.items() if _marks_of(held) != then]
        alive = ((name, reference(), then) for name, (reference, then) in self._modules.items())
        return written + [name for name, module, then in alive if module is not None and self._lacks_of(module, then)]

    def _lacks_of(self, module: nn.Module, then: Mapping[str, object]) -> bool:
        """Whether it has other values than then in what no checkpoint has."""
        now, tensors = _marks_within(module), tensors_of(module)
        written = [tensors[name] for name in now if now[name] != then.get(name)]
        kept = self._memory_kept() if written else ()
        trained = {id(item) for optimizer in self._seen for item in _trained_by(optimizer)}  # it is named itself
        return any(storage_of(item) not in kept and id(item) not in trained for item in written)

    def tensors(self) -> list[str]:
        """Names of other tensors of the script's that are written to, as a queue of features is."""
        alive = ((name, reference(), then) for name, (reference, then) in self._tensors.items())
        written = [(name, item) for name, item, then in alive if item is not None and item._version != then]
        kept = self._memory_kept() if written else ()
        gradients = {storage_of(p.grad) for p in self._state.trained if p.grad is not None} if written else ()
        return [name for name, item in written if storage_of(item) not in {*kept, *gradients}]

    def numbers(self) -> list[str]:
        """Names of numbers which the script's own modules have as attributes, and which go on in each update, as counts
        do. Ask it once in each."""
        for name, value in _numbers_of(self._state.modules):
            self._numbers.setdefault(name, deque(maxlen=_LOOKS)).append(value)
        return [name for name, values in self._numbers.items() if len(values) == _LOOKS and goes_on(values)]

    def _memory_kept(self) -> set[object]:
        return {storage_of(item) for item in self._state.image(data=False).tensors}

    def in_its_place(self) -> str | None:
        """The kind of one that trains the parameters of the guard's optimizer, which itself has made no step in the
        run; None: there is none."""
        if self._state.counters.step:
            return None
        own = {id(item) for item in self._state.trained}
        alive = (optimizer for reference in self._steady if (optimizer := reference()) is not None)
        return next((type(each).__name__ for each in alive if own & {*map(id, _trained_by(each))}), None)

    def scheduler(self) -> bool:
        """Whether a scheduler acts on the optimizer, and nothing that was handed over may be it."""
        return not self._may_have_scheduler and (self._is_scheduled() or self._awaits_plateau)

    @functools.cached_property
    def _may_have_scheduler(self) -> bool:
        return any(map(_may_schedule, self._state.objects.values()))

    def _is_scheduled(self) -> bool:
        optimizer = self._state.optimizer
        if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # by which torch itself knows it
            return False
        return any(group["lr"] != group.get("initial_lr", group["lr"]) for group in optimizer.param_groups)

    @functools.cached_property
    def _awaits_plateau(self) -> bool:
        """Whether there is a scheduler that goes by a metric: it leaves no trace in the optimizer until it acts."""
        of_all = (item for item in gc.get_objects() if issubclass(type(item), ReduceLROnPlateau))
        return any(item.optimizer is self._state.optimizer for item in of_all)

    def group(self) -> bool:
        """Whether the guard's optimizer has got another group since, which checkpoints then have."""
        return len(self._state.optimizer.param_groups) > self._groups

    def evaluation(self) -> bool:
        """Whether a loader was first read in the training, and drew a seed for its workers from the random states that
        the training draws from. It has them still, so it draws no more; a process that goes on draws once more."""
        for reference in self._unread:
            loader = reference()
            if loader is not None and loader._iterator is not None and loader not in _KEPT_LOADERS:
                return True
        return False

    @functools.cached_property
    def _unread(self) -> "list[weakref.ref[DataLoader[Any]]]":
        """Those that had not been read when this was first asked."""
        loaders = (item for item in gc.get_objects() if issubclass(type(item), DataLoader))
        persistent = (item for item in loaders if item.persistent_workers and item.generator is None)
        return [weakref.ref(item) for item in persistent if item._iterator is None]

    def _lacks(self, optimizer: Optimizer) -> bool:
        if self._is_within(optimizer):
            return False  # it may hand out copies
        image = self._state.image(data=False)
        kept = {memory_of(item) for item in image.tensors}
        keeps = [item for item in tree_leaves([*optimizer.state.values()]) if isinstance(item, Tensor)]
        return any(memory_of(item) not in kept for item in (*keeps, *_trained_by(optimizer)))

    def _is_within(self, optimizer: Optimizer) -> bool:
        """Whether another object, which was handed over, has it."""
        others = (item for item in self._state.objects.values() if not isinstance(item, Optimizer | LRScheduler))
        return any(value is optimizer for item in others for value in _attributes(item))


def _state_of(generator: Any) -> int:
    return cast(int, Digest(Generators(generator).states()).value)


def _marks_of(held: Any) -> list[tuple[int, int]]:
    return [(id(item), item._version) for item in tensors_in(held)]


def _numbers_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, float]]:
    """But for those of modules that hand out more than their tensors."""
    for owner, module in modules.items():
        for prefix, part in module.named_modules():
            kind = type(part)
            if is_of_own_file(kind) and kind.get_extra_state is nn.Module.get_extra_state:
                named = [(name, value) for name, value in vars(part).items() if type(value) in (int, float)]
                yield from ((".".join(filter(None, (owner, prefix, name))), value) for name, value in named)


def _marks_within(module: nn.Module) -> dict[str, object]:
    """By name. A write to `item.data` shows in values alone: of these there are a few, of one tensor."""
    tensors = tensors_of(module)
    marks: dict[str, object] = {
        name: (id(item), item.is_inference() or item._version, storage_of(item)) for name, item in tensors.items()
    }
    if tensors:
        name, last = [*tensors.items()][-1]
        begins = local_of(last).detach().flatten()[:8].resolve_conj().resolve_neg()
        marks[name] = marks[name], str(begins.view(torch.uint8).tolist())
    return marks


def generators_beside(state: TrainingState, loader: Any, variables: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Random generators that are attributes of modules or optimizers, or variables of the script, by name. Those that
    the loader has are the cursor's."""
    found = dict(_generators_of(state))
    return found | generators_of_script(variables, loader, *found.values())


def _generators_of(state: TrainingState) -> Iterator[tuple[str, Any]]:
    """In the attributes themselves: what else these refer to may be the loader's, which is kept."""
    parts: list[tuple[str, Any]] = [
        (f"{owner}.{prefix}" if prefix else owner, part)
        for owner, module in state.modules.items() for prefix, part in module.named_modules()
    ]  # fmt: skip
    named = {"optimizer": state.optimizer, **state.objects}
    parts += [(name, item) for name, item in named.items() if isinstance(item, Optimizer)]
    for name, part in parts:
        for attribute, value in vars(part).items():
            if is_generator(value):
                yield f"{name}.{attribute}", value


def _may_schedule(item: object) -> bool:
    """Whether it is a scheduler, or may be or have one for all that can be seen."""
    if isinstance(item, LRScheduler) or any(isinstance(value, LRScheduler | Optimizer) for value in _attributes(item)):
        return True
    return hasattr(item, "step") and not type(item).__module__.startswith("torch.")


def _attributes(item: object) -> list[object]:
    return [*getattr(item, "__dict__", {}).values()]


def _trained_by(optimizer: Optimizer) -> list[Tensor]:
    return [item for group in optimizer.param_groups for item in group["params"]]
