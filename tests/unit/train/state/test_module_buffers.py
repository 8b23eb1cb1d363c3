"""Buffers of all kinds, taken apart and put back; what modules hold besides is named."""

from typing import Any

import pytest
import torch
from test_state import through_disk
from torch import Tensor, nn
from torch.nn.utils import prune

from rollback.errors import RunDoesNotFit
from rollback.sentinel import Sentinel
from rollback.train.data.cursor import cursor_for
from rollback.train.state.module_buffers import not_kept, register_buffers
from rollback.train.state.state import TrainingState
from rollback.train.state.state_copy import StateCopy


class Model(nn.Module):
    cache: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.register_buffer("count", None)


def state_of(model: nn.Module, **objects: Any) -> TrainingState:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingState(model, optimizer, objects, cursor_for([1, 2, 3]), Sentinel("normal"))


def test_a_buffer_that_no_state_dict_has_is_each_rank_s_own_beside_those_of_the_state_dict() -> None:
    model, other = Model(), Model()
    model.hidden.fill_(7.0)
    image = state_of(model).image()
    assert image.local["buffers"] == {"mean": {"$tensor": "local/buffers/mean"}}, "what state_dict gives, and no more"
    assert {name for name in image.local_tensors if "hidden" in name} == {"local/nonpersistent_buffers/model/hidden"}
    before = other.hidden
    state_of(other).load(*through_disk(image))
    assert other.hidden is before, "others may hold on to it"
    assert torch.equal(other.hidden, model.hidden)


def test_buffers_of_other_modules_that_were_handed_over_come_back_too() -> None:
    criterion, other = Model(), Model()
    criterion.hidden.fill_(7.0)
    criterion.mean.fill_(8.0)
    image = state_of(nn.Linear(1, 1), criterion=criterion).image()
    state_of(nn.Linear(1, 1), criterion=other).load(*through_disk(image))
    assert torch.equal(other.hidden, criterion.hidden)
    assert torch.equal(other.mean, criterion.mean)


def test_buffers_of_other_modules_are_each_rank_s_own_as_the_model_s() -> None:
    image = state_of(nn.Linear(1, 1), criterion=Model()).image()
    assert {name for name in image.local_tensors if "mean" in name} == {"local/object_buffers/criterion/mean"}
    assert not [name for name in image.shared_tensors if "mean" in name]


def test_buffers_of_other_modules_are_read_from_a_checkpoint_that_shared_them() -> None:
    criterion, other = Model(), Model()
    criterion.mean.fill_(8.0)
    shared, local = through_disk(state_of(nn.Linear(1, 1), criterion=criterion).image())
    shared["objects"]["criterion"] |= local.pop("object_buffers")["criterion"]
    state_of(nn.Linear(1, 1), criterion=other).load(shared, local)
    assert torch.equal(other.mean, criterion.mean)


