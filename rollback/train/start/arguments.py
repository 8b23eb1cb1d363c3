"""Sorts and checks the arguments of the guard."""

import inspect
import operator
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rollback.config import Settings, settings_from, spelt
from rollback.environment import ENV_RUN, host_name
from rollback.errors import UsageError, WrongSetting
from rollback.rundir import seal
from rollback.sentinel import Sentinel
from rollback.train.comm.ranks import Ranks
from rollback.train.introspection import own_variables
from rollback.train.start.averaging import check_averaging
from rollback.train.state.ddp_broadcasts import DdpBroadcasts
from rollback.train.state.stateful import Stateful
from rollback.train.updates.wrappers import ddp_inside, outermost

_OF_A_HOST = {"fast_tier", "evidence_limit", "init"}
"""Settings that a host may have for itself: room on it, and a path there. Its ranks alone act by the former; by `init`
all ranks do, or none."""
_SHOWN = 60  # characters of a value


def as_called(given: Any) -> Any:
    """A module that the guard got, as the script calls it: in the DDP that the script has around it, in a variable. Any
    other value as it is.

    A script that saves `model.module.state_dict()` may hand that module over here. What DDP knows belongs to the
    training too: the hook by which it averages, its buckets, whether it broadcasts buffers next.
    """
    if not isinstance(given, nn.Module) or not torch.distributed.is_initialized() or ddp_inside(given) is not None:
        return given
    modules = (thing for _, thing in own_variables() if isinstance(thing, nn.Module) and "_modules" in vars(thing))
    around = outermost(given, modules)
    return given if ddp_inside(around) is None else around


def settings_and_objects(others: dict[str, Any]) -> tuple[Settings, dict[str, Stateful]]:
    """The settings and the objects among the guard's further arguments. Raises UsageError for other values."""
    given = {name: value for name, value in others.items() if name in Settings.model_fields}
    objects: dict[str, Stateful] = {}
    for name, value in others.items():
        if name in given or value is None:
            continue
        if isinstance(value, type):
            raise UsageError(
                f"what the guard got as {name}= is the class {value.__name__}",
                hint="hand over an instance of it, made and ready",
            )
        if not isinstance(value, Stateful):
            raise UsageError(
                f"what the guard got as {name}= is a {type(value).__name__}: neither a setting nor an object with "
                "state_dict and load_state_dict",
                hint=f"the settings are {', '.join(Settings.model_fields)}",
            )
        objects[name] = value
    return settings_from(given), objects


