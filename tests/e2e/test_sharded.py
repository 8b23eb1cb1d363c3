"""Sharded models (FSDP2, HSDP, tensor parallel): oracle A, kills, drift, other numbers of ranks, export."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from job_results import JOB, LAUNCH, Scenarios
from safetensors.torch import load_file
from toy import Toy, facts, flat, require_same
from warm_server import run_warm

from rollback.facts.training import Attached, Committed, Drifted, Incident, Quarantined, Restored
from rollback.inspect.ring.export import export
from rollback.inspect.ring.verify import verify
from rollback.rundir.records import read_metrics

FSDP = Toy(400, epochs=2, sampler="distributed", sharding="fsdp", width=17)  # 17 rows on two ranks: 9 and 8
OF_TWO = {
    "nan": FSDP.but(nan=(57,), nan_rank=1),
    "garbage": FSDP.but(garbage=(60, 84)).with_settings(skip_after=0),
    "accumulation": FSDP.but(samples=800, accumulate=2, nan=(57,), nan_rank=0),
    "mixed": FSDP.but(sharding="fsdp, mixed", nan=(57,)),
    "gathered": FSDP.but(sharding="fsdp, gathered", nan=(57,)),
    "recomputed": FSDP.but(sharding="fsdp, recomputed", nan=(57,)),
    "epochs": FSDP.but(samples=200, epochs=3, loop="epochs", between=True, nan=(52,)).with_settings(rewind=12),
}
OF_FOUR = {
    "hsdp": FSDP.but(samples=800, sharding="hsdp", nan=(57,), nan_rank=3),
    "tensor parallel": FSDP.but(sharding="tensor parallel", nan=(57,)),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Scenarios]:
    jobs = {}
    for ranks, toys in ((2, OF_TWO), (4, OF_FOUR)):
        scenarios = jobs[ranks] = Scenarios(tmp_path_factory.mktemp(f"of-{ranks}"))
        for name, toy in toys.items():
            scenarios.add(name, toy)
            scenarios.add(f"{name}, fresh", toy, skips_of=str(scenarios.run(name)))
        healthy = next(iter(toys.values())).but(nan=())
        scenarios.add("guarded", healthy)
        scenarios.add("unguarded", healthy, run=None)
        if ranks == 4:
            scenarios.add("drift", healthy, flip=[1, 33])
        scenarios.torchrun(ranks)
    return jobs


def scenarios_with(jobs: dict[int, Scenarios], name: str) -> tuple[int, Scenarios]:
    ranks = 2 if name in OF_TWO else 4
    return ranks, jobs[ranks]


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_as_if_the_bad_batches_had_never_been_there(jobs: dict[int, Scenarios], name: str) -> None:
    ranks, scenarios = scenarios_with(jobs, name)
    assert facts(scenarios.run(name), Restored)
    for rank in range(ranks):
        require_same(scenarios.portrait(name, rank), scenarios.portrait(f"{name}, fresh", rank), f"{name}, {rank}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_healthy_run_is_what_it_is_without_a_guard(jobs: dict[int, Scenarios], ranks: int) -> None:
    scenarios = jobs[ranks]
    for rank in range(ranks):
        require_same(scenarios.portrait("guarded", rank), scenarios.portrait("unguarded", rank), f"rank {rank}")
    assert facts(scenarios.run("guarded"), Committed)


def test_the_rank_with_the_nan_is_named(jobs: dict[int, Scenarios]) -> None:
    assert facts(jobs[2].run("nan"), Incident)[0].ranks == (1,)
    assert facts(jobs[4].run("hsdp"), Incident)[0].ranks == (3,)


def test_replicas_of_a_part_that_differ_in_one_bit_are_named(jobs: dict[int, Scenarios]) -> None:
    drifted = facts(jobs[4].run("drift"), Drifted)
    assert drifted[0].step == 40, "the first snapshot after the bit had changed"
    assert drifted[0].ranks == (1, 3), "of two replicas none is the majority"
    assert not facts(jobs[2].run("guarded"), Drifted)


def test_an_export_has_the_whole_tensors(jobs: dict[int, Scenarios], tmp_path: Path) -> None:
    for ranks in (2, 4):
        run = jobs[ranks].run("guarded")
        assert verify(run).exit_code == 0
        export(run, "final", tmp_path / f"{ranks}.safetensors")
        found = flat({"model": load_file(tmp_path / f"{ranks}.safetensors")})
        ended = jobs[ranks].portrait("guarded", 0)
        assert found == {key: text for key, text in ended.items() if key in found}
        assert {key for key in ended if key.startswith("/model/")} == found.keys()


def test_the_norm_is_that_of_all_parts(tmp_path: Path) -> None:
    """Measured from the parts it is what clip_grad_norm_ finds, which is handed over in another run."""
    job = Path(__file__).parent / "jobs" / "sharded_norms.py"
    norms = {}
    for told in ("measured", "told"):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(job), told]
        run_warm([sys.executable, *command], cwd=tmp_path, timeout=180, check=True)
        norms[told] = [metric.grad_norm for metric in read_metrics(tmp_path / told / "metrics" / "train.jsonl")]
    assert len(norms["told"]) >= 8
    torch.testing.assert_close(torch.tensor(norms["measured"]), torch.tensor(norms["told"]), rtol=1e-5, atol=0)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(jobs: dict[int, Scenarios], tmp_path: Path) -> None:
    """In a rollback's first steps, when the newest checkpoint lies behind."""
    scenarios = Scenarios(tmp_path)
    scenarios.add("nan", OF_TWO["nan"], run=None, signal=[1, 66, signal.SIGKILL, 1])
    body = scenarios.path.read_text().replace('"run": null, ', "")  # the supervisor's
    scenarios.path.write_text(body)
    done = run_warm(
        [*LAUNCH, "--nproc", "2", "--run", str(tmp_path / "run"), str(JOB), str(scenarios.path)],
        env=scenarios.environment, timeout=scenarios.limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert [fact.checkpoint is not None for fact in facts(tmp_path / "run", Attached)] == [False, True]
    for rank in range(2):
        require_same(scenarios.portrait("nan", rank), jobs[2].portrait("nan, fresh", rank), f"rank {rank}")


STAGES = [(4, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp"), (4, "hsdp"), (2, None), (2, "fsdp"), (1, None)]


def test_parameters_and_optimizer_are_the_same_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """One run's final state, restored by jobs of other numbers of ranks, sharded in other ways and not at all."""
    toy = Toy(samples=480, sampler="distributed", width=17)
    states = []
    for place, (ranks, sharding) in enumerate(STAGES):
        scenarios = Scenarios(tmp_path)
        scenarios.path = tmp_path / f"{place}.json"
        scenarios.add(str(place), toy.but(batch_size=12 // ranks, sharding=sharding), run=str(tmp_path / "run"))
        for rank in range(ranks):
            (tmp_path / f"{place}-{rank}.log").touch()  # of samples: none after the first stage
        scenarios.torchrun(ranks)
        portrait = scenarios.portrait(str(place), 0)
        states.append({
            key.replace("/module.", "/"): text for key, text in portrait.items()
            if key.startswith(("/model", "/optimizer", "/scheduler")) and "running" not in key
        })  # fmt: skip
    for (ranks, sharding), state in zip(STAGES, states, strict=True):
        require_same(states[0], state, f"{ranks} ranks, {sharding}")
    assert not facts(tmp_path / "run", Quarantined)
    assert [fact.world_size for fact in facts(tmp_path / "run", Attached)] == [ranks for ranks, _ in STAGES]
