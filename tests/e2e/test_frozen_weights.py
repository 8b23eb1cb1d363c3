"""Weights that nothing trains are stored once in a run, and a run with them is bit for bit what it was."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import toy
from job_results import JOB, Scenarios
from launching import Launch, launching
from safetensors.numpy import load_file
from toy import Base, Toy, facts, files, require_same, same_skips_from_the_start, stop_at, train
from typer.testing import CliRunner
from warm_server import run_warm

from checkpoints import damage
from rollback.checkpoints import ring
from rollback.checkpoints.format import manifest as manifests
from rollback.cli import app
from rollback.errors import ExitCode, NoUsableCheckpoint
from rollback.facts.training import Attached, Committed, Drifted, Dropped, Finished, Restored
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.rundir import identity, paths
from rollback.rundir.paths import RunPaths
from rollback.train.snapshots import frozen as room

FROZEN = Toy(base="frozen")
BASE = 32_768 * 9 * 4


def scenario(folder: Path, toy: Toy, **more: object) -> str:
    path = folder / "scenarios.json"
    path.write_text(json.dumps([{"name": "job", "toy": toy.to_json(), **more}]))
    return str(path)


def test_a_run_goes_on_from_the_url_alone_and_after_a_kill_with_its_frozen_weights_stored_once(tmp_path: Path) -> None:
    job, url = FROZEN.but(samples=240, nan=(13,)), f"file://{tmp_path}/url"
    with launching(tmp_path, with_torchrun=False, script=JOB) as launch:
        stopped, output = launch.finish(scenario(tmp_path, job, signal=[0, 25, signal.SIGTERM]), "--ring", url)
        assert stopped == ExitCode.RESUMABLE, output
        assert facts(launch.run, Restored)
        assert all(fact.bytes < BASE / 2 for fact in facts(launch.run, Committed))
        (tmp_path / "other").mkdir()
        other = Launch(tmp_path / "other", False, JOB)
        launch.started = other.started  # they end with it
        done, output = other.finish(scenario(tmp_path, job, signal=[0, 40, signal.SIGKILL, 2]), "--ring", url)
    assert done == ExitCode.DONE, output
    assert "fetching frozen weights" in output
    assert [bool(fact.checkpoint) for fact in facts(other.run, Attached)] == [False, True, True]
    ended = json.loads((tmp_path / "job-0.json").read_text())["portrait"]
    require_same(ended, same_skips_from_the_start(job, other.run, tmp_path / "fresh"), "killed, and from the URL")
    here, there = (list(place.iterdir()) for place in (other.paths.frozen, tmp_path / "url" / "frozen"))
    assert [path.name for path in here] == [path.name for path in there]
    for place in (str(other.run), url):
        assert CliRunner().invoke(app, ["ring", "verify", place]).exit_code == ExitCode.DONE
        assert "frozen weights, stored once: 1.1 MiB for" in CliRunner().invoke(app, ["ring", "list", place]).stdout
        exported = tmp_path / "model.safetensors"
        made = CliRunner().invoke(app, ["ring", "export", place, "final", "-o", str(exported), "--force"])
        assert made.exit_code == 0, made.output
    assert {name for name in load_file(exported) if "0.wide" in name} == {"0.wide.weight", "0.wide.bias"}
    (path,) = here
    damage(path)
    said = CliRunner().invoke(app, ["ring", "verify", str(other.run)])
    assert said.exit_code == ExitCode.NO_CHECKPOINT
    assert path.name in said.stdout


def test_weights_that_move_although_nothing_trains_them_are_restored_bit_for_bit(tmp_path: Path) -> None:
    job = Toy(base="slow", samples=480, nan=(87,)).with_settings(snapshot_every=40)
    ended = train(job, tmp_path / "run")
    first, dropped, *_ = facts(tmp_path / "run", Committed, Dropped)
    assert (first.step, dropped.step) == (0, 40)
    assert "0.wide.bias" in dropped.reason
    assert facts(tmp_path / "run", Committed)[1].step < 80, "the one that was dropped is made up for"
    assert facts(tmp_path / "run", Restored)
    require_same(ended, same_skips_from_the_start(job, tmp_path / "run", tmp_path / "fresh"), "slow weights")


def test_a_run_that_was_begun_by_an_older_version_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, run = FROZEN.but(samples=160), tmp_path / "run"
    monkeypatch.setattr(room, "LEAST", 1 << 40)
    monkeypatch.setattr(identity, "format_for", lambda ranks: 3)
    with pytest.raises(KeyboardInterrupt):
        train(job, run, hook=stop_at(25), log=tmp_path / "log")
    monkeypatch.undo()
    for name in ring.names(RunPaths(run)):
        write_as_format_3(RunPaths(run).checkpoint(name) / paths.MANIFEST)
    assert json.loads(RunPaths(run).identity.read_text())["format"] == 3
    ended = train(job, run, log=tmp_path / "log")
    require_same(ended, train(job, log=tmp_path / "undisturbed"), "begun by an older version")
    assert json.loads(RunPaths(run).identity.read_text())["format"] == paths.FORMAT, "an older one refuses it now"
    before, *_, after = facts(run, Committed)
    assert before.bytes > BASE > 2 * after.bytes


def write_as_format_3(path: Path) -> None:
    body = json.loads(path.read_text())
    del body["frozen"], body["check"]
    body["format"] = 3
    path.write_text(json.dumps({**body, "check": manifests.check_of(body)}))


class OtherBase(Base):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.wide.weight.data += 1.0


def test_other_frozen_weights_are_put_back_and_without_the_file_nothing_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, run = FROZEN.but(samples=160), RunPaths(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(job, run.root, hook=stop_at(25), log=tmp_path / "log")
    (file,) = run.frozen.iterdir()
    moved = file.rename(tmp_path / "moved")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(toy, "Base", OtherBase)
        before = files(run.root)
        with pytest.raises(NoUsableCheckpoint, match="frozen weights of the model"):
            train(job, run.root, log=tmp_path / "log")
        assert files(run.root) == before
        moved.rename(file)
        ended = train(job, run.root, log=tmp_path / "log")
    require_same(ended, train(job, log=tmp_path / "undisturbed"), "put back")


def test_without_the_file_a_script_that_makes_the_same_weights_goes_on_and_it_is_written_again(tmp_path: Path) -> None:
    job, run = FROZEN.but(samples=160), RunPaths(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(job, run.root, hook=stop_at(25), log=tmp_path / "log")
    (file,) = run.frozen.iterdir()
    file.unlink()
    ended = train(job, run.root, log=tmp_path / "log")
    require_same(ended, train(job, log=tmp_path / "undisturbed"), "the script made the same")
    assert list(run.frozen.iterdir()) == [file]
    assert verify(ReadableRun.at(run.root)).exit_code == ExitCode.DONE


KILLED = """
import os, signal, sys
from pathlib import Path
from toy import Toy, train
from rollback.checkpoints import ring
ring.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
train(Toy.from_json(sys.argv[1]), Path(sys.argv[2]), log=Path(sys.argv[3]))
"""


def test_a_kill_between_the_file_and_the_first_checkpoint_costs_the_beginning(tmp_path: Path) -> None:
    job, run, log = FROZEN.but(samples=80), RunPaths(tmp_path / "run"), tmp_path / "log"
    given = [sys.executable, "-c", KILLED, job.to_json(), str(run.root), str(log)]
    assert run_warm(given, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == -signal.SIGKILL
    (file,) = run.frozen.iterdir()
    assert not ring.names(run)
    half = file.with_name(f".{file.name}.tmp")
    half.write_bytes(file.read_bytes()[:1000])  # as a kill in the middle of it leaves
    ended = train(job, run.root, log=log)
    require_same(ended, train(job, log=tmp_path / "undisturbed"), "killed")
    assert list(run.frozen.iterdir()) == [file]


def test_the_state_at_the_end_is_kept_where_frozen_weights_have_moved_since_the_last_snapshot(tmp_path: Path) -> None:
    train(Toy(base="slow", samples=40).with_settings(snapshot_every=1000), tmp_path / "run")
    (finished,) = facts(tmp_path / "run", Finished)
    assert finished.checkpoint is not None
    assert len(facts(tmp_path / "run", Dropped)) == 1


@pytest.mark.soak
def test_two_ranks_and_a_bit_of_one_of_them(tmp_path: Path) -> None:
    """NaN, weights that move, and one bit of a frozen weight of one replica."""
    scenarios = Scenarios(tmp_path)
    job = FROZEN.but(samples=800, sampler="distributed")
    for name, bad in {"nan": job.but(nan=(57,), nan_rank=1), "slow": job.but(base="slow", nan=(57,))}.items():
        scenarios.add(name, bad)
        scenarios.add(f"{name}, fresh", bad, skips_of=str(scenarios.run(name)))
        scenarios.add("drift", job, flip=[1, 33])
    scenarios.torchrun(2)
    for name in ("nan", "slow"):
        assert facts(scenarios.run(name), Restored)
        for rank in (0, 1):
            require_same(scenarios.portrait(name, rank), scenarios.portrait(f"{name}, fresh", rank), name)
    assert facts(scenarios.run("drift"), Drifted)[0].ranks == (0, 1)
    assert all(fact.bytes < BASE / 2 for fact in facts(scenarios.run("nan"), Committed))
