"""What `rollback.protect` refuses of Lightning: exit code, message and what to do instead; and nothing is left."""

from pathlib import Path
from typing import Any

import pytest
from refused import answers_of, require_one_message, require_refused

SCRIPT = Path(__file__).parents[1] / "jobs" / "refused_lightning.py"
DDP = 'strategy="ddp"'
REFUSED = {
    "an older lightning": ("lightning 2.6 and later, below 3; installed is 2.5.6", "pip install"),
    "a newer lightning": ("lightning 2.6 and later, below 3; installed is 3.0.0", "pip install"),
    "an older pytorch-lightning": ("pytorch-lightning 2.6 and later, below 3; installed is 2.5.6", "pip install"),
    "FSDP": ("FSDPStrategy", DDP),
    "DeepSpeed": ("DeepSpeedStrategy", DDP),
    "tensor parallel": ("several ranks take one batch (tensor_parallel_size='auto')", "tensor_parallel_size=1"),
    "a strategy of one's own": ("MyStrategy", DDP),
    "spawned ranks": ("forks or spawns", "rollback launch"),
    "one device in each of several ranks": ("one device by itself, in each of 2 ranks", "Trainer(devices=N)"),
    "fast_dev_run": ("fast_dev_run", "the real run"),
    "overfit_batches": ("overfit_batches=2", "Subset"),
    "reloaded loaders": ("reload_dataloaders_every_n_epochs", "one loader for the whole run"),
    "validation by time": ("val_check_interval is a time", "a number of batches"),
    "averaged weights": ("StochasticWeightAveraging", "ring export"),
    "weights that the module averages": ("WeightAveraging", "ema=ema"),
    "groups in mid-run": ("BaseFinetuning", "all groups"),
    "ckpt_path": ("ckpt_path='out/last.ckpt'", "leave it out"),
    "by hand": ("automatic_optimization=False", "return the loss"),
    "two optimizers": ("automatic_optimization=False", "one optimizer"),
    "no optimizer": ("without an optimizer", "configure_optimizers"),
    "dataloader_iter": ("dataloader_iter", "batch_idx"),
    "a combined loader": ("a dict of 2 loaders", "StackDataset"),
    "a list of loaders": ("a list of 2 loaders", "one DataLoader"),
    "a stream": ("Stream, which is only read in order", "__getitem__"),
    "an odd callback": ("the state of Odd: there is a PosixPath in it", "state_dict"),
    "behind fit": ("trained already, unprotected", "before trainer.fit()"),
    "fitted twice": ("a second time", "another Trainer"),
    "protected twice": ("before", "call it once"),
    "no setting": ("polcy", "policy"),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return answers_of(SCRIPT, REFUSED)


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_what_to_do_instead(answers: dict[str, Any], case: str) -> None:
    require_refused(answers[case], *REFUSED[case])
    assert answers[case]["left"] == []


@pytest.mark.parametrize("case", ["ckpt_path", "a list of loaders"])
def test_under_launch_it_is_one_message_and_exit_code_2(tmp_path: Path, case: str) -> None:
    require_one_message(SCRIPT, case, tmp_path)
