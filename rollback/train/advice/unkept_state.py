"""What acts on the training and is in no checkpoint: an optimizer, or a scheduler, that the guard was not handed; the
workers of another loader; a random generator of a module's, of an optimizer's or of the script's own; an average of the
weights that the script makes by hand, and other tensors of its variables, as a queue of features.

Nothing else of rollback sees it: all goes well until a resume or a rollback begins it anew. torch tells of each step of
any optimizer. What it keeps is compared by memory with what a checkpoint would have, so that an optimizer inside of
another is innocent where that one hands out its state. Schedulers that go by a metric and loaders with workers that
persist are looked for among all objects, once.
"""

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from rollback.train.advice.carried_tensors import CarriedTensors
from rollback.train.advice.optimizer_attributes import OptimizerAttributes, tells_itself
from rollback.train.advice.own_numbers import OwnNumbers
from rollback.train.advice.script_tensors import (
    ModelCopies,
    copies_of_script,
    modules_of_script,
    tensors_of,
    tensors_of_script,
)
from rollback.train.data.cursor.digest import Digest
from rollback.train.data.cursor.generators import Generators
from rollback.train.introspection import instances
from rollback.train.sharded import is_sharded, local_of
from rollback.train.state.module_buffers import storage_of
from rollback.train.state.state import TrainingState
from rollback.train.state.stateful import trained_by
from rollback.train.state.tree import memory_of
from rollback.wording import AdviceText

OPTIMIZER_NOT_KEPT = AdviceText(
    "optimizer-not-kept",
    "an optimizer of the kind {kind} trains in the loop, and the guard was not handed all that it keeps and trains: no "
    "checkpoint has that, so a rollback leaves it as it is and a resume begins it anew. Hand it over by a name of its "
    "own, and its module too: {guard.hand_over:other_optimizer=..., other_model=...}",
)
ATTRIBUTES_NOT_KEPT = AdviceText(
    "optimizer-attributes",
    "each update changes {names} of the optimizer {kind}, attributes of its own that are not in its state_dict: no "
    "checkpoint has them, so a rollback leaves them as they are and a resume begins them anew. Where updates depend on "
    "them, as a bias correction or a momentum does, keep them in self.state[parameter], or a number in its group: "
    'group["t"] += 1',
)
GENERATOR_NOT_KEPT = AdviceText(
    "generator-not-kept",
    "in the training {names} draws random numbers, a generator that no checkpoint has: a rollback leaves it as it is, "
    "and a resume begins it anew. If it makes no data, have it kept, in front of the loop: "
    "{guard.keep:noise=generator}. One that the script seeds in each batch needs nothing",
)
COPIES_NOT_KEPT = AdviceText(
    "copies-not-kept",
    "the script writes to {names}, copies of the model's weights or a module of its own, and no checkpoint has these: "
    "a rollback leaves them as they are, and a resume begins them anew. Where something depends on them later, as on "
    "an average of the weights, hand over the module, or an object with state_dict and load_state_dict that has them, "
    "by a name of its own: {guard.hand_over:average=average}. A copy that is filled anew before each use needs nothing",
)
VARIABLES_NOT_KEPT = AdviceText(
    "variables-not-kept",
    "the training writes to {names}, tensors or samples of the script's that no checkpoint has: a rollback leaves them "
    "as they are, and a resume begins them anew. If a later batch reads what is written there, as from a queue of "
    'features, make tensors buffers of a module that is handed over: bank.register_buffer("queue", queue), '
    "{guard.hand_over:bank=bank}. Hand over a list in an object with state_dict and load_state_dict, and have a number "
    "kept: {guard.keep:kept = mean=0.0}",
)
NUMBERS_NOT_KEPT = AdviceText(
    "numbers-not-kept",
    "each update changes {names}, numbers that modules have as attributes, and no checkpoint has these: a rollback "
    "leaves them as they are, and a resume begins them anew. Where the model's outputs depend on them, as on a "
    'temperature that falls, make them buffers: self.register_buffer("t", torch.zeros(()))',
)
NUMBERS_OF_OBJECTS_NOT_KEPT = AdviceText(
    "numbers-of-objects-not-kept",
    "each update changes {names}, numbers that objects have as attributes which the guard was handed, and their "
    "state_dict() has none of these: a rollback leaves them as they are, and a resume begins them anew. Where training "
    "depends on them, as the decay of an average may on its count of updates, put them into state_dict() and take them "
    "back in load_state_dict()",
)
SCHEDULER_NOT_KEPT = AdviceText(
    "scheduler-not-kept",
    "a scheduler changes the learning rate, and the guard was not handed it: after a resume it begins with its first "
    "step, and a rollback does not bring it back. {guard.hand_over:scheduler=scheduler}",
)
GROUP_ADDED = AdviceText(
    "group-added",
    "the optimizer has got a parameter group since the guard was made (add_param_group), as for layers that are "
    "unfrozen: a rollback to before that ends the attempt, and the next start is refused behind it. Make the optimizer "
    "with all its groups before the guard is made (lr=0 for one whose time comes later): where this job ends, the same "
    "command then goes on",
)
EVALUATION_DRAWS = AdviceText(
    "evaluation-draws",
    "another loader than the guard's, with persistent_workers=True, is read in the training: only its first pass draws "
    "a seed, from the random states that the training draws from. Behind a resume, or a rollback to before that pass, "
    "the run goes on with other random numbers. Give it a generator of its own: DataLoader(..., "
    "generator=torch.Generator())",
)

