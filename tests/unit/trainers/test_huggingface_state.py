"""What is kept of a Trainer at every step: what counts, at the same cost however long the run has been logging."""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor


def kept_of(trainer: Any) -> Any:
    pytest.importorskip("transformers")  # seconds, which only the worker that runs these tests should spend
    from rollback.trainers.huggingface.state import LoopState

    return LoopState(trainer, cast(Any, SimpleNamespace(set_aside=lambda: None)))


def trainer_with(rows: list[dict[str, Any]]) -> Any:
    state = SimpleNamespace(epoch=0.5, global_step=7, max_steps=90, log_history=rows, stateful_callbacks={})
    return SimpleNamespace(
        state=state, callback_handler=SimpleNamespace(callbacks=[]), _tr_loss=torch.zeros(()),
        control=SimpleNamespace(should_training_stop=False), _step=8, _last_loaded_step=7,
        args=SimpleNamespace(should_save=False), model=SimpleNamespace(),
        accelerator=SimpleNamespace(backward=Tensor.backward, sync_gradients=True),
        floating_point_ops=lambda batch: 6 * batch.numel(), current_flos=100.0,
    )  # fmt: skip


def test_rows_that_were_logged_come_back_and_are_not_written_out_again_at_every_step() -> None:
    rows: list[dict[str, Any]] = [{"loss": 2.5, "step": 1}, {"loss": math.inf, "step": 2}]
    logs = kept_of(trainer_with(rows)).logs
    first = logs.state_dict()
    assert logs.state_dict() is first
    rows.append({"eval_accuracy": np.float32(0.5), "name": "a\nb", "step": 3})

    other = trainer_with([])
    kept_of(other).logs.load_state_dict(logs.state_dict())
    assert other.state.log_history == [*rows[:2], {"eval_accuracy": 0.5, "name": "a\nb", "step": 3}]


def test_after_a_return_the_rows_of_undone_steps_are_gone() -> None:
    trainer = trainer_with([{"step": 1}])
    logs = kept_of(trainer).logs
    before = logs.state_dict()
    trainer.state.log_history.append({"step": 2})
    logs.state_dict()
    logs.load_state_dict(before)
    trainer.state.log_history.append({"step": 20})
    assert logs.state_dict().splitlines() == ['{"step": 1}', '{"step": 20}']


def test_what_an_evaluation_has_filled_in_of_how_texts_are_made_is_as_it_was_then() -> None:
    """It makes those behind it stop at another length. What the script sets otherwise now, is as it sets it now."""

    def generating(beams: int) -> tuple[Any, Any, dict[str, Any]]:
        trainer = trainer_with([])
        config = trainer.model.generation_config = SimpleNamespace(num_beams=beams, max_length=None, eos=2)
        kept = kept_of(trainer)
        config.eos = [7, 2]  # as `train()` itself does
        return kept, config, kept.state_dict()

    kept, config, before = generating(1)
    vars(config).update(max_length=20, num_beams=2)
    behind = json.loads(json.dumps(kept.state_dict()))
    for resumed, beams in ((1, 2), (4, 4)):
        other, filled, _ = generating(resumed)
        other.load_state_dict(behind)
        assert vars(filled) == {"num_beams": beams, "max_length": 20, "eos": [7, 2]}
    kept.load_state_dict(before)
    assert vars(config) == {"num_beams": 1, "max_length": None, "eos": [7, 2]}
    kept.load_state_dict({name: value for name, value in behind.items() if name != "generation"})
    assert vars(config) == {"num_beams": 1, "max_length": None, "eos": [7, 2]}, "an older run does not tell"


def test_arguments_that_change_while_training_go_back_with_it_and_the_others_are_the_scripts() -> None:
    pytest.importorskip("transformers")
    from rollback.trainers.huggingface.state import ChangedArguments

    def trained(clip: float, every: int) -> tuple[Any, ChangedArguments]:
        trainer = trainer_with([])
        vars(trainer.state).update(logging_steps=every)
        trainer.args = SimpleNamespace(max_grad_norm=clip, device=torch.device("cpu"), seed=1)
        return trainer, ChangedArguments(trainer)

    def of(trainer: Any) -> tuple[float, int, int]:
        return trainer.args.max_grad_norm, trainer.state.logging_steps, trainer.args.seed

    trainer, changed = trained(1.0, 10)
    before = changed.state_dict()
    trainer.args.max_grad_norm, trainer.state.logging_steps = 0.5, 2
    trainer.args.device, trainer.state.global_step = torch.device("meta"), 9
    behind = changed.state_dict()
    for clip, every, expected in ((1.0, 10, (0.5, 2, 1)), (4.0, 10, (4.0, 2, 1)), (1.0, 5, (0.5, 5, 1))):
        resumed, again = trained(clip, every)
        again.load_state_dict(behind)
        assert of(resumed) == expected
        assert resumed.state.global_step == 7
    changed.load_state_dict(before)
    assert of(trainer) == (1.0, 10, 1)


