"""TRL's trainers that hold more than weights: a reference model that follows, completions for several batches."""

from pathlib import Path

import pytest
from compared_runs import require_all_same, require_undisturbed
from trainer_job import TrainerJob

FOLLOWED = TrainerJob(
    loop="dpo", samples=40, bad_at=(23,),
    more={
        "bf16": False, "include_num_input_tokens_seen": "no", "max_length": 16, "sync_ref_model": True,
        "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.6,
    },
)  # fmt: skip
"""20 batches in an epoch."""
GENERATING = TrainerJob(
    loop="grpo", samples=24, accumulate=4, bad_at=(58,),
    settings={"policy": "surgical", "rewind": None, "skip_after": None},
    more={
        "bf16": False, "include_num_input_tokens_seen": "no", "num_generations": 2, "max_completion_length": 4,
        "steps_per_generation": 2, "num_iterations": 2, "use_adaptive_entropy": True,
        "entropy_target": 100.0, "entropy_coef_delta": 0.1,
    },
)  # fmt: skip
"""48 batches in an epoch, and completions for four of them at a time: those of an update. Each raises the weight of the
entropy in the loss."""
UNEVEN = GENERATING.but(epochs=3, bad_at=(118,)).with_settings(skip=[{"first": 9, "last": 9}])
"""An epoch ends within the batches that its last completions are for."""
MODULES = "trl peft datasets accelerate transformers.models.llama.modeling_llama"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rollback_is_as_if_the_bad_batch_had_never_been_there(tmp_path: Path, ranks: int) -> None:
    jobs = {"followed": FOLLOWED, "generating": GENERATING}
    clean = {name: job.but(bad_at=()) for name, job in jobs.items()}
    require_all_same(tmp_path, ranks, clean, {**jobs, "uneven": UNEVEN}, MODULES)


@pytest.mark.soak
@pytest.mark.parametrize("job", [FOLLOWED, GENERATING], ids=["followed", "generating"])
def test_a_rank_that_is_killed_costs_nothing(tmp_path: Path, job: TrainerJob) -> None:
    require_undisturbed(tmp_path, job.but(bad_at=()), ["in a step"], MODULES)
