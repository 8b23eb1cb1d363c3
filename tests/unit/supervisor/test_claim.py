"""The run directory before the first attempt: what is refused, and that nothing on disk changes by it."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
from disks import disk_of, may_mount
from warm_server import run_warm

from recorded_run import RecordedRun
from rollback.errors import ExitCode, RollbackError, RunDirectoryError, RunDoesNotFit, RunInUse
from rollback.facts.training import AttemptStarted, Finished
from rollback.rundir import lock, seal
from rollback.rundir.identity import JobIdentity, new_identity, read_identity, write_identity
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor import claim as claim_module
from rollback.supervisor.claim import Claim, claim_or_private, read_past
from rollback.system import files


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def write_past(paths: RunPaths, attempt: int = 4) -> None:
    paths.root.mkdir(parents=True, exist_ok=True)
    write_identity(paths, new_identity(JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={})))
    for path, number in ((paths.train_journal, attempt), (paths.supervisor_journal, attempt - 1)):
        journal = Journal(path, number)
        journal.append(Finished(step=1, batch=1))
        journal.append(Finished(step=2, batch=2))
        journal.close()


def is_a_file(paths: RunPaths) -> None:
    paths.root.write_text("not a directory")


def holds_other_files(paths: RunPaths) -> None:
    paths.root.mkdir()
    paths.root.joinpath("thesis.tex").write_text("years of work")


def has_a_damaged_identity(paths: RunPaths) -> None:
    write_past(paths)
    paths.identity.write_text("{")


def has_another_format(paths: RunPaths) -> None:
    write_past(paths)
    paths.identity.write_text('{"format": 99}')


def has_a_damaged_journal(paths: RunPaths) -> None:
    write_past(paths)
    lines = paths.train_journal.read_bytes().splitlines(keepends=True)
    paths.train_journal.write_bytes(b"x" + b"".join(lines))


def has_a_damaged_journal_of_supervisors(paths: RunPaths) -> None:
    write_past(paths)
    lines = paths.supervisor_journal.read_bytes().splitlines(keepends=True)
    paths.supervisor_journal.write_bytes(b"x" + b"".join(lines))


@pytest.mark.parametrize(
    ("arrange", "exit_code"),
    [
        (is_a_file, ExitCode.IO),
        (holds_other_files, ExitCode.UNFIT),
        (has_a_damaged_identity, ExitCode.IO),
        (has_another_format, ExitCode.UNFIT),
        (has_a_damaged_journal, ExitCode.IO),
        (has_a_damaged_journal_of_supervisors, ExitCode.IO),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_and_stays_as_it_is(
    tmp_path: Path, arrange: Callable[[RunPaths], None], exit_code: ExitCode
) -> None:
    paths = RunPaths(tmp_path / "run")
    arrange(paths)
    before = tree(tmp_path)
    with pytest.raises(RollbackError) as caught:
        read_past(paths)
    assert caught.value.exit_code == exit_code
    assert str(paths.root) in caught.value.message
    assert tree(tmp_path) == before


def test_a_run_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RollbackError, match="is not a directory") as caught:
        read_past(RunPaths(tmp_path / "file" / "run"))
    assert caught.value.exit_code == ExitCode.IO


@pytest.mark.parametrize("missing", [os.R_OK, os.W_OK, os.X_OK])
@pytest.mark.parametrize("name", ["", "ring", "journal"])
def test_a_directory_without_permission_is_refused_by_name(
    tmp_path: Path, name: str, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "run")
    write_past(paths)
    paths.ring.mkdir()
    forbidden = paths.root / name if name else paths.root
    # Tests may run as root, whom permissions do not stop.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != forbidden or not mode & missing)
    with pytest.raises(RollbackError) as caught:
        read_past(paths)
    assert caught.value.message.endswith(f"may not read and write {forbidden}")
    assert caught.value.exit_code == ExitCode.IO


@pytest.mark.skipif(not may_mount(), reason="only root may mount, and not everywhere")
def test_a_directory_on_a_read_only_disk_is_refused_as_such(tmp_path: Path) -> None:
    with disk_of("1m", tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(RollbackError, match=f"the disk of {disk} is read-only") as caught:
            read_past(RunPaths(disk / "run"))
    assert caught.value.exit_code == ExitCode.IO


def test_a_new_directory_an_empty_one_and_what_a_crash_at_the_start_left_are_fine(tmp_path: Path) -> None:
    assert read_past(RunPaths(tmp_path / "a" / "b")).last_attempt == 0
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    assert read_past(paths).last_attempt == 0
    paths.lock.touch()
    paths.holder.touch()
    paths.ranks.mkdir()
    assert read_past(paths).last_attempt == 0


def test_a_run_json_that_stays_as_it_is_is_not_read_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at ten times a second until the ranks have attached, and of a large model it has megabytes."""
    paths = RunPaths(tmp_path / "run")
    claim = Claim(paths)
    identity = new_identity(JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={}))
    write_identity(paths, identity)
    read = list[RunPaths]()
    monkeypatch.setattr(claim_module, "read_identity", lambda paths: read.append(paths) or read_identity(paths))
    for _ in range(3):
        claim.keep()
    assert read == [paths]
    write_identity(paths, identity)
    claim.keep()
    assert read == [paths, paths]
    claim.release()