def test_weights_that_a_module_keeps_in_buffers_are_stored_once_for_all_ranks() -> None:
    class Average(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("weight", torch.full((1 << 19,), value))

    image, other = state_of(nn.Linear(1, 1), average=Average(2.0)).image(), Average(0.0)
    assert "shared/objects/average/weight" in image.shared_tensors
    state_of(nn.Linear(1, 1), average=other).load(*through_disk(image))
    assert bool((other.weight == 2.0).all())


def test_a_buffer_that_has_several_names_is_stored_once_and_is_no_rank_s_but_its_own() -> None:
    def tied() -> nn.Module:
        one, two, three = nn.Module(), nn.Module(), nn.Module()
        one.register_buffer("table", torch.zeros(4))
        two.register_buffer("table", one.table)
        three.register_buffer("table", one.table, persistent=False)
        return nn.ModuleList([one, two, three, nn.Linear(1, 1)])

    model, other = tied(), tied()
    model[0].table.copy_(torch.arange(4.0))  # type: ignore[index, union-attr, operator]
    image = state_of(model).image()
    assert [name for name in (*image.local_tensors, *image.shared_tensors) if "table" in name] == [
        "local/buffers/0.table"
    ]
    assert set(image.local["buffers"]) == {"0.table", "1.table"}, "as the state_dict has them"
    state_of(other).load(*through_disk(image))
    assert torch.equal(other[1].table, torch.arange(4.0))  # type: ignore[index, arg-type, union-attr]
    assert other[1].table is other[0].table is other[2].table  # type: ignore[index, union-attr]


def test_a_buffer_that_got_its_tensor_later_or_another_shape_is_as_it_was() -> None:
    model, fresh, later = Model(), Model(), Model()
    empty = through_disk(state_of(model).image())
    model.cache, model.count, model.hidden = torch.ones(2, 5), torch.ones(1), torch.arange(6.0)
    filled = through_disk(state_of(model).image())
    for one in (fresh, later):
        state_of(one).load(*filled)
        assert torch.equal(one.cache, torch.ones(2, 5))  # type: ignore[arg-type]
        assert torch.equal(one.count, torch.ones(1))  # type: ignore[arg-type]
        assert torch.equal(one.hidden, torch.arange(6.0))
    state_of(later).load(*empty)
    assert later.cache is later.count is None
    assert torch.equal(later.hidden, torch.zeros(3))


class Growing(nn.Module):
    """Registers its buffers in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("own", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "mean" not in self.inner._buffers:
            self.inner.register_buffer("mean", torch.zeros(2))
            self.register_buffer("count", torch.zeros(1), persistent=False)
        self.inner.mean.add_(x.mean(0))  # type: ignore[union-attr, operator]
        self.count.add_(1)  # type: ignore[union-attr, operator]
        return self.inner(x)  # type: ignore[no-any-return]


def test_buffers_that_a_forward_has_made_come_with_a_checkpoint_and_go_with_one_that_has_none() -> None:
    """In the model, and in another module."""
    model, criterion = Growing(), Growing()
    before = through_disk(state_of(model, criterion=criterion).image())
    for module in (model, criterion):
        module(torch.ones(3, 2))
    after = through_disk(state_of(model, criterion=criterion).image())
    fresh, other = Growing(), Growing()
    state = state_of(fresh, criterion=other)
    for module in (fresh, other):
        module.own.fill_(7.0)  # type: ignore[union-attr, operator]
    state.load(*after)
    for module in (fresh, other):
        assert {name: item.tolist() for name, item in module.named_buffers()} == {
            "own": [0.0], "inner.mean": [1.0, 1.0], "count": [1.0]
        }  # fmt: skip
        assert "inner.mean" in module.state_dict()
        assert "count" not in module.state_dict()
        module(torch.ones(3, 2))
        assert module.count.item() == 2  # type: ignore[union-attr, operator]
    state.load(*before)
    for module in (fresh, other):
        assert [name for name, _ in module.named_buffers()] == ["own"]


class Twice(nn.Module):
    """One layer in two places, as in models that share weights between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = Lazy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(1))
        self.count.add_(1)  # type: ignore[union-attr, operator]
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_buffer_that_a_forward_has_made_in_a_module_of_two_names_comes_and_goes() -> None:
    model = Twice()
    state = state_of(model)
    before = through_disk(state.image())
    model(torch.ones(3, 2))
    after = through_disk(state.image())
    state.load(*before)
    assert list(model.buffers()) == []
    state.load(*after)
    assert model.first.count.tolist() == [2.0]
    fresh = Twice()
    state_of(fresh).load(*after)
    assert fresh.second.count.tolist() == [2.0]


def test_a_buffer_of_a_module_that_is_not_there_is_named() -> None:
    model = Growing()
    model(torch.ones(3, 2))
    image = through_disk(state_of(model).image())
    with pytest.raises(RunDoesNotFit, match=r"the checkpoint has the buffer 'inner\.mean'"):
        register_buffers(nn.ModuleDict({"outer": nn.Linear(1, 1)}), image[1]["buffers"], {}, ())


