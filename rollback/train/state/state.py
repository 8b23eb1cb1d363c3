"""The state of training: the live objects, as the image that a checkpoint keeps, and back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rollback.errors import CheckpointDamaged, UsageError
from rollback.rundir.identity import JobIdentity
from rollback.sentinel import Hint, Sentinel, learning_rate_hint
from rollback.train.data import rng
from rollback.train.data.cursor import Cursor
from rollback.train.sharded import FsdpModules, is_sharded, is_sharded_alike, local_of
from rollback.train.state import module_buffers, tree
from rollback.train.state.ddp_broadcasts import DdpBroadcasts
from rollback.train.state.image import IN_PLACE, PARAMETERS, Image, require_one_gpu, take_parts, tensor_in_words
from rollback.train.state.kept_values import ScriptState
from rollback.train.state.module_buffers import all_of, can_be_written, load_buffers, nonpersistent, not_kept
from rollback.train.state.nonfinite import FiniteCheck
from rollback.train.state.stateful import (
    Stateful,
    load_into,
    load_optimizer,
    require_same_groups,
    require_same_order,
    require_same_parameters,
    tensors_of_state,
    trained_by,
)
from rollback.train.state.tree import memory_of
from rollback.train.updates.learning_rate import RateReader
from rollback.train.updates.model_switches import ModelSwitches
from rollback.train.updates.wrappers import unwrap


@dataclass
class Counters:
    """Where training stands."""

    step: int = 0
    """Completed updates."""
    batches_per_step: int = 1
    learning_rate: float | None = None
    """The last one."""
    highest_rate: float | None = None
    """The highest learning rate so far."""
    first_rate: float | None = None
    """That of the run's first update; None: checkpoints did not have it once."""
    epoch_left: bool = False
    """At an epoch's end: whether the script has already done its work between this epoch and the next."""

    def note_update(self, batches: int, *, last_of_epoch: bool) -> None:
        """Note the number of batches of an update. The last update of an epoch may have fewer than a whole one."""
        self.batches_per_step = max(batches, self.batches_per_step) if last_of_epoch else batches


