"""torchtitan under `rollback.protect`: bit for bit the unprotected run, that given its skips, or the undisturbed one.

With what was logged. torchtitan is bound to an older `datasets` than the other tests have, so it is not installed with
them: where it cannot be imported, the test of the default suite is skipped. `scripts/test --soak
tests/e2e/trainers/test_torchtitan.py` installs it into a folder of its own, and tries all.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compared_runs import require_all_same, require_undisturbed
from job_results import LAUNCH, Scenarios
from refused import answers_of, require_one_message, require_refused
from toy import facts, require_same
from trainer_job import JOB, LIMIT, TrainerJob

from rollback.facts.training import Incident

ROOT = Path(__file__).parents[3]
REFUSING = ROOT / "tests" / "e2e" / "jobs" / "refused_torchtitan.py"
ON_CPU = ROOT / "tests" / "support" / "cpu_for_torchtitan.py"
PACKAGES = [
    "torchtitan==0.3.0", "torch_checkpointing==0.1.1", "spmd_types==0.2.3", "tyro==1.0.17", "einops==0.8.2",
    "docstring-parser==0.18.0", "typeguard==4.6.0",
]  # fmt: skip
"""Itself, and of what it needs what the tests do not have. Its bound datasets<4.8 is not kept."""
IMPORTED = ("torchtitan", "torch_checkpointing", "spmd_types", "tyro", "einops", "torchdata", "datasets", "tensorboard")
MISSING = [name for name in IMPORTED if importlib.util.find_spec(name) is None]
MODULES = "torchtitan_loop accelerate"

TITAN = TrainerJob(loop="torchtitan", samples=40, max_steps=40)
"""Its documents have 30 batches for a rank; then they are read again, shuffled."""
SURGICAL: dict[str, Any] = {"policy": "surgical", "rewind": None, "skip_after": None}
ACCUMULATED = TITAN.but(accumulate=3, max_steps=20)

CLEAN = {
    "plain": TITAN,
    "accumulation, logged now and then": ACCUMULATED.but(more={"log": 7}),
    "validation": TITAN.but(evaluate=6),
    "several optimizers": TITAN.but(more={"several": True}),
    "points": TITAN.but(more={"tensorboard": True}),
    "bfloat16": TITAN.but(more={"dtype": "bfloat16"}),
    "recomputed": TITAN.but(more={"recomputed": True}),
    "worker": TITAN.but(workers=2),
    "streamed": TITAN.but(stream="datasets"),
    "interleaved": TITAN.but(stream="interleaved"),
    "long documents": TITAN.but(samples=200),
}
BAD = {
    "in the middle": TITAN.but(bad_at=(17,)),
    "in the last step": TITAN.but(bad_at=(39,)),
    "in the first step": TITAN.but(bad_at=(0,)),
    "over the end of the documents": TITAN.but(bad_at=(33,)),
    "over the end of the documents, alone": TITAN.but(bad_at=(31,), settings=SURGICAL),
    "over the end of the documents, worker": TITAN.but(bad_at=(33,), workers=2),
    "over the end of the documents, streamed": TITAN.but(bad_at=(33,), stream="datasets"),
    "over the end of the documents, interleaved": TITAN.but(bad_at=(33,), stream="interleaved"),
    "twice": TITAN.but(bad_at=(12, 30), max_steps=50),
    "accumulation": ACCUMULATED.but(bad_at=(31,)),
    "logged now and then": TITAN.but(bad_at=(18,), more={"log": 7}),
    "validation": TITAN.but(bad_at=(18,), evaluate=4),
    "several optimizers": TITAN.but(bad_at=(18,), more={"several": True}),
    "points": TITAN.but(bad_at=(18,), more={"tensorboard": True}),
    "bfloat16": TITAN.but(bad_at=(18,), more={"dtype": "bfloat16"}),
}
KILLED = TITAN.but(bad_at=(32,), bad_rank=1, accumulate=2, max_steps=38, evaluate=7)
KILLED_AT = [
    "in the first step", "in a step", "behind an epoch's start", "while a checkpoint is committed",
    "before the incident is journalled", "in the middle of the rollback", "before the end is",
]  # fmt: skip
REFUSED = {
    "twice": ("before", "call it once"),
    "trained twice": ("a second time", "another Trainer"),
    "its checkpoints": ("checkpoints of its own ('checkpoint')", "checkpoint.load_only=True"),
    "resumed from its checkpoints": ("goes on from step 5", "checkpoint.enable=False"),
    "CUDA graphs": ("CUDA graphs", "training.disable_cuda_graphs=True"),
    "pipeline": ("pipeline_parallel_degree=2", "data_parallel_shard_degree"),
    "tensors": ("tensor_parallel_degree=2", "data_parallel_shard_degree"),
    "context": ("context_parallel_degree=2", "context_parallel_degree=1"),
    "experts": ("expert_parallel_degree=2", "expert_parallel_degree=1"),
    "float8": ("quantized layers", "without converters"),
    "states in bfloat16": ("a state in bfloat16", 'optimizer.implementation="fused"'),
    "documents that end": ("HuggingFaceTextDataset with infinite=False", "dataloader.infinite=True"),
    "interleaved documents that end": ("HuggingFaceTextDataset", "dataloader.infinite=True"),
    "torchft": ("torchft", "rollback launch"),
    "a loop of its own": ("Own has a loop of its own", "inherits train"),
    "fake ranks": ("comm.mode='fake_backend'", 'comm.mode="default"'),
    "another version": ("torchtitan 0.3 and later, below 0.4; installed is 0.2.2", "pip install"),
}

needs_torchtitan = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} cannot be imported: see the head of this file"
)


@pytest.fixture(scope="module")
def torchtitan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """It can be imported in what the tests start."""
    with pytest.MonkeyPatch.context() as patch:
        if MISSING:
            folder = tmp_path_factory.mktemp("torchtitan")
            install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(folder),
                *PACKAGES,
            ]
            done = subprocess.run(install, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert done.returncode == 0, done.stdout
            patch.setenv("PYTHONPATH", str(folder))
        yield


def pick(jobs: dict[str, TrainerJob], *names: str) -> dict[str, TrainerJob]:
    return {name: jobs[name] for name in names}


@needs_torchtitan
def test_a_protected_training_is_the_unprotected_one_or_that_given_its_skips(tmp_path: Path) -> None:
    bad = pick(BAD, "over the end of the documents")
    require_all_same(tmp_path, 2, pick(CLEAN, "plain"), bad, MODULES)


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_way_to_train_and_each_place_for_a_bad_batch(tmp_path: Path, ranks: int) -> None:
    require_all_same(tmp_path, ranks, CLEAN, BAD, MODULES)


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
def test_parts_that_several_ranks_have(tmp_path: Path) -> None:
    replicated = TITAN.but(more={"replicas": 2})
    require_all_same(tmp_path, 2, {"hsdp": replicated}, {"hsdp": replicated.but(bad_at=(33,))}, MODULES)


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
def test_the_debug_model_as_it_is(tmp_path: Path) -> None:
    whole = TITAN.but(samples=400, max_steps=24, more={"whole": True})
    require_all_same(tmp_path, 2, {"whole": whole}, {"whole": whole.but(bad_at=(13,))}, MODULES)


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
def test_a_run_may_begin_with_the_weights_of_a_checkpoint_of_torchtitan(tmp_path: Path) -> None:
    scenarios = Scenarios(tmp_path, JOB, MODULES, LIMIT)
    saving = {"enable": True, "interval": 5}
    scenarios.add("saved", TITAN.but(max_steps=5, more={"checkpoint": saving}), run=None)
    saved = tmp_path / "saved-output" / "checkpoint" / "step-5"
    begun = TITAN.but(more={"checkpoint": {"enable": True, "load_only": True, "initial_load_path": str(saved)}})
    scenarios.add("protected", begun)
    scenarios.add("unprotected", begun, run=None)
    scenarios.add("from nothing", TITAN, run=None)
    scenarios.torchrun(2)
    assert list(saved.iterdir())
    for rank in (0, 1):
        protected = scenarios.portrait("protected", rank)
        require_same(protected, scenarios.portrait("unprotected", rank), f"rank {rank}")
        assert protected != scenarios.portrait("from nothing", rank)
        assert not list((tmp_path / "protected-output").glob("checkpoint*"))


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
def test_where_the_guard_only_observes_the_check_of_the_loss_ends_the_job_as_without_it(tmp_path: Path) -> None:
    scenarios = Scenarios(tmp_path, JOB, MODULES, LIMIT)
    scenarios.add("observed", TITAN.but(bad_at=(7,), settings={"observe_only": True}))
    with pytest.raises(AssertionError, match=r"Loss is not finite.* at step 8\. Stopping training"):
        scenarios.torchrun(1)
    assert facts(scenarios.run("observed"), Incident)


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
def test_a_rank_that_is_killed_in_torchtitan_costs_nothing(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, KILLED, KILLED_AT, MODULES)


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
def test_a_job_that_is_told_to_stop_is_saved_and_goes_on(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, KILLED.but(bad_at=()), ["by SIGTERM", "by rollback stop"], MODULES)


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
def test_what_cannot_be_kept_of_torchtitan_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    answers = answers_of(REFUSING, REFUSED)
    for case, (met, instead) in REFUSED.items():
        require_refused(answers[case], met, instead)
        assert not answers[case]["left"]
    for case in ("CUDA graphs", "resumed from its checkpoints"):  # by protect, and within train
        require_one_message(REFUSING, case, tmp_path)


@pytest.mark.soak
@pytest.mark.usefixtures("torchtitan")
def test_the_example_trains_as_without_the_lines_that_protect_it(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "examples" / "torchtitan_lm.py"
    lines = script.read_text().splitlines(keepends=True)
    own = [line for line in lines if "rollback" in line]
    assert len(own) == 2  # the import is one of them
    bare = tmp_path / "bare_torchtitan_lm.py"
    bare.write_text("".join(line for line in lines if line not in own))
    (tmp_path / "bare").mkdir()
    protected = logged_by([*LAUNCH, "--nproc", "2"], script, tmp_path)
    alone = logged_by(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], bare, tmp_path / "bare"
    )
    assert protected == alone
    assert set(protected) == {str(step) for step in range(1, 7)}


def logged_by(command: list[str], script: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Loss and norm of each step, as they are printed."""
    done = subprocess.run(
        [*command, str(ON_CPU), str(script), "--steps", "6"], cwd=folder, text=True, timeout=LIMIT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    return {
        step: (loss, norm) for step, loss, norm in re.findall(r"step: +(\d+) +loss: +(\S+) +grad_norm: +(\S+)", plain)
    }
