"""Setup mistakes are noticed, and what looks like them is not. Each mistake is trained beside its correct twin."""

import builtins
import copy
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sharding import fully_sharded, one_rank
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from toy import facts as facts_of
from warm_server import run_warm

import rollback
from rollback.facts.training import Advice, Incident
from rollback.sentinel import Blip, Kind, Sentinel, Verdict
from rollback.source.instrumentation import BY_BATCH
from rollback.train.advice import advisor as advising
from rollback.train.advice.advisor import Advisor
from rollback.train.advice.habits import Habit
from rollback.train.advice.unkept_state import UnkeptState
from rollback.train.comm.beat import Beat
from rollback.train.data.cursor import cursor_for
from rollback.train.data.passes import PLAIN_EPOCH_LOOP
from rollback.train.state.kept_values import KeptAttribute
from rollback.train.state.state import TrainingState
from rollback.train.updates.optimizer import Updates
from rollback.trainers.evaluated_loaders import EvaluatedLoaders
from rollback.wording import Calls


@dataclass
class Script:
    """One training script. `backward` and `update` are its own lines for them."""

    folder: Path
    backward: Callable[[Tensor], None]
    update: Callable[[nn.Module, Any], None]
    accumulate: int = 1
    scaler: Any = None
    steps: int = 12
    observe_first: bool = False
    optimizer: Any = torch.optim.SGD
    loader: Callable[[Tensor], Any] = lambda data: DataLoader(data, 4)  # type: ignore[assignment,arg-type,return-value]
    others: Callable[[Any], dict[str, Any]] = lambda optimizer: {}
    """What is handed over beside it."""
    sharded: bool = False
    zero_before: bool | None = None
    """Gradients are set to zero in front of each first backward of an update; whether to None."""
    held_back: bool = False
    """FSDP2 sums the gradients over the ranks once for each update."""
    bias: bool = True

    def codes(self) -> list[str]:
        """Codes of the advice that it gets."""
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8, self.bias), nn.Tanh(), nn.Linear(8, 1, self.bias))
        if self.sharded:
            fully_sharded(model)
        optimizer = self.optimizer(model.parameters(), lr=1e-3)
        data = torch.randn(4 * self.steps * self.accumulate, 4, generator=torch.Generator().manual_seed(1))
        guard = rollback.Guard(
            model=model, optimizer=optimizer, loader=self.loader(data), scaler=self.scaler, run=self.folder,
            snapshot_every=0, observe_only=True, **self.others(optimizer),
        )  # fmt: skip
        for number, x in enumerate(guard):
            if self.held_back:
                model.set_requires_gradient_sync(number % self.accumulate == self.accumulate - 1)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            if self.observe_first:
                guard.observe(loss)
            if self.zero_before is not None and number % self.accumulate == 0:
                optimizer.zero_grad(set_to_none=self.zero_before)
            self.backward(loss)
            if not self.observe_first:
                guard.observe(loss)
            if number % self.accumulate == self.accumulate - 1:
                self.update(model, optimizer)
        guard.close()
        assert not facts_of(self.folder, Incident)
        return codes_in(self.folder)


def codes_in(folder: Path) -> list[str]:
    """Codes of the advice in this run."""
    return [fact.code for fact in facts_of(folder, Advice)]


def train(
    guard: rollback.Guard,
    optimizer: Any,
    loss_of: Callable[[Any], Tensor],
    behind: Callable[[Any], object] = lambda x: None,
    set_to_none: bool = True,
) -> None:
    """A script's loop, to its end. behind: what it does with a batch behind the update."""
    for x in guard:
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        guard.observe(loss)
        behind(x)
    guard.close()


def plain(loss: Tensor) -> None:
    loss.backward()


def by(count: int) -> Callable[[Tensor], None]:
    return lambda loss: (loss / count).backward()


def stepping(
    before: Callable[[nn.Module], Any] | None = None,
    after: Callable[[nn.Module], Any] | None = None,
    set_to_none: bool = True,
) -> Callable[[nn.Module, Any], None]:
    """An update with something before and something after the step."""

    def update(model: nn.Module, optimizer: Any) -> None:
        if before:
            before(model)
        optimizer.step()
        if after:
            after(model)
        optimizer.zero_grad(set_to_none=set_to_none)

    return update


def clip(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 0.01)


# --- what the guard is not told ---------------------------------------------------------------------------------------


def guarded(folder: Path, batches: int, *, observing: int | None, stepping: bool | None = True) -> list[str]:
    """Codes of the advice for a script that tells the loss in every so-manieth update, and may step another optimizer
    than the guard's, or (None) none."""
    model = nn.Linear(2, 1)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=1e-3) for _ in range(2))
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * batches, run=folder, snapshot_every=0,
        observe_only=True,
    )  # fmt: skip
    for number, x in enumerate(guard):
        loss = model(x).sum()
        loss.backward()
        if stepping is not None:
            (optimizer if stepping else other).step()
        optimizer.zero_grad()
        if observing and number % observing == 0:
            guard.observe(loss)
    guard.close()
    return codes_in(folder)


def test_a_loss_that_is_never_told_is_asked_for(tmp_path: Path) -> None:
    assert guarded(tmp_path, advising._UNOBSERVED + 2, observing=None) == ["never-observed"]


def test_a_loss_that_is_told_now_and_then_is_enough(tmp_path: Path) -> None:
    assert guarded(tmp_path, 3 * advising._UNOBSERVED, observing=advising._UNOBSERVED - 1) == []


def test_batches_without_an_update_are_noticed(tmp_path: Path) -> None:
    assert guarded(tmp_path, advising.WITHOUT_UPDATE + 1, observing=1, stepping=None) == ["never-updated"]


def test_an_optimizer_that_steps_in_the_place_of_the_guards_is_noticed_soon(tmp_path: Path) -> None:
    assert guarded(tmp_path, 2 * advising._OTHER_UPDATES, observing=1, stepping=False) == ["never-updated"]