_FIRST = 10  # updates: a generator that has drawn in none of them has drawn the first weights
_BATCHES = 3  # in which it must have stepped: some scripts make an optimizer for a moment

_WATCHING: "list[weakref.ref[UnkeptState]]" = []
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
    for known in _WATCHING:
        if (watching := known()) is not None:
            watching.stepped(optimizer)


class _Watched(NamedTuple):
    """A list or a module of the script's, or a tensor, and the marks of its tensors when the watch began."""

    name: str
    thing: Callable[[], Any]
    """None: it is gone."""
    then: Mapping[str, object]
    begins: str
    sharded: Collection[str]
    """The names of those that were sharded."""

    @classmethod
    def of(cls, name: str, thing: Any) -> "_Watched":
        keeps_alive = isinstance(thing, list | tuple | dict)  # of these there are no weak references
        tensors = tensors_of(thing)
        return cls(
            name, (lambda: thing) if keeps_alive else weakref.ref(thing), _marks_of(tensors), _begin_of(thing),
            {name for name, item in tensors.items() if is_sharded(item)},
        )  # fmt: skip

    def written(self, *, waits: bool) -> list[Tensor]:
        """Those of its tensors that are others now, or have other values. waits: the device may be waited for."""
        if (thing := self.thing()) is None:
            return []
        tensors = tensors_of(thing)
        # Behind a forward without a backward FSDP2 leaves whole ones in their places.
        as_then = {name: item for name, item in tensors.items() if is_sharded(item) or name not in self.sharded}
        found = [tensors[name] for name, mark in _marks_of(as_then).items() if mark != self.then.get(name)]
        may_look = waits and len(as_then) == len(tensors)
        return found or ([*tensors.values()][-1:] if may_look and self.begins != _begin_of(thing) else [])