KILLED_EARLY = """
import os, sys
from pathlib import Path
import torch
import rollback
from rollback.rundir.paths import RunPaths
from rollback.supervisor.claim import read_past

def killed_at(number, run):
    seen = 0
    def watch(event, arguments):
        nonlocal seen
        if event in ("rollback.write", "os.rename"):
            seen += 1
            if seen == number:
                os._exit(9)
    sys.addaudithook(watch)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    next(rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(2)] * 4, run=run, fast_tier="off"))

for number in range(1, 100):
    run = Path(f"run-{number}")
    if os.fork() == 0:
        killed_at(number, run)
        os._exit(0)
    os.wait()
    read_past(RunPaths(run))
    if (run / "journal").exists():
        break
    print(number, sorted(path.name for path in run.iterdir()) if run.exists() else "nothing")
"""


def test_what_a_start_leaves_that_is_killed_at_any_write_is_no_other_directory(tmp_path: Path) -> None:
    done = run_warm([sys.executable, "-c", KILLED_EARLY], cwd=tmp_path, stdout=PIPE, stderr=STDOUT)
    assert done.returncode == 0, done.stdout
    assert ".run.json.tmp" in done.stdout
    assert ".holder.json.tmp" in done.stdout


@pytest.mark.parametrize("journal", ["train_journal", "supervisor_journal"])
def test_what_was_read_before_the_lock_stands_until_somebody_writes(tmp_path: Path, journal: str) -> None:
    paths = RunPaths(tmp_path / "run")
    write_past(paths)
    before = read_past(paths)
    assert read_past(paths, before) is before
    later = Journal(getattr(paths, journal), 9)
    later.append(Finished(step=3, batch=3))
    later.close()
    assert read_past(paths, before).last_attempt == 9


