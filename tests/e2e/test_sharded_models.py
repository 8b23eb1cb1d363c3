"""Sharded models (FSDP2, HSDP, tensor parallel): oracle A, kills, drift, other numbers of ranks, export."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from job_results import LAUNCH, Scenarios
from safetensors.torch import load_file
from toy import Toy, facts, flat, require_same
from warm_server import run_warm

from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import read_manifest
from rollback.checkpoints.format.parts import read_parts
from rollback.errors import ExitCode
from rollback.facts.training import Attached, Committed, Drifted, Incident, Quarantined, Restored
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.export import export
from rollback.inspect.ring.verify import verify
from rollback.rundir.metrics.metric_columns import joined, metric_pieces
from rollback.rundir.paths import RunPaths

FSDP = Toy(72, epochs=2, sampler="distributed", sharding="fsdp", width=17).with_settings(  # 18 steps on two ranks
    snapshot_every=4, probation=6, rewind=2, skip_after=1
)  # 17 rows on two ranks: 9 and 8
OF_TWO = {
    "nan": FSDP.but(nan=(12,), nan_rank=1),
    "epochs": FSDP.but(
        samples=144, sharding="fsdp, mixed, gathered", accumulate=2, loop="epochs", between=True, nan=(25,), nan_rank=0
    ),
}
OF_FOUR = {
    "hsdp": FSDP.but(samples=144, sharding="hsdp", nan=(12,), nan_rank=3),
    "tensor parallel": FSDP.but(sharding="tensor parallel", nan=(12,)),
}
LONG = FSDP.but(samples=400).with_settings(snapshot_every=10, probation=8, rewind=5, skip_after=3)
OF_TWO_AT_LENGTH = {
    "long nan": LONG.but(nan=(57,), nan_rank=1),
    "garbage": LONG.but(garbage=(60, 84)).with_settings(skip_after=0),
    "twice": LONG.but(samples=800, epochs=1, nan=(57, 62)).with_settings(rewind=2, skip_after=0, horizon=40),
    "accumulation": FSDP.but(samples=144, sharding="fsdp, mixed, gathered", accumulate=2, nan=(25,), nan_rank=0),
    "epochs": FSDP.but(sharding="fsdp, offloaded, recomputed", loop="epochs", between=True, nan=(12,)),
    "long accumulation": LONG.but(samples=800, accumulate=2, nan=(57,), nan_rank=0),
    "mixed": LONG.but(sharding="fsdp, mixed", nan=(57,)),
    "gathered": LONG.but(sharding="fsdp, gathered", nan=(57,)),
    "recomputed": LONG.but(sharding="fsdp, recomputed", nan=(57,)),
    "offloaded": LONG.but(sharding="fsdp, offloaded", nan=(57,)),
    "screen": LONG.but(garbage=(60, 71)).with_settings(policy="screen"),
    "long epochs": LONG.but(samples=200, epochs=3, loop="epochs", between=True, nan=(52,)).with_settings(rewind=12),
}
OF_FOUR_AT_LENGTH = {
    "long hsdp": LONG.but(samples=800, sharding="hsdp", nan=(57,), nan_rank=3),
    "hsdp accumulation": LONG.but(samples=1600, sharding="hsdp", accumulate=2, nan=(57,), nan_rank=2),
    "hsdp garbage": LONG.but(samples=800, sharding="hsdp", garbage=(60, 84)).with_settings(skip_after=0),
    "tensor parallel garbage": LONG.but(sharding="tensor parallel", garbage=(60, 84)).with_settings(skip_after=0),
    "hsdp epochs": LONG.but(sharding="hsdp", epochs=3, loop="epochs", between=True, nan=(30,)).with_settings(rewind=12),
    "long tensor parallel": LONG.but(sharding="tensor parallel", nan=(57,)),
    "one row": LONG.but(width=1, nan=(20,)),  # three of four ranks have no part of the first layer
}


def performed(folder: Path, ranks: int, toys: dict[str, Toy]) -> Scenarios:
    """Each of them, and one over the same data that was told at the start what that one has found out."""
    scenarios = Scenarios(folder, limit=900)
    for name, toy in toys.items():
        scenarios.add(name, toy)
        scenarios.add(f"{name}, fresh", toy, skips_of=str(scenarios.run(name)))
    first = next(iter(toys.values()))
    healthy = first.but(nan=(), samples=first.samples * 8 // 9)  # an epoch ends with step 8
    scenarios.add("guarded", healthy)
    scenarios.add("unguarded", healthy, run=None)
    if ranks == 4:
        scenarios.add("drift", healthy, flip=[1, 6])
    scenarios.torchrun(ranks)
    return scenarios


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Scenarios]:
    return {
        ranks: performed(tmp_path_factory.mktemp(f"of-{ranks}"), ranks, toys)
        for ranks, toys in ((2, OF_TWO), (4, OF_FOUR))
    }


@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in OF_TWO), *((4, name) for name in OF_FOUR)])
def test_as_if_the_bad_batches_had_never_been_there(jobs: dict[int, Scenarios], ranks: int, name: str) -> None:
    require_oracle(jobs[ranks], ranks, name)


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "toys"), [(2, OF_TWO_AT_LENGTH), (4, OF_FOUR_AT_LENGTH)])
def test_so_it_is_at_length_and_in_every_way_to_shard(tmp_path: Path, ranks: int, toys: dict[str, Toy]) -> None:
    scenarios = performed(tmp_path, ranks, toys)
    for name in toys:
        require_oracle(scenarios, ranks, name)
    if "twice" in toys:
        assert len(facts(scenarios.run("twice"), Restored)) == 2


def require_oracle(scenarios: Scenarios, ranks: int, name: str) -> None:
    assert facts(scenarios.run(name), Restored), name
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
    assert drifted[0].step == 8, "the first snapshot after the bit had changed"
    assert drifted[0].ranks == (1, 3), "of two replicas none is the majority"
    assert not facts(jobs[2].run("guarded"), Drifted)


def test_replicas_share_the_writing(jobs: dict[int, Scenarios]) -> None:
    """Of a model of two replicas each part is stored once, about as much by each rank."""
    run = RunPaths(jobs[4].run("hsdp"))
    stored: dict[str, int] = {}
    sizes = []
    for shard in ring.open_shards(
        run.checkpoint(ring.names(run)[-1]), read_manifest(run.checkpoint(ring.names(run)[-1]))
    ):
        parts = read_parts(shard.metadata, {name: entry.shape for name, entry in shard.entries.items()})
        sizes.append(sum(shard.entries[name].nbytes for name in parts))
        for name, part in parts.items():
            stored[name] = stored.get(name, 0) + part.box.size
        shard.close()
    whole = {name.removeprefix("shared/"): size for name, size in stored.items()}
    assert whole["model/0.weight"] == 17 * 8
    assert whole["optimizer/state/0/exp_avg"] == 17 * 8
    assert max(sizes) < 0.35 * sum(sizes)


@pytest.mark.parametrize(("ranks", "job", "meshes"), [(2, "nan", "2 ranks"), (4, "hsdp", "replicas 2 x shards 2")])
def test_audit_list_and_report_know_how_the_model_is_spread(
    jobs: dict[int, Scenarios], tmp_path: Path, ranks: int, job: str, meshes: str
) -> None:
    run = jobs[ranks].run(job)
    audit, listing = command_output("audit", str(run)), command_output("ring", "list", str(run))
    assert f"6 of 6 parameters are sharded over {meshes}" in " ".join(audit.split())
    assert [line.split()[7:9] for line in listing.splitlines()][1:2] == [[str(ranks), "ring"]], listing
    command_output("report", str(run), "-o", str(tmp_path / "page.html"))
    assert "6 of 6 parameters" in (tmp_path / "page.html").read_text()


def command_output(*arguments: str) -> str:
    done = run_warm([sys.executable, "-m", "rollback", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_an_export_has_the_whole_tensors(jobs: dict[int, Scenarios], tmp_path: Path) -> None:
    for ranks in (2, 4):
        run = jobs[ranks].run("guarded")
        assert verify(ReadableRun.at(run)).exit_code == 0
        export(ReadableRun.at(run), "final", tmp_path / f"{ranks}.safetensors")
        found = flat({"model": load_file(tmp_path / f"{ranks}.safetensors")})
        ended = jobs[ranks].portrait("guarded", 0)
        assert found == {key: text for key, text in ended.items() if key in found}
        assert {key for key in ended if key.startswith("/model/")} == found.keys()


def test_the_norm_is_that_of_all_parts(tmp_path: Path) -> None:
    """Measured from the parts it is what clip_grad_norm_ finds, which is handed over in another run."""
    job = Path(__file__).parent / "jobs" / "sharded_norms.py"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(job)]
    run_warm([sys.executable, *command], cwd=tmp_path, timeout=180, check=True)
    norms = {
        told: joined(metric_pieces(tmp_path / told / "metrics" / "train.jsonl", [])).grad_norm
        for told in ("measured", "told")
    }
    assert len(norms["told"]) >= 8
    torch.testing.assert_close(torch.tensor(norms["measured"]), torch.tensor(norms["told"]), rtol=1e-5, atol=0)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(jobs: dict[int, Scenarios], tmp_path: Path) -> None:
    """In a rollback's first steps, when the newest checkpoint lies behind."""
    scenarios = Scenarios(tmp_path)
    scenarios.add("nan", OF_TWO["nan"], run=None, signal=[1, 15, signal.SIGKILL, 1])
    body = scenarios.path.read_text().replace('"run": null, ', "")  # the supervisor's
    scenarios.path.write_text(body)
    code, output = scenarios.launch(tmp_path / "run")
    assert code == 0, output[-4000:]
    assert [fact.checkpoint is not None for fact in facts(tmp_path / "run", Attached)] == [False, True]
    for rank in range(2):
        require_same(scenarios.portrait("nan", rank), jobs[2].portrait("nan, fresh", rank), f"rank {rank}")


