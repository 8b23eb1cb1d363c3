"""What a LightningModule keeps for itself comes back, if training has changed it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollback.train.advice.own_numbers import OwnNumbers


@pytest.fixture
def make() -> Any:
    """A module, and what is kept of it. Their imports take seconds, which only the worker that runs these tests should
    spend."""
    lightning = pytest.importorskip("lightning")
    from rollback.trainers.lightning.own_attributes import OwnAttributes

    class LightningModule(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class Net(LightningModule):
        def __init__(self, rate: float) -> None:
            super().__init__("net")
            self.save_hyperparameters()
            self.rate, self.losses, self.best = rate, [], {"step": 0}
            self.center = torch.zeros(2)

    def made(rate: float = 0.1) -> tuple[Any, Any]:
        module = Net(rate)
        return module, OwnAttributes(module)

    return made


def trained(module: Any) -> None:
    module.losses += [torch.tensor(0.5), (torch.ones((), requires_grad=True) * 2)]
    module.best["step"] = 7
    module.late = float("nan")
    module.center += 1  # a tensor that no checkpoint has is named by advice


def test_what_training_has_changed_is_there_in_a_new_process_and_settings_are_the_scripts(make: Any) -> None:
    module, attributes = make()
    assert attributes.state_dict() == {}
    trained(module)
    kept = attributes.state_dict()
    assert kept.keys() == {"losses", "best", "late"}
    other, again = make(rate=0.2)
    again.load_state_dict(kept)
    assert [loss.item() for loss in other.losses] == [0.5, 2]
    assert (other.best, other.rate) == ({"step": 7}, 0.2)
    assert other.late != other.late
    assert again.state_dict().keys() == kept.keys()


def test_what_the_script_sets_when_training_begins_is_a_setting_unless_training_changes_it(make: Any) -> None:
    def begin(module: Any, attributes: Any, folder: str) -> None:
        module.folder, module.rate = folder, 1.0  # in on_train_start
        attributes.begin()

    module, attributes = make()
    begin(module, attributes, "version_0")
    assert attributes.state_dict() == {}
    module.rate = 0.5
    kept = attributes.state_dict()
    assert kept.keys() == {"rate"}
    other, again = make()
    again.load_state_dict(kept)
    begin(other, again, "version_1")
    again.load_state_dict(kept)
    assert (other.folder, other.rate) == ("version_1", 0.5)
    other.folder = "later"
    again.load_state_dict(kept)
    assert other.folder == "version_1"


def test_numbers_that_come_back_are_not_called_unkept(make: Any) -> None:
    module, _ = make()
    module.part = type(module)(0.3)
    kept = SimpleNamespace(has_attribute=lambda *_: False)
    numbers = OwnNumbers(SimpleNamespace(modules={"model": module}, objects={}, kept=kept))  # type: ignore[arg-type]
    for _ in range(5):
        module.rate *= 0.9
        module.part.rate *= 0.9
        numbers.look()
    assert numbers.of_modules() == ["model.part.rate"]


def test_a_rollback_to_where_training_began_undoes_all(make: Any) -> None:
    module, attributes = make()
    losses = module.losses
    trained(module)
    del module.rate
    attributes.load_state_dict({})
    assert module.losses == []
    assert module.losses is losses, "who else has it sees that, too"
    assert (module.best, module.rate) == ({"step": 0}, 0.1)
    assert not hasattr(module, "late")


def test_what_is_too_much_is_named_once_where_it_is_missed(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    module, attributes = make()
    module.losses += [0.5] * 1001
    kept = attributes.state_dict()
    assert "Net.losses" not in capfd.readouterr().err
    for _ in range(2):
        attributes.load_state_dict(kept)
    assert capfd.readouterr().err.count("Net.losses stays as it is") == 1
    assert len(module.losses) == 1001


def test_a_tensor_that_may_be_a_view_of_a_buffer_is_not_written_to(make: Any) -> None:
    module, attributes = make()
    module.register_buffer("queue", torch.zeros(2, 3))
    module.row, module.rows = module.queue[0], [module.queue[0]]
    kept = attributes.state_dict()
    module.queue[1] = 5
    module.row, module.rows = module.queue[1], [module.queue[1]]
    attributes.load_state_dict(kept)
    assert module.queue.tolist() == [[0, 0, 0], [5, 5, 5]]
    assert (module.row.tolist(), module.rows[0].tolist()) == ([0, 0, 0], [0, 0, 0])


def test_what_the_script_has_as_an_object_now_stays_one(make: Any) -> None:
    module, attributes = make()
    module.rate = 0.5
    kept = attributes.state_dict()
    other, again = make(rate=print)
    again.load_state_dict(kept)
    assert other.rate is print


def test_activations_that_a_step_leaves_behind_are_no_history(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    module, attributes = make()
    module.features = torch.zeros(2000)
    module.node = {}
    module.node["parent"] = module.node
    attributes.load_state_dict(attributes.state_dict())
    assert attributes.state_dict() == {}
    assert "stays as it is" not in capfd.readouterr().err


def test_two_attributes_that_have_one_object_now_are_two_again(make: Any) -> None:
    """`self.best = self.last = {}`, of which training has set each by itself."""
    module, attributes = make()
    module.best, module.late = {"step": 3}, {"step": 7}
    kept = attributes.state_dict()
    other, again = make()
    other.late = other.best
    again.load_state_dict(kept)
    assert (other.best, other.late) == ({"step": 3}, {"step": 7})
    other.late = other.losses = []
    again.load_state_dict({"late": {"value": [1.0]}})
    assert (other.late, other.losses) == ([1.0], []), "of which one is as it was when training began"
    shared = other.losses = other.late = [1.0]
    kept = again.state_dict()
    shared.append(2.0)
    again.load_state_dict(kept)
    assert shared == [1.0]
    assert other.losses is other.late is shared


def test_an_attribute_that_is_to_go_takes_no_object_from_another_one(make: Any) -> None:
    """`self.window = self.losses`, which a rollback leads back before: a callback may have that list, too."""
    module, attributes = make()
    module.losses.append(1.0)
    kept, shared = attributes.state_dict(), module.losses
    module.window = shared
    shared.append(2.0)
    attributes.load_state_dict(kept)
    assert not hasattr(module, "window")
    assert module.losses is shared
    assert shared == [1.0]