class UnkeptState:
    """Watches all optimizers of this process, for as long as it lives. Nothing here is collective.

    generators: random generators that nobody has had kept yet, by name. variables: those of the script.
    """

    def __init__(
        self, state: TrainingState, generators: Mapping[str, Any], variables: Sequence[tuple[str, Any]]
    ) -> None:
        self._state = state
        self._seen: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """Positions of the first batches in which an optimizer has stepped that the guard does not have."""
        self._newest: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """That of the newest one."""
        self._judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        handed = (state.optimizer, *state.objects.values())
        own = (item for item in handed if isinstance(item, Optimizer) and not tells_itself(item))
        self._own = [OptimizerAttributes(item) for item in own]
        self._groups = len(state.optimizer.param_groups)
        self._generators = {name: (thing, _state_of(thing)) for name, thing in generators.items()}
        """Each with its state now."""
        self._handed = handed
        self._copies: list[_Watched] = []
        """Of the model's weights, as of an average; and modules."""
        self._averages: list[_Watched] = []
        """Those of them with all that the model has, which the training may follow from a late epoch on."""
        self._tensors: list[_Watched] = []
        """Others."""
        self._carried = CarriedTensors(self._has)
        self._numbers = OwnNumbers(state)
        self._looks = 0
        self.watch(variables)
        _WATCHING[:] = [*(known for known in _WATCHING if known() is not None), weakref.ref(self)]
        _watch_all_steps()

    def watch(self, variables: Sequence[tuple[str, Any]]) -> None:
        """Watch these from now on, too."""
        copies = copies_of_script(self._state.model, self._handed, variables)
        had = (*self._state.modules.values(), *(value for item in self._handed for value in _attributes(item)))
        modules = modules_of_script(had, variables)
        found = [_Watched.of(*named) for named in (*copies.items(), *modules.items())]
        like_model = ModelCopies(self._state.model)
        is_average = {name: like_model.has([*module.parameters()]) for name, module in modules.items()}
        self._copies += found
        self._averages += [each for each in found if is_average.get(each.name, True)]
        known = {id(item) for held in copies.values() for item in tensors_of(held).values()}
        others = tensors_of_script((name, item) for name, item in variables if id(item) not in known)
        self._tensors += [_Watched.of(*named) for named in others.items()]

    def stepped(self, optimizer: Optimizer) -> None:
        if optimizer is self._state.optimizer or any(optimizer is item for item in self._state.objects.values()):
            return
        self._newest[optimizer] = self._state.cursor.batch
        seen = self._seen.setdefault(optimizer, set())
        if len(seen) < _BATCHES:
            seen.add(self._state.cursor.batch)

    @property
    def _steady(self) -> list[Optimizer]:
        """Those that have stepped in `_BATCHES` of them."""
        return [optimizer for optimizer, batches in self._seen.items() if len(batches) == _BATCHES]

    def advice(self) -> Iterator[AdviceText]:
        """What is found behind an update. Ask it once in each of the first ones, and later now and then:
        what is found stays there."""
        self._looks += 1
        for kind in self._optimizers():
            yield OPTIMIZER_NOT_KEPT.of(kind=kind)
        for kind, attributes in self._own_attributes():
            yield ATTRIBUTES_NOT_KEPT.of(kind=kind, names=attributes)
        if self._looks <= _FIRST:
            self._numbers.look()
            for advice, names in (
                (GENERATOR_NOT_KEPT, self._generators_that_drew()),
                (COPIES_NOT_KEPT, self._lacking(_written(self._copies, waits=True))),
                (VARIABLES_NOT_KEPT, self._variables_that_lack()),
                (NUMBERS_NOT_KEPT, self._numbers.of_modules()),
                (NUMBERS_OF_OBJECTS_NOT_KEPT, self._numbers.of_objects()),
            ):
                if names:
                    yield advice.of(names=", ".join(names))
        elif names := self._averages_that_lack():
            yield COPIES_NOT_KEPT.of(names=", ".join(names))
        if not self._may_have_scheduler and (self._is_scheduled() or self._awaits_plateau):
            yield SCHEDULER_NOT_KEPT
        if len(self._state.optimizer.param_groups) > self._groups:
            yield GROUP_ADDED
        if self._evaluation_draws():
            yield EVALUATION_DRAWS

    def _optimizers(self) -> Iterator[str]:
        """The kinds of those of which a checkpoint lacks something. Each is looked at once."""
        for optimizer in self._steady:
            if optimizer not in self._judged:
                self._judged.add(optimizer)
                if self._lacks(optimizer):
                    yield type(optimizer).__name__

    def _own_attributes(self) -> Iterator[tuple[str, str]]:
        """The kinds of the guard's optimizers that keep state in attributes, which no checkpoint has; and which."""
        for own in self._own:
            if (names := own.found()) and not self._is_within(own.optimizer):
                yield type(own.optimizer).__name__, ", ".join(names)

    def _generators_that_drew(self) -> list[str]:
        """Names of the random generators of modules, of optimizers and of the script that have drawn since."""
        unkept = {name: one for name, one in self._generators.items() if not self._state.kept.has_object(one[0])}
        return [name for name, (thing, then) in unkept.items() if _state_of(thing) != then]

    def _averages_that_lack(self) -> list[str]:
        """Those that the training begins to write to. Each is told of once."""
        written = _written(self._averages, waits=False)
        self._averages = [each for each in self._averages if each.name not in written]
        return self._lacking(written)

    def _variables_that_lack(self) -> list[str]:
        """Also those that have got what they hold only since the guard was made. Copies of weights are told as such."""
        carried = self._carried.changed()
        for name in [each.name for each in self._copies]:
            carried.pop(name, None)
        return self._lacking(_written(self._tensors, waits=True) | carried)

    def _has(self, thing: object) -> bool:
        """Whether the guard was handed it."""
        handed = (*self._handed, *self._state.modules.values())
        return any(thing is item for item in handed) or self._state.kept.has_object(thing)

    def _lacking(self, written: Mapping[str, Sequence[Any]]) -> list[str]:
        """Names of those that no checkpoint has. Nor is it a gradient, or trained by an optimizer, which is named
        itself."""
        if not written:
            return []
        gradients = tensors_of([item.grad for item in self._state.trained])
        kept = {storage_of(item) for item in (*self._state.image(data=False).tensors, *gradients.values())}
        trained = {id(item) for optimizer in self._seen for item in trained_by(optimizer)}

        def has(item: Any) -> bool:
            return isinstance(item, Tensor) and (storage_of(item) in kept or id(item) in trained)

        return [name for name, items in written.items() if not all(map(has, items))]

    def in_its_place(self, batches: int) -> str | None:
        """The kind of one that trains the parameters of the guard's optimizer, which itself has made no step in so many
        batches; None: there is none."""
        own, first = {id(item) for item in self._state.trained}, self._state.cursor.batch - batches
        there = (each for each in self._steady if self._newest[each] > first)
        return next((type(each).__name__ for each in there if own & {*map(id, trained_by(each))}), None)

    @functools.cached_property
    def _may_have_scheduler(self) -> bool:
        """Whether something that was handed over may be it."""
        return any(map(_may_schedule, self._state.objects.values()))

    def _is_scheduled(self) -> bool:
        optimizer = self._state.optimizer
        if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # by which torch itself knows it
            return False
        return any(group["lr"] != group.get("initial_lr", group["lr"]) for group in optimizer.param_groups)

    @functools.cached_property
    def _awaits_plateau(self) -> bool:
        """Whether there is a scheduler that goes by a metric: it leaves no trace in the optimizer until it acts."""
        schedulers = instances(lambda kind: issubclass(kind, ReduceLROnPlateau))
        return any(item.optimizer is self._state.optimizer for item in schedulers)

    def _evaluation_draws(self) -> bool:
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
        loaders = instances(lambda kind: issubclass(kind, DataLoader))
        persistent = (item for item in loaders if getattr(item, "persistent_workers", False) and item.generator is None)
        return [weakref.ref(item) for item in persistent if item._iterator is None]

    def _lacks(self, optimizer: Optimizer) -> bool:
        if self._is_within(optimizer):
            return False  # it may hand out copies
        image = self._state.image(data=False)
        kept = {memory_of(item) for item in image.tensors}
        keeps = [item for item in tree_leaves([*optimizer.state.values()]) if isinstance(item, Tensor)]
        return any(memory_of(item) not in kept for item in (*keeps, *trained_by(optimizer)))

    def _is_within(self, optimizer: Optimizer) -> bool:
        """Whether another object, which was handed over, has it."""
        others = (item for item in self._state.objects.values() if not isinstance(item, Optimizer | LRScheduler))
        return any(value is optimizer for item in others for value in _attributes(item))