def test_a_module_that_makes_its_state_dict_itself_loads_itself() -> None:
    """As an average of weights that begins with its first update."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shadow: dict[str, Tensor] = {}

        def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
            return dict(self.shadow)

        def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
            self.shadow = dict(state)

    average, other = Average(), Average()
    average.shadow = {"inner.weight": torch.ones(2), "shadow": torch.full((1,), 3.0)}
    state_of(Model(), average=other).load(*through_disk(state_of(Model(), average=average).image()))
    assert {name: item.tolist() for name, item in other.shadow.items()} == {"inner.weight": [1.0, 1.0], "shadow": [3.0]}


def test_what_a_state_dict_has_and_is_no_buffer_is_left_alone() -> None:
    class Metric(nn.Module):
        """As torchmetrics does it: a state is a plain attribute."""

        total = torch.zeros(1)

        def get_extra_state(self) -> torch.Tensor:
            return self.total

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.total = state

    metric, other = Metric(), Metric()
    metric.total = torch.full((1,), 3.0)
    state_of(Model(), metric=other).load(*through_disk(state_of(Model(), metric=metric).image()))
    assert other.total.item() == 3.0
    assert not dict(other.named_buffers())


def test_a_buffer_whose_elements_are_one_in_memory_is_restored() -> None:
    def expanded(value: float) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("hidden", torch.tensor([value]).expand(3), persistent=False)
        model.register_buffer("mask", torch.tensor([value]).expand(3))
        return model

    model, other = expanded(1.0), expanded(2.0)
    assert not [name for name in state_of(model).live_tensors() if "hidden" in name or "mask" in name]
    state_of(other).load(*through_disk(state_of(model).image()))
    assert other.hidden.tolist() == other.mask.tolist() == [1.0] * 3  # type: ignore[union-attr, operator]


def test_a_checkpoint_from_before_they_were_kept_is_read_and_what_it_lacks_is_named() -> None:
    model, other = Model(), Model()
    model.mean.fill_(3.0)
    shared, local = through_disk(state_of(model).image())
    del local["nonpersistent_buffers"]
    state = state_of(other)
    other.hidden.fill_(5.0)
    state.load(shared, local)
    assert state.not_in_checkpoint == ["hidden"]
    assert torch.equal(other.mean, model.mean)
    assert torch.equal(other.hidden, torch.full((3,), 5.0))


def test_what_modules_hold_in_plain_attributes_is_named_and_views_of_what_is_kept_are_not() -> None:
    model, criterion = Model(), nn.Module()
    model.inner.plain = torch.ones(3)
    model.view = model.inner.weight[0]
    model.several = [model.inner.weight, torch.zeros(2)]
    model.table = {"one": torch.zeros(2)}
    model.register_buffer("odd", torch.eye(3).to_sparse(), persistent=False)
    criterion.center = torch.zeros(2)
    criterion.register_buffer("mean", torch.zeros(2))
    assert sorted(state_of(model, criterion=criterion).not_kept()) == [
        "criterion.center", "inner.plain", "odd", "several", "table"
    ]  # fmt: skip
    assert state_of(nn.LSTM(2, 2), norm=nn.BatchNorm1d(2)).not_kept() == []


class TellsMore(nn.Module):
    """Hands out a tensor as a part of its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.told = torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"told": self.told, "count": 1}


def test_what_is_in_an_extra_state_is_not_named_as_lost() -> None:
    assert state_of(nn.Sequential(nn.Linear(2, 2), TellsMore())).not_kept() == []


def test_buffers_of_a_part_in_torchscript_are_kept() -> None:
    one, other = (state_of(nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.BatchNorm1d(2)))) for _ in range(2))
    one.model(torch.ones(4, 2))
    other.load(*through_disk(one.image()))
    assert torch.equal(other.model[1].running_mean, one.model[1].running_mean)


class RemembersTheLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("odd", torch.eye(2).to_sparse(), persistent=False)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> None:
        self.last = x[-1]


def test_a_buffer_that_is_a_part_of_a_batch_now_is_restored_without_a_write_to_the_data() -> None:
    data = torch.arange(12.0).reshape(3, 2, 2)
    untouched, state = data.clone(), state_of(RemembersTheLast())
    state.model(data[0])
    held, kept = StateCopy(state), through_disk(state.image())
    for put_back in (lambda: held.put_back(state), lambda: state.load(*kept)):
        state.model(data[2])
        put_back()
        assert torch.equal(state.model.last, untouched[0, -1])
        assert torch.equal(data, untouched)


@pytest.mark.parametrize(
    "applied",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.random_unstructured(prune.l1_unstructured(layer, "weight", 0.5), "weight", 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_each_forward_computes_anew_need_not_be_kept(applied: Any) -> None:
    layer = applied(nn.Linear(4, 3))
    layer(torch.ones(2, 4))
    assert isinstance(vars(layer)["weight"], torch.Tensor)
    assert not_kept(layer) == []
    layer.last = torch.ones(2)
    assert not_kept(layer) == ["last"]