class TrainingState:
    """The live objects of one rank. Nothing here is collective."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objects: Mapping[str, Stateful],
        cursor: Cursor,
        sentinel: Sentinel,
    ) -> None:
        self.model = unwrap(model)
        self.optimizer = optimizer
        modules = {name: unwrap(item) for name, item in objects.items() if isinstance(item, nn.Module)}
        self.objects: dict[str, Stateful] = {**objects, **modules}
        self.classes = {name: type(item).__name__ for name, item in self.objects.items()}
        self.modules: dict[str, nn.Module] = {"model": self.model, **modules}
        """The model, and the other objects that are modules."""
        self.fsdp = FsdpModules(self.modules.values())
        self.fsdp.reshard()
        self.switches = ModelSwitches(self.modules)
        self.broadcasts = DdpBroadcasts({"model": model, **objects})
        self._own_buffers = {owner: all_of(module) for owner, module in self.modules.items()}
        """The names of those that the modules were made with. A forward may make others."""
        self._own_memory = {memory_of(item) for item in self._kept_buffers()}
        """Theirs. A forward may put another tensor in the place of one, which others have too."""
        self.cursor = cursor
        self.sentinel = sentinel
        self.counters = Counters()
        self._rate_reader = RateReader()
        self.kept = ScriptState()
        self.not_in_checkpoint: list[str] = []
        """Buffers without a value in the last `load`; they did not change."""
        places = ("shared/objects", "local/object_buffers")
        others = tuple(f"{place}/{tree.escape(name)}/" for name in modules for place in places)
        self.finite = FiniteCheck((*IN_PLACE, *others), self._in_words)
        self._of_trained: tuple[list[int], list[str | None]] = [], []
        self._loaded_at = 0
        self._random: dict[str, Any] = {}

    def _in_words(self, name: str) -> str:
        return tensor_in_words(name, self.trained_names(), self.classes)

    def job(self, world_size: int) -> JobIdentity:
        """The identity of this job, for run.json."""
        tensors = {name: item for name, item in self.model.state_dict().items() if isinstance(item, Tensor)}
        return JobIdentity(
            world_size=world_size,
            model=[(name, str(item.dtype).removeprefix("torch."), list(item.shape)) for name, item in tensors.items()],
            optimizer={
                "class": type(self.optimizer).__name__,
                "groups": [len(group["params"]) for group in self.optimizer.param_groups],
            },
            objects=sorted(self.objects),
            data=self.cursor.describe(),
        )

    def image(self, *, data: bool = True) -> Image:
        """The image of the present state. Raises UsageError with the name of what a checkpoint cannot keep.

        data: with the position in the data.
        """
        model, buffers = self.model.state_dict(), all_of(self.model)
        states = {name: item.state_dict() for name, item in self.objects.items()}
        objects, object_buffers = module_buffers.split_own_buffers(self.objects, states)
        local = {
            "random": rng.capture(),
            **({"cursor": self.cursor.state_dict()} if data else {}),
            "kept": self.kept.state_dict(),
            "nonfinite": self.finite.left_alone or {},
            "broadcasts": self.broadcasts.state_dict(),
        }
        shared_tensors, local_tensors = dict[str, Tensor](), dict[str, Tensor]()
        persistent = {name: value for name, value in model.items() if name in buffers}
        whole = {"model": model, **states}
        hidden = {owner: nonpersistent(module, whole[owner]) for owner, module in self.modules.items()}
        trees = {
            "buffers": tree.encode_once(persistent, "local/buffers", local_tensors),
            "nonpersistent_buffers": tree.encode_each(hidden, "local/nonpersistent_buffers", local_tensors),
            "object_buffers": tree.encode_each(object_buffers, "local/object_buffers", local_tensors),
            **tree.encode(local, "local", local_tensors),
        }
        shared = tree.encode({**self.large_shared(model), **self.small_shared(objects)}, "shared", shared_tensors)
        parts, sharded = take_parts(shared_tensors, local_tensors)
        self._require_sharded_alike(sharded)
        still = self._frozen_memory()
        frozen = frozenset(
            name for name, item in shared_tensors.items() if name.startswith(PARAMETERS) and memory_of(item) in still
        )
        return Image(shared, trees, shared_tensors, local_tensors, parts, sharded, frozen, self.classes)

    def large_shared(self, model: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Of what all ranks have alike, what is large or changes with an update alone. model: its `state_dict`, if that
        is there. Any thread may call it: nothing is asked that another thread might be changing between two updates."""
        model, buffers = self.model.state_dict() if model is None else model, all_of(self.model)
        return {
            "model": {name: value for name, value in model.items() if name not in buffers},
            "optimizer": self.optimizer.state_dict(),
            "trained": self.trained_names(),
            "sentinel": self.sentinel.state_dict(),
        }

    def small_shared(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """The rest of that. objects: the states of the others, without what is not shared."""
        return {"objects": objects, "gradients": self.switches.state_dict(), "counters": vars(self.counters)}

    def _frozen_memory(self) -> set[tuple[Any, ...]]:
        """The memory of the model's parameters that do not require a gradient, that no optimizer holds, and that share
        their memory with nothing else: what is tied to a trained parameter changes with it."""
        optimizers = self.optimizer, *self.objects.values()
        held = {id(item) for each in optimizers for item in trained_by(each)}

        def is_still(item: Tensor) -> bool:
            return isinstance(item, nn.Parameter) and not (item.requires_grad or id(item) in held or is_sharded(item))

        still = list(filter(is_still, self.model.parameters()))
        if not still:  # of most models: the rest would cost every snapshot a millisecond and more
            return set()
        everything = [item for module in self.modules.values() for item in (*module.parameters(), *module.buffers())]
        others = {local_of(item).untyped_storage().data_ptr() for item in everything if not is_still(item)}
        return {memory_of(item) for item in still if item.untyped_storage().data_ptr() not in others}

    def places(self) -> Callable[[str], Tensor | None]:
        """Finds the tensor of the live objects that a checkpoint has by some name, if there is one. For the state of an
        optimizer, also of one by a name of its own, which need not be there yet: the parameter whose state it is."""
        objects = {name: item.state_dict() for name, item in self.objects.items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        tensors: dict[str, Tensor] = {}
        found = {"model": self.model.state_dict(), "objects": objects, "optimizer": {"param_groups": groups}}
        tree.encode(found, "shared", tensors)
        of_state = self._parameters_of_states()

        def find(name: str) -> Tensor | None:
            return present if (present := tensors.get(name)) is not None else of_state(name)

        return find

    def _parameters_of_states(self) -> Callable[[str], nn.Parameter | None]:
        """Finds the parameter whose state in an optimizer a checkpoint has by some name."""
        trained = {"shared/optimizer/state": self.trained} | {
            f"shared/objects/{tree.escape(name)}/state": trained_by(item) for name, item in self.objects.items()
        }

        def find(name: str) -> nn.Parameter | None:
            for owner, parameters in trained.items():
                index = name.removeprefix(f"{owner}/").split("/")[0]
                if index.isdecimal() and int(index) < len(parameters):
                    return parameters[int(index)]
            return None

        return find

    def _require_sharded_alike(self, sharded: Mapping[str, Tensor]) -> None:
        """Raise UsageError where an optimizer keeps what has its parameter's shape, and is sharded otherwise: it would
        come back as the parameter is."""
        of_state = self._parameters_of_states()
        for name, item in sharded.items():
            parameter = of_state(name)
            if parameter is not None and item.shape == parameter.shape and not is_sharded_alike(item, parameter):
                raise UsageError(
                    f"{self._in_words(name)} has the shape of its parameter and is sharded otherwise "
                    f"({item.placements}): a resume would shard it as the parameter is",  # type: ignore[attr-defined]
                    hint="let the optimizer keep it as torch.zeros_like(parameter) makes it, and redistribute that in "
                    "its step",
                )

    def _kept_buffers(self) -> list[Tensor]:
        found = (item for module in self.modules.values() for item in module.buffers())
        return [item for item in found if not is_lazy(item) and tree.is_storable(item)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all modules."""
        return [item for module in self.modules.values() for item in module.parameters()]

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer trains, in its order."""
        return trained_by(self.optimizer)

    def trained_names(self) -> list[str | None]:
        """Their names in the model's state; None for those of other modules."""
        trained = self.trained
        if self._of_trained[0] != (present := [*map(id, trained)]):
            names: dict[Any, str] = {}
            for name, item in self.model.state_dict(keep_vars=True).items():
                if isinstance(item, Tensor) and not is_lazy(item):  # a state_dict may have other objects
                    names.setdefault(id(item), name)
                    if local_of(item).numel():  # what is empty has no memory
                        names.setdefault(memory_of(item), name)
            self._of_trained = (
                present,
                [None if is_lazy(item) else names.get(id(item), names.get(memory_of(item))) for item in trained],
            )
        return self._of_trained[1]

    def not_kept(self) -> list[str]:
        """Names of the modules' tensors that no checkpoint keeps."""
        return self._names(lambda _, module: not_kept(module))

    def _names(self, of: Callable[[str, nn.Module], Iterable[str]]) -> list[str]:
        """Names in all modules. Names outside the model begin with the name of their object."""
        return [
            name if owner == "model" else f"{owner}.{name}"
            for owner, module in self.modules.items() for name in of(owner, module)
        ]  # fmt: skip

    def check(self) -> None:
        """Raise UsageError for what a checkpoint cannot keep, and for trained parameters that it would not keep."""
        require_one_gpu((image := self.image()).tensors)
        for name, item in self.model.named_parameters():
            if not can_be_written(local_of(item)):
                raise UsageError(
                    f"the elements of the parameter {name!r} are one in memory, as expand() leaves them: no checkpoint "
                    "can be loaded into it",
                    hint="give it memory of its own, for example nn.Parameter(value.clone())",
                )
        kept, trained = {*map(id, self.parameters)}, self.trained
        memory = {memory_of(item) for item in image.tensors}
        lost = [item for item in trained if id(item) not in kept and memory_of(item) not in memory]
        if not lost:
            return
        if len(lost) == len(trained):
            raise UsageError(
                f"none of the {len(trained)} parameters that the optimizer trains is the model's",
                hint="make the optimizer of the parameters of this very model, not of a copy or of an earlier one",
            )
        raise UsageError(
            f"{len(lost)} of the {len(trained)} parameters that the optimizer trains are in nothing that was handed "
            "over: no checkpoint would keep them",
            hint="hand over what they belong to by a name of its own, for example criterion=criterion",
        )

    def live_tensors(self, *, whole: bool = False) -> dict[str, Tensor]:
        """The tensors of the image that belong to the live objects: a write to them changes the objects.

        A state_dict may return copies, or what hooks make of its tensors. These are not among them. whole: without
        parts of sharded tensors.
        """
        buffers = (item for item in self._kept_buffers() if memory_of(item) in self._own_memory)
        held = [*self.model.parameters(), *buffers]
        held += tensors_of_state(self.optimizer)
        own = {memory_of(item) for item in held if can_be_written(item)}
        image = self.image(data=False)
        tensors = {**image.shared_tensors, **image.local_tensors}
        tensors = {name: item for name, item in tensors.items() if not (whole and name in image.parts)}
        return {name: item for name, item in tensors.items() if name.startswith(IN_PLACE) and memory_of(item) in own}

    def load(self, shared: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        """Load a decoded state into the live objects, into their present tensors where possible.

        The tensors must be those of `live_tensors`, or must have no other user: an optimizer keeps the tensors that it
        gets. Gradients are dropped, since their update is made or will not happen; who had one has zeros. Without a
        position in the data, that stays as it is. Random states come last, after everything that may draw. Raises
        StateRefused where an object refuses its state.
        """
        if set(shared["objects"]) != set(self.objects):
            raise CheckpointDamaged(f"the checkpoint keeps the objects {sorted(shared['objects'])}")
        require_same_parameters(shared["model"], self.model)
        require_same_order(shared.get("trained", []), self.trained_names())  # checkpoints had none once
        require_same_groups(shared["optimizer"], self.optimizer)
        model = {**shared["model"], **local["buffers"]}
        objects = module_buffers.join_own_buffers(shared["objects"], local.get("object_buffers", {}))  # once shared
        stored = {owner: {} for owner in self.modules} | local.get("nonpersistent_buffers", {})  # once there were none
        for owner, module in self.modules.items():
            kept = local["buffers"] if owner == "model" else objects[owner]  # its parameters are there already
            persistent = {name: item for name, item in kept.items() if isinstance(item, Tensor)}
            module_buffers.register_buffers(module, persistent, stored[owner], self._own_buffers[owner])
        stored["model"] = {**local["buffers"], **stored["model"]}
        self.not_in_checkpoint = self._names(lambda owner, each: load_buffers(each, stored[owner], self._own_memory))
        if not _is_in_place(model, self.model.state_dict()):
            load_into("model", self.model, model)
        load_optimizer(self.optimizer, shared["optimizer"])
        for name, item in self.objects.items():
            load_into(name, item, objects[name])
        for parameter in self.parameters:
            parameter.grad = None
        for owner, name in self.fsdp.gradients():
            setattr(owner, name, None)
        self.switches.loaded = shared.get("gradients")  # checkpoints had none once
        self.switches.give_zeros(self.switches.loaded)
        self.sentinel.load_state_dict(shared["sentinel"])
        self.counters = Counters(**shared["counters"])
        if "cursor" in local:
            self.cursor.load_state_dict(local["cursor"])
            self._loaded_at = self.cursor.batch
        self.kept.load_state_dict(local.get("kept", {}))  # nor this
        self.finite.left_alone = local.get("nonfinite", self.finite.left_alone)  # nor this
        self.broadcasts.put_back(local.get("broadcasts", {}))  # nor this
        self._random = local["random"]
        self.restore_random_states()

    def begin_with(self, model: Mapping[str, Tensor], optimizer: Mapping[int, Mapping[str, Any]]) -> None:
        """A new run begins with these tensors of the model, of which most have been read into its own, and with this
        state of the optimizer, by the number of its parameter; hyperparameters stay as they are."""
        present = self.model.state_dict()
        if not _is_in_place(model, {name: present[name] for name in model}):
            self.model.load_state_dict({**present, **model}, strict=True)
        if optimizer:
            load_optimizer(self.optimizer, {**self.optimizer.state_dict(), "state": optimizer})

    @property
    def batch_in_hand(self) -> bool:
        """Whether a batch has been handed out since the last load."""
        return self.cursor.batch > self._loaded_at

    def note_learning_rate(self) -> Hint:
        """Note the rate of the step that has ended. Returns the sentinel's hint."""
        counters = self.counters
        if (given := self.optimizer.param_groups[0].get("lr")) is None:
            return Hint.NONE  # an optimizer that finds its step by itself
        rate = self._rate_reader.read(given)
        hint = learning_rate_hint(counters.learning_rate, rate, counters.highest_rate)
        counters.first_rate = rate if counters.step == 0 else counters.first_rate
        counters.learning_rate = rate
        counters.highest_rate = max(rate, counters.highest_rate or rate)
        return hint

    def restore_random_states(self) -> None:
        """Restore the random states of the last `load`, and of the generators that the script has had kept."""
        rng.restore(self._random)
        self.kept.restore_generators()


def _is_in_place(loaded: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Whether a model's tensors already hold the state to load."""
    return loaded.keys() == present.keys() and all(
        isinstance(item, Tensor) and isinstance(present[name], Tensor) and memory_of(item) == memory_of(present[name])
        for name, item in loaded.items()
    )
