"""What TRL's trainers hold besides a Trainer's own: which models the guard is given, when completions are made anew."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rollback.errors import UsageError


@pytest.fixture
def trl() -> Any:
    pytest.importorskip("transformers")  # seconds, which only the worker that runs these tests should spend
    from rollback.trainers.huggingface import trl as module

    return module


def callback(name: str, module: str = "trl.trainer.callbacks", **has: Any) -> Any:
    made = type(name, (), {"__module__": module})()
    vars(made).update(has)
    return made


def with_callbacks(*callbacks: Any) -> Any:
    return SimpleNamespace(callback_handler=SimpleNamespace(callbacks=list(callbacks)))


def test_a_reference_model_that_follows_is_handed_over_once_and_unwrapped(trl: Any) -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    compiled = nn.Module()
    compiled._orig_mod = model
    sync = [callback("SyncRefModelCallback", ref_model=item) for item in (compiled, None, model, other)]
    found = trl.reference_models(with_callbacks(callback("PrinterCallback", "transformers.trainer_callback"), *sync))
    assert list(found) == ["ref_model", "ref_model_1"]
    assert found["ref_model"] is model
    assert found["ref_model_1"] is other


def test_what_is_derived_from_trls_callback_counts_and_a_strangers_of_that_name_does_not(trl: Any) -> None:
    teacher = type("SyncTeacher", (type(callback("SyncRefModelCallback")),), {"__module__": "mine"})()
    teacher.ref_model = nn.Linear(1, 1)
    assert list(trl.reference_models(with_callbacks(teacher))) == ["ref_model"]
    assert trl.reference_models(with_callbacks(callback("SyncRefModelCallback", "mine"))) == {}


def test_what_online_dpo_has_gathered_for_its_next_log_is_kept_and_a_strangers_of_that_name_is_not(trl: Any) -> None:
    online = callback("OnlineDPOTrainer", "trl.experimental.online_dpo.online_dpo_trainer", stats={"beta": [0.1]})
    derived = type("Mine", (type(online),), {"__module__": "mine"})()
    assert trl.adapted_attributes(online) == trl.adapted_attributes(derived) == ("stats",)
    assert trl.adapted_attributes(callback("OnlineDPOTrainer", "mine", stats=object())) == ()


def generating(*, steps: int | None, accumulate: int, iterations: int | None = 1, counted: int = 0) -> Any:
    args = SimpleNamespace(steps_per_generation=steps, gradient_accumulation_steps=accumulate)
    trainer = SimpleNamespace(args=args, _buffered_inputs=None, _step=counted)
    if iterations is not None:
        trainer.num_iterations = iterations
    return trainer


@pytest.mark.parametrize(
    ("steps", "accumulate", "iterations"), [(1, 1, 1), (4, 4, 1), (2, 4, 2), (2, 6, 1), (None, 3, None)]
)
def test_completions_that_an_update_uses_up_are_no_hindrance(
    trl: Any, steps: int | None, accumulate: int, iterations: int | None
) -> None:
    trl.require_completions_of_one_update(generating(steps=steps, accumulate=accumulate, iterations=iterations))


@pytest.mark.parametrize(("steps", "accumulate", "iterations"), [(2, 1, 1), (1, 1, 2), (4, 6, 1), (8, 4, 1)])
def test_completions_that_outlast_an_update_are_refused(trl: Any, steps: int, accumulate: int, iterations: int) -> None:
    with pytest.raises(UsageError, match="completions for"):
        trl.require_completions_of_one_update(generating(steps=steps, accumulate=accumulate, iterations=iterations))


@pytest.mark.parametrize("name", ["AsyncGRPOTrainer", "AsyncDistillationTrainer"])
def test_a_trainer_whose_completions_a_worker_makes_meanwhile_is_refused_by_name(trl: Any, name: str) -> None:
    folder = "async_grpo" if "GRPO" in name else "async_distillation"
    there = Path(pytest.importorskip("trl").__file__).parent / "experimental" / folder
    assert f"class {name}(" in (there / f"{folder}_trainer.py").read_text(), "that is its name"
    of_trl = type(name, (), {"__module__": f"trl.experimental.{folder}.{folder}_trainer"})
    trainer: Any = type("Mine", (of_trl,), {"__module__": "mine"})()
    with pytest.raises(UsageError, match=f"cannot guard an {name}: a worker makes its completions"):
        trl.require_completions_of_one_update(trainer)


@pytest.mark.parametrize(("counted", "then"), [(8, 8), (9, 12), (11, 12)])
def test_behind_a_short_update_completions_are_made_anew(trl: Any, counted: int, then: int) -> None:
    trainer = generating(steps=2, accumulate=4, iterations=2, counted=counted)
    trl.end_update(trainer)
    assert trainer._step == then


def test_a_trainer_without_completions_is_left_alone(trl: Any) -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(gradient_accumulation_steps=1), _step=3)
    trl.require_completions_of_one_update(trainer)
    trl.end_update(trainer)
    assert trainer._step == 3


def test_a_trainer_that_samples_from_what_it_trains_is_known(trl: Any) -> None:
    of_trl = type("GKDTrainer", (), {"__module__": "trl.experimental.gkd.gkd_trainer"})
    mine: Any = type("Mine", (of_trl,), {"__module__": "mine"})()
    assert not trl.generates_text(mine)
    mine.generation_config = None
    assert trl.generates_text(mine)
    assert not trl.generates_text(SimpleNamespace(generation_config=None))
