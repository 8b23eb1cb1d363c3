"""`rollback doctor`: what it measures it removes, and what it concludes follows from what it measured."""

import errno
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from checkpoints import write_checkpoint
from recorded_run import RecordedRun
from rollback.checkpoints import ring
from rollback.cli import app
from rollback.cli.options.values import parse_size
from rollback.doctor import machine, storage
from rollback.doctor.examine import examine
from rollback.doctor.findings import DoctorReport, size
from rollback.doctor.machine import judge_clock, judge_cores, judge_limits, judge_python, judge_torch
from rollback.doctor.storage import (
    Disk,
    Mount,
    judge_fast_tier,
    judge_kind,
    judge_room,
    judge_save,
    judge_syncs,
    look_at_disk,
    look_at_fast_tier,
    look_at_ring,
    measure,
)
from rollback.environment import ENV_FAST_TIER
from rollback.errors import UsageError
from rollback.ring.url.store import Store
from rollback.rundir.paths import RunPaths

GIB = 1 << 30
SHM = Path("/dev/shm")


def disk(**changed: Any) -> Disk:
    fields: dict[str, Any] = {
        "directory": Path("/data"), "mount": Mount("/data", "ext4", "/dev/sda"), "free": 100 * GIB, "rate": GIB,
        "syncs": (0.004,),
    }  # fmt: skip
    return Disk(**{**fields, **changed})


