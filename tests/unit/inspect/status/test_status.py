"""The status: alive or not, where the run stands, and how fast, without touching it."""

import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vouched import kinds_parsed

from recorded_run import RecordedRun, eventful_run, hold, incident, rollback_plan, stopped_by_themselves
from rollback.cli import app
from rollback.errors import ExitCode, RunDirectoryError
from rollback.facts.training import (
    AttemptEnded,
    AttemptStarted,
    Drained,
    Evicted,
    Finished,
    LeftDurableRing,
    RestartScheduled,
    Restored,
)
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.record.ending import NO_END
from rollback.inspect.status import status as status_module
from rollback.inspect.status.report import RunStatus
from rollback.inspect.status.status import StatusReader, read_status
from rollback.rundir.heartbeats import Heartbeat, write_heartbeat
from rollback.rundir.journal import journal_index
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import Journal
from rollback.rundir.lock import RunLock
from rollback.rundir.metrics.metric_lines import read_last_metrics
from rollback.rundir.paths import RunPaths
from rollback.system.processes import start_of

C0, C1 = "c000000-s00000000", "c000001-s00000020"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """A run in its first attempt, with a checkpoint of step 20, judged up to step 34."""
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    run.commit(0, C0, 0)
    run.commit(20, C1, 20)
    run.judge(0, 34)
    return run


def beat(run: RecordedRun, rank: int, **changed: Any) -> None:
    """A heartbeat of this very process, 2 s old, unless something else is said."""
    fields: dict[str, Any] = {
        "pid": os.getpid(), "host": socket.gethostname(), "attempt": 1, "step": 36, "batch": 72, "doing": "training",
        "monotonic": time.monotonic() - 2, "start": start_of(os.getpid()),
    }  # fmt: skip
    run.paths.ranks.mkdir(exist_ok=True)
    write_heartbeat(run.paths.heartbeat(rank), Heartbeat(**{**fields, **changed}))


