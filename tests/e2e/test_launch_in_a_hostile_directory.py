"""`rollback launch` in a run directory that somebody else has prepared, and with a seal."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import Launch, launching

from rollback.rundir.heartbeats import Heartbeat, write_heartbeat
from rollback.rundir.identity import JobIdentity, new_identity
from rollback.rundir.paths import FORMAT


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path, with_torchrun=False) as launch:
        yield launch


@pytest.mark.parametrize("run_id", [".ssh", "projects"])
def test_a_hostile_run_directory_harms_nobody_who_launches_in_it(job: Launch, tmp_path: Path, run_id: str) -> None:
    paths, home, private = job.paths, tmp_path / "home", tmp_path / "private"
    (home / run_id).mkdir(parents=True)
    (home / run_id).chmod(0o700)
    (home / run_id / "id_ed25519").write_text("a key")
    private.write_text("a secret\nwithout an end")
    private.chmod(0o600)
    paths.metrics.parent.mkdir(parents=True)
    paths.ranks.mkdir()
    identity = new_identity(JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={})).model_dump(
        mode="json"
    )
    paths.identity.write_text(json.dumps({**identity, "run_id": run_id}))
    paths.fast_pointer.write_text(json.dumps({"format": FORMAT, "directory": str(home / run_id), "hosts": 1}))
    paths.metrics.symlink_to(private)
    if run_id == ".ssh":
        paths.holder.symlink_to(private)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as bystander:
        beat = Heartbeat(
            pid=bystander.pid, host=os.uname().nodename, attempt=1, step=1, batch=1, doing="training",
            monotonic=time.monotonic(), created=psutil.Process(bystander.pid).create_time(),
        )  # fmt: skip
        write_heartbeat(paths.heartbeat(3), beat)
        code, output = job.finish("finish")
        assert bystander.poll() is None
        bystander.kill()
    assert code == (74 if run_id == ".ssh" else 0), output
    assert (home / run_id / "id_ed25519").read_text() == "a key"
    assert private.read_text() == "a secret\nwithout an end"
    assert private.stat().st_mode & 0o777 == 0o600
    written = [path for path in paths.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not any(b"a secret" in path.read_bytes() for path in written)


def test_a_sealed_run_goes_on_with_its_key_only(job: Launch, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(hashlib.sha256(b"key").digest())
    key.chmod(0o600)
    code, output = job.finish("finish", "--seal", str(key))
    assert code == 0, output
    for journal in (job.paths.train_journal, job.paths.supervisor_journal):
        lines = journal.read_text().splitlines()
        assert lines
        assert all("seal" in json.loads(line) for line in lines)
    before = {path: path.read_bytes() for path in job.paths.root.rglob("*") if path.is_file()}
    assert not any(key.read_bytes() in content for content in before.values())
    code, output = job.finish("finish", "--run", str(job.run))
    assert code == 78, output
    assert "--seal KEYFILE" in output
    assert {path: path.read_bytes() for path in job.paths.root.rglob("*") if path.is_file()} == before
    code, output = job.finish("finish", "--seal", str(key))
    assert code == 0, output
    key.chmod(0o644)
    code, output = job.finish("finish", "--seal", str(key))
    assert code == 2, output


READ_BY_A_LAUNCH = {
    "run.json": (lambda paths: paths.identity, 74),
    "supervisor.jsonl": (lambda paths: paths.supervisor_journal, 0),  # a torn last line, as a crash leaves it
    "heartbeat": (lambda paths: paths.heartbeat(0), 0),
    "fast tier": (lambda paths: paths.fast_pointer, 0),
    "request": (lambda paths: paths.request("000000-5d0c6f1a"), 0),
}


@pytest.mark.parametrize("file", READ_BY_A_LAUNCH)
def test_no_content_of_a_file_is_a_traceback_of_a_launch(job: Launch, file: str) -> None:
    place, expected = READ_BY_A_LAUNCH[file]
    place(job.paths).parent.mkdir(parents=True, exist_ok=True)
    place(job.paths).write_bytes(b"[" * 60_000)
    code, output = job.finish("finish")
    assert code == expected, output
    assert "Traceback" not in output
