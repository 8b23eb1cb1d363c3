"""The panel: it fits its terminal, tells what is to be told, obeys nothing that it shows, and ends no run."""

import io
import math
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from checkpoints import write_checkpoint
from recorded_run import RecordedRun, eventful_run, incident, rollback_plan
from rollback.facts.ring import Drained, DrainFailed
from rollback.facts.training import (
    Advice,
    AttemptEnded,
    AttemptStarted,
    PassedOver,
    RestartScheduled,
    Restored,
    Stopped,
)
from rollback.inspect.status import status as statuses
from rollback.inspect.status.report import RunStatus
from rollback.inspect.status.status import StatusReader, read_status
from rollback.live.fact_lines import line_of
from rollback.live.panel import Curves, panel
from rollback.live.panel_screen import PanelScreen, above
from rollback.live.view import View
from rollback.live.watch import standing, watch_lines
from rollback.rundir.heartbeats import Heartbeat, write_heartbeat
from rollback.rundir.lock import RunLock
from rollback.rundir.metrics.metric_lines import Metric, metric_line
from rollback.system.lines import LineWriter
from rollback.system.processes import start_of
from rollback.terminal.canvas import Canvas
from rollback.terminal.curve import CAPACITY, Bucket, Curve, draw, extent
from rollback.terminal.messages import line_for

LIMIT = 30.0


def text_of(status: RunStatus | None, curves: Curves | None = None, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(panel(status, curves or Curves(), width, 61.0))
    return file.getvalue()


# Curves ---------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=300), st.integers(1, 16))
def test_a_curve_in_few_buckets_keeps_extremes_and_what_is_not_finite(values: list[float], capacity: int) -> None:
    curve = Curve(capacity)
    for step, value in enumerate(values):
        curve.add(step, value)
    columns = curve.columns(10**6)
    finite = [value for value in values if math.isfinite(value)]
    assert len(columns) <= capacity
    assert extent(columns) == ((min(finite), max(finite)) if finite else None)
    assert any(column.nonfinite for column in columns) == (len(finite) < len(values))


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(2, 32), st.integers(1, 40))
def test_a_curve_takes_steps_in_any_order_and_stays_small(steps: list[int], capacity: int, width: int) -> None:
    curve = Curve(capacity)
    for step in steps:
        curve.add(step, 1.0)
        assert len(curve.columns(10**6)) <= capacity
    assert len(curve.columns(width)) <= width


def test_undone_steps_leave_the_curve() -> None:
    curve = Curve()
    for step, value in [*((step, 1.0) for step in range(50)), (50, 99.0), (51, math.nan), (40, 2.0)]:
        curve.add(step, value)
    columns = curve.columns(CAPACITY)
    assert len(columns) == 41
    assert extent(columns) == (1.0, 2.0)
    assert not any(column.nonfinite for column in columns)


def test_a_curve_is_drawn_from_above_to_below_with_a_cross_for_what_is_not_finite() -> None:
    columns = [Bucket(2.0, 2.0), Bucket(2.0, 2.0), Bucket(1.0, 1.0), Bucket(1.0, 1.0), Bucket(nonfinite=True)]
    top, bottom = (line.plain for line in draw(columns, extent(columns), 2))
    assert (top, bottom) == ("⠉⡆⠀", "⠀⣇×")


def test_a_curve_further_than_a_float_goes_is_drawn() -> None:
    columns = [Bucket.of(1e308), Bucket.of(-1e308)]
    (line,) = draw(columns, extent(columns), 1)
    assert line.plain == "⢱"


# The picture ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    run = RecordedRun(tmp_path / "gpt", monkeypatch)
    run.attach(0, 1, None, 0)
    for seq, step in enumerate((0, 20, 30)):
        run.commit(step, write_checkpoint(run.paths, seq, step), step, good=step < 30)
    run.judge(0, 34)
    beat(run, 36)
    return run


def beat(run: RecordedRun, step: int, doing: str = "training") -> None:
    me = psutil.Process()
    run.paths.ranks.mkdir(exist_ok=True)
    heartbeat = Heartbeat(
        pid=me.pid, host=os.uname().nodename, attempt=1, step=step, batch=2 * step, doing=doing,
        monotonic=time.monotonic(), start=start_of(me.pid) or "",
    )  # fmt: skip
    write_heartbeat(run.paths.heartbeat(0), heartbeat)


