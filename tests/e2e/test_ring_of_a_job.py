"""What a real run leaves in its ring is proved, what is damaged is named, and its weights load elsewhere."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from attempts import Forker
from safetensors.torch import load_file
from torch import nn
from toy import Toy, facts, require_same, train, weights
from typer.testing import CliRunner

from checkpoints import damage
from rollback.checkpoints import ring, tiers
from rollback.checkpoints.format import layout
from rollback.checkpoints.format.manifest import ShardRecord
from rollback.checkpoints.format.shard import write_shard
from rollback.cli import app
from rollback.errors import ExitCode, RunDoesNotFit
from rollback.facts.training import Attached
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.rundir.paths import RunPaths


def test_the_weights_of_a_checkpoint_load_into_the_module_and_are_those_of_that_step(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "model.safetensors"
    seen: dict[str, torch.Tensor] = {}

    def hook(guard: object, position: int) -> None:
        if position == 30:
            seen.update({name: value.clone() for name, value in guard._loop.state.model.state_dict().items()})  # type: ignore[attr-defined]

    train(Toy(samples=200), run, hook=hook)
    (name,) = [name for name in ring.names(RunPaths(run)) if name.endswith("-s00000030")]
    done = CliRunner().invoke(app, ["ring", "export", str(run), name, "-o", str(output)])
    assert done.exit_code == 0, done.output
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    module.load_state_dict(load_file(output), strict=True)
    for key, value in module.state_dict().items():
        assert torch.equal(value, seen[key]), key


def test_everything_that_a_run_commits_is_proved_intact(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for job in (Toy(samples=200, scaler=True, overflow=(20,)), Toy(samples=200, loader="stateful")):
        path = run / job.loader
        train(job, path)
        found = verify(ReadableRun.at(path))
        assert found.exit_code == ExitCode.DONE, found
        assert found.intact == len(ring.names(RunPaths(path))) > 2


def test_damage_that_verify_names_is_what_the_next_start_passes_over(tmp_path: Path) -> None:
    """One flipped bit, one missing shard, one truncated manifest."""

    def stop(_guard: object, position: int) -> None:
        if position == 45:
            raise KeyboardInterrupt

    run, toy = tmp_path / "run", Toy(samples=400)
    with pytest.raises(KeyboardInterrupt):
        train(toy, run, hook=stop)
    *_, intact, flipped, missing, truncated = (RunPaths(run).checkpoint(name) for name in ring.names(RunPaths(run)))
    damage(flipped / "rank-00000.safetensors")
    (missing / "rank-00000.safetensors").unlink()
    (truncated / "manifest.json").write_bytes((truncated / "manifest.json").read_bytes()[:-30])
    said = CliRunner().invoke(app, ["ring", "verify", str(run)])
    assert said.exit_code == ExitCode.FAILED
    for checkpoint, words in (
        (flipped, "has hash"),
        (missing, "No such file"),
        (truncated, "manifest.json is damaged"),
    ):
        assert [line for line in said.stdout.splitlines() if checkpoint.name in line and words in line]
    train(toy, run)
    assert facts(run, Attached)[-1].checkpoint == intact.name
    assert verify(ReadableRun.at(run)).exit_code == ExitCode.DONE


def test_what_a_crash_leaves_in_memory_alone_is_proved_and_the_next_start_goes_on_from_it(tmp_path: Path) -> None:
    """The same three faults in slots; the run directory has no checkpoint."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    toy = Toy().with_settings(fast_tier=str(memory))
    with Forker() as forker:
        assert forker.status(toy, run, log=str(tmp_path / "log"), signal=[47, signal.SIGKILL]) == -signal.SIGKILL
    shutil.rmtree(run / "ring")
    assert verify(ReadableRun.at(run)).exit_code == ExitCode.DONE
    *_, intact, flipped, missing, truncated = tiers.locate(RunPaths(run))
    damage(flipped.directory / "rank-00000.safetensors")
    (missing.directory / "rank-00000.safetensors").unlink()
    manifest = truncated.directory / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-30])
    said = CliRunner().invoke(app, ["ring", "verify", str(run)])
    assert said.exit_code == ExitCode.FAILED, said.output
    for named, words in (
        (flipped.name, "has hash"),
        (missing.name, "No such file"),
        (truncated.directory.name, "manifest.json is damaged"),
    ):
        assert [line for line in said.stdout.splitlines() if named in line and words in line]
    ended = train(toy, run, log=tmp_path / "log")
    assert facts(run, Attached)[-1].checkpoint == intact.name
    require_same(ended, train(Toy(), log=tmp_path / "undisturbed-log"), "went on from memory")


@pytest.mark.parametrize("tree", ["[" * 100_000, "{}", "[]", '{"$set": 1}', '{"model": 1}', '{"$tensor": []}'])
def test_a_tree_that_is_none_of_ours_is_passed_over_at_the_next_start(
    tmp_path: Path, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size and hashes were made to fit: whoever wrote it meant harm."""
    run, toy = tmp_path / "run", Toy(samples=200)
    train(toy.but(max_steps=25), run)
    *_, sound, hostile = ring.manifests(RunPaths(run))[0]
    directory = RunPaths(run).checkpoint(hostile.name)
    (directory / "rank-00000.safetensors").unlink()
    monkeypatch.setattr(layout, "require_shallow", lambda text: None)
    written = write_shard(directory / "rank-00000.safetensors", [], {"shared": tree, "local": "{}"})
    record = ShardRecord(file="rank-00000.safetensors", size=written.size, hash=written.digest)
    (directory / "manifest.json").write_bytes(hostile.model_copy(update={"shards": (record,)}).to_json())
    assert verify(ReadableRun.at(run)).exit_code == ExitCode.FAILED
    train(toy, run)
    assert facts(run, Attached)[-1].checkpoint == sound.name


def test_a_guard_that_is_refused_since_the_url_has_another_job_leaves_nothing_of_it_behind(tmp_path: Path) -> None:
    toy, new = Toy().with_settings(ring=f"file://{tmp_path}/bucket"), tmp_path / "new"
    train(toy, tmp_path / "run")
    with pytest.raises(RunDoesNotFit, match="belongs to another job"):
        train(toy.but(samples=toy.samples + 8), new)
    assert {path.name for path in new.rglob("*")} == {"lock"}
    require_same(weights(train(toy, new)), weights(train(Toy())), "the job of the URL")
