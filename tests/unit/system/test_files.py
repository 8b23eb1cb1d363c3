"""A run directory that somebody else has written: nothing outside of it is read, changed, removed or ended."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from checkpoints import write_checkpoint
from rollback.checkpoints import ring, tiers
from rollback.checkpoints.fast_tier import slots
from rollback.environment import ENV_RUN, ENV_SUPERVISOR
from rollback.errors import RollbackError, RunDirectoryError
from rollback.facts.training import Finished, Window
from rollback.rundir.heartbeats import Heartbeat, read_heartbeats, write_heartbeat
from rollback.rundir.identity import JobIdentity, new_identity, read_identity, write_identity
from rollback.rundir.journal.journal import Journal, read_journal
from rollback.rundir.paths import FORMAT, RunPaths
from rollback.rundir.requests import Request, read_request, submit
from rollback.supervisor.claim import Claim
from rollback.supervisor.torchrun.processes import leftovers, living_ranks
from rollback.system import files
from rollback.system.durable import open_regular, write_file
from rollback.system.lines import LineWriter
from rollback.system.processes import start_of
from rollback.train.data.draw_log import DrawLog
from rollback.train.drill import _FullDisk


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    return paths


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Somebody's file, outside of the run directory."""
    path = tmp_path / "private"
    path.write_text("a secret\nwithout an end")
    path.chmod(0o600)
    return path


def name_run(paths: RunPaths, run_id: str) -> None:
    """A run.json with that id, as another program would write it."""
    identity = new_identity(JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={})).model_dump(
        mode="json"
    )
    paths.identity.write_text(json.dumps({**identity, "run_id": run_id}))


def point(paths: RunPaths, directory: Path) -> None:
    paths.fast_pointer.write_text(json.dumps({"format": FORMAT, "directory": str(directory), "hosts": 1}))


def belongs_to(paths: RunPaths, directory: Path) -> None:
    (directory / "tier.json").write_text(json.dumps({"format": FORMAT, "run": str(paths.root)}))


@pytest.mark.parametrize("run_id", [".ssh", "projects"])
@pytest.mark.parametrize("says_whose_it_is", [True, False])
def test_a_directory_that_a_run_directory_points_to_is_not_removed(
    paths: RunPaths, tmp_path: Path, run_id: str, says_whose_it_is: bool
) -> None:
    home = tmp_path / run_id
    home.mkdir(mode=0o700)
    (home / "id_ed25519").write_text("a key")
    name_run(paths, run_id)
    point(paths, home)
    if says_whose_it_is:
        belongs_to(paths, home)
    with contextlib.suppress(RollbackError):
        tiers.release(paths, (), None)
    assert (home / "id_ed25519").read_text() == "a key"


def test_a_run_id_that_is_no_name_is_refused(paths: RunPaths) -> None:
    name_run(paths, ".ssh")
    with pytest.raises(RunDirectoryError, match="run_id"):
        read_identity(paths)


def test_of_a_fast_tier_goes_what_we_write_and_nothing_else(paths: RunPaths, tmp_path: Path) -> None:
    write_identity(
        paths, identity := new_identity(JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={}))
    )
    tier = slots.tier_of(tmp_path / "memory", identity.run_id)
    tier.root.parent.parent.mkdir()
    slots.claim(tier, paths.root)
    slots.map_shard(tier, 0, 0, 4096).close()
    slots.map_shard(tier, 1, 0, 4096).close()
    (tier.slot(1) / "thesis.tex").write_text("years of work")
    tiers.point_to_fast_tier(paths, tier)
    assert tiers.release(paths, (), None)
    assert [path.name for path in sorted(tier.root.rglob("*"))] == ["slot-01", "thesis.tex", "tier.json"]
    (tier.slot(1) / "thesis.tex").unlink()
    tiers.release(paths, (), None)
    assert not tier.root.exists()


def test_of_a_checkpoint_that_is_evicted_goes_what_we_write_and_nothing_else(paths: RunPaths) -> None:
    name = write_checkpoint(paths, 1, 10)
    folder = paths.checkpoint(name) / "notes"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    ring.evict(paths, name)
    assert ring.names(paths) == []
    assert [path.read_text() for path in paths.ring.rglob("*.tex")] == ["years of work"]
    assert not list(paths.ring.rglob("*.safetensors"))