def check_trained(model: object, optimizer: object, objects: Mapping[str, object]) -> None:
    """Raise UsageError for a wrong model, for an optimizer whose steps cannot be noticed or whose state cannot be
    had, and for gradients that are averaged by what no checkpoint keeps."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"what the guard got as model= is a {type(model).__name__}; it takes an nn.Module",
            hint="of several models make one: torch.nn.ModuleDict({'encoder': encoder, 'decoder': decoder})",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "what the guard got as model= is a TorchScript module, which takes no hooks",
            hint="put it into another module, before the optimizer is made: model = torch.nn.Sequential(model)",
        )
    if isinstance(optimizer, list | tuple | dict):
        raise UsageError(
            f"what the guard got as optimizer= is a {type(optimizer).__name__}; it takes one optimizer",
            hint="hand over as optimizer= the one whose steps count as updates, the others by names of their own "
            "(discriminator_optimizer=...)",
        )
    kind = type(optimizer)
    check_whole(optimizer, "optimizer")
    for name, item in objects.items():
        check_whole(item, name)
    try:
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):  # type: ignore[attr-defined]
            register(lambda *_: None).remove()
    except (AttributeError, TypeError) as error:  # a wrapper may have made plain dicts in the place of torch's hooks
        raise UsageError(
            f"what the guard got as optimizer= is a {kind.__name__} ({kind.__module__}), whose steps cannot be "
            f"noticed: {error}",
            hint=_in_place_of(optimizer),
        ) from error
    if not _has_own_step(optimizer):
        raise UsageError(
            f"what the guard got as optimizer= is a {kind.__name__} ({kind.__module__}), which has no step of its own: "
            "it changes weights in mid-backward, as LOMO does, where no update can be judged or taken back",
            hint="take an optimizer that makes the update in step(); one with little memory is Adafactor",
        )
    if "param_groups" not in optimizer.state_dict():  # type: ignore[attr-defined]
        raise UsageError(
            f"what the guard got as optimizer= is a {kind.__name__} ({kind.__module__}), whose state_dict has no "
            "param_groups, as those of torch have",
            hint=_in_place_of(optimizer),
        )
    check_averaging(model, objects)


def _has_own_step(optimizer: Any) -> bool:
    """Hooks, and a learning rate scheduler, put a function around a step."""
    step = inspect.unwrap(optimizer.step)
    return getattr(step, "__func__", step) is not inspect.unwrap(torch.optim.Optimizer.step)


def _in_place_of(wrapper: object) -> str:
    """What to hand over where a wrapper cannot be the optimizer. Its own state, such as slow weights, is kept too."""
    parts = getattr(wrapper, "__dict__", {})
    inner = next((name for name, item in parts.items() if isinstance(item, torch.optim.Optimizer)), None)
    if inner is None:
        return "it takes a torch.optim.Optimizer; a wrapper usually has the real one in an attribute"
    both = ", and the wrapper by a name of its own (wrapper=optimizer)" if isinstance(wrapper, Stateful) else ""
    return f"hand over as optimizer= the torch optimizer inside it, optimizer.{inner}{both}; go on stepping the wrapper"


def check_whole(item: object, name: str) -> None:
    """Raise UsageError for an optimizer that spreads its state over the ranks in a form of its own."""
    kinds = {kind.__name__ for kind in type(item).__mro__}  # by names, so that nothing is imported for it
    if "ZeroRedundancyOptimizer" in kinds:
        raise UsageError(
            f"what the guard got as {name}= is a ZeroRedundancyOptimizer: each rank has a part of its state, and hands "
            "out none",
            hint="make the class that it wraps of all parameters, in its place (its .optim has those of one rank); to "
            "spread state over the ranks, shard the model with torch.distributed.fsdp.fully_shard (FSDP2)",
        )


def check_run(run: object) -> None:
    """Raise UsageError where the run directory is no path."""
    if not isinstance(run, str | os.PathLike | None):
        raise UsageError(f"Guard got run={run!r}, which is no path", hint="for example run='runs/one'")


def check_alike(settings: Settings, max_steps: int | None, run: object, ranks: Ranks) -> None:
    """Collective: raise WrongSetting, on all ranks, where they do not train by the same settings.

    Each host is given its own command line. By other settings ranks would decide otherwise about the same facts: they
    would go to different batches without a word, or wait in different collectives. By another seal a host would refuse
    what the others have written, and without one restore what they would refuse. And by another run directory, as
    where each rank has put the time into its name, no rank would find what the others have written.

    run: as the script has given it. Another host may have the same directory elsewhere.
    """
    if not ranks.distributed:
        return
    own = {
        **settings.model_dump(mode="json", exclude=_OF_A_HOST), "init": "given" if settings.init else None,
        "max_steps": max_steps, "seal": _key_of_seal(),
    }  # fmt: skip
    if ENV_RUN not in os.environ and 0 in ranks.on_this_host:
        own["run"] = None if run is None else str(run)
    first = ranks.from_first(own)
    here = f"on rank {ranks.rank} ({host_name()})"
    fault = ", ".join(
        f"{name} is {str(first.get(name))[:_SHOWN]} on rank 0 and {str(value)[:_SHOWN]} {here}"
        for name, value in own.items()
        if first.get(name) != value
    )
    if (found := ranks.first_fault(fault)) is not None:
        raise WrongSetting(
            f"the ranks are to train by different settings: {found}",
            hint="give all hosts the same options and variables, and the same script; nothing was changed",
        )


def check_wrapped_alike(broadcasts: DdpBroadcasts, ranks: Ranks) -> None:
    """Collective: raise UsageError, on all ranks, where DDP is around what the guard has on some ranks only. Each looks
    among its own variables (`as_called`). Those without it would not rehearse a resume's first step with the others."""
    here = {owner: len(wrappers) for owner, wrappers in broadcasts.state_dict().items()}
    of_rank_0 = ranks.from_first(here)
    fault = ", ".join(
        f"{of_rank_0.get(owner, 0)} around or in {owner} on rank 0, and {here.get(owner, 0)} on rank {ranks.rank} "
        f"({host_name()})"
        for owner in {**of_rank_0, **here}
        if of_rank_0.get(owner, 0) != here.get(owner, 0)
    )
    if (found := ranks.first_fault(fault)) is not None:
        raise UsageError(
            f"the guard finds another number of DistributedDataParallel from rank to rank: {found}",
            hint="hand over what the script calls, the DistributedDataParallel and not its .module, on all ranks; "
            "nothing was changed",
        )


def _key_of_seal() -> str | None:
    """What tells the key from those of other ranks. One that cannot be used is refused by all ranks, or later."""
    try:
        key = seal.present()
    except UsageError as error:
        return error.message
    return key.name if key else None


def whole_number(value: Any, what: str) -> int:
    """`value` as an int of 0 or more. what: its name and call, for the UsageError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"{what}={value!r}", hint="it takes a whole number, 0 or more")
    return number


def sentinel_for(settings: Settings) -> Sentinel:
    """The run's sentinel. Raises WrongSetting where probation is too short for the sentinel's patience."""
    sentinel = Sentinel(settings.sensitivity, settings.objective)
    if settings.probation <= sentinel.patience:
        raise WrongSetting(
            f"{spelt('probation')}={settings.probation} is no longer than the sentinel's patience of "
            f"{sentinel.patience} steps: a checkpoint could be called good before the trouble in it is called",
            hint=f"set it to {sentinel.patience + 1} or more",
        )
    return sentinel