def test_the_last_attempt_is_the_latest_of_both_journals(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write_past(paths, attempt=4)
    assert read_past(paths).last_attempt == 4


def test_a_claim_that_is_undone_leaves_nothing_of_what_it_made(tmp_path: Path) -> None:
    claim = Claim(RunPaths(tmp_path / "runs" / "train"))
    assert (tmp_path / "runs" / "train" / "holder.json").exists()
    claim.undo()
    assert tree(tmp_path) == {}


def test_a_claim_that_is_undone_restores_the_record_of_a_dead_holder(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write_past(paths)
    paths.lock.touch()
    paths.holder.write_bytes(b'{"pid": 1}')
    before = tree(tmp_path)
    Claim(paths).undo()
    assert tree(tmp_path) == before


def test_what_a_job_is_refused_for_is_told_also_where_the_disk_does_not_take_the_record_of_a_dead_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`undo` is called while the refusal is on its way to who reads it."""

    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    paths = RunPaths(tmp_path / "run")
    write_past(paths)
    paths.holder.write_bytes(b'{"pid": 1}')
    claim = Claim(paths)
    monkeypatch.setattr(files, "open_file", full)
    monkeypatch.setattr(files, "unlink", full)
    claim.undo()
    monkeypatch.undo()
    Claim(paths).release()


def test_a_directory_can_be_claimed_again_after_a_claim_was_undone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    Claim(paths).undo()
    claim = Claim(paths)
    claim.release()
    assert not paths.holder.exists()


def test_the_last_start_is_the_latest_of_the_supervisor(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write_past(paths)
    assert read_past(paths).last_start is None
    journal = Journal(paths.supervisor_journal, 5)
    starts = [AttemptStarted(command=("torchrun",), host="node1", pid=pid) for pid in (4, 5, 6)]
    for start in starts:
        journal.append(start)
        journal.append(Finished(step=1, batch=1))
    journal.close()
    assert read_past(paths).last_start == starts[-1]


@pytest.mark.parametrize("name", ["run.json", "journal"])
def test_a_run_directory_may_hold_other_files_once_it_is_one(tmp_path: Path, name: str) -> None:
    paths = RunPaths(tmp_path / "run")
    write_past(paths)
    (paths.root / "notes.txt").write_text("mine")
    if name == "run.json":
        for journal in paths.train_journal.parent.iterdir():
            journal.unlink()
        paths.train_journal.parent.rmdir()
    else:
        paths.identity.unlink()
    assert read_past(paths).last_attempt == (0 if name == "run.json" else 4)


@pytest.mark.parametrize(("others", "named"), [(["a"], "but 'a'"), (["b", "a"], "but 'a' and 1 more")])
def test_what_stands_in_the_way_is_named(tmp_path: Path, others: list[str], named: str) -> None:
    for name in others:
        (tmp_path / name).write_text("")
    with pytest.raises(RunDoesNotFit) as caught:
        read_past(RunPaths(tmp_path))
    assert caught.value.message.endswith(named)


def test_what_is_left_of_a_run_directory_that_was_removed_in_mid_run_is_called_that(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for folder in (paths.attempt_logs(1), paths.ranks, paths.failures(1)):
        folder.mkdir(parents=True)
    with pytest.raises(RunDoesNotFit, match="what is left of a run directory") as refused:
        read_past(paths)
    assert f"rm -r {tmp_path}" in str(refused.value.hint)
    paths.checkpoint("c000001-s00000010").mkdir(parents=True)
    with pytest.raises(RunDoesNotFit) as refused:
        read_past(paths)
    assert "rm -r" not in str(refused.value.hint), "there are checkpoints"
    assert "rollback ring export" in str(refused.value.hint)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunDoesNotFit) as refused:
        read_past(paths)
    assert "rm -r" not in str(refused.value.hint), "somebody else has something there"


# --- where there may be no guard --------------------------------------------------------------------------------------


def test_a_directory_that_can_be_used_is_held(tmp_path: Path) -> None:
    paths, claim, error = claim_or_private(RunPaths(tmp_path / "run"), tmp_path / "stand-in", insist=False)
    assert (paths.root, error) == (tmp_path / "run", None)
    with pytest.raises(RunInUse):
        Claim(paths)
    claim.release()


def test_another_one_stands_in_for_a_directory_that_cannot_be_used_and_the_error_is_kept(tmp_path: Path) -> None:
    broken = RunPaths(tmp_path / "run")
    holds_other_files(broken)
    before = tree(broken.root)
    paths, claim, error = claim_or_private(broken, tmp_path / "stand-in", insist=False)
    assert paths.root == tmp_path / "stand-in"
    assert isinstance(error, RunDoesNotFit)
    assert paths.holder.exists()
    assert tree(broken.root) == before
    claim.release()


@pytest.mark.parametrize("insist", [True, False])
def test_nothing_stands_in_for_a_run_or_where_the_directory_itself_is_asked_for(tmp_path: Path, insist: bool) -> None:
    broken = RunPaths(tmp_path / "run")
    if insist:
        holds_other_files(broken)
    else:
        has_a_damaged_journal(broken)
    with pytest.raises(RollbackError):
        claim_or_private(broken, tmp_path / "stand-in", insist=insist)
    assert not (tmp_path / "stand-in").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_claim_that_fails_leaves_nothing_of_what_it_made(
    tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no room")

    paths = RunPaths(tmp_path / "runs" / "train")
    if there:
        Claim(paths).release()
    before = tree(tmp_path)
    monkeypatch.setattr(lock, "write_file", refuse)
    with pytest.raises(RunDirectoryError, match="holder") as caught:
        Claim(paths)
    assert tree(tmp_path) == before
    monkeypatch.undo()
    Claim(paths).release()
    assert caught.value.hint is not None


def test_a_claim_is_undone_although_its_lock_has_vanished(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    claim = Claim(paths)
    paths.lock.unlink()
    claim.undo()
    assert not paths.root.exists()


def test_a_directory_that_the_disk_refuses_to_list_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RunDirectoryError, match=r"reading the run directory .*: Input/output error"):
        read_past(RunPaths(tmp_path))


@pytest.mark.parametrize("sealed", [("train",), ("supervisor",), ("train", "supervisor")], ids=" and ".join)
def test_a_past_with_sealed_lines_is_not_gone_on_with_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: tuple[str, ...]
) -> None:
    paths, key = RunPaths(tmp_path / "run"), tmp_path / "key"
    write_past(paths)
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    monkeypatch.setenv(seal.ENV_SEAL, str(key))
    for name in sealed:
        path = paths.train_journal.with_name(f"{name}.jsonl")
        path.unlink()
        journal = Journal(path, 1)
        journal.append(Finished(step=1, batch=1))
        journal.close()
    monkeypatch.delenv(seal.ENV_SEAL)
    with pytest.raises(RunDoesNotFit, match="is sealed, and without its key"):
        read_past(paths)


def test_a_run_of_another_format_is_called_that_whatever_its_journals_hold(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    has_another_format(paths)
    paths.train_journal.write_text("lines of that format\nand more\n")
    with pytest.raises(RunDoesNotFit, match="format"):
        read_past(paths)


def test_the_seats_on_record_are_those_of_an_attempt_that_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a range of nodes a third one came, with which the ranks refused the job, and then the launch was stopped."""
    run = RecordedRun(tmp_path, monkeypatch)
    start = AttemptStarted(command=("torchrun",), host="a", pid=1, nodes=("a", "b"))
    run.tell(0, start, 1)
    run.attach(1, 1, None, 0)
    run.tell(2, start.model_copy(update={"nodes": ("a", "b", "c")}), 2)
    past = read_past(run.paths)
    assert (past.seats, past.last_attempt) == (("a", "b"), 2)


@pytest.mark.parametrize("begun", [True, False], ids=["before this launch", "by an earlier attempt of it"])
def test_a_run_that_was_moved_while_its_ranks_started_is_not_gone_on_with_as_another_one(
    tmp_path: Path, begun: bool
) -> None:
    """They find no run there, and begin one. Nothing of the earlier run is lost; but to train it again, from its first
    step, is not what the command was given for."""
    paths = RunPaths(tmp_path / "run")
    job = JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={})
    paths.root.mkdir()
    if begun:
        write_identity(paths, new_identity(job))
    claim = Claim(paths, read_past(paths))
    claim.keep()
    if not begun:
        write_identity(paths, new_identity(job))
    paths.identity.touch()
    claim.keep()
    paths.root.rename(tmp_path / "moved")
    claim.keep()
    paths.root.mkdir()
    write_identity(paths, new_identity(job))
    with pytest.raises(RunDoesNotFit, match="was moved or removed while the ranks started"):
        claim.keep()
    claim.release()