def _written(watched: Iterable[_Watched], *, waits: bool) -> dict[str, list[Tensor]]:
    """What the script has written to, by name."""
    return {each.name: items for each in watched if (items := each.written(waits=waits))}


def _state_of(generator: Any) -> int:
    return cast(int, Digest(Generators(generator).states()).value)


def _marks_of(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: (id(item), item.is_inference() or item._version, storage_of(item)) for name, item in tensors.items()}


def _begin_of(thing: Any) -> str:
    """A few values of one tensor of a module: a write to `item.data` shows in values alone."""
    tensors = [*tensors_of(thing).values()] if isinstance(thing, nn.Module) else []
    begins = [local_of(last).detach().flatten()[:8].resolve_conj().resolve_neg() for last in tensors[-1:]]
    return "".join(str(item.view(torch.uint8).tolist()) for item in begins)


def _may_schedule(item: object) -> bool:
    """Whether it is a scheduler, or may be or have one for all that can be seen."""
    if isinstance(item, LRScheduler) or any(isinstance(value, LRScheduler | Optimizer) for value in _attributes(item)):
        return True
    return hasattr(item, "step") and not type(item).__module__.startswith("torch.")


def _attributes(item: object) -> list[object]:
    return [*getattr(item, "__dict__", {}).values()]