@pytest.mark.parametrize("between", ["nothing", "the other's updates", "the guard's updates"])
def test_an_optimizer_that_goes_on_in_the_place_of_the_guards_is_noticed_soon(tmp_path: Path, between: str) -> None:
    """As where a script changes from Adam to SGD in mid-run. Not one whose updates lie between those of the guard's,
    nor one that trained before it."""
    model, often = nn.Linear(2, 1), 2 * advising._OTHER_UPDATES
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=1e-3) for _ in range(2))
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * (3 * often), run=tmp_path, snapshot_every=0,
        observe_only=True,
    )  # fmt: skip
    for number, x in enumerate(guard):
        loss = model(x).sum()
        loss.backward()
        guard.observe(loss)
        if between == "nothing":
            (optimizer if number < often else other).step()
        elif between == "the other's updates":
            (optimizer if number % often == often - 1 else other).step()
        elif number < 4 or number % often == often - 1:
            (other if number < 4 else optimizer).step()
        optimizer.zero_grad()
    guard.close()
    found = codes_in(tmp_path)
    assert ("updates-by-another" in found) is (between == "nothing"), found


def evaluated(folder: Path, *, over_guard: bool, accumulate: int = 1) -> list[str]:
    """Codes of the advice for a script that evaluates after each epoch."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=1e-3), [torch.ones(1, 2)] * 8
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=loader, run=folder, snapshot_every=0, observe_only=True
    )
    for _ in guard.epochs(4):
        for number, x in enumerate(guard):
            loss = model(x).square().sum() * (1 / accumulate)
            loss.backward()
            guard.observe(loss)
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            assert all(model(x) is not None for x in (guard if over_guard else loader))
    guard.close()
    return codes_in(folder)


def test_an_evaluation_that_takes_its_batches_from_the_guard_is_told(tmp_path: Path) -> None:
    assert evaluated(tmp_path, over_guard=True) == ["evaluated-over-guard"]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_evaluation_over_a_loader_is_innocent(tmp_path: Path, accumulate: int) -> None:
    assert evaluated(tmp_path, over_guard=False, accumulate=accumulate) == []


# --- what the guard is not handed -------------------------------------------------------------------------------------


class Around(torch.optim.Optimizer):
    """An optimizer around Adam. It hands out Adam's state, or none, as many do that perturb weights."""

    def __init__(self, parameters: Any, *, shares: bool) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.inner = torch.optim.Adam(self.param_groups)
        self.param_groups = self.inner.param_groups
        if shares:
            self.state = self.inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def handed(folder: Path, *names: str, shares: bool = True, moments: int = 0) -> list[str]:
    """Codes of the advice for a script that trains two models with an optimizer each, and hands over these of them.

    moments: in so many batches a new optimizer trains the second model."""
    torch.manual_seed(0)
    model, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, second = Around(model.parameters(), shares=shares), torch.optim.Adam(critic.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    others = {"critic": critic, "second": second, "scheduler": scheduler}
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 8, run=folder, snapshot_every=0,
        observe_only=True, **{name: others[name] for name in names},
    )  # fmt: skip
    for number, x in enumerate(guard):
        loss = (model(x) + critic(x)).square().sum()
        loss.backward()
        if moments == 0:
            second.step()
        elif number < moments:
            torch.optim.Adam(critic.parameters()).step()
        optimizer.step()
        optimizer.zero_grad()
        second.zero_grad()
        scheduler.step()
        guard.observe(loss)
    guard.close()
    return codes_in(folder)


def test_a_script_that_hands_over_all_is_told_nothing(tmp_path: Path) -> None:
    assert handed(tmp_path, "critic", "second", "scheduler") == []


@pytest.mark.parametrize("names", [("scheduler",), ("scheduler", "critic")])
def test_an_optimizer_that_was_not_handed_over_is_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert handed(tmp_path, *names) == ["optimizer-not-kept"]


def test_an_optimizer_whose_state_another_does_not_hand_out_is_named(tmp_path: Path) -> None:
    assert handed(tmp_path, "critic", "second", "scheduler", shares=False) == ["optimizer-not-kept"]


def test_a_guard_that_is_forgotten_while_an_optimizer_goes_through_its_hooks_ends_no_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = [UnkeptState(TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal")), {}, [])]
    handles = [register_optimizer_step_post_hook(hook) for hook in (lambda *_: watching.clear(), lambda *_: None)]
    model(torch.ones(2)).backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert not watching


def test_optimizers_that_are_made_for_a_batch_are_innocent(tmp_path: Path) -> None:
    assert handed(tmp_path, "critic", "scheduler", moments=6) == []


def test_a_scheduler_that_was_not_handed_over_is_asked_for(tmp_path: Path) -> None:
    assert handed(tmp_path, "critic", "second") == ["scheduler-not-kept"]


@pytest.mark.parametrize("handed_over", [True, False])
def test_a_scheduler_that_goes_by_a_metric_is_asked_for_before_it_acts(tmp_path: Path, handed_over: bool) -> None:
    made: list[Any] = []

    def others(optimizer: Any) -> dict[str, Any]:
        made.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
        return {"scheduler": made[0]} if handed_over else {}

    codes = Script(tmp_path, plain, stepping(), others=others).codes()
    assert codes == ([] if handed_over else ["scheduler-not-kept"])


def test_a_group_that_the_optimizer_gets_in_mid_run_is_told_before_a_start_is_refused(tmp_path: Path) -> None:
    def unfreezing(model: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    assert Script(tmp_path, plain, unfreezing).codes() == ["group-added"]


class OfItsOwn(torch.optim.Optimizer):
    """A script's own Adam without the second moment. keeps: what of it is in attributes."""

    keeps: tuple[str, ...] = ()

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "t": 0})
        self.t, self.power, self.moments = 0, 1.0, [torch.zeros_like(item) for item in self.param_groups[0]["params"]]
        self.norm, self.cache, self.params = 0.0, [torch.zeros(10)], self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["t"] += 1
        self.t += "t" in self.keeps
        self.power *= 0.9 if "power" in self.keeps else 1
        self.norm = float(sum(item.grad.norm() for item in self.params))
        self.cache[0].normal_()
        for number, item in enumerate(self.params):
            moment = self.moments[number] if "moments" in self.keeps else self.state[item].setdefault("m", item * 0)
            moment.mul_(0.9).add_(item.grad)
            item.sub_(moment, alpha=group["lr"] / (1 - 0.9 ** group["t"]))


class OfReplaced(OfItsOwn):
    """One that makes its moments anew in each update."""

    keeps = ("moments",)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.moments = [moment.clone() for moment in self.moments]
        super().step()


class AroundItsOwn(torch.optim.Adam):
    """One whose step calls the one that it overrides, and that counts from its class's number on."""

    t = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        super().step(closure)


class ToldByItself(OfItsOwn):
    keeps = ("t", "moments")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "t": self.t, "moments": self.moments}