@pytest.fixture
def bystander() -> Iterator[psutil.Process]:
    """A process that has nothing to do with any run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def heartbeat_of(process: psutil.Process) -> Heartbeat:
    return Heartbeat(
        pid=process.pid, host=os.uname().nodename, attempt=1, step=1, batch=1, doing="training",
        monotonic=time.monotonic(), start=start_of(process.pid) or "", looked=time.monotonic(),
    )  # fmt: skip


def test_a_process_that_only_a_heartbeat_names_is_not_ended(paths: RunPaths, bystander: psutil.Process) -> None:
    paths.ranks.mkdir()
    write_heartbeat(paths.heartbeat(0), heartbeat_of(bystander))
    assert leftovers(paths) == []
    assert living_ranks(read_heartbeats(paths.ranks), paths) == {}


def test_a_rank_that_this_launch_has_started_is_found_by_its_heartbeat(paths: RunPaths) -> None:
    paths.ranks.mkdir()
    environment = {**os.environ, ENV_RUN: str(paths.root), ENV_SUPERVISOR: f"{os.getpid()}:1.0"}
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], env={})"
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE) as torchrun:
        while not (children := psutil.Process(torchrun.pid).children()):
            time.sleep(0.01)
        (rank,) = children  # its own environment says nothing, as that of a program that has given itself a title
        write_heartbeat(paths.heartbeat(0), heartbeat_of(rank))
        assert living_ranks(read_heartbeats(paths.ranks), paths) == {0: rank}
        torchrun.kill()
        rank.kill()


def writes_metrics(paths: RunPaths) -> None:
    LineWriter(paths.metrics).close()


def writes_a_journal(paths: RunPaths) -> None:
    journal = Journal(paths.train_journal, 1)
    journal.append(Finished(step=1, batch=1))
    journal.close()


def writes_draws(paths: RunPaths) -> None:
    DrawLog(paths.draws(0), afresh=True).close()


def takes_the_run_directory(paths: RunPaths) -> None:
    Claim(paths).undo()


def writes_an_identity(paths: RunPaths) -> None:
    write_identity(paths, new_identity(JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={})))


WRITERS: dict[str, tuple[Callable[[RunPaths], None], Callable[[RunPaths], Path]]] = {
    "metrics": (writes_metrics, lambda paths: paths.metrics),
    "journal": (writes_a_journal, lambda paths: paths.train_journal),
    "draws": (writes_draws, lambda paths: paths.draws(0)),
    "holder": (takes_the_run_directory, lambda paths: paths.holder),
    "lock": (takes_the_run_directory, lambda paths: paths.lock),
    "identity": (writes_an_identity, lambda paths: paths.identity),
}


@pytest.mark.parametrize("kind", ["link", "hard link"])
@pytest.mark.parametrize("which", WRITERS)
def test_what_a_link_leads_to_is_neither_changed_nor_shown(
    paths: RunPaths, private: Path, which: str, kind: str
) -> None:
    write, place = WRITERS[which]
    target = place(paths)
    target.parent.mkdir(exist_ok=True)
    target.symlink_to(private) if kind == "link" else os.link(private, target)
    before = private.stat()
    with contextlib.suppress(OSError, RollbackError):
        write(paths)
    assert private.read_text() == "a secret\nwithout an end"
    assert private.stat().st_mode == before.st_mode
    shown = [path for path in paths.root.rglob("*") if path.is_file() and not path.samefile(private)]
    assert not any("a secret" in path.read_text() for path in shown)


@pytest.mark.parametrize("by_the_kernel", [True, False])
def test_no_part_of_a_path_below_the_run_directory_is_a_link(
    paths: RunPaths, tmp_path: Path, by_the_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_the_kernel:
        monkeypatch.setattr(files, "_open_directory", files._walk_to)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.jsonl").write_text("theirs")
    for folder in ("metrics", "ring"):
        (paths.root / folder).symlink_to(elsewhere)
    with pytest.raises(files.NotAFileOfOurs, match="symbolic link"):
        LineWriter(paths.metrics)
    with pytest.raises(OSError, match="symbolic link"):
        ring.begin_writing(paths, "c000001-s00000010", 1)
    with pytest.raises(OSError, match="symbolic link"):
        write_file(paths.metrics, b"ours")
    assert [path.name for path in elsewhere.iterdir()] == ["train.jsonl"]
    assert (elsewhere / "train.jsonl").read_text() == "theirs"


def test_the_run_directory_itself_may_be_reached_over_links(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    paths = RunPaths(tmp_path / "runs" / "train")
    writes_a_journal(paths)
    assert (tmp_path / "scratch" / "train" / "journal" / "train.jsonl").is_file()
    assert len(read_journal(paths.train_journal).records) == 1


@pytest.mark.parametrize("which", WRITERS)
def test_nobody_waits_for_a_pipe_in_the_place_of_a_file(paths: RunPaths, which: str) -> None:
    write, place = WRITERS[which]
    target = place(paths)
    target.parent.mkdir(exist_ok=True)
    os.mkfifo(target)
    with contextlib.suppress(OSError, RollbackError):
        write(paths)
    if target.is_fifo():
        with pytest.raises((OSError, ValueError), match="regular file"):
            open_regular(target)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_stranger_s_file_where_everybody_may_write_is_not_believed(paths: RunPaths) -> None:
    paths.root.chmod(0o1777)
    paths.holder.write_text("{}")
    os.chown(paths.holder, 12345, 12345)
    with pytest.raises(ValueError, match="belongs to user 12345"):
        open_regular(paths.holder)
    with pytest.raises(RunDirectoryError, match="belongs to user 12345"):
        Claim(paths)
    paths.root.chmod(0o2770)  # a group's: what its members write is believed
    assert open_regular(paths.holder).read() == b"{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(
    ("mode", "owner", "believed"),
    [(0o755, 0, True), (0o1777, 0, False), (0o1777, 12345, True), (0o777, 0, True)],
    ids=["its owner's alone", "everybody's, sticky", "the stranger's own run", "shared by all, as under umask 000"],
)
def test_nor_is_what_lies_in_a_stranger_s_directory(paths: RunPaths, mode: int, owner: int, believed: bool) -> None:
    name = submit(paths, Request(order="skip", skip=Window(first=3, last=5), who="a stranger", at="now"))
    for path in (paths.requests, paths.request(name)):
        os.chown(path, 12345, 12345)
    paths.root.parent.chmod(0o1777)  # as /tmp: where a run directory lies counts for nothing
    paths.root.chmod(mode)
    os.chown(paths.root, owner, owner)
    if believed:
        assert read_request(paths, name).who == "a stranger"
    else:
        with pytest.raises(ValueError, match=f"{paths.requests} belongs to user 12345"):
            read_request(paths, name)


def test_a_disk_that_a_drill_has_made_full_refuses_what_is_made_below_a_descriptor(paths: RunPaths) -> None:
    disk = _FullDisk(str(paths.root))
    disk.fill()
    for make in (writes_metrics, writes_a_journal, lambda paths: ring.begin_writing(paths, "c000001-s00000010", 1)):
        with pytest.raises((OSError, RunDirectoryError), match="No space"):
            make(paths)
    disk.full = False
    writes_metrics(paths)


@pytest.mark.parametrize(("inodes", "free", "told"), [(100, 0, True), (100, 5, False), (0, 0, False)])
@pytest.mark.parametrize(
    "make", [lambda path: files.open_file(path, os.O_WRONLY | os.O_CREAT), files.make_new_directory]
)
def test_a_disk_that_has_room_and_no_inode_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], inodes: int, free: int, told: bool
) -> None:
    """Some file systems have no limit of inodes, and say that there are 0."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = os.open

    def open_what_is_there(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            refuse()
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "open", open_what_is_there)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=9, f_files=inodes, f_favail=free))
    with pytest.raises(OSError, match="No space left on device") as caught:
        make(tmp_path / "new")
    assert (f"df -i {tmp_path}" in str(caught.value.strerror)) == told
    assert caught.value.filename == str(tmp_path / "new")
