"""What is kept of a Trainer of torchtitan: several optimizers as one, layers as they lie, data that go back."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from rollback.trainers.torchtitan.state import JoinedOptimizer, TrainState, make_rewindable, without_state_dict_hooks


class Container(Optimizer):
    """Made as torchtitan's: an optimizer of all parameters with no options, that steps others."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


def made(seed: int) -> tuple[nn.Module, Container]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    first, second, third = model
    groups = [{"params": [first.weight], "lr": 0.1}, {"params": [first.bias, second.weight], "lr": 0.01}]
    return model, Container(AdamW(groups), SGD([second.bias, *third.parameters()], 0.1, momentum=0.9))


def train(model: nn.Module, container: Container, steps: int) -> None:
    source = torch.Generator().manual_seed(5)
    for _ in range(steps):
        model(torch.randn(2, 3, generator=source)).sum().backward()
        container.step()
        model.zero_grad()


def test_several_optimizers_are_kept_as_one_and_put_back() -> None:
    model, container = made(1)
    joined = JoinedOptimizer(container)
    train(model, container, 3)
    kept, weights = copy.deepcopy(joined.state_dict()), copy.deepcopy(model.state_dict())
    assert [group["params"] for group in kept["param_groups"]] == [[0], [1, 2], [3, 4, 5]]
    assert sorted(kept["state"]) == list(range(6))
    train(model, container, 2)
    other, others = made(2)
    for trained, optimizers in ((model, container), (other, others)):
        trained.load_state_dict(weights)
        JoinedOptimizer(optimizers).load_state_dict(copy.deepcopy(kept))
        train(trained, optimizers, 2)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)
    assert [group["lr"] for group in joined.param_groups] == [0.1, 0.01, 0.1]


def test_the_steps_of_several_optimizers_are_one_update() -> None:
    model, container = made(1)
    joined, seen = JoinedOptimizer(container), []
    before = [item.detach().clone() for item in model.parameters()]
    moved = lambda: any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))  # noqa: E731
    joined.register_step_pre_hook(lambda *_: seen.append(("pre", moved())))
    joined.register_step_post_hook(lambda *_: seen.append(("post", moved())))
    train(model, container, 1)
    assert seen == [("pre", False), ("post", True)]


class Fused(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 4)
        self.register_state_dict_post_hook(_split)


def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    weight = state.pop(f"{prefix}weight")
    state[f"{prefix}q"], state[f"{prefix}k"] = weight[:2].clone(), weight[2:].clone()


def test_a_layer_that_splits_its_state_is_kept_whole_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_split, "__module__", "torchtitan.models.common.attention")
    model = nn.Sequential(Fused())
    with without_state_dict_hooks(model):
        state = model.state_dict()
        assert sorted(state) == ["0.bias", "0.weight"]
        assert state["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert sorted(model.state_dict()) == ["0.bias", "0.k", "0.q"]


class Documents(IterableDataset[Tensor]):
    """Made as torchtitan's: read again and again, from the second time on in another order, which a load of an earlier
    place does not undo."""

    def __init__(self) -> None:
        self._original_data = list(range(6))
        self._data, self._place, self._epoch = self._original_data, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            while self._place < len(self._data):
                self._place += 1
                yield torch.tensor(self._data[self._place - 1])
            self._place, self._epoch = 0, self._epoch + 1
            self._data = self._original_data[::-1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place, self._epoch = state["place"], state["epoch"]
        if self._epoch > 0:
            self._data = self._original_data[::-1]


class ParallelAwareDataloader(StatefulDataLoader[Tensor]):
    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": b"pickled"}


def test_data_go_back_over_their_end() -> None:
    loader = ParallelAwareDataloader(Documents(), batch_size=2)
    make_rewindable(loader)
    batches = iter(loader)
    first = [next(batches).tolist()]
    kept = copy.deepcopy(loader.state_dict())
    rest = [next(batches).tolist() for _ in range(4)]
    assert (first, rest) == ([[0, 1]], [[2, 3], [4, 5], [5, 4], [3, 2]])
    loader.load_state_dict(kept)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(4)] == rest


def test_a_rollback_makes_void_what_was_drawn() -> None:
    class Trainer:
        step = 7
        metrics_processor = type("Metrics", (), {"logger": None})

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, kept: dict[str, int]) -> None:
            self.step = kept["step"]

    trainer, drawn = Trainer(), [object()]
    state = TrainState(trainer, drawn)
    assert state.state_dict() == {"step": 7}
    assert not state.has_moved()
    state.load_state_dict({"step": 3})
    assert (trainer.step, drawn, state.has_moved(), state.has_moved()) == (3, [], True, False)