@pytest.mark.parametrize(
    ("kind", "keeps", "named"),
    [
        (OfItsOwn, ("t",), "t"), (OfItsOwn, ("power",), "power"), (OfItsOwn, ("moments",), "moments"),
        (OfItsOwn, ("moments", "power"), "moments, power"), (OfReplaced, ("moments",), "moments"),
        (AroundItsOwn, (), "t"), (OfItsOwn, (), None), (ToldByItself, ("t", "moments"), None),
    ],
)  # fmt: skip
def test_an_optimizer_that_keeps_its_state_in_attributes_is_told_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, keeps: tuple[str, ...], named: str | None
) -> None:
    """What it measures, works with and refers to is none of it."""
    monkeypatch.setattr(kind, "keeps", keeps, raising=False)
    assert Script(tmp_path, plain, stepping(), optimizer=kind).codes() == ["optimizer-attributes"] * bool(named)
    assert all(f"changes {named} of the optimizer {kind.__name__}," in fact.text for fact in facts_of(tmp_path, Advice))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "NAdam", "RAdam", "Adadelta", "Adagrad", "Adamax", "ASGD", "Rprop"])
def test_torchs_own_optimizers_and_what_schedulers_add_to_them_are_innocent(tmp_path: Path, kind: str) -> None:
    def others(optimizer: Any) -> dict[str, Any]:
        return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    of_torch = type(kind, (getattr(torch.optim, kind),), {})  # as a script's own kind, that changes nothing
    assert Script(tmp_path, plain, stepping(), optimizer=of_torch, others=others).codes() == []


@pytest.mark.parametrize("generator", [torch.Generator(), np.random.default_rng(0), random.Random(0)])
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("reads_ahead", [True, False])
def test_a_generator_of_a_modules_own_that_draws_in_the_training_is_named_where_it_is_not_kept(
    tmp_path: Path, generator: Any, draws: bool, reads_ahead: bool
) -> None:
    """One that has made the first weights is none."""
    noise = nn.Module()
    noise.generator = generator
    loader: dict[str, Any] = {"loader": lambda data: [*DataLoader(data, 4)]} if reads_ahead else {}

    def draw(model: nn.Module) -> object:
        if not draws:
            return None
        return torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()

    others = {"noise": noise}
    codes = Script(tmp_path, plain, stepping(before=draw), others=lambda optimizer: others, **loader).codes()
    assert codes == ["generator-not-kept"] * (draws and reads_ahead)


class Draws:
    """The source of a pipeline, which gives what it draws, and has its generator in its state."""

    def __init__(self) -> None:
        self.generator, self.given = random.Random(0), 0

    def __iter__(self) -> Iterator[Any]:
        while self.given < 6:
            self.given += 1
            yield torch.full((1, 2), self.generator.random())
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": json.dumps(self.generator.getstate())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, after = json.loads(state["generator"])
        self.given = state["given"]
        self.generator.setstate((version, tuple(words), after))


class Piped:
    """A part of a pipeline, as torchdata's nodes are."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __iter__(self) -> Iterator[Any]:
        return iter(self.before)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.before.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before.load_state_dict(state)


@pytest.mark.parametrize("has_state", [True, False])
def test_a_generator_deep_in_a_pipeline_is_named_only_where_the_pipeline_has_no_state(
    tmp_path: Path, has_state: bool
) -> None:
    source = Draws()
    loader: Any = source if has_state else [torch.ones(1, 2)] * 6
    for _ in range(6 * has_state):
        loader = Piped(loader)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, run=tmp_path, max_steps=6)
    train(guard, optimizer, lambda x: model(x).sum(), lambda x: None if has_state else source.generator.random())
    assert codes_in(tmp_path) == ["generator-not-kept"] * (not has_state)


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_an_average_by_hand_that_was_not_handed_over_is_named(tmp_path: Path, follows: bool, handed_over: bool) -> None:
    model = nn.Linear(2, 1)
    average = {name: item.detach().clone() for name, item in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    others = {"average": SimpleNamespace(held=average, state_dict=lambda: average, load_state_dict=average.update)}
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 6, run=tmp_path, **(others if handed_over else {})
    )

    def follow(x: Tensor) -> None:
        for name, item in model.named_parameters() if follows else ():
            average[name].lerp_(item.detach(), 0.1)

    train(guard, optimizer, lambda x: model(x).sum(), follow)
    assert codes_in(tmp_path) == ["copies-not-kept"] * (follows and not handed_over)


def test_an_average_that_is_in_no_variable_is_named_where_a_trainer_tells_of_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    held = SimpleNamespace(average=[item.detach().clone() for item in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 6, run=tmp_path)
    guard.watch([("Average.held", held.average)])
    for x in guard:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, item in zip(held.average, model.parameters(), strict=True):
            mean.lerp_(item.detach(), 0.1)
    guard.close()
    (told,) = [fact.text for fact in facts_of(tmp_path, Advice) if fact.code == "copies-not-kept"]
    assert "writes to Average.held, " in told


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("kind", ["in inference mode", "emptied", "beside sparse gradients", "beside nested tensors"])
def test_odd_copies_of_weights_in_a_script_end_no_guard(tmp_path: Path, kind: str) -> None:
    texts = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])] if kind == "beside nested tensors" else []
    model = nn.Embedding(4, 1, sparse=kind == "beside sparse gradients")
    with torch.inference_mode(kind == "in inference mode"):
        average: list[Any] = [item.detach().clone() for item in model.parameters()]
    queue = torch.zeros(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.tensor([1])] * 4, run=tmp_path)
    assert "average" in {each.name for each in guard._loop.advisor.unkept._copies}
    for x in guard:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "emptied":
            average[0] = None
        elif kind == "beside sparse gradients":
            average[0].lerp_(model.weight.detach(), 0.1)
            queue[0] += 1.0
    assert (guard.step, len(texts)) == (4, kind == "beside nested tensors")
    guard.close()


@pytest.mark.parametrize("held", ["weights", "gradients"])
def test_a_list_of_what_the_model_has_itself_is_no_copy_of_it(tmp_path: Path, held: str) -> None:
    model = nn.Linear(2, 1)
    for item in model.parameters():
        item.grad = torch.zeros_like(item)
    own = [item.detach() if held == "weights" else item.grad for item in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 6, run=tmp_path)
    train(guard, optimizer, lambda x: model(x).sum(), set_to_none=False)
    assert len(own) == 2
    assert codes_in(tmp_path) == []


def test_modules_without_plain_values_may_be_among_the_variables_of_a_script(tmp_path: Path) -> None:
    model, skeleton, graph = nn.Linear(2, 1), nn.Linear(2, 1, device="meta"), nn.Linear(2, 1, dtype=torch.complex64)
    graph.register_buffer("adjacency", torch.eye(2).to_sparse())
    graph.register_buffer("levels", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 2, run=tmp_path)
    watched = {each.name for each in guard._loop.advisor.unkept._copies}
    assert "graph" in watched
    assert "skeleton" not in watched
    assert skeleton.weight.is_meta
    guard.close()


class Centered(nn.Module):
    """A loss with a buffer, as of self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def follow(self, model: nn.Module) -> None:
        self.center = self.center * 0.9 + model.bias.detach() * 0.1


