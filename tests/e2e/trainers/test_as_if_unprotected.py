"""Loops of other libraries under `rollback.protect`: bit for bit the unprotected run, or the one given its skips.

A few at one rank and at two; `scripts/test --soak tests/e2e/trainers` tries all, Accelerate's at four ranks as well.
"""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from compared_runs import require_all_same
from packaging.version import Version
from trainer_job import TrainerJob

HAS_FSDP2 = Version(version("accelerate")) >= Version("1.6")
TRAINER = TrainerJob()
"""30 batches in an epoch, twice."""
SFT = TrainerJob(loop="sft", more={"bf16": False})
ACCELERATE = TrainerJob(loop="accelerate")
BY_EPOCH = {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}
READ_BY_RANK = {"dispatch_batches": False}
STREAM = {"stream": "plain", "max_steps": 40, "more": {"accelerator_config": READ_BY_RANK}}
STATEFUL = {**READ_BY_RANK, "use_stateful_dataloader": True}
SEEDABLE = {"use_seedable_sampler": True}
AS_SET = {"rewind": None, "skip_after": None}  # the policy's own
SHORT = {"samples": 24}
"""12 batches in an epoch: the jobs of the default suite."""
SHARDED = {**SHORT, "sharded": True, "accumulate": 2, "evaluate": 5, "save": 10}
UNEVEN = {"samples": 156, "accumulate": 4, "settings": {"rewind": 1, "skip_after": 0, "snapshot_every": 2}}
"""78 batches in an epoch, four to an update: a window takes along what is left over, and ends within an update's."""