@pytest.mark.parametrize(("asked", "stops"), [(90, True), (7, False), (120, False)])
def test_a_stop_by_a_callback_holds_unless_more_steps_are_asked_for(asked: int, stops: bool) -> None:
    stopped = trainer_with([])
    stopped.control.should_training_stop = True
    other = trainer_with([])
    other.state.max_steps = asked
    kept = kept_of(other)
    kept.load_state_dict(kept_of(stopped).state_dict())
    stays = kept.stopped_early and not kept.asked_for_more
    assert stays is stops, "with 7 steps there is nothing to be stopped early"


@pytest.mark.parametrize("as_text", [False, True])
def test_what_an_earlier_version_kept_is_read(as_text: bool) -> None:
    trainer = trainer_with([])
    state = kept_of(trainer).state_dict()
    del state["stopped_before"]
    rows = [{"step": 1}]
    state.update({"logs": json.dumps(rows[0])} if as_text else {"state": {**state["state"], "log_history": rows}})
    kept_of(trainer).load_state_dict(state)
    assert trainer.state.log_history == [{"step": 1}]


def test_the_count_of_batches_of_trls_trainers_goes_back_and_vllm_gets_the_weights_anew() -> None:
    trainer = trainer_with([])
    kept = kept_of(trainer)
    before = kept.state_dict()
    trainer._step, trainer._last_loaded_step = 12, 10
    kept.load_state_dict(before)
    assert (trainer._step, trainer._last_loaded_step) == (8, -1)


@pytest.mark.parametrize("name", ["_metrics", "_stored_metrics"])
def test_what_trl_has_gathered_for_its_next_log_is_that_of_the_steps_that_count(name: str) -> None:
    """ORPO and CPO drop a mode when they log it, and hold tensors."""
    gathered: Any = defaultdict(lambda: defaultdict(list))
    gathered["train"]["margin"].append(torch.tensor(0.1))
    trainer = trainer_with([])
    setattr(trainer, name, gathered)
    kept = json.loads(json.dumps(kept_of(trainer).state_dict()))
    gathered["train"]["margin"].append(torch.tensor(math.nan))
    gathered["eval"]["margin"].append(1.0)
    kept_of(trainer).load_state_dict(kept)
    assert gathered == {"train": {"margin": [torch.tensor(0.1).item()]}, "eval": {}}

    del gathered["train"]
    kept_of(trainer).load_state_dict(kept)
    assert gathered["train"] == {"margin": [torch.tensor(0.1).item()]}


def trainer_with_callback(counting: Any) -> Any:
    trainer = trainer_with([])
    trainer.callback_handler.callbacks.append(counting)
    return trainer


def counting_callback(every: int, seen: list[int]) -> Any:
    pytest.importorskip("transformers")
    from transformers.trainer_callback import ExportableState, TrainerCallback

    class Counting(TrainerCallback, ExportableState):  # type: ignore[misc]
        def __init__(self, every: int, seen: list[int]) -> None:
            self.every, self._seen = every, seen

        def state(self) -> dict[str, Any]:
            return {"args": {"every": self.every, "seen": self._seen}}

    return Counting(every, seen)


def test_what_a_callback_counts_in_its_arguments_comes_back_and_a_setting_is_the_scripts() -> None:
    counting = counting_callback(5, [])
    kept = kept_of(trainer_with_callback(counting))
    before = json.dumps(kept.state_dict())
    counting._seen += [1, 2]
    later = json.dumps(kept.state_dict())
    counting._seen.append(3)
    kept.load_state_dict(json.loads(later))
    assert counting._seen == [1, 2]
    kept.load_state_dict(json.loads(before))
    assert counting._seen == []

    counting = counting_callback(7, [])
    resumed = kept_of(trainer_with_callback(counting))
    resumed.load_state_dict(json.loads(later))
    assert (counting.every, counting._seen) == (7, [1, 2])
    assert json.loads(json.dumps(resumed.state_dict()))["callbacks"] == json.loads(later)["callbacks"]


def test_a_callbacks_attributes_as_an_earlier_version_kept_them_are_read() -> None:
    counting = counting_callback(5, [])
    kept = kept_of(trainer_with_callback(counting))
    state = kept.state_dict()
    state["callbacks"] = [["Counting", {"best": 3}]]
    kept.load_state_dict(state)
    assert (counting.best, counting.every) == (3, 5)


@pytest.mark.parametrize(("before", "now"), [(True, True), (True, False), (False, False)])
def test_a_weight_of_the_entropy_that_adapts_comes_back_and_a_setting_is_the_scripts(before: bool, now: bool) -> None:
    adapting, other = trainer_with([]), trainer_with([])
    vars(adapting).update(use_adaptive_entropy=before, entropy_coef=0.35, _last_world_entropy=1.5)
    vars(other).update(use_adaptive_entropy=now, entropy_coef=0.2, _last_world_entropy=math.inf)
    kept_of(other).load_state_dict(kept_of(adapting).state_dict())
    comes_back = before and now
    assert (other.entropy_coef, other._last_world_entropy) == ((0.35, 1.5) if comes_back else (0.2, math.inf))