class Copied(nn.Module):
    """A copy of a model that follows it as scripts write that: by `data`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)

    def follow(self, model: nn.Module) -> None:
        for item, other in zip(self.module.parameters(), model.parameters(), strict=True):
            item.data.mul_(0.9).add_(other.data, alpha=0.1)


@pytest.mark.parametrize("kind", ["average", "copy", "loss", "model", "around the model"])
@pytest.mark.parametrize("handed_over", [False, True, "within an object"])
@pytest.mark.parametrize("follows", [False, True])
def test_a_module_beside_the_model_that_the_training_writes_to_is_named(
    tmp_path: Path, kind: str, follows: bool, handed_over: bool | str
) -> None:
    model = nn.Linear(2, 1)
    beside: Any = {
        "average": lambda: AveragedModel(model), "copy": lambda: Copied(model), "loss": Centered,
        "model": lambda: model, "around the model": lambda: nn.Sequential(model, nn.BatchNorm1d(1).eval()),
    }[kind]()  # fmt: skip
    within = SimpleNamespace(held=beside, state_dict=beside.state_dict, load_state_dict=beside.load_state_dict)
    others = {"beside": beside if handed_over is True else within} if handed_over and kind != "model" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 6, run=tmp_path, **others)

    def follow(x: Tensor) -> None:
        if follows and kind == "average":
            beside.update_parameters(model)
        elif follows and kind in ("copy", "loss"):
            beside.follow(model)

    train(guard, optimizer, lambda x: model(x).sum(), follow)
    named = follows and not handed_over and kind in ("average", "copy", "loss")
    assert codes_in(tmp_path) == ["copies-not-kept"] * named


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("kind", ["average", "list", "loss"])
def test_so_is_an_average_that_the_training_writes_to_in_its_late_epochs_alone(
    tmp_path: Path, kind: str, handed_over: bool
) -> None:
    """As stochastic weight averaging does. Of other modules that is no sign: an evaluation may write to them."""
    model = nn.Linear(2, 1)
    beside: Any = {
        "average": lambda: AveragedModel(model), "loss": Centered,
        "list": lambda: [item.detach().clone() for item in model.parameters()],
    }[kind]()  # fmt: skip
    held = SimpleNamespace(held=beside, state_dict=lambda: {"of": beside}, load_state_dict=len)
    others = {"beside": held if kind == "list" else beside} if handed_over else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 24, run=tmp_path, **others)

    def follow(x: Tensor) -> None:
        if guard.step >= 20 and kind == "list":
            beside[0].lerp_(model.weight.detach(), 0.1)
        elif guard.step >= 20:
            (beside.update_parameters if kind == "average" else beside.follow)(model)

    train(guard, optimizer, lambda x: model(x).sum(), follow)
    assert codes_in(tmp_path) == ["copies-not-kept"] * (kind != "loss" and not handed_over)


@pytest.mark.parametrize("written", [False, True])
def test_a_sharded_teacher_whose_forward_leaves_whole_parameters_in_their_places_is_innocent(
    tmp_path: Path, written: bool
) -> None:
    """FSDP2 takes those of the outermost module apart again behind a backward alone."""
    with one_rank():
        model, teacher = (fully_sharded(nn.Linear(2, 1)) for _ in range(2))
        teacher.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 24, run=tmp_path)

        def loss_of(x: Tensor) -> Tensor:
            with torch.no_grad():
                told = teacher(x)
            return (model(x) - told).square().sum()

        def follow(x: Tensor) -> None:
            if written:
                teacher.reshard()  # type: ignore[attr-defined]
                teacher.weight.mul_(0.9)

        train(guard, optimizer, loss_of, follow)
    assert codes_in(tmp_path) == ["copies-not-kept"] * written


class Cooling(nn.Module):
    """A temperature that falls, or a count, as an attribute; with a state of its own, or as a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.t, self.seen = nn.Linear(2, 1), kind, 1.0, 0
        self.register_buffer("heat", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "falls":
            self.t *= 0.9
        elif self.kind in ("counts", "hands out"):
            self.seen += 1
        elif self.kind == "buffer":
            self.heat *= 0.9
        else:
            self.seen = len(x)
        out: Tensor = self.layer(x) * self.t * self.heat
        return out


class HandsOut(Cooling):
    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize(
    ("kind", "named"),
    [("falls", "model.1.t"), ("counts", "model.1.seen"), ("buffer", None), ("stays", None), ("hands out", None)],
)
def test_a_number_of_a_module_that_goes_on_in_each_update_is_named(
    tmp_path: Path, kind: str, named: str | None
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), (HandsOut if kind == "hands out" else Cooling)(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 12, run=tmp_path)
    train(guard, optimizer, lambda x: model(x).sum())
    assert codes_in(tmp_path) == ["numbers-not-kept"] * bool(named)
    assert all(f"changes {named}, numbers" in fact.text for fact in facts_of(tmp_path, Advice))


class Average:
    """Of a model's weights, as scripts write it: its decay depends on how many updates it has seen."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.kind, self.decay, self.updates = kind, 0.99, 0
        self.seen = 1
        """By bits, of samples."""
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model: nn.Module) -> None:
        self.updates += self.kind != "stays"
        self.seen <<= 1000 * (self.kind == "large")
        for name, value in model.state_dict().items():
            self.shadow[name].lerp_(value, 1 - min(self.decay, self.updates / (10 + self.updates)))

    def state_dict(self) -> dict[str, Any]:
        count = {"number": {"n": self.updates}, "tensor": {"n": torch.tensor(self.updates)}}
        return {"shadow": self.shadow, "phase": torch.tensor(1j), "seen": self.seen, **count.get(self.kind, {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("counts", "average.updates"), ("large", "average.updates"), ("number", None), ("tensor", None),
        ("stays", None),
    ],
)  # fmt: skip
def test_a_number_of_an_object_that_goes_on_in_each_update_and_is_not_in_its_state_is_named(
    tmp_path: Path, kind: str, named: str | None
) -> None:
    model = nn.Linear(2, 2)
    optimizer, average = torch.optim.SGD(model.parameters(), lr=1e-3), Average(model, kind)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, average=average, loader=[torch.ones(1, 2)] * 12, run=tmp_path
    )
    train(guard, optimizer, lambda x: model(x).sum(), lambda x: average.update(model))
    assert codes_in(tmp_path) == ["numbers-of-objects-not-kept"] * bool(named)
    assert all(f"changes {named}, numbers" in fact.text for fact in facts_of(tmp_path, Advice))


class KeptNumber(KeptAttribute):
    """The attribute `seen`, as one that a loop carries is kept with --adopt."""

    def __init__(self, cooling: Cooling) -> None:
        self._cooling = cooling

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._cooling.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cooling.seen = state["value"]

    def is_attribute(self, name: str, value: float) -> bool:
        return name == "seen" and value == self._cooling.seen


def test_a_number_of_a_module_that_is_put_back_is_not_named(tmp_path: Path) -> None:
    model, other = Cooling("counts"), Cooling("counts")
    both = nn.ModuleList([model, other])
    optimizer = torch.optim.SGD(both.parameters(), lr=1e-3)
    guard = rollback.Guard(model=both, optimizer=optimizer, loader=[torch.ones(1, 2)] * 12, run=tmp_path)
    other.seen = 5
    guard.keep(seen=KeptNumber(model))
    train(guard, optimizer, lambda x: (model(x) + other(x)).sum())
    (told,) = facts_of(tmp_path, Advice)
    assert "changes model.1.seen, numbers" in told.text


@pytest.mark.parametrize("held", ["variable", "buffer", "view of a weight", "gradients", "batch", "read alone"])
def test_a_tensor_of_the_scripts_that_the_training_writes_to_is_named(tmp_path: Path, held: str) -> None:
    """Not what a checkpoint has, nor what each step makes anew."""
    model, bank = nn.Linear(2, 3), nn.Module()
    queue = model.weight.detach() if held == "view of a weight" else torch.zeros(3, 2)
    others = {}
    if held == "buffer":
        bank.register_buffer("queue", queue)
        others = {"bank": bank}
    if held == "gradients":
        model.weight.grad = queue.view(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, 2)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=[x.clone() for _ in range(6)], run=tmp_path, **others
    )

    def write(x: Tensor) -> None:
        if held == "batch":
            x.mul_(2)
        elif held in ("variable", "buffer"):
            queue[guard.step % 3] = x[0]

    train(guard, optimizer, lambda x: (model(x) + queue.detach().sum()).sum(), write, set_to_none=False)
    texts = [fact.text for fact in facts_of(tmp_path, Advice) if fact.code == "variables-not-kept"]
    assert len(texts) == (held == "variable")
    assert all("writes to queue," in text for text in texts)


class Held:
    """What a script hands over that keeps a mean."""

    mean: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"mean": None if self.mean is None else float(self.mean)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = None if state["mean"] is None else torch.tensor(state["mean"])


@dataclass(slots=True)
class Hidden:
    h: Tensor


@pytest.mark.parametrize("kind", ["mean", "replay", "state", "slots", "logged", "attribute", "handed over", "kept"])
def test_what_the_training_depends_on_and_is_there_only_since_the_guard_was_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Not what is merely logged, nor what is made anew in each iteration."""
    monkeypatch.delattr(builtins, BY_BATCH, raising=False)  # as in a process in which no script was adopted
    model, held = nn.Linear(2, 3), Held()
    mean: Any = None
    state: Any = None
    slots: Any = None
    logged: Any = None
    replay: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    others = {"held": held} if kind == "handed over" else {}
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=[torch.ones(1, 2) for _ in range(6)], run=tmp_path, **others
    )
    if kind == "kept":
        guard.keep(held=held)
    for x in guard:
        out = model(x)
        loss = out.sum()
        if kind == "mean":
            mean = loss.detach() if mean is None else 0.9 * mean + 0.1 * loss.detach()
            loss = loss / mean
        elif kind in ("attribute", "handed over", "kept"):
            held.mean = loss.detach() if held.mean is None else 0.9 * held.mean + 0.1 * loss.detach()
            loss = loss / held.mean
        elif kind == "replay":
            if replay:
                loss = loss + model(random.choice(replay)).sum()
            replay.append(x)
        elif kind == "state":
            loss = loss if state is None else loss + state.sum()
            state = out.detach()
        elif kind == "slots":
            slots = Hidden(out.detach()) if slots is None else Hidden(slots.h + out.detach())
            loss = loss / slots.h.sum()
        else:
            logged = loss.detach() if logged is None else 0.9 * logged + 0.1 * loss.detach()
            print(logged)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        guard.observe(loss)
    guard.close()
    texts = [fact.text for fact in facts_of(tmp_path, Advice) if fact.code == "variables-not-kept"]
    named = {"attribute": "held.mean"}.get(kind, kind) if kind not in ("logged", "handed over", "kept") else None
    assert len(texts) == bool(named)
    assert all(f"writes to {named}, tensors" in text for text in texts)


