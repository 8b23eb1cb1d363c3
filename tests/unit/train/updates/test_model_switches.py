"""A script unfreezes layers in mid-run: what is sent back to before that trains without them again. And a gradient of
zero is another thing than none."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from toy import SETTINGS, facts

import rollback
from rollback.facts.training import Advice, Planned, Restored, ScreenedOut
from rollback.train.last_snapshot.small_state import SmallStateReader
from rollback.train.last_snapshot.writers import large_state, shared_tree
from rollback.train.updates.model_switches import ModelSwitches

EPOCH = 12  # batches
Loop = Literal["epochs", "range", "steps"]


class Script:
    """Its first layer is frozen until the second epoch. The first `times` that batch `broken` comes by, it is NaN.

    loop: `steps`: the loop's body counts, and the layer is trained from the sixteenth batch on. frozen: what it begins
    with.
    """

    def __init__(self, run: Path, broken: int | None = None, *, frozen: bool = True, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self.layer = self.model[0].requires_grad_(not frozen)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        data = torch.randn(EPOCH, 4, 4, generator=torch.Generator().manual_seed(1))
        self.guard = rollback.Guard(
            model=self.model, optimizer=self.optimizer, loader=list(data), run=run,
            **SETTINGS | {"snapshot_every": 5} | settings,
        )  # fmt: skip
        self.broken = broken
        self.times = 1
        self.trained: dict[int, bool] = {}

    def train(self, loop: Loop = "epochs", *, unfreezes_at: int | None = 1, leave_at: int | None = None) -> "Script":
        for epoch in self._epochs(loop):
            if epoch == unfreezes_at and loop != "steps":
                self.layer.requires_grad_(True)
            for x in self.guard:
                if loop == "steps" and self.guard.batch == 16:
                    self.layer.requires_grad_(True)
                self.trained[self.guard.batch] = self.layer.weight.requires_grad
                self._update(x)
                if self.guard.batch == leave_at:
                    self.guard.close()
                    return self
        self.guard.close()
        return self

    def _epochs(self, loop: Loop) -> Iterator[int]:
        return self.guard.epochs(3) if loop == "epochs" else iter(range(3))

    def _update(self, x: Tensor) -> None:
        self.guard._loop.checkpoints.snapshots.wait()
        broken = self.times > 0 and self.guard.batch == self.broken
        self.times -= broken
        loss = self.model(x * torch.nan if broken else x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.guard.observe(loss)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()


def require_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("loop", ["epochs", "range", "steps"])
def test_a_run_sent_back_to_before_a_layer_was_unfrozen_ends_as_if_it_had_skipped_the_batches_from_the_start(
    tmp_path: Path, loop: Loop
) -> None:
    run = tmp_path / "run"
    script = Script(run, broken=20, rewind=9, skip_from="onset").train(loop)
    (back,) = facts(run, Restored)
    (plan,) = facts(run, Planned)
    assert back.batch < EPOCH < 20
    assert plan.skip is not None
    unfrozen = 16 if loop == "steps" else EPOCH
    assert script.trained == {batch: batch >= unfrozen for batch in script.trained}
    fresh = Script(tmp_path / "fresh", skip=[plan.skip]).train(loop)
    require_same(script.weights, fresh.weights)


def test_what_an_undone_update_did_to_a_layer_is_undone(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", broken=16, policy="screen")
    script.times = 2
    script.train("steps")
    (out,) = facts(tmp_path / "run", ScreenedOut)
    assert (out.window.first, out.window.last) == (16, 16)
    del script.trained[16]
    assert {*script.trained.values()} == {False}, "no other batch unfreezes the layer"
    require_same(script.weights, Script(tmp_path / "fresh", skip=[out.window]).train("steps").weights)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_start_in_a_new_process_leaves_what_the_script_says(tmp_path: Path, frozen: bool) -> None:
    Script(tmp_path / "run").train(leave_at=EPOCH + 8)
    script = Script(tmp_path / "run", frozen=frozen)
    assert script.guard.step > EPOCH
    assert script.layer.weight.requires_grad is not frozen
    script.train(unfreezes_at=None)
    assert {*script.trained.values()} == {not frozen}


@pytest.mark.parametrize(
    ("frozen", "unfreezes_at", "told"), [(True, None, True), (True, 1, False), (False, None, False)]
)
def test_layers_that_are_not_unfrozen_again_are_told(
    tmp_path: Path, frozen: bool, unfreezes_at: int | None, told: bool
) -> None:
    Script(tmp_path / "run").train(leave_at=EPOCH + 8)
    Script(tmp_path / "run", frozen=frozen).train(unfreezes_at=unfreezes_at)
    advice = [each.text for each in facts(tmp_path / "run", Advice) if each.code == "requires-grad-not-again"]
    assert len(advice) == told
    assert not told or "requires_grad of 0.bias, 0.weight on its way" in advice[0]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_rollback_to_before_the_process_freezes_what_was_frozen_if_the_script_began_alike(
    tmp_path: Path, frozen: bool
) -> None:
    Script(tmp_path / "run").train(leave_at=EPOCH + 3)
    script = Script(tmp_path / "run", broken=EPOCH + 5, frozen=frozen, rewind=9, skip_from="onset").train()
    (back,) = facts(tmp_path / "run", Restored)
    assert back.batch < EPOCH
    first = min(batch for batch in script.trained if batch < EPOCH)
    assert script.trained[first] is not frozen


def test_an_older_checkpoint_that_tells_nothing_of_it_changes_nothing(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    script.layer.requires_grad_(True)
    script.guard._loop.state.switches.put_back(None)
    assert script.layer.weight.requires_grad
    script.guard.close()


def test_the_last_snapshot_has_it_as_it_was_at_the_step_s_end(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    state = script.guard._loop.state
    script.layer.requires_grad_(True)
    small, expected = SmallStateReader(state).shared(), state.image().shared["gradients"]
    script.layer.requires_grad_(False)
    tree = shared_tree(large_state(state)[0], small, {})
    assert tree["gradients"] == expected == {**state.switches.state_dict(), "changed": ["0.weight", "0.bias"]}
    assert tree.keys() == state.image().shared.keys()
    script.guard.close()


def in_modes(run: Path, loop: Loop, broken: int | None = None, **settings: Any) -> tuple[nn.Module, dict[int, bool]]:
    """The statistics of the second layer are frozen by `eval()` from batch 16 on (`steps`), or from the second epoch.
    The model comes in eval mode, and each batch is followed by an evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.randn(EPOCH, 4, 4, generator=torch.Generator().manual_seed(1))
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=list(data), run=run, **SETTINGS | {"snapshot_every": 5} | settings
    )  # fmt: skip
    model.train()
    modes: dict[int, bool] = {}
    for epoch in guard.epochs(3) if loop == "epochs" else range(3):
        if epoch == 1 and loop != "steps":
            model[1].eval()
        for x in guard:
            guard._loop.checkpoints.snapshots.wait()
            if guard.batch == 16 and loop == "steps":
                model[1].eval()
            modes[guard.batch] = model[1].training
            assert model.training
            loss = model(x * torch.nan if guard.batch == broken else x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.observe(loss)
            broken = None if guard.batch == broken else broken
            was = model[1].training
            model.eval()
            model.train()
            model[1].train(was)
    guard.close()
    return model, modes


@pytest.mark.parametrize(("loop", "broken"), [("epochs", 20), ("range", 20), ("steps", 20), ("steps", 2)])
def test_a_run_sent_back_to_before_a_module_was_put_into_eval_mode_trains_it_there_as_before(
    tmp_path: Path, loop: Loop, broken: int
) -> None:
    model, modes = in_modes(tmp_path / "run", loop, broken, rewind=9, skip_from="onset")
    (back,) = facts(tmp_path / "run", Restored)
    (plan,) = facts(tmp_path / "run", Planned)
    assert back.batch < EPOCH
    assert plan.skip is not None
    frozen = 16 if loop == "steps" else EPOCH
    assert modes == {batch: batch < frozen for batch in modes}
    require_same(model.state_dict(), in_modes(tmp_path / "fresh", loop, skip=[plan.skip])[0].state_dict())


def trained_by_zeros(run: Path, broken: int | None = None, leave_at: int | None = None, **settings: Any) -> nn.Module:
    """The second layer is used in the first batches only, and has zeros from then on: Adam moves and decays it."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(30, 4, 4, generator=torch.Generator().manual_seed(1))
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=list(data), run=run, **SETTINGS | settings)
    for x in guard:
        guard._loop.checkpoints.snapshots.wait()
        used = model if guard.batch < 6 else model[:1]
        loss = torch.stack([layer(x) for layer in used]).square().mean() * (torch.nan if guard.batch == broken else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        guard.observe(loss)
        broken = None if guard.batch == broken else broken
        if guard.batch == leave_at:
            break
    guard.close()
    return model


def test_a_parameter_whose_gradient_is_zero_is_trained_on_behind_a_resume_and_a_rollback(tmp_path: Path) -> None:
    undisturbed = trained_by_zeros(tmp_path / "undisturbed")
    trained_by_zeros(tmp_path / "left", leave_at=24)
    require_same(trained_by_zeros(tmp_path / "left").state_dict(), undisturbed.state_dict())
    sent_back = trained_by_zeros(tmp_path / "run", broken=25)
    (plan,) = facts(tmp_path / "run", Planned)
    assert plan.skip is not None
    fresh = trained_by_zeros(tmp_path / "fresh", skip=[plan.skip])
    require_same(sent_back.state_dict(), fresh.state_dict())


def test_of_sparse_gradients_and_where_there_are_none_nothing_is_told() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1))
    gradients = ModelSwitches({"model": model})
    assert gradients.state_dict()["without"] is None
    model(torch.tensor([1])).sum().backward()
    assert gradients.state_dict()["without"] == ["0.weight"]