CLEAN = {
    "trainer": TRAINER,
    "trainer, accumulation": TRAINER.but(samples=76, accumulate=4, evaluate=3),
    "trainer, best of several": TRAINER.but(**SHORT, evaluate=5, save=10, more={"load_best_model_at_end": True}),
    "trainer, by steps": TRAINER.but(max_steps=47, more={"logging_first_step": True}),
    "trainer, an epoch and a half": TRAINER.but(epochs=1.5),
    "trainer, by epoch": TRAINER.but(more=BY_EPOCH),
    "trainer, stopped": TRAINER.but(stop_at=41),
    "trainer, short epochs": TRAINER.but(samples=15, epochs=3),
    "trainer, worker": TRAINER.but(workers=1),
    "trainer, scaled": TRAINER.but(samples=76, accumulate=4, scaled=True),
    "trainer, stream": TRAINER.but(**STREAM),
    "trainer, stream, shuffled": TRAINER.but(**{**STREAM, "stream": "datasets, shuffled"}, accumulate=4),
    "sft": SFT.but(samples=76, accumulate=4, evaluate=3),
    "accelerate": ACCELERATE.but(accumulate=2),
    "accelerate, odd epochs": ACCELERATE.but(samples=59, accumulate=4, epochs=3),
    "accelerate, seedable": ACCELERATE.but(accumulate=4, more=SEEDABLE),
    "accelerate, split batches": ACCELERATE.but(batch_size=4, more={"split_batches": True}),
    "accelerate, scaled": ACCELERATE.but(accumulate=2, scaled=True),
    "accelerate, worker": ACCELERATE.but(workers=1),
    "accelerate, stream": ACCELERATE.but(samples=59, accumulate=4, stream="plain", more=READ_BY_RANK),
    "trainer, sharded": TRAINER.but(**SHARDED),
    "accelerate, sharded": ACCELERATE.but(**{**SHARDED, "save": 0}),
}
BAD = {
    "trainer, in the middle": TRAINER.but(bad_at=(17,), evaluate=5, save=5),
    "trainer, in the last update": TRAINER.but(bad_at=(59,)),
    "trainer, at an epoch's tail": TRAINER.but(bad_at=(29,), more=BY_EPOCH),
    "trainer, over an epoch's start": TRAINER.but(**SHORT, bad_at=(14,), evaluate=5, more={"eval_on_start": True}),
    "trainer, first evaluation undone": TRAINER.but(
        **SHORT, bad_at=(14,), evaluate=14, workers=1, more={"dataloader_persistent_workers": True}
    ),
    "trainer, surgical": TRAINER.but(bad_at=(22,), settings={"policy": "surgical", **AS_SET}),
    "trainer, balanced": TRAINER.but(bad_at=(41,), settings=AS_SET),
    "trainer, accumulation": TRAINER.but(bad_at=(58,), evaluate=3, **UNEVEN),
    "trainer, by steps": TRAINER.but(bad_at=(12, 50), max_steps=70),
    "trainer, scaled": TRAINER.but(bad_at=(32,), scaled=True),
    "trainer, stopped": TRAINER.but(bad_at=(20,), stop_at=21),
    "trainer, short epochs": TRAINER.but(samples=15, epochs=5, bad_at=(18,), settings={"rewind": 12}),
    "trainer, stream": TRAINER.but(bad_at=(32,), **STREAM),
    "trainer, stream, shuffled": TRAINER.but(bad_at=(32,), **{**STREAM, "stream": "datasets, shuffled"}),
    "sft": SFT.but(bad_at=(33,), evaluate=5, save=7),
    "accelerate, in the middle": ACCELERATE.but(bad_at=(17,)),
    "accelerate, in the last update": ACCELERATE.but(bad_at=(59,)),
    "accelerate, at an epoch's tail": ACCELERATE.but(bad_at=(29,)),
    "accelerate, over an epoch's start": ACCELERATE.but(**SHORT, bad_at=(14,), more=SEEDABLE),
    "accelerate, seedable, evaluated": ACCELERATE.but(
        **SHORT, epochs=3, bad_at=(14,), evaluate=1, save=5, more=SEEDABLE
    ),
    "accelerate, first evaluation undone": ACCELERATE.but(**SHORT, bad_at=(14,), evaluate=1, workers=1),
    "accelerate, surgical": ACCELERATE.but(bad_at=(22,), settings={"policy": "surgical", **AS_SET}),
    "accelerate, balanced": ACCELERATE.but(bad_at=(41,), settings=AS_SET),
    "accelerate, accumulation": ACCELERATE.but(bad_at=(58,), **UNEVEN),
    "accelerate, odd epochs": ACCELERATE.but(bad_at=(81,), **UNEVEN),
    "accelerate, stateful": ACCELERATE.but(bad_at=(32,), more={"use_stateful_dataloader": True}),
    "accelerate, stateful, evaluated": ACCELERATE.but(
        **SHORT, bad_at=(14,), evaluate=1, more={"use_stateful_dataloader": True}
    ),
    "accelerate, stream": ACCELERATE.but(bad_at=(32,), stream="drawing", more=READ_BY_RANK),
    "trainer, sharded": TRAINER.but(**SHARDED, bad_at=(14,)),
    "accelerate, sharded": ACCELERATE.but(**{**SHARDED, "save": 0}, bad_at=(14,)),
    "accelerate, stateful stream": ACCELERATE.but(bad_at=(32,), stream="datasets", more=STATEFUL),
}
FEW: dict[int, tuple[list[str], list[str]]] = {
    1: (
        ["trainer, accumulation", "accelerate, stream"],
        ["trainer, accumulation", "accelerate, stream", "trainer, in the middle", "trainer, at an epoch's tail"],
    ),
    2: (
        ["trainer, best of several"],
        ["accelerate, seedable, evaluated", "trainer, first evaluation undone", "trainer, sharded"],
    ),
}
"""Clean ones, and those with a bad batch. Each that goes back here, goes over an epoch's start."""


def require_same_of(folder: Path, ranks: int, clean: list[str], bad: list[str]) -> None:
    chosen = [
        {name: jobs[name] for name in names if HAS_FSDP2 or not jobs[name].sharded}
        for jobs, names in ((CLEAN, clean), (BAD, bad))
    ]
    require_all_same(folder, ranks, *chosen)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_protected_run_is_the_unprotected_one_or_that_given_its_skips(tmp_path: Path, ranks: int) -> None:
    require_same_of(tmp_path, ranks, *FEW[ranks])


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_way_to_train_and_each_place_for_a_bad_batch(tmp_path: Path, ranks: int) -> None:
    clean, bad = ([n for n in jobs if ranks < 4 or n.startswith("accelerate")] for jobs in (CLEAN, BAD))
    require_same_of(tmp_path, ranks, clean, bad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float16_with_the_scaler_that_accelerate_makes(tmp_path: Path) -> None:
    """On a CPU Accelerate makes none: there, the jobs `scaled` hand one in."""
    job = TRAINER.but(more={"use_cpu": False, "fp16": True, "full_determinism": True})
    require_all_same(tmp_path, 1, {"float16": job}, {"float16": job.but(bad_at=(32,))})