def test_the_panel_tells_where_a_run_stands(run: RecordedRun) -> None:
    shown = text_of(read_status(run.paths.root))
    for words in (
        "gpt · running", "step       36", "loss       2.5", "healthy", "step 20 · 16 steps ago",
        "●●○ 2 good, 1 on probation", "incidents  none", "now        training", "attempt 1 · 2 ranks · 61 s",
    ):  # fmt: skip
        assert words in shown, shown


def test_where_a_url_has_the_good_checkpoints_the_panel_does_not_say_that_none_is_good(run: RecordedRun) -> None:
    status = read_status(run.paths.root)
    shown = text_of(status.model_copy(update={"ring": [held for held in status.ring if not held.good]}))
    assert "○ 1 on probation" in shown


def test_a_rewind_and_the_steps_to_be_made_up_are_shown(run: RecordedRun) -> None:
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, "c000001-s00000020", 20, (60, 89)))
    assert "rewinding: rollback to c000001-s00000020 (step 20), skip batches 60:89" in text_of(
        read_status(run.paths.root), width=100
    )
    run.tell(
        36,
        Restored(
            incident=1,
            checkpoint="c000001-s00000020",
            step=20,
            batch=40,
            steps_lost=16,
            seconds=0.1,
            route="in_process",
        ),
    )
    run.tell(36, PassedOver(first=60, last=89, step=30, timeline=1))
    beat(run, 24)
    shown = text_of(read_status(run.paths.root))
    assert "1 · 1 restore · 30 batches skipped" in shown
    assert "making up what was undone" in shown
    assert "4 of 16 steps" in shown


def test_a_wait_before_the_next_attempt_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "gpt", monkeypatch)
    lock = RunLock(run.paths, "supervisor")
    run.tell(0, AttemptStarted(command=("torchrun",), host="node1", pid=1))
    run.tell(1, AttemptEnded(status=1, cause="rank 1 was killed", step=7, seconds=1.0))
    run.tell(1, RestartScheduled(delay=30.0, budget_left=3, reason="no progress"))
    work = read_status(run.paths.root).work
    assert work is not None
    assert (work.unit, work.total) == ("seconds", 30.0)
    assert "waiting before the next attempt" in text_of(read_status(run.paths.root))
    lock.release()


def test_the_durable_ring_is_shown_and_what_keeps_it_from_being_filled(run: RecordedRun) -> None:
    drained = {"checkpoint": "c000001-s00000020", "step": 20, "place": "s3://bucket/run"}
    run.tell(36, Drained(bytes=4096, seconds=1.0, **drained))
    assert "durable    step 20 · s3://bucket/run" in text_of(read_status(run.paths.root))
    failed = DrainFailed(checkpoint=None, place="s3://bucket/run", error="[bold]access denied\x1b[2J")
    run.tell(37, failed)
    assert "nothing can be copied: " in text_of(read_status(run.paths.root))
    assert "[bold]access denied\\x1b[2J" in text_of(read_status(run.paths.root), width=100)


def test_an_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eventful_run(tmp_path / "run", monkeypatch)
    shown = text_of(read_status(tmp_path / "run"))
    assert "run · ended" in shown
    assert "finished: the training loop ended" in shown


@pytest.mark.parametrize("width", [12, 20, 40, 60, 64, 80, 100, 300])
def test_it_fits_every_terminal(run: RecordedRun, width: int) -> None:
    curves, source = Curves(), random.Random(1)
    for step in range(3000):
        value = math.nan if step == 2500 else source.random() * 1e4
        curves.add(Metric(step=step, batch=step, loss=value, grad_norm=value, verdict="spike", attempt=1, timeline=0))
    run.tell(35, Advice(code="no-epochs", text="a very long text " * 20))
    for status in (None, read_status(run.paths.root)):
        lines = text_of(status, curves, width).splitlines()
        assert all(len(line) <= width for line in lines), "\n".join(lines)
        assert len({len(line) for line in lines}) == 1


HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]x[/] \u202e\u2028\r\n\x9b31m"


def test_hostile_names_are_shown_and_not_obeyed(run: RecordedRun) -> None:
    run.tell(35, Advice(code=HOSTILE, text=HOSTILE))
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, HOSTILE, 20, (60, 89)))
    beat(run, 36, doing=HOSTILE)
    shown = text_of(read_status(run.paths.root), width=100) + above(HOSTILE).plain
    assert "[bold red]" in shown
    assert not {char for char in shown if not char.isprintable() and char != "\n"}