def test_a_batch_that_is_taken_at_the_end_of_a_turn_is_taken_again_and_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(builtins, BY_BATCH, raising=False)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 2) for _ in range(6)], run=tmp_path)
    batches = iter(guard)
    x = next(batches, None)
    while x is not None:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
        x = next(batches, None)
    assert guard.step == 6
    guard.close()
    assert codes_in(tmp_path) == []


PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}


def evaluating(evaluate: Callable[[], object]) -> Callable[[Tensor], None]:
    """A script that does so at its last steps."""
    steps = iter(range(100))

    def backward(loss: Tensor) -> None:
        plain(loss)
        if next(steps) > 2:
            evaluate()

    return backward


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"persistent_workers": True}, ["evaluation-draws"]),
        ({"persistent_workers": True, "generator": torch.Generator()}, []),
        ({"persistent_workers": False}, []),
    ],
)
def test_another_loader_whose_first_pass_alone_draws_is_named(
    tmp_path: Path, settings: dict[str, Any], advice: list[str]
) -> None:
    evaluated: DataLoader[Any] = DataLoader([1.0], num_workers=1, **settings)  # type: ignore[arg-type]
    assert Script(tmp_path, evaluating(lambda: list(evaluated)), stepping(), steps=5).codes() == advice


def test_a_loader_that_was_read_before_the_training_and_one_whose_passes_are_kept_are_innocent(tmp_path: Path) -> None:
    before, within = DataLoader([1.0], **PERSISTENT), DataLoader([1.0], **PERSISTENT)
    kept = EvaluatedLoaders()

    def evaluate() -> None:
        kept.begin("within", within)
        list(before), list(within)

    list(before)
    assert Script(tmp_path, evaluating(evaluate), stepping(), steps=5).codes() == []


