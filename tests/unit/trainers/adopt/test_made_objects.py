"""Which of a script's objects are trained."""

import gc
from typing import Any

import pytest
import torch
from sharding import one_rank
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from rollback.errors import UsageError
from rollback.trainers.adopt.made_objects import (
    CopiedWeights,
    MadeObjects,
    optimizers_of,
    trained_objects,
)


def made(*things: Any) -> list[Any]:
    """With the modules that are inside others, as they are made."""
    found: list[Any] = []
    for thing in things:
        found += [*reversed(list(thing.modules()))] if isinstance(thing, nn.Module) else [thing]
    return found


def test_the_model_is_the_outermost_module_that_the_optimizer_trains() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = StepLR(optimizer, 1)
    found = trained_objects(made(other, model, nn.ReLU(), optimizer, scheduler))
    assert found == (model, optimizer, {"scheduler": scheduler, "module": other})


def test_several_of_a_kind_are_counted_and_parts_of_a_scheduler_go_with_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = [LinearLR(optimizer), StepLR(optimizer, 1)]
    chain, second = SequentialLR(optimizer, parts, [3]), StepLR(optimizer, 2)
    average = AveragedModel(model)
    _, _, objects = trained_objects(made(model, average, optimizer, *parts, chain, second))
    assert objects == {"scheduler": chain, "scheduler2": second, "module": average}


class Average:
    """state: what it has; the state of a library's average of the weights is such a list."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


class NamedAverage(Average):
    """Another class, whose name comes behind that one's."""


def test_an_average_that_is_no_module_is_found_by_what_it_has() -> None:
    model = nn.Linear(7, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    copies = [p.detach().clone() for p in model.parameters()]
    others = [Average(list(model.parameters())), Average(copies[:1]), Average(3), Average(copies + copies)]
    named, listed = NamedAverage(dict(enumerate(copies))), Average(copies)
    found = trained_objects(made(model, optimizer))[2]
    assert found == {"average": listed, "average2": named}, others  # by their class, in whatever order they are found
    another = Average([p.detach().clone() for p in model.parameters()])
    with pytest.raises(UsageError, match="several averages of its model that are of class Average"):
        trained_objects(made(model, optimizer))
    del another


class Shadow:
    """A script's own, without a state_dict."""

    def __init__(self, shadow: dict[str, Any]) -> None:
        self.shadow = shadow


def test_copies_of_the_weights_in_variables_of_the_script_are_kept_where_they_are() -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ema = Shadow({name: p.detach().clone() for name, p in model.named_parameters()})
    listed = [p.detach().clone() for p in model.parameters()]
    again = list(ema.shadow.values())
    others = [*model.parameters()], listed[:1]
    found = trained_objects(made(model, optimizer))[2]
    assert [*found] == ["copies", "copies2"], (again, others)
    kept = {name: {place: item.clone() for place, item in thing.state_dict().items()} for name, thing in found.items()}
    tensors = [*listed, *ema.shadow.values()]
    before = [item.clone() for item in tensors]
    for item in tensors:
        item.add_(1)
    for name, thing in found.items():
        thing.load_state_dict(kept[name])
    assert all(map(torch.equal, tensors, before))


def test_a_scaler_that_is_switched_off_is_not_kept() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    on, off = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    assert trained_objects(made(model, optimizer, off, on))[2] == {"scaler": on}


@pytest.mark.parametrize("count", [0, 2])
def test_an_update_is_known_with_one_optimizer_only(count: int) -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(count)]
    with pytest.raises(UsageError, match=f"the script has {count} optimizers"):
        trained_objects(made(model, *optimizers))


def test_an_optimizer_that_spreads_its_state_is_named_and_not_the_one_inside_it() -> None:
    model = nn.Linear(2, 2)
    with one_rank():
        outer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UsageError, match="is a ZeroRedundancyOptimizer: each rank has a part of its state"):
        trained_objects(made(model, outer, outer.optim))


def test_parameters_without_a_module_are_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
    with pytest.raises(UsageError, match="parameters that are in no module"):
        trained_objects([nn.Linear(2, 2), optimizer])


@pytest.mark.parametrize("shapes", [[2, 3], [2, 3, 3, 3], [2, 2, 3], [2, 1, 3]], ids=str)
def test_copies_are_not_put_into_others(shapes: list[int]) -> None:
    kept = CopiedWeights([torch.ones(size) for size in (2, 3, 3)]).state_dict()
    here = [torch.zeros(size) for size in shapes]
    with pytest.raises(ValueError, match=r"here, and \[\[2\], \[3\], \[3\]\] there"):
        CopiedWeights(here).load_state_dict(kept)
    assert not any(map(torch.any, here))


def test_objects_that_are_gone_are_forgotten_and_training_mode_is_that_of_a_trained_module() -> None:
    objects = MadeObjects()
    model, gone = nn.Linear(2, 2), nn.Linear(3, 3)
    for thing in (model, gone):
        objects.note(thing)
    assert not objects.are_trained(), "there is no optimizer"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    objects.note(optimizer)
    del gone, thing
    assert objects.alive() == [model, optimizer]
    assert optimizers_of(objects.alive()) == [optimizer]
    assert objects.are_trained()
    model.eval()
    assert not objects.are_trained()
    assert objects.are_trained(in_any_mode=True)


def test_what_a_script_makes_in_each_step_leaves_nothing_and_the_collector_comes_by_once_for_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects, model = MadeObjects(), nn.Linear(2, 2)
    for _ in range(100):
        objects.note(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = StepLR(optimizer, 1)  # a cycle
    for thing in (model, optimizer, scheduler):
        objects.note(thing)
    assert len(objects._made) == 3
    del optimizer, scheduler, thing
    assert objects.alive() == [model]
    assert len(objects._made) == 1
    collections: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(None))
    objects.note(DataLoader([1]))  # type: ignore[arg-type]
    for _ in range(3):
        objects.alive()
    assert not collections
    objects.note(nn.Linear(2, 2))
    for _ in range(3):
        objects.alive()
    assert len(collections) == 1