@settings(deadline=None)
@given(st.text(alphabet=st.characters() | st.sampled_from("\x1b[]0;m\r\t\x07"), max_size=80))
def test_nothing_that_a_script_prints_moves_the_cursor(line: str) -> None:
    file = io.StringIO()
    Console(file=file, width=200, force_terminal=True, color_system="truecolor").print(above(line), soft_wrap=True)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).removesuffix("\n")
    assert all(char.isprintable() for char in shown), repr(shown)


def test_colours_of_a_script_are_kept_and_a_progress_bar_shows_its_last_state() -> None:
    assert above("\x1b[31mred\x1b[0m").spans
    assert above("1%\r50%\r\x1b[K99%\r").plain == "99%"
    assert above("a\tb") == Text("a       b")


# Reading again --------------------------------------------------------------------------------------------------------


def test_each_line_of_the_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = eventful_run(tmp_path / "run", monkeypatch)
    parts = RecordedRun(tmp_path / "parts", monkeypatch)
    reader = StatusReader(parts.paths.root)
    sources = [whole.paths.train_journal, whole.paths.supervisor_journal]
    targets = [parts.paths.train_journal, parts.paths.supervisor_journal]
    targets[0].parent.mkdir()
    source = random.Random(7)
    lines = [path.read_bytes().splitlines(keepends=True) for path in sources]
    while any(lines):
        which = source.choice([index for index, rest in enumerate(lines) if rest])
        with open(targets[which], "ab") as file:
            file.write(lines[which].pop(0))
        again, anew = reader.read(), read_status(parts.paths.root)
        assert again.model_dump(exclude={"work", "run_id"}) == anew.model_dump(exclude={"work", "run_id"})
    assert reader.read().ending == read_status(whole.paths.root).ending


def test_a_run_that_is_begun_anew_under_the_eyes_of_a_watcher(run: RecordedRun) -> None:
    view = View(run.paths.root)
    assert view.refresh() is not None
    run.paths.train_journal.unlink()
    view.refresh()
    assert view.fault is not None
    assert view.status is not None
    view.refresh()
    assert view.fault is None


def test_a_fault_on_the_way_is_told_once_and_what_was_told_is_not_told_again(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.tell(36, AttemptStarted(command=("torchrun",), host="node1", pid=1))
    journal = run.paths.train_journal
    content = journal.read_bytes()

    def away() -> None:
        journal.unlink()
        journal.mkdir()

    def back_again() -> None:
        journal.rmdir()
        journal.write_bytes(content)
        # by the clock of another host, which is behind
        run.tell(30, DrainFailed(checkpoint=None, place="s3://bucket", error="gone"))

    def end() -> None:
        run.tell(40, Stopped(reason="structural", step=36, batch=72, checkpoint=None, account="enough"))
        monkeypatch.setattr(statuses, "is_alive", lambda *_: "no")

    happens = iter([away, lambda: None, back_again, end])
    monkeypatch.setattr(time, "sleep", lambda _: next(happens)())
    out = io.StringIO()
    watch_lines(run.paths.root, out)
    first, fault, *others = out.getvalue().splitlines()
    assert first.startswith("running")
    assert fault.startswith("what is shown is as it was last: reading the journal")
    assert [line.partition("  ")[2] for line in others[:-1]] == [
        "nothing can be copied to the durable ring s3://bucket: gone", "stopped at step 36: enough",
    ]  # fmt: skip


def test_facts_become_lines_and_a_watch_in_lines_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventful_run(tmp_path / "run", monkeypatch)
    out = io.StringIO()
    status = watch_lines(tmp_path / "run", out)
    assert status is not None
    assert status.state == "ended"
    assert out.getvalue() == standing(status) + "\n"
    reader = StatusReader(tmp_path / "run")
    reader.read()
    told = [line for record in reader.news if (line := line_of(record))]
    assert "attempt 1 is over: rank 1 was killed by signal 9" in told
    assert "rewind to step 20 (c000001-s00000020), skip batches 40:103" in told


# On a terminal --------------------------------------------------------------------------------------------------------


HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"  # the cursor


def read_until(descriptor: int, condition: Callable[[bytes], bool]) -> bytes:
    seen, deadline = b"", time.monotonic() + LIMIT
    while not condition(seen):
        assert time.monotonic() < deadline, seen[-2000:]
        try:
            seen += os.read(descriptor, 1 << 16)
        except OSError:
            break
    return seen


def test_watching_on_a_terminal_ends_with_q_and_leaves_the_terminal_as_it_was(run: RecordedRun) -> None:
    import termios

    terminal, ours = pty.openpty()
    before = termios.tcgetattr(ours)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "PYTHONUTF8": "1"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "rollback", "status", str(run.paths.root), "--watch"]
    watch = subprocess.Popen(command, stdin=ours, stdout=ours, stderr=ours, env=environment)
    read_until(terminal, lambda seen: b"steps ago" in seen and b"training" in seen)
    os.write(terminal, b"q")
    assert watch.wait(LIMIT) == 0
    assert termios.tcgetattr(ours) == before
    os.close(ours)
    os.close(terminal)