# --- clipped after the step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_after_the_step_is_noticed(tmp_path: Path, limit: float, sharded: bool) -> None:
    late = stepping(after=lambda model: clip_grad_norm_(model.parameters(), limit))
    # That clipping leaves a sharded gradient as it is leaves no trace.
    seen = limit == 0.01 or not sharded
    assert Script(tmp_path, plain, late, sharded=sharded).codes() == ["clipped-after-step"] * seen


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("before", [None, clip, lambda model: clip_grad_value_(model.parameters(), 0.01)])
def test_an_ordinary_update_gets_no_advice(tmp_path: Path, before: Any, set_to_none: bool, sharded: bool) -> None:
    assert Script(tmp_path, plain, stepping(before, set_to_none=set_to_none), sharded=sharded).codes() == []


# --- gradients that are carried over updates --------------------------------------------------------------------------


def only_stepping(model: nn.Module, optimizer: Any) -> None:
    optimizer.step()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_nothing_sets_to_zero_are_noticed(tmp_path: Path, accumulate: int, sharded: bool) -> None:
    script = Script(tmp_path, by(accumulate), only_stepping, accumulate=accumulate, sharded=sharded)
    assert script.codes() == ["gradients-carried"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_set_to_zero_in_front_of_the_backward_are_innocent(
    tmp_path: Path, set_to_none: bool, accumulate: int, sharded: bool
) -> None:
    script = Script(tmp_path, by(accumulate), only_stepping, accumulate=accumulate, sharded=sharded)
    assert replace(script, zero_before=set_to_none).codes() == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_another_loss_leaves_behind_the_step_are_innocent_where_they_are_set_to_zero(
    tmp_path: Path, set_to_none: bool, sharded: bool
) -> None:
    """As a discriminator gets them, where the generator is trained behind it."""

    def update(model: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        model(torch.ones(4, 4)).sum().backward()

    assert replace(Script(tmp_path, plain, update, sharded=sharded), zero_before=set_to_none).codes() == []


class ZeroingSGD(torch.optim.SGD):
    """Its steps leave zeros."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.zero_grad(set_to_none=False)


def test_gradients_that_the_step_itself_sets_to_zero_are_innocent(tmp_path: Path, sharded: bool) -> None:
    assert Script(tmp_path, plain, only_stepping, optimizer=ZeroingSGD, sharded=sharded).codes() == []


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_so_it_is_with_sharded_layers_of_one_parameter_or_two_and_with_zeros_that_torch_does_not_count(
    tmp_path: Path, foreach: bool, bias: bool, carried: bool
) -> None:
    """FSDP2 puts the gradients of a layer into one memory: an addition to one of them counts for all."""
    update = only_stepping if carried else stepping(set_to_none=False)
    script = Script(tmp_path, plain, update, optimizer=partial(torch.optim.SGD, foreach=foreach), bias=bias)
    with one_rank():
        assert replace(script, sharded=True).codes() == ["gradients-carried"] * carried


ADVERSARIAL = {
    "the critic's never": ("", "critic_optimizer"),
    "the critic's behind its update": ("critic behind", None),
    "the critic's in front of its turn": ("critic in front", None),
    "the critic's, which is updated now and then": ("critic now and then", "critic_optimizer"),
    "the generator's, to which the critic's turn adds": ("critic in front, through", "optimizer"),
    "all in front": ("critic in front, through, generator in front", None),
}
"""How a script of two optimizers sets gradients to zero, and whose are found to be carried."""


@pytest.mark.parametrize("how", ADVERSARIAL)
def test_gradients_that_another_loss_has_left_are_noticed_of_each_optimizer(tmp_path: Path, how: str) -> None:
    zeroed, whose = ADVERSARIAL[how]
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer, critics = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (generator, critic))
    guard = rollback.Guard(
        model=generator, optimizer=optimizer, loader=[torch.ones(2, 4)] * 18, critic=critic, critic_optimizer=critics,
        run=tmp_path, snapshot_every=0, observe_only=True,
    )  # fmt: skip
    for number, x in enumerate(guard):
        if "generator in front" in zeroed:
            optimizer.zero_grad()
        loss = critic(generator(x)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "critic in front" in zeroed:
            critics.zero_grad()
        made = generator(x)
        (critic(x) - critic(made if "through" in zeroed else made.detach())).mean().backward()
        if "now and then" not in zeroed or number % 3 == 2:
            critics.step()
            if "now and then" in zeroed:
                critics.zero_grad()
        if "critic behind" in zeroed:
            critics.zero_grad()
        guard.observe(loss)
    guard.close()
    assert codes_in(tmp_path) == ["gradients-carried"] * (whose is not None)
    assert all(f"an update of {whose} uses" in fact.text for fact in facts_of(tmp_path, Advice))


# --- clipped while scaled ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[torch.optim.SGD, lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, fused=True)])
def optimizer(request: pytest.FixtureRequest) -> Any:
    return request.param


def scaled(folder: Path, optimizer: Any, clipping: str) -> list[str]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update(model: nn.Module, optimizer: Any) -> None:
        if clipping == "unscaled":
            scaler.unscale_(optimizer)
        if clipping == "factor":
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
        elif clipping != "none":
            clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    script = Script(folder, lambda loss: scaler.scale(loss).backward(), update, scaler=scaler, optimizer=optimizer)
    return script.codes()


def test_clipping_while_scaled_is_noticed(tmp_path: Path, optimizer: Any) -> None:
    assert scaled(tmp_path, optimizer, "scaled") == ["clipped-while-scaled"]


def told_of_scaled_clipping(optimizer: Any) -> str:
    """What is said of clipping to 0.5 while a factor of 1024 is in the gradients."""
    one = advisor(nn.Linear(1, 1), optimizer)
    one.habit = Habit(1, written=True, while_scaled=True)
    for norm, _ in zip(norms(), range(advising._SCALED), strict=False):
        limit = 0.5 / 1024
        said = one.judge(replace(beat(norm, limit / norm), scale=1024.0), HEALTHY)
    (advice,) = said
    text = advice.in_words(Calls())
    assert advice.code == "clipped-while-scaled"
    assert "{" not in text
    return text


class Lion(torch.optim.Optimizer):
    """Of another library: how it goes about gradients is not known."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})


def test_what_clipping_while_scaled_does_is_told_as_it_is_for_each_optimizer() -> None:
    plain = told_of_scaled_clipping(torch.optim.SGD)
    assert "up to 1,024 times smaller than meant" in plain
    for adaptive in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        even = told_of_scaled_clipping(adaptive)
        assert "times smaller" not in even
        assert f"{adaptive.__name__} divides the size of gradients out again" in even
        assert "eps" in even
    unknown = told_of_scaled_clipping(Lion)
    assert "depends on how Lion goes about the size of gradients" in unknown
    for text in (plain, even, unknown):
        assert "acts as 0.000488" in text
        assert "scaler.unscale_(optimizer)" in text


@pytest.mark.parametrize("clipping", ["unscaled", "factor", "none"])
def test_clipping_what_is_unscaled_or_a_constant_factor_is_not(tmp_path: Path, optimizer: Any, clipping: str) -> None:
    assert scaled(tmp_path, optimizer, clipping) == []


def test_clipping_beside_a_scaler_that_is_off_is_clipping(tmp_path: Path) -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)

    def update(model: nn.Module, optimizer: Any) -> None:
        clip(model)
        off.step(optimizer)
        off.update()
        optimizer.zero_grad()

    assert Script(tmp_path, lambda loss: off.scale(loss).backward(), update, scaler=off).codes() == []


# --- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observe_first", [True, False])
def test_accumulating_losses_that_nobody_divides_is_noticed(tmp_path: Path, observe_first: bool, sharded: bool) -> None:
    script = Script(tmp_path, plain, stepping(), accumulate=4, observe_first=observe_first, sharded=sharded)
    assert script.codes() == ["loss-not-divided"]


@pytest.mark.parametrize(("divide", "codes"), [(1, ["loss-not-divided"]), (4, [])])
def test_so_are_those_that_fully_shard_sums_with_the_last(tmp_path: Path, divide: int, codes: list[str]) -> None:
    """`set_requires_gradient_sync(False)`: there is no gradient of a part before."""
    with one_rank():
        backward = plain if divide == 1 else by(divide)
        assert Script(tmp_path, backward, stepping(), accumulate=4, sharded=True, held_back=True).codes() == codes


def test_accumulating_undivided_losses_is_noticed_through_a_gradient_scaler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def update(model: nn.Module, optimizer: Any) -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def codes(folder: Path, divide: float) -> list[str]:
        def backward(loss: Tensor) -> None:
            scaler.scale(loss / divide if divide > 1 else loss).backward()

        return Script(folder, backward, update, accumulate=2, scaler=scaler).codes()

    assert codes(tmp_path / "undivided", 1) == ["loss-not-divided"]
    assert codes(tmp_path / "divided", 2) == []


@pytest.mark.parametrize(
    ("backward", "before"),
    [
        (by(4), None),
        (lambda loss: (loss * 0.25).backward(), None),
        (plain, lambda model: [parameter.grad.div_(4) for parameter in model.parameters()]),
    ],
    ids=["divided", "multiplied", "gradients divided"],
)
def test_accumulation_that_is_normalised_somehow_gets_no_advice(tmp_path: Path, backward: Any, before: Any) -> None:
    assert Script(tmp_path, backward, stepping(before), accumulate=4).codes() == []


def test_batches_that_are_not_accumulated_need_no_division(tmp_path: Path) -> None:
    cleared: list[nn.Module] = []

    def update(model: nn.Module, optimizer: Any) -> None:
        cleared[:] = [model]
        optimizer.step()
        optimizer.zero_grad()

    def backward(loss: Tensor) -> None:
        if cleared:  # as a script does whose other optimizer has the batches in between
            cleared[0].zero_grad()
        loss.backward()

    assert Script(tmp_path, backward, update, accumulate=2).codes() == []


RANK = """
import sys, torch, torch.distributed as dist, rollback
from contextlib import nullcontext
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
with_no_sync, run = sys.argv[1] == "1", sys.argv[2]
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=torch.randn(40, 4, 4).unbind(), run=run,
                       snapshot_every=0, observe_only=True)
for number, x in enumerate(guard):
    last = number % 4 == 3
    with model.no_sync() if with_no_sync and not last else nullcontext():
        loss = model(x).square().mean()
        (loss / 4).backward()
    guard.observe(loss)
    if last:
        optimizer.step()
        optimizer.zero_grad()
guard.close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("ranks", "with_no_sync", "codes"), [(2, True, []), (2, False, ["no-no-sync"]), (1, False, [])]
)
def test_accumulation_without_no_sync_is_noticed_where_ranks_exchange_gradients(
    tmp_path: Path, ranks: int, with_no_sync: bool, codes: list[str]
) -> None:
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run_warm([*torchrun, str(script), str(int(with_no_sync)), str(run)], env=environment, check=True)
    facts = facts_of(run)
    assert [fact.code for fact in facts if isinstance(fact, Advice)] == codes


# --- clipping at every step, or never ---------------------------------------------------------------------------------


HEALTHY = Verdict(Kind.HEALTHY, 0)
SPIKE = Verdict(Kind.SPIKE, 0)
RECOVERED = Verdict(Kind.HEALTHY, 0, ended=Blip(0, 1, 5.0, 4.0, "loss-high", "recovered"))


def beat(norm: float, kept: float) -> Beat:
    return Beat(
        loss=1.0, grad_norm=norm, nonfinite_ranks=(), stop=False, scaler_skipped=False,
        clip_factor=kept, measured=norm,
    )  # fmt: skip


def norms() -> Iterator[float]:
    """Gradient norms of a training: from 4 to 12, never the same twice in a row."""
    while True:
        yield from (4.0, 7.0, 12.0, 5.5)


def codes_of(advisor: Advisor, habit: Habit, kept: Callable[[float], float], updates: int, *verdicts: Verdict) -> list:
    told, advisor.habit = [*verdicts, *[HEALTHY] * updates][:updates], habit
    said = [advisor.judge(beat(norm, kept(norm)), verdict) for norm, verdict in zip(norms(), told, strict=False)]
    return [advice.code for advice in said[-1]]


def advisor(model: nn.Module, kind: Any = torch.optim.AdamW) -> Advisor:
    optimizer = kind(model.parameters(), lr=1e-3)
    state = TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal"))
    return Advisor(state, Updates(optimizer, None, model), model, UnkeptState(state, {}, []))


WRITTEN, UNTOUCHED = Habit(1, written=True), Habit(1, written=False)


def test_what_is_not_called_since_the_loss_measures_no_progress_is_told() -> None:
    beat = Beat(loss=1.0, grad_norm=1.0)
    verdict = Verdict(Kind.WATCH, 7, 3, "loss-high", advice="the loss has stood out since step 3")
    (said,) = advisor(nn.Linear(1, 1)).judge(beat, verdict)
    text = said.in_words(Calls())
    assert said.code == "no-progress"
    assert text.startswith("step 7: the loss has stood out since step 3")
    assert "Only what is far beyond all seen is called" in text


def test_clipping_at_every_step_is_noticed_after_many() -> None:
    one = advisor(nn.Linear(1, 1))
    assert codes_of(one, WRITTEN, lambda norm: 1 / norm, 2 * advising._CLIPPED - 1) == []
    assert codes_of(one, WRITTEN, lambda norm: 1 / norm, 1) == ["often-clipped"]


@pytest.mark.parametrize(("limit", "codes"), [(5.0, ["often-clipped"]), (6.0, [])])
def test_clipping_in_more_than_half_of_the_updates_is_noticed(limit: float, codes: list[str]) -> None:
    """Norms of 4, 7, 12 and 5.5: with a limit of 5 three of four are clipped, with one of 6 two of four."""
    one = advisor(nn.Linear(1, 1))
    assert codes_of(one, WRITTEN, lambda norm: min(1.0, limit / norm), 2 * advising._CLIPPED) == codes


def test_clipping_now_and_then_is_what_it_is_for() -> None:
    assert codes_of(advisor(nn.Linear(1, 1)), WRITTEN, lambda norm: min(1.0, 10 / norm), 1000) == []


def test_a_constant_factor_is_not_clipping() -> None:
    assert codes_of(advisor(nn.Linear(1, 1)), WRITTEN, lambda norm: 0.25, 1000) == []


def test_where_the_norm_never_varies_clipping_cannot_be_told_from_a_factor() -> None:
    one = advisor(nn.Linear(1, 1))
    one.habit = WRITTEN
    assert not any(one.judge(beat(4.0, 0.25), HEALTHY) for _ in range(1000))


def test_a_transformer_that_keeps_spiking_unclipped_is_advised_to_clip() -> None:
    one = advisor(nn.TransformerEncoderLayer(8, 2))
    assert codes_of(one, UNTOUCHED, lambda norm: 1.0, 200, SPIKE, RECOVERED, SPIKE) == ["never-clipped"]


@pytest.mark.parametrize(
    ("model", "habit", "verdicts", "optimizer"),
    [
        (nn.Linear(1, 1), UNTOUCHED, (SPIKE, SPIKE, SPIKE), torch.optim.AdamW),
        (nn.TransformerEncoderLayer(8, 2), WRITTEN, (SPIKE, SPIKE, SPIKE), torch.optim.AdamW),
        (nn.TransformerEncoderLayer(8, 2), UNTOUCHED, (SPIKE, SPIKE), torch.optim.AdamW),
        (nn.TransformerEncoderLayer(8, 2), UNTOUCHED, (SPIKE, SPIKE, SPIKE), torch.optim.Adafactor),
        (nn.TransformerEncoderLayer(8, 2), Habit(1, written=None), (SPIKE, SPIKE, SPIKE), torch.optim.AdamW),
    ],
    ids=["no transformer", "clips", "too few spikes", "clips inside", "not known"],
)
def test_no_advice_to_clip_otherwise(model: nn.Module, habit: Habit, verdicts: Any, optimizer: Any) -> None:
    assert codes_of(advisor(model, optimizer), habit, lambda norm: 1.0, 200, *verdicts) == []


def test_every_advice_says_what_to_do_and_no_placeholder_is_left() -> None:
    for given_as_it_is in (advising.CLIPPED_AFTER_STEP, PLAIN_EPOCH_LOOP):
        assert "{" not in given_as_it_is.in_words(Calls())
    one = advisor(nn.Linear(1, 1))
    one._layers.heaviest, one.habit = "head", WRITTEN
    for norm, _ in zip(norms(), range(2 * advising._CLIPPED), strict=False):
        said = one.judge(beat(norm, 1 / norm), HEALTHY)
    layer = " The largest gradient is that of head."
    assert said == [advising.OFTEN_CLIPPED.of(share=1.0, count=300, limit=1.0, norm=6.25, layer=layer)]
    assert "{" not in said[0].in_words(Calls())