SHORT_STAGES = [(2, "fsdp"), (4, "hsdp"), (2, None), (3, "fsdp")]
STAGES = [(4, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp"), (4, "hsdp"), (2, None), (2, "fsdp"), (1, None)]


@pytest.mark.parametrize("stages", [SHORT_STAGES, pytest.param(STAGES, marks=pytest.mark.soak)], ids=["a few", "all"])
def test_parameters_and_optimizer_are_the_same_on_other_numbers_of_ranks(
    tmp_path: Path, stages: list[tuple[int, str | None]]
) -> None:
    """One run's final state, restored by jobs of other numbers of ranks, sharded in other ways and not at all."""
    toy = Toy(samples=60, sampler="distributed", width=17)
    states = []
    for place, (ranks, sharding) in enumerate(stages):
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
    for (ranks, sharding), state in zip(stages, states, strict=True):
        require_same(states[0], state, f"{ranks} ranks, {sharding}")
    assert not facts(tmp_path / "run", Quarantined)
    assert [fact.world_size for fact in facts(tmp_path / "run", Attached)] == [ranks for ranks, _ in stages]


OWN_OPTIMIZER = Path(__file__).parent / "jobs" / "own_optimizer.py"


@pytest.mark.parametrize("kind", ["by rows", "two optimizers", "late average"])
def test_what_is_kept_beside_a_sharded_weight_comes_back(tmp_path: Path, kind: str) -> None:
    """By rows it has another shape than the weight, and is sharded as that is. A new process does not have it yet, when
    it restores: neither what a second optimizer keeps, nor an average that begins late."""
    for name, killed_at in (("undisturbed", -1), ("killed", 10)):
        run, out = str(tmp_path / f"run-{name}"), str(tmp_path / name)
        run_warm(
            [*LAUNCH, "--nproc", "2", "--run", run, str(OWN_OPTIMIZER), kind, out, str(killed_at)],
            timeout=180,
            check=True,
        )
    assert not facts(tmp_path / "run-killed", Quarantined)
    assert facts(tmp_path / "run-killed", Attached)[-1].step > 0
    ended = [torch.load(tmp_path / name / f"{rank}.pt") for name in ("undisturbed", "killed") for rank in (0, 1)]
    assert all(torch.equal(*pair) for other in ended[1:] for pair in zip(ended[0], other, strict=True))


def test_where_each_rank_keeps_a_state_of_its_own_in_plain_tensors_no_checkpoint_is_taken(tmp_path: Path) -> None:
    """One rank stores plain tensors for all: a resumed run would go on with the state of another rank's part."""
    run = tmp_path / "run"
    done = run_warm(
        [*LAUNCH, "--nproc", "2", "--run", str(run), str(OWN_OPTIMIZER), "by parts", str(tmp_path / "out"), "-1"],
        timeout=180, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == ExitCode.USAGE, done.stdout
    what = "the plain tensors (parameters that are not sharded, the state of the optimizer and of objects)"
    assert f"{what} of ranks 0, 1" in done.stdout
    assert "must keep it in DTensors" in done.stdout
    assert {fact.ranks for fact in facts(run, Drifted)} == {(0, 1)}
    assert {fact.step for fact in facts(run, Committed)} == {0}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("average of uneven parts", "is F32[2, 8] on rank 1, and F32[3, 8] on rank 0"),
        ("average of parts", "has other values on rank 1 than on rank 0"),
    ],
)
def test_ranks_that_keep_other_tensors_or_other_values_are_refused(tmp_path: Path, kind: str, what: str) -> None:
    """One rank stores for all, and which one follows from the tensors' sizes: else one may be stored by none, and a
    restore would mix what the ranks had."""
    done = run_warm(
        [
            *LAUNCH, "--nproc", "2", "--run", str(tmp_path / "run"), str(OWN_OPTIMIZER), kind, str(tmp_path / "out"),
            "-1",
        ],
        timeout=180, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert f"they are not: the tensor 'parts.0' of the AverageOfParts that is kept as 'average' {what}" in done.stdout