def test_a_weight_of_the_entropy_that_is_set_to_adapt_behind_protect_comes_back_too() -> None:
    trainer = trainer_with([])
    kept = kept_of(trainer)
    vars(trainer).update(use_adaptive_entropy=True, entropy_coef=0.35, _last_world_entropy=1.5)
    before = kept.state_dict()
    trainer.entropy_coef = 0.4
    kept.load_state_dict(before)
    assert trainer.entropy_coef == 0.35


@pytest.mark.parametrize("saves", [True, False])
def test_of_the_folder_of_the_best_model_those_ranks_know_that_save(saves: bool, tmp_path: Path) -> None:
    """Another host may have been replaced, and had nothing in such a folder but its own random states."""
    trainer = trainer_with([])
    best = {"best_metric": 2.5, "best_global_step": 5, "best_model_checkpoint": str(tmp_path / "checkpoint-5")}
    vars(trainer.state).update(best)
    trainer.args.should_save = saves
    vars(trainer.accelerator).update(
        device=torch.device("cpu"), is_main_process=saves, reduce=lambda value, reduction: value
    )
    kept_of(trainer).forget_lost_best()
    assert {name: vars(trainer.state)[name] for name in best} == (dict.fromkeys(best) if saves else best)


def trainer_in_a_step(**set_otherwise: Any) -> Any:
    """Its 8th. It logs in the 10th, evaluates in the 15th and saves in the 20th."""
    pytest.importorskip("transformers")
    from transformers.trainer_callback import TrainerControl

    trainer = trainer_with([])
    vars(trainer.state).update({"logging_steps": 10, "eval_steps": 15, "save_steps": 20, **set_otherwise})
    trainer.args = SimpleNamespace(
        logging_strategy="steps", logging_first_step=False, eval_strategy="steps", eval_delay=0, save_strategy="steps"
    )
    trainer.control, trainer._tr_loss = TrainerControl(), torch.tensor(0.7)
    return trainer


def trained(kept: Any, trainer: Any, loss: float) -> tuple[Any, Any]:
    """What was told in the backward, and what there is once the Trainer has added to its sums."""
    weight, batch = torch.ones((), requires_grad=True), torch.ones(5)
    found = []
    weight.register_hook(lambda _: found.append(kept.coming_state_dict()))
    kept.sums.begin(batch)
    kept.sums.backward(weight * loss)
    trainer._tr_loss += torch.tensor(loss)
    trainer.current_flos += float(kept.sums.floating_point_ops(batch))
    trainer.state.global_step += 1
    return found[0], kept.state_dict()


def test_in_an_updates_last_backward_it_is_known_what_the_trainer_adds_to_behind_it() -> None:
    trainer, counted = trainer_in_a_step(), []
    trainer.floating_point_ops = lambda batch: counted.append(batch) or 6 * batch.numel()
    kept = kept_of(trainer)
    trainer.accelerator.sync_gradients = False
    assert trained(kept, trainer, 0.1)[0] is None, "another batch of that update comes behind it"
    trainer.accelerator.sync_gradients = True
    trainer.state.global_step = 7
    told, at_end = trained(kept, trainer, 0.3)
    assert told == at_end == {**at_end, "loss": torch.tensor(0.7).add(0.1).add(0.3).item()}
    assert at_end["loop"] == {"current_flos": 160.0, "_step": 8}
    assert len(counted) == 2, "once for each batch"
    assert kept.coming_state_dict() == at_end, "also where an exception ends the step behind that"


@pytest.mark.parametrize(
    ("set_otherwise", "loss"),
    [({name: 8}, 0.5) for name in ("logging_steps", "eval_steps", "save_steps", "max_steps")]
    + [({}, math.nan), ({}, -math.inf)],
)
def test_it_is_not_known_where_the_trainer_logs_evaluates_or_saves_nor_of_a_loss_that_is_not_finite(
    set_otherwise: dict[str, Any], loss: float
) -> None:
    """Which the Trainer may leave out of the sum (`logging_nan_inf_filter`)."""
    trainer = trainer_in_a_step(**set_otherwise)
    kept = kept_of(trainer)
    assert trained(kept, trainer, loss)[0] is None
    trainer._tr_loss.zero_()
    trainer.state.max_steps = 90
    told, at_end = trained(kept, trainer, 0.5)
    assert told == at_end, "the next one"


def test_what_each_update_changes_on_all_ranks_alike_comes_back_and_is_in_no_mark() -> None:
    trainer, other = trainer_with([]), trainer_with([])
    kept, counts = kept_of(trainer), kept_of(trainer).counts
    counts.last_update = torch.tensor(0.1), 1e-3
    before = kept.state_dict()
    vars(trainer.state).update(epoch=1 / 3, global_step=9, num_input_tokens_seen=2**60 + 1)
    assert kept.state_dict() == before
    again = kept_of(other).counts
    again.load_state_dict(counts.state_dict())
    assert vars(other.state) == vars(trainer.state)
    assert (again.last_update, again.lines) == ((torch.tensor(0.1).item(), 1e-3), 0)
