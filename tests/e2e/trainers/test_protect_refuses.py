"""What `rollback.protect` refuses: the exit code, what is said, what to do instead; and nothing is left behind."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from refused import answers_of, require_one_message, require_refused

SCRIPT = Path(__file__).parents[1] / "jobs" / "refused_by_protect.py"
REFUSED = {
    "a stranger": ("types.SimpleNamespace", "rollback.Guard"),
    "nothing": ("got nothing", "an Accelerator and what its prepare() returned"),
    "an older transformers": ("transformers 5.3 and later, below 6; installed is 4.57.1", "pip install"),
    "a newer transformers": ("transformers 5.3 and later, below 6; installed is 6.0.0", "pip install"),
    "a source tree": ("installed is none: it runs from a source tree", "pip install 'transformers>=5.3,<6'"),
    "an older accelerate": ("accelerate 1.3 and later, below 2; installed is 0.34.2", "pip install"),
    "resume_from_checkpoint": ("resume_from_checkpoint='out/checkpoint-5'", "leave it out"),
    "auto_find_batch_size": ("auto_find_batch_size=True", "gradient_accumulation_steps"),
    "ignore_data_skip": ("ignore_data_skip=True", "take it out"),
    "enable_jit_checkpoint": ("enable_jit_checkpoint=True", "take it out"),
    "an optimizer for each layer": ("galore_adamw_layerwise", 'optim="adafactor"'),
    "the Trainer with DeepSpeed": ("DEEPSPEED", "DistributedDataParallel"),
    "the Trainer with FSDP": ("the first version of FSDP", 'fsdp_config={"version": 2}'),
    "the Trainer with DataParallel": ("DataParallel on 2 GPUs", "one process for each GPU"),
    "completions for several updates": ("completions for 8 batches", "gradient_accumulation_steps=8"),
    "completions for an update and a half": ("an update has 6", "gradient_accumulation_steps=4"),
    "an average of the weights": ("BEMACallback averages the weights", "ema="),
    "hyperparameter_search": ("hyperparameter_search", "the final run"),
    "trained twice": ("a second time", "another Trainer"),
    "behind train": ("4 steps already, unprotected", "before trainer.train()"),
    "a loop of its own": ("OwnLoop trains in a loop of its own", "_inner_training_loop() of OwnLoop"),
    "a loop and steps of its own": ("OwnSteps trains in a loop of its own", "_inner_training_loop() of OwnSteps"),
    "twice": ("before", "call it once"),
    "an average without a name": ("got a Linear besides a Trainer", "ema=ema"),
    "no setting": ("polcy", "policy"),
    "what the Trainer has by its name": ("got max_steps=", "a Trainer has it"),
    "a scheduler by its name": ("got scheduler=", "without a name"),
    "the dispatcher": ("DataLoaderDispatcher", "dispatch_batches=False"),
    "the Trainer with the dispatcher": ("DataLoaderDispatcher", "accelerator_config"),
    "a stream, as it is by default": ("DataLoaderDispatcher", "dispatch_batches=False"),
    "the Trainer with a stream, as it is by default": ("DataLoaderDispatcher", "accelerator_config"),
    "DeepSpeed": ("DEEPSPEED", "torchrun"),
    "Megatron": ("MEGATRON_LM", "torchrun"),
    "FSDP": ("the first version of FSDP", "fsdp_version=2"),
    "tensor parallelism": ("with tensor and sequence parallelism", "FSDP alone"),
    "the Trainer in each of several ranks": ("knows of 1 of 2 ranks", "use_cpu=True"),
    "an Accelerator in each of several ranks": ("knows of 1 of 2 ranks", "cpu=True"),
    "an Accelerator alone": ("no model and no optimizer and no loader", "behind accelerator.prepare"),
    "two loaders": ("besides another loader", "the loader that is trained on"),
    "without prepare": ("SGD", "what prepare() has returned"),
    "registered behind it": ("of a SGD behind rollback.protect", "in front of rollback.protect"),
    "load_state": ("accelerator.load_state()", "take it out"),
    "skip_first_batches": ("accelerator.skip_first_batches()", "take it out"),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return answers_of(SCRIPT, REFUSED)


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_what_to_do_instead(answers: dict[str, Any], case: str) -> None:
    require_refused(answers[case], *REFUSED[case])


def test_nothing_is_left_behind(answers: dict[str, Any]) -> None:
    by_hand = ("registered behind it", "load_state", "skip_first_batches")  # behind protect(), when there is a run
    refused_before_a_guard = {name: answer["left"] for name, answer in answers.items() if name not in by_hand}
    assert not any(refused_before_a_guard.values()), refused_before_a_guard


@pytest.mark.parametrize("case", ["resume_from_checkpoint"])
def test_under_launch_it_is_one_message_and_exit_code_2(tmp_path: Path, case: str) -> None:
    require_one_message(SCRIPT, case, tmp_path)


@pytest.mark.skipif(version("accelerate").startswith("1.3."), reason="it wraps an evaluated model as any other")
def test_ranks_that_an_evaluation_has_left_without_ddp_are_refused_before_a_step(tmp_path: Path) -> None:
    said = require_one_message(SCRIPT, "evaluated before", tmp_path, ranks=2)
    assert "each of the 2 ranks would train a model of its own" in said
    assert "eval_on_start=True" in said
    assert "the end" not in said
