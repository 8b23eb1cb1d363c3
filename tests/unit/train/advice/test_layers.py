"""Layers whose gradient vanishes, and embeddings that grow without bound, are named; sound ones are not."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rollback
from rollback.facts.training import Advice, Incident
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.train.advice import advisor as advising
from rollback.train.advice.layers import GROWTH_LOOKS, LOOKS, Layers
from rollback.train.updates.gradients import GradientNorms


class Net(nn.Module):
    """Two layers, and a third whose part in the result is `share`."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.first, self.faint, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.share * self.faint(x))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advising, "EVERY", 2)


@pytest.mark.parametrize(
    ("share", "codes"), [(1e-10, ["vanishing-gradient"]), (1e-6, []), (0.0, ["vanishing-gradient"])]
)
def test_a_layer_whose_gradient_stays_below_a_share_of_the_whole_is_named_in_the_record(
    tmp_path: Path, share: float, codes: list[str]
) -> None:
    torch.manual_seed(0)
    model = Net(share)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=DataLoader(torch.randn(80, 4), 4), run=tmp_path)
    for x in guard:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
    guard.close()
    facts = [record.fact for record in read_journal(RunPaths(tmp_path).train_journal).records]
    told = [fact for fact in facts if isinstance(fact, Advice)]
    assert [fact.code for fact in told] == codes
    assert all("gradient of faint has" in fact.text for fact in told)
    assert not any(isinstance(fact, Incident) for fact in facts)


def looked_at(model: nn.Module, change: Callable[[int], None], looks: int) -> list[str]:
    """The codes after so many looks, each of them after `change`."""
    layers, parameters = Layers(model), list(model.parameters())
    each = torch.ones(len(parameters))
    for number in range(looks):
        change(number)
        layers.look(GradientNorms(parameters, each, torch.linalg.vector_norm(each), None, None))
    return [*layers.found]


GROWTHS: dict[str, tuple[Callable[[int], float], bool]] = {
    "linear": (lambda number: 20.0 + 5.0 * number, True),
    "exponential": (lambda number: 20.0 * 1.1**number, True),
    "like a random walk": (lambda number: 20.0 * math.sqrt(1 + number), False),
    "to a bound": (lambda number: 100.0 * (1 - 0.8**number) + 20, False),
    "with a pause": (lambda number: 20.0 + 5.0 * min(number, 8), False),
    "no larger than the others": (lambda number: 0.1 * 1.1**number, False),
}


@pytest.mark.parametrize("how", GROWTHS)
def test_an_embedding_is_named_whose_largest_row_grows_without_slowing_down(how: str) -> None:
    model = nn.ModuleDict({"token": nn.Embedding(16, 4)})
    weight = model["token"].weight
    size, grows = GROWTHS[how]

    def change(number: int) -> None:
        with torch.no_grad():
            weight.fill_(0.5)
            weight[7] = size(number) / 2

    assert looked_at(model, change, GROWTH_LOOKS + 1) == []
    assert looked_at(model, change, GROWTH_LOOKS + 2) == ["growing-embedding"] * grows


def test_a_parameter_may_have_the_name_that_wrappers_give_to_a_model() -> None:
    assert looked_at(nn.ParameterDict({"module": nn.Parameter(torch.ones(1))}), print, 2) == []


def test_an_embedding_without_rows_ends_nothing() -> None:
    """As of extra tokens of which there are none so far."""
    assert looked_at(nn.ModuleDict({"extra": nn.Embedding(0, 4), "token": nn.Embedding(2, 4)}), print, 2) == []


def test_a_gradient_that_is_seen_now_and_then_has_not_vanished() -> None:
    model = Net(1.0)
    layers, parameters = Layers(model), list(model.parameters())
    for look in range(4 * LOOKS):
        each = torch.ones(len(parameters))
        each[2:4] = 1e-12 if look % LOOKS else 1.0
        layers.look(GradientNorms(parameters, each, torch.linalg.vector_norm(each), None, None))
    assert not layers.found


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0])
def test_a_look_at_gradients_that_are_not_finite_or_all_zero_says_nothing(wrong: float) -> None:
    model = Net(1.0)
    layers, parameters = Layers(model), list(model.parameters())
    each = torch.full((len(parameters),), wrong)
    for _ in range(3 * LOOKS):
        layers.look(GradientNorms(parameters, each, torch.linalg.vector_norm(each), None, None))
    assert (layers.found, layers.heaviest) == ({}, None)


def test_the_layer_with_the_largest_gradient_is_known_by_its_name_inside_wrappers() -> None:
    model = nn.Sequential()
    model.add_module("module", Net(1.0))
    layers, parameters = Layers(model), list(model.parameters())
    each = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    for _ in range(2):
        layers.look(GradientNorms(parameters, each, torch.linalg.vector_norm(each), None, None))
    assert layers.heaviest == "faint"
