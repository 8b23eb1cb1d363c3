"""LoRAs of PEFT's, in TRL's trainer and in a script's own loop: their base is stored once, and every run is exact."""

from pathlib import Path

import pytest
from compared_runs import require_all_same, require_undisturbed
from toy import facts
from trainer_job import TrainerJob

from rollback.facts.training import Committed
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.rundir.paths import RunPaths

SFT = TrainerJob(loop="sft", bad_at=(33,), more={"bf16": False})
LORA = TrainerJob(loop="lora", bad_at=(33,))
ADALORA = LORA.but(more={"adapter": "adalora"})
MODULES = "trl peft datasets accelerate transformers.models.llama.modeling_llama"


def require_base_stored_once(run: Path) -> None:
    (base,) = RunPaths(run).frozen.iterdir()
    assert base.stat().st_size > 1 << 20
    assert all(fact.bytes < base.stat().st_size / 2 for fact in facts(run, Committed))
    assert verify(ReadableRun.at(run)).exit_code == 0


@pytest.mark.soak
def test_a_rollback_is_as_if_the_bad_batch_had_never_been_there(tmp_path: Path) -> None:
    bad = {"sft": SFT, "lora": LORA, "adalora": ADALORA}
    require_all_same(tmp_path, 1, {"lora": LORA.but(bad_at=())}, bad, MODULES)
    for name in ("clean lora", "bad sft", "bad lora", "bad adalora"):
        require_base_stored_once(tmp_path / name)


@pytest.mark.soak
@pytest.mark.parametrize("job", [SFT, LORA, ADALORA], ids=["sft", "lora", "adalora"])
def test_killed_and_from_the_url_alone(tmp_path: Path, job: TrainerJob) -> None:
    for name in ("killed", "url"):
        (tmp_path / name).mkdir()
    require_undisturbed(tmp_path / "killed", job, ["in a step"], MODULES)
    require_undisturbed(tmp_path / "url", job.but(bad_at=()), ["by SIGTERM"], MODULES, url=True)
    for run in (tmp_path / "killed/0/killed", tmp_path / "url/0/killed"):
        require_base_stored_once(run)