def on(kind: str) -> Disk:
    return disk(mount=Mount("/data", kind, "source"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch in a process of its own takes seconds, which one test pays; so does writing a quarter GiB."""
    monkeypatch.setattr(storage, "_FIRST", 1 << 20)
    monkeypatch.setattr(storage, "_LARGEST", 4 << 20)
    monkeypatch.setattr(storage, "_OBJECT", 1 << 16)
    told = '{"torch": "2.10.0", "devices": [], "cuda": null, "hip": null, "nccl": null, "distributed": true}'
    monkeypatch.setattr(machine, "_PROBE", f"print({told!r})")


# --- what is concluded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (judge_fast_tier(SHM, 100 * GIB, GIB, 6), "ok", "7 slots"),
        (judge_fast_tier(SHM, 10 * GIB, GIB, 6), "warn", "5 slots of the 7"),
        (judge_fast_tier(SHM, 7 * GIB, GIB, 6), "warn", "straight to the disk"),
        (judge_fast_tier(SHM, 64 << 20, None, 6), "warn", "64.0 MiB"),
        (judge_fast_tier(SHM, 64 * GIB, None, 6), "ok", "64.0 GiB"),
        (judge_kind(on("ext4")), "ok", "ext4"),
        (judge_kind(on("tmpfs")), "warn", "restart of the machine"),
        (judge_kind(on("overlay")), "warn", "goes with the container"),
        (judge_kind(on("nfs4")), "warn", "server"),
        (judge_kind(on("fuse.s3fs")), "warn", "server"),
        (judge_room(disk(free=8 * GIB), GIB, 6), "ok", "take 7.0 GiB"),
        (judge_room(disk(free=5 * GIB), GIB, 6), "warn", "5.0 GiB free"),
        (judge_room(disk(free=GIB), GIB, 6), "fail", "1.0 GiB free"),
        (judge_room(disk(free=0, rate=None), None, 6), "fail", "0 bytes free"),
        (judge_kind(disk(rate=None)), "ok", "which is full"),
        (judge_syncs(disk(syncs=(0.004, 0.2, 0.004))), "ok", "4.00 ms"),
        (judge_syncs(disk(syncs=(5e-6,))), "warn", "faster than a device can be"),
        (judge_syncs(disk(syncs=(0.5,))), "warn", "500.00 ms"),
        (judge_save(60 * GIB, GIB, 60.0, "disk"), "warn", "about 60.0 s"),
        (judge_save(61 * GIB, GIB, 60.0, "disk"), "fail", "about 61.0 s"),
        (judge_save(GIB, GIB, 60.0, "disk"), "ok", "about 1.0 s"),
        (judge_cores(8, 4), "ok", "8 processors for 4 ranks"),
        (judge_cores(1.5, 4), "warn", "1.5 processors"),
        (judge_cores(8, None), "ok", "--nproc"),
        (judge_python((3, 11, 9)), "warn", "a loader's worker hangs"),
        (judge_python((3, 10, 15)), "ok", "Python 3.10.15"),
        (judge_python((3, 12, 0)), "ok", "Python 3.12.0"),
        (judge_limits(1024, 1 << 20, -1), "warn", "1024 open files"),
        (judge_limits(65536, 65536, -1), "ok", "65536"),
        (judge_limits(-1, -1, 1 << 30), "fail", "1.0 GiB at most"),
        (judge_clock(5), "warn", "not synchronised"),
        (judge_clock(0), "ok", "synchronised"),
        (judge_clock(-1), "ok", "cannot be asked"),
    ],
)
def test_what_was_measured_is_judged(finding: Any, level: str, words: str) -> None:
    assert finding.level == level, finding
    assert words in finding.found
    assert (finding.fix is None) == (level == "ok")  # whoever is warned is told what to do


def test_torch_is_judged_by_what_it_says_of_itself() -> None:
    told: dict[str, Any] = {
        "torch": "2.13.0+cu130", "cuda": "13.0", "hip": None, "devices": [["NVIDIA H100", 80 * GIB]] * 8,
        "nccl": "2.27.3", "distributed": True,
    }  # fmt: skip
    assert judge_torch(told).level == "ok"
    assert "8 x NVIDIA H100 (80.0 GiB), CUDA 13.0, NCCL 2.27.3" in judge_torch(told).found
    assert judge_torch({**told, "torch": "2.9.1"}).level == "fail"
    assert judge_torch({**told, "nccl": None}).level == "warn"
    assert judge_torch({**told, "distributed": False}).level == "warn"


def test_what_is_not_known_is_not_guessed() -> None:
    assert judge_save(None, GIB, 60.0, "disk") is None
    assert judge_save(GIB, None, 60.0, "disk") is None


@pytest.mark.parametrize(
    ("text", "count"), [("12GiB", 12 << 30), ("800MB", 800_000_000), ("1.5e9", 1_500_000_000), ("4k", 4000), ("7", 7)]
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text, "--state-bytes") == count


@pytest.mark.parametrize("text", ["", "big", "1.2.3G", "-5G", "1e999", "5XB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text, "--state-bytes")


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    measured = measure(tmp_path)
    assert measured.rate is not None
    assert measured.rate > 0
    assert all(seconds >= 0 for seconds in measured.syncs)
    assert list(tmp_path.iterdir()) == []


def test_of_a_disk_without_room_for_a_measurement_no_rate_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for root on a disk of which only the reserve is left: small files can be written there, and no checkpoint."""
    monkeypatch.setattr(storage, "_FIRST", 0)
    _, rate = look_at_disk(tmp_path, GIB, 6)
    assert rate is None
    assert judge_save(GIB, rate, 60.0, "disk") is None


def test_a_directory_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [finding], rate = look_at_disk(tmp_path / "file" / "run", None, 6)
    assert (finding.level, rate) == ("fail", None)
    assert finding.fix


def test_a_tmpfs_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert look_at_fast_tier(tmp_path / "missing", None, 6).level == "warn"
    told = look_at_fast_tier(tmp_path / "file", None, 6)
    assert (told.level, f"{tmp_path}/file is not a directory" in told.found) == ("warn", True)


def test_a_ring_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    finding, rate = look_at_ring(f"file://{tmp_path}")
    assert finding.level == "ok", finding
    assert rate
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_two_doctors_at_one_ring_have_objects_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, keys = Store.put, []

    def noted(store: Store, key: str, data: bytes) -> None:
        keys.append(key)
        put(store, key, data)

    monkeypatch.setattr(Store, "put", noted)
    for _ in range(2):
        look_at_ring(f"file://{tmp_path}")
    assert len({*keys}) == 4, "a probe and an object of each"


@pytest.mark.parametrize("url", ["not-a-url", "nosuch://bucket/x", "file:///proc/nothing/here"])
def test_a_ring_that_cannot_be_used_fails_with_what_to_do(url: str) -> None:
    finding, rate = look_at_ring(url)
    assert (finding.level, rate) == ("fail", None)
    assert finding.fix


def test_the_whole_examination_makes_no_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    report = examine(run, state_bytes=GIB, ranks=os.cpu_count(), grace=60.0, base=tmp_path)
    assert {finding.topic for finding in report.findings} >= {
        "torch", "fast tier", "run directory", "disk space", "sync", "saving to disk", "cores", "limits", "clock"
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_memory_is_asked_for_what_the_ranks_of_this_host_store(tmp_path: Path) -> None:
    """Of two ranks each has its own host: its slots hold one shard, the ring's disk both."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write_checkpoint(paths, 0, 10)
    shards = ring.manifests(paths)[0][0].shards
    assert shards[0].size == shards[1].size
    for ranks, bytes_here in ((1, shards[0].size), (2, 2 * shards[0].size), (None, 2 * shards[0].size)):
        report = examine(paths.root, ranks=ranks, grace=60.0, base=tmp_path)
        (tier,) = [finding.found for finding in report.findings if finding.topic == "fast tier"]
        assert f"a checkpoint has {size(bytes_here)}" in tier
        assert report.state_bytes == 2 * shards[0].size


def test_what_a_run_directory_tells_need_not_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch, world_size=3)
    assert examine(run.paths.root, grace=60.0).ranks == 3
    run.paths.fast_pointer.write_text('{"hosts": 2}')
    assert examine(run.paths.root, grace=60.0).ranks == 2
    run.paths.identity.write_text("{")
    report = examine(run.paths.root, grace=60.0)
    assert [finding.topic for finding in report.findings if finding.level == "fail"] == ["run"]


# --- the command ------------------------------------------------------------------------------------------------------


def doctor(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_the_exit_code_is_1_only_if_something_fails(tmp_path: Path) -> None:
    good = doctor("--run", tmp_path, "--json")
    assert DoctorReport.model_validate_json(good.stdout).exit_code == good.exit_code == 0
    bad = doctor("--run", tmp_path, "--ring", "nosuch://x/y", "--json")
    assert bad.exit_code == 1
    assert [found["topic"] for found in json.loads(bad.stdout)["findings"] if found["level"] == "fail"] == ["ring"]
    assert "→" in doctor("--run", tmp_path, "--ring", "nosuch://x/y").stdout
    assert isinstance(doctor("missing.py").exception, UsageError)


def test_a_script_comes_with_its_arguments_as_for_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    done = doctor("--nproc", 1, "--json", "train.py", "--lr", "3e-4", "data", "--nproc", "8")
    report = DoctorReport.model_validate_json(done.stdout)
    assert (Path(report.run), report.ranks) == (Path("runs/train"), 1)


def test_hostile_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    place = tmp_path / "\x1b[31m[bold]x"
    place.mkdir()
    shown = doctor("--run", place).stdout
    assert "\x1b[31m" not in shown
    assert "\\x1b[31m[bold]x" in "".join(shown.split())


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("raise OSError('no libtorch')", "fail"),
        ("import os; os.write(2, b'no libtorch in Malm\\xf6'); raise SystemExit(1)", "fail"),
        (None, "ok"),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, code: str | None, level: str) -> None:
    monkeypatch.undo()
    if code:
        monkeypatch.setattr(machine, "_PROBE", code)
    finding = machine.look_at_torch()
    assert finding.level == level, finding
    assert ("no libtorch" in finding.found) == bool(code)


def test_where_no_process_can_be_started_that_is_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    finding = machine.look_at_torch()
    assert (finding.level, "Resource temporarily unavailable" in finding.found) == ("fail", True)


def test_a_file_of_the_working_directory_is_not_taken_for_a_module_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the user')")
    finding = machine.look_at_torch()
    assert finding.level == "ok", finding


def test_where_no_temporary_file_can_be_made_that_is_the_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.look_at_temporary_files().level == "ok"
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere/at/all"])
    finding = machine.look_at_temporary_files()
    assert (finding.level, "/nowhere/at/all" in finding.found, "TMPDIR" in (finding.fix or "")) == ("fail", True, True)


@pytest.mark.parametrize(("code", "fix"), [("import nothing_like_it", "install torch"), ("1 / 0", "import torch")])
def test_what_to_do_follows_from_why_torch_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, code: str, fix: str
) -> None:
    monkeypatch.setattr(machine, "_PROBE", code)
    assert fix in (machine.look_at_torch().fix or "")


def test_a_link_on_the_way_to_the_run_directory_is_followed_as_by_a_launch(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    report = examine(tmp_path / "scratch" / "run", grace=60.0, base=tmp_path)
    (found,) = [finding for finding in report.findings if finding.topic == "run directory"]
    assert found.found.startswith(f"{tmp_path}/disk is on")
    assert report.run == f"{tmp_path}/scratch/run"
    assert not [*(tmp_path / "disk").iterdir()]


def test_a_fast_tier_that_is_switched_off_is_not_praised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_FAST_TIER, "off")
    report = examine(tmp_path / "run", state_bytes=100, grace=60.0)
    (found,) = [finding for finding in report.findings if finding.topic == "fast tier"]
    assert (found.level, found.found) == ("ok", "off (ROLLBACK_FAST_TIER): the ranks will write straight to the disk")


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert isinstance(CliRunner().invoke(app, ["doctor"]).exception, UsageError)