def test_ctrl_z_gives_the_shell_its_cursor_and_watching_goes_on_behind_it(run: RecordedRun) -> None:
    terminal, ours = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "PYTHONUTF8": "1"}
    environment.pop("NO_COLOR", None)
    # As a shell does: a group of its own, which is no orphan of its session.
    program = "import os; os.setpgrp(); from rollback.cli import main; main()"
    command = [sys.executable, "-c", program, "status", str(run.paths.root), "--watch"]
    watch = subprocess.Popen(command, stdin=ours, stdout=ours, stderr=ours, env=environment)
    seen = read_until(terminal, lambda seen: b"steps ago" in seen and b"training" in seen)
    assert seen.rfind(HIDDEN) > seen.rfind(SHOWN)
    watch.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(watch.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status
    os.set_blocking(terminal, False)
    assert SHOWN in read_until(terminal, lambda _: False), "what it has written by then"
    os.set_blocking(terminal, True)
    watch.send_signal(signal.SIGCONT)
    read_until(terminal, lambda seen: b"training" in seen)
    os.write(terminal, b"q")
    assert watch.wait(LIMIT) == 0
    os.close(ours)
    os.close(terminal)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_printed_stands_above_the_panel(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    file = Terminal()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    with PanelScreen(line_for, run.paths.root, console) as screen:
        screen.show("out", b"first line\nsecond \xc2")
        screen.say("said")
        screen.show("out", b"\xbd half\n")
    shown = file.getvalue()
    assert shown.index("first line") < shown.index("second ½ half") < shown.rindex("╭")
    assert "rollback: said" in shown
    assert "2 good, 1 on probation" in shown


def test_the_panel_of_a_launch_answers_ctrl_z_as_long_as_it_is_there(run: RecordedRun) -> None:
    with PanelScreen(line_for, run.paths.root, Console(file=Terminal(), width=80)):
        assert signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL


def test_a_terminal_that_breaks_costs_the_panel_and_nothing_else(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)

    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    console = Console(file=Broken(), width=80, force_terminal=True)
    with PanelScreen(line_for, run.paths.root, console) as screen:
        screen.show("out", b"still here\n")
    captured = capfd.readouterr()
    assert "still here\n" in captured.out
    assert "going on without the panel (OSError: [Errno 5] Input/output error)" in captured.err


def test_what_a_narrower_terminal_has_wrapped_is_wiped(run: RecordedRun) -> None:
    file = Terminal()
    console = Console(file=file, width=80, height=50, force_terminal=True, color_system=None)
    canvas, status = Canvas(console), read_status(run.paths.root)
    canvas.start()
    canvas.draw(panel(status, Curves(), 80, 1.0))
    height = file.getvalue().count("\n") + 1
    console.width = 40
    file.truncate(0)
    canvas.draw(panel(status, Curves(), 40, 1.0))
    # Each line of 80 columns stands in two rows of 40: up over all of them, wipe, and down to where the last line was.
    assert f"\r\x1b[{2 * height - 1}A\x1b[J" + "\n" * (height - 1) in file.getvalue()
    file.truncate(0)
    canvas.draw(panel(status, Curves(), 40, 1.0))
    assert "\x1b[J" not in file.getvalue()
    canvas.stop()


def test_metrics_are_followed_line_by_line(run: RecordedRun) -> None:
    view = View(run.paths.root)
    view.refresh()
    writer = LineWriter(run.paths.metrics)
    metric = Metric(step=35, batch=70, loss=9.0, grad_norm=math.nan, verdict="spike", attempt=1, timeline=0)
    writer.write(metric_line(**dict(metric)))
    writer.flush()
    view.refresh()
    assert extent(view._curves.loss.columns(CAPACITY)) == (2.5, 9.0)
    assert view._curves.grad_norm.columns(CAPACITY)[-1].nonfinite
    writer.close()