def gone() -> int:
    """The pid of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def status_of(run: RecordedRun) -> RunStatus:
    return read_status(run.paths.root)


def test_living_ranks_make_a_running_run_that_stands_where_the_slowest_is(run: RecordedRun) -> None:
    beat(run, 0)
    beat(run, 1, step=35, batch=70, doing="writing a checkpoint")
    status = status_of(run)
    assert (status.state, status.doing) == ("running", "writing a checkpoint")
    assert (status.step, status.batch, status.attempt) == (35, 70, 1)
    assert [entry.alive for entry in status.ranks] == ["yes", "yes"]
    assert status.ranks[0].age == pytest.approx(2, abs=1)
    assert (status.loss, status.grad_norm, status.verdict) == (2.5, 1.0, "healthy")
    assert (status.last_good_checkpoint, status.last_good_age) == (C1, 15)


def test_the_newest_good_checkpoint_is_that_of_the_highest_number_beyond_a_million_too(run: RecordedRun) -> None:
    names = ["c999999-s00000040", "c1000000-s00000050"]
    for name, step in zip(names, (40, 50), strict=True):
        run.commit(30.0, name, step)
    assert status_of(run).last_good_checkpoint == names[1]


def test_what_left_memory_before_the_run_went_back_behind_it_is_no_longer_good(run: RecordedRun) -> None:
    """No plan discards what is not held. It is of steps that are undone all the same."""
    run.tell(35.0, Evicted(checkpoint=C1, reason="the ring is full", tier="fast"))
    assert status_of(run).last_good_checkpoint == C1, "a ring may have it"
    run.tell(36.0, incident(0, 34, 34))
    run.tell(37.0, rollback_plan(0, C0, 0, (68, 69)))
    assert status_of(run).last_good_checkpoint == C0


def test_the_rate_is_that_of_the_present_stretch_of_training(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    began = datetime(2030, 1, 1, tzinfo=timezone.utc).timestamp()
    monkeypatch.setattr(status_module.time, "time", lambda: began + 20)
    beat(run, 0)
    assert status_of(run).steps_per_second == pytest.approx(36 / (20 - 2), rel=0.01)


@pytest.mark.parametrize("blocks", range(6))
def test_a_kept_history_stands_for_the_lines_that_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """Wherever it ends, and also while the run goes on: with it, checkpoints that came and went are not parsed."""
    monkeypatch.setattr(journal_index, "LINES", 4)
    run = eventful_run(tmp_path / "run", monkeypatch)
    path = run.paths.train_journal
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    without = status_of(run)
    path.write_bytes(b"".join(lines[: 4 * blocks]))
    past = fold_journal(path, to_keep=True)
    Journal(path, 1, past.reading).close()
    past.keep()
    reader = StatusReader(run.paths.root)
    reader.read()
    path.write_bytes(whole)
    assert reader.read() == without, "a reader from before the run went on"
    parsed = kinds_parsed(monkeypatch)
    assert status_of(run) == without
    behind = Counter(json.loads(line)["kind"] for line in lines[4 * blocks :])
    assert Counter(parsed)["committed"] == behind["committed"]


def test_another_process_under_the_same_pid_is_not_the_rank(run: RecordedRun) -> None:
    beat(run, 0, start="1@another boot")
    beat(run, 1, pid=gone())
    status = status_of(run)
    assert [entry.alive for entry in status.ranks] == ["no", "no"]
    assert (status.state, status.steps_per_second) == ("died", None)


def test_ranks_on_another_host_may_be_alive(run: RecordedRun) -> None:
    beat(run, 0, host="somewhere.else")
    status = status_of(run)
    assert (status.state, status.ranks[0].alive, status.ranks[0].age) == ("unknown", "unknown", None)


def test_heartbeats_of_an_earlier_attempt_are_history(run: RecordedRun) -> None:
    beat(run, 0)
    run.attach(40, 2, C1, 20)
    beat(run, 1, attempt=2, step=21)
    status = status_of(run)
    assert [entry.rank for entry in status.ranks] == [1]
    assert status.step == 21


def test_that_the_supervisor_was_killed_is_said_when_neither_it_nor_a_rank_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_by_themselves(tmp_path / "other", monkeypatch)

    def account() -> str:
        ending = read_status(run.paths.root).ending
        assert ending is not None
        return ending.account

    beat(run, 0, pid=gone())
    hold(run.paths, alive=True)
    assert account() == "told to stop", "the supervisor is alive"
    hold(run.paths, alive=False)
    assert account() == f"told to stop; {NO_END}"
    beat(run, 1)
    assert account() == "told to stop", "a rank is alive"
    assert read_run_contents(run.paths.root).abandoned is False
    beat(run, 1, host="elsewhere")
    assert account() == "told to stop", "of a rank elsewhere it is not known"
    assert read_run_contents(run.paths.root).abandoned is False
    beat(run, 1, pid=gone())
    assert read_run_contents(run.paths.root).abandoned is True


def test_a_holder_without_ranks_is_starting_and_one_that_was_killed_is_not(run: RecordedRun) -> None:
    lock = RunLock(run.paths, "supervisor")
    status = status_of(run)
    assert status.state == "starting"
    assert status.holder
    assert (status.holder.role, status.holder.pid, status.holder.alive) == ("supervisor", os.getpid(), "yes")
    said = json.loads(run.paths.holder.read_text())
    run.paths.holder.write_text(json.dumps({**said, "pid": gone()}))
    assert status_of(run).state == "died"
    # The pid is in use again, by a process that started after the holder took the lock.
    run.paths.holder.write_text(json.dumps({**said, "start": "1@another boot"}))
    assert status_of(run).state == "died"
    lock.release()


def test_a_holder_that_is_suspended_is_told_with_the_way_to_let_it_go_on(run: RecordedRun) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        said = {"host": socket.gethostname(), "since": "2030-01-01T00:00:00+00:00", "role": "rollback launch"}
        run.paths.holder.write_text(json.dumps({**said, "pid": sleeper.pid, "start": start_of(sleeper.pid)}))
        assert status_of(run).notices == []
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        (notice,) = status_of(run).notices
        assert f"rollback launch (pid {sleeper.pid}) is suspended" in notice
        assert f"kill -CONT {sleeper.pid}" in notice
        sleeper.kill()


def test_a_run_of_another_user_is_told_with_who_may_read_it(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(RunDirectoryError, match="Permission denied") as raised:
        read_status(run.paths.root)
    assert raised.value.exit_code == ExitCode.IO
    assert "the user that runs the job" in str(raised.value.hint)


def test_a_run_that_is_held_but_has_no_record_yet_is_starting(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    lock = RunLock(paths, "supervisor")
    assert read_status(paths.root).state == "starting"
    lock.release()


@pytest.mark.parametrize("pid", [0, -1, 2**40, "many", None])
def test_a_pid_that_cannot_be_is_nobody(run: RecordedRun, pid: Any) -> None:
    said = {"pid": pid, "host": socket.gethostname(), "since": "2030-01-01T00:00:00+00:00", "role": "supervisor"}
    run.paths.holder.write_text(json.dumps(said))
    if isinstance(pid, int):
        beat(run, 0, pid=pid)
    assert status_of(run).state in ("unknown", "died")


def test_a_pending_plan_is_told(run: RecordedRun) -> None:
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, C1, 20, (40, 89)))
    assert status_of(run).pending == f"rollback to {C1} (step 20), skip batches 40:89, for incident 1"


def test_a_rewind_that_an_operator_asked_for_is_no_incident(run: RecordedRun) -> None:
    run.tell(35, incident(1, 30, 34, verdict="requested", request="0-a"))
    run.tell(35, rollback_plan(1, C1, 20, (40, 89)))
    run.tell(36, Restored(
        incident=1, checkpoint=C1, step=20, batch=40, steps_lost=16, seconds=0.1, route="in_process",
    ))  # fmt: skip
    status, totals = status_of(run), compile_audit(read_run_contents(run.paths.root)).totals
    for told in (status, totals):
        assert (told.incidents, told.incidents_asked, told.rollbacks, told.rewinds_asked) == (1, 1, 1, 1)
    shown = " ".join(CliRunner().invoke(app, ["status", str(run.paths.root)]).output.split())
    assert "0, 0 restores (and 1 rewind that an operator asked for), 0 batches skipped" in shown


def test_an_ended_run_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_of(eventful_run(tmp_path / "run", monkeypatch))
    assert status.state == "ended"
    assert status.ending
    assert (status.ending.how, status.step, status.incidents, status.rollbacks) == ("finished", 100, 2, 2)
    assert (status.skipped_batches, status.candidates, status.pending) == (64, [], None)


def test_a_run_that_has_only_begun_has_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_of(RecordedRun(tmp_path / "run", monkeypatch))
    assert (status.step, status.last_good, status.loss, status.attempt) == (None, None, None, 0)


def test_of_an_ended_run_no_ranks_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = eventful_run(tmp_path / "run", monkeypatch)
    for rank in range(2):
        beat(run, rank, attempt=2, pid=gone())
    text = CliRunner().invoke(app, ["status", str(run.paths.root)]).stdout
    assert "ended" in text
    assert "seen alive" not in text


def test_of_a_killed_run_step_and_loss_are_those_on_record(run: RecordedRun) -> None:
    for rank in range(2):
        beat(run, rank, pid=gone())
    text = CliRunner().invoke(app, ["status", str(run.paths.root)]).stdout
    assert "died" in text
    assert "at least 36, batch 72" in text
    assert "2.5 at step 34, the last on record" in text


def test_an_epoch_s_end_is_not_the_end_of_a_run_that_was_killed_later(run: RecordedRun) -> None:
    run.tell(24, Finished(step=24, batch=48))
    beat(run, 0, pid=gone())
    assert (status_of(run).state, status_of(run).ending) == ("died", None)


def test_a_run_that_has_ended_stands_behind_its_last_batch(run: RecordedRun) -> None:
    run.commit(36, "c000009-s00000036", 36)
    run.tell(37, Finished(step=36, batch=72))
    beat(run, 0, batch=71, pid=gone())
    assert (status_of(run).step, status_of(run).batch) == (36, 72)


def test_a_run_that_has_just_been_started_again_stands_at_its_checkpoint(run: RecordedRun) -> None:
    run.attach(40, 2, C1, 20)
    beat(run, 0, attempt=2, step=0, batch=0, doing="starting")
    status = status_of(run)
    assert (status.step, status.batch, status.last_good_age) == (20, 40, 0)
    assert status.last_judged
    assert status.last_judged.undone


def test_a_loss_over_accumulated_batches_is_said_to_be_as_observed(run: RecordedRun) -> None:
    status = status_of(run)
    assert status.last_judged
    assert (status.loss, status.last_judged.step, status.last_judged.batches) == (2.5, 34, 2)
    text = " ".join(CliRunner().invoke(app, ["status", str(run.paths.root)]).stdout.split())
    assert "as observed in an update of 2 batches; where the script divides each by 2, it is 5 undivided" in text


@pytest.mark.parametrize("recorded", ["runs/x/ring", "/moved/from/here/ring"])
def test_the_place_of_the_durable_ring_works_from_anywhere(
    run: RecordedRun, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.tell(21, Drained(checkpoint=C1, step=20, place=recorded, bytes=1, seconds=0.1))
    monkeypatch.chdir(run.paths.root.parent)
    durable = read_status(Path("run")).durable
    assert durable
    assert durable.place == str(run.paths.root / "ring")
    assert not durable.is_there
    assert "it is not there" in " ".join(CliRunner().invoke(app, ["status", "run"]).output.split())
    run.paths.checkpoint(C1).mkdir(parents=True)
    durable = read_status(Path("run")).durable
    assert durable
    assert durable.is_there
    run.tell(22, Drained(checkpoint=C1, step=20, place="s3://bucket/runs/x", bytes=1, seconds=0.1))
    durable = read_status(Path("run")).durable
    assert durable
    assert durable.place == "s3://bucket/runs/x"
    assert durable.is_there, "a URL is not asked"


def test_a_ring_that_this_user_may_not_look_into_is_said_and_not_that_its_checkpoint_is_gone(run: RecordedRun) -> None:
    run.tell(21, Drained(checkpoint=C1, step=20, place=str(run.paths.ring), bytes=1, seconds=0.1))
    run.paths.ring.symlink_to("y" * 300)  # the system refuses to look, as it does below a directory that is closed
    status = read_status(run.paths.root)
    assert status.durable
    assert status.durable.is_there
    assert any(line.startswith("which checkpoints there are cannot be told") for line in status.notices)


def test_an_older_checkpoint_that_is_copied_behind_a_newer_one_does_not_take_its_place(run: RecordedRun) -> None:
    """As when a run is stopped: the newest one is copied first, then the newest good one."""
    for at, name, step in ((21, C1, 20), (22, C0, 0)):
        run.tell(at, Drained(checkpoint=name, step=step, place="s3://bucket/runs/x", bytes=1, seconds=0.1))
    durable = read_status(run.paths.root).durable
    assert durable
    assert (durable.checkpoint, durable.step) == (C1, 20)
    run.tell(23, incident(0, 20, 24))
    run.tell(24, rollback_plan(0, C0, 0, (40, 49), discards=(C1,)))
    durable = read_status(run.paths.root).durable
    assert durable
    assert durable.checkpoint == C0
    run.tell(25, LeftDurableRing(checkpoint=C0, place="s3://bucket/runs/x", reason="the ring is full"))
    run.tell(26, Drained(checkpoint=C0, step=0, place="s3://bucket/other", bytes=1, seconds=0.1))
    durable = read_status(run.paths.root).durable
    assert durable
    assert durable.place == "s3://bucket/other"


@pytest.mark.parametrize("tail", ["", '{"step": 3', "\0" * 100_000, "\0\0\n" * 50])
def test_the_last_sound_metric_counts(run: RecordedRun, tail: str) -> None:
    with open(run.paths.metrics, "a") as file:
        file.write(tail)
    found = read_last_metrics(run.paths.metrics, 16)
    assert found == [] if len(tail) > 1 << 16 else found[-1].step == 34


def test_the_command_prints_a_few_lines_or_json(run: RecordedRun) -> None:
    beat(run, 0)
    text = CliRunner().invoke(app, ["status", str(run.paths.root)])
    assert text.exit_code == 0
    assert len(text.stdout.splitlines()) <= 12
    shown = " ".join(text.stdout.split())
    for words in [
        "running: training, attempt 1",
        "36, batch 72",
        "2.5 at step 34",
        "norm 1, healthy",
        C1,
        "16 steps ago",
    ]:
        assert words in shown, words
    body = json.loads(CliRunner().invoke(app, ["status", str(run.paths.root), "--json"]).stdout)
    assert body["schema"] == 1
    assert body["step"] == 36


def test_a_supervisor_that_waits_to_begin_again_has_not_ended_whatever_the_ranks_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody sent the ranks themselves SIGTERM: they saved and stopped, and one of them failed on its way out."""
    run = stopped_by_themselves(tmp_path / "run", monkeypatch)
    hold(run.paths, alive=True)
    run.tell(50, AttemptEnded(status=1, cause="rank 1 was killed", why="signal", step=36, seconds=50.0))
    run.tell(51, RestartScheduled(delay=60.0, budget_left=9, reason="no progress, restart 2"))
    status = status_of(run)
    assert (status.state, status.ending) == ("starting", None)
    assert status.work is not None
    assert status.work.what == "waiting before the next attempt"
    shown = CliRunner().invoke(app, ["status", str(run.paths.root)]).stdout
    assert "for the next attempt: rank 1 was killed" in shown, "which may take the whole --node-timeout"
    run.tell(60, AttemptStarted(command=("torchrun",), host="node1", pid=1), 2)
    assert status_of(run).waiting is None
