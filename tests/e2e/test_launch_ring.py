"""`rollback launch --ring URL`: the supervisor fills the ring, and a machine that has nothing but the URL goes on."""

import json
import signal
from pathlib import Path

import pytest
from launching import Launch, launching, tree
from s3_server import serving_s3
from safetensors.numpy import load_file
from selection import soak
from toy import facts
from typer.testing import CliRunner
from waiting import wait_for

from rollback.cli import app
from rollback.errors import ExitCode
from rollback.facts.training import Attached, Drained, Finished, Stopped
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.rundir.paths import RunPaths

TINY = Path(__file__).parent / "jobs" / "tiny.py"


def elsewhere(launch: Launch, name: str) -> Launch:
    """The same job on a machine that has no run directory."""
    folder = launch.folder / name
    folder.mkdir()
    other = Launch(folder, False, launch.script)
    launch.started = other.started  # they end with it
    return other


def test_a_preempted_run_goes_on_from_the_url_alone(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/ring"
    with launching(tmp_path, with_torchrun=False, script=TINY) as launch:
        process = launch.start("--hold", "--ring", url)
        launch.wait_for_heartbeats(1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == ExitCode.RESUMABLE, output
        (stopped,) = facts(launch.run, Stopped)
        assert stopped.checkpoint in [fact.checkpoint for fact in launch.facts(Drained)]  # type: ignore[attr-defined]

        other = elsewhere(launch, "other")
        status, output = other.finish("--hold", "--ring", url)
        assert status == ExitCode.DONE, output
        assert "fetching the record of run" in output
        assert facts(other.run, Attached)[-1].step == stopped.step
        assert verify(ReadableRun.at(other.run)).exit_code == ExitCode.DONE

        runner = CliRunner()
        listed = json.loads(runner.invoke(app, ["ring", "list", url, "--json"]).stdout)
        assert listed["directory"] == url
        assert stopped.checkpoint in [entry["checkpoint"] for entry in listed["checkpoints"]]
        assert runner.invoke(app, ["ring", "verify", url]).exit_code == ExitCode.DONE
        unknown = runner.invoke(app, ["ring", "verify", url, "nosuch"])
        assert f"there is no checkpoint nosuch in {url}" in str(unknown.exception)
        output_file = tmp_path / "model.safetensors"
        exported = runner.invoke(app, ["ring", "export", url, "newest", "-o", str(output_file)])
        assert exported.exit_code == ExitCode.DONE, exported.output
        assert len(load_file(output_file)) == 2

        # The first machine comes back: what it has is older, and it takes what is newer.
        status, output = launch.finish("--hold", "--ring", url)
        assert status == ExitCode.DONE, output
        assert "is newer than the one in" in output
        shard = max((tmp_path / "ring" / "ring").glob("*/rank-00000.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        damaged = runner.invoke(app, ["ring", "verify", url])
        assert damaged.exit_code == ExitCode.FAILED
        assert shard.parent.name in damaged.stdout


def test_a_launch_with_another_url_fills_that_one_also_where_its_first_attempt_dies_before_it_attaches(
    tmp_path: Path,
) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, runpy\n"
        "if os.environ['ROLLBACK_ATTEMPT'] == '2':\n"
        "    os.kill(os.getpid(), 9)\n"
        f"runpy.run_path({str(TINY)!r}, run_name='__main__')\n"
    )
    with launching(tmp_path, with_torchrun=False, script=script) as launch:
        for ring in ("one", "another"):
            status, output = launch.finish("", "--ring", f"file://{tmp_path}/{ring}")
            assert status == ExitCode.DONE, output
        (*_, final) = facts(launch.run, Finished)
        assert (tmp_path / "another" / "ring" / str(final.checkpoint)).exists()


def test_a_final_state_that_does_not_get_to_the_url_is_kept_here_and_the_same_command_copies_it(tmp_path: Path) -> None:
    ring, away, script = tmp_path / "ring", tmp_path / "away", tmp_path / "leaves.py"
    script.write_text(
        "import os, runpy\n"
        "if os.environ['ROLLBACK_ATTEMPT'] == '1':\n"
        f"    os.rename({str(ring)!r}, {str(away)!r})\n"
        f"    open({str(ring)!r}, 'w').close()\n"
        f"runpy.run_path({str(TINY)!r}, run_name='__main__')\n"
    )
    with launching(tmp_path, with_torchrun=False, script=script) as launch:
        arguments = "", "--ring", f"file://{ring}"
        status, output = launch.finish(*arguments)
        assert status == ExitCode.IO, output
        (final,) = [fact.checkpoint for fact in facts(launch.run, Finished)]
        kept = RunPaths(launch.run).checkpoint(str(final))
        assert f"its final state is not at file://{ring} (" in output
        assert f"it is in {kept.relative_to(tmp_path)}, and the same command copies it" in output
        assert kept.exists()
        ring.unlink()
        away.rename(ring)
        status, output = launch.finish(*arguments)
        assert status == ExitCode.DONE, output
        assert final in [fact.checkpoint for fact in launch.facts(Drained) if fact.place == f"file://{ring}"]  # type: ignore[attr-defined]


def test_a_launch_that_is_refused_since_the_url_has_another_job_leaves_nothing_of_it_behind(tmp_path: Path) -> None:
    """It has been fetched by then: only the ranks know their job."""
    url = f"file://{tmp_path}/ring"
    with launching(tmp_path, with_torchrun=False, script=TINY) as launch:
        status, output = launch.finish("", "--ring", url)
        assert status == ExitCode.DONE, output
        new = elsewhere(launch, "new")
        status, output = new.finish("--width 5", "--ring", url)
        assert status == ExitCode.UNFIT, output
        assert "fetching the record of run" in output
        assert "belongs to another job" in output
        assert not new.run.exists(), tree(new.run)
        kept = elsewhere(launch, "kept")
        assert kept.finish("", "--ring", url)[0] == ExitCode.DONE
        before = tree(kept.run)
        assert kept.finish("--width 5", "--ring", url)[0] == ExitCode.UNFIT
        assert tree(kept.run) == before, "a run that was there stays"


@pytest.mark.parametrize("number", [signal.SIGTERM, *soak(signal.SIGINT)])
def test_a_stop_signal_ends_a_launch_that_still_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The bucket gives the record and no shard; each read of one is tried again for a minute."""
    with (
        serving_s3(monkeypatch, "bucket") as server,
        launching(tmp_path, with_torchrun=False, script=TINY) as launch,
    ):
        url = "s3://bucket/run"
        status, output = launch.finish("", "--ring", url)
        assert status == ExitCode.DONE, output
        server.refuses = lambda request: request.startswith("GET") and ".safetensors" in request
        other = elsewhere(launch, "other")
        process = other.start("", "--ring", url)
        wait_for(lambda: server.refused)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == ExitCode.RESUMABLE, output
        assert "told to stop while the newest state was fetched" in output
        server.refuses = lambda request: False
        status, output = other.finish("", "--ring", url)
        assert (status, "fetching checkpoint" in output) == (ExitCode.DONE, True), output


def test_a_stop_signal_ends_a_launch_whose_url_does_not_answer_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving_s3(monkeypatch, "bucket") as server,
        launching(tmp_path, with_torchrun=False, script=TINY) as launch,
    ):
        server.refuses = lambda request: True
        process = launch.start("", "--ring", "s3://bucket/run")
        wait_for(lambda: server.refused)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == ExitCode.RESUMABLE, output
        assert "told to stop while s3://bucket/run was looked at" in output
        assert not launch.run.exists()


def test_a_ring_that_cannot_be_used_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with launching(tmp_path, with_torchrun=False, script=TINY) as launch:
        for url, status, words in (
            ("nope://bucket/run", ExitCode.USAGE, "no file system is known"),
            ("bucket/run", ExitCode.USAGE, "is not a URL"),
            ("memory://run", ExitCode.USAGE, "no other process would find it"),
            ("gs://bucket/run", ExitCode.USAGE, "a package that cannot be imported"),
            ("s3://key:secret@bucket/run", ExitCode.USAGE, "names credentials"),
            ("file:///proc/run", ExitCode.IO, "rollback-probe"),
        ):
            found, output = launch.finish("", "--ring", url)
            assert (found, words in output) == (status, True), output
            assert "secret" not in output
            assert not launch.run.exists()
