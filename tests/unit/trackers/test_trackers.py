"""Trackers, looked at with their own readers: the curve without the discarded steps, and no word that is obeyed."""

import errno
import json
import math
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from typer.testing import CliRunner

from recorded_run import RecordedRun, eventful_run, incident, rollback_plan
from rollback.cli import app
from rollback.errors import ExitCode, OutputNotWritten, UsageError
from rollback.facts.fact import Fact
from rollback.facts.training import PassedOver
from rollback.rundir.metrics.metric_lines import Metric, metric_line
from rollback.rundir.paths import RunPaths
from rollback.system.lines import LineWriter
from rollback.trackers.follow import Reader, follow
from rollback.trackers.process import trackers_beside
from rollback.trackers.story import Leg
from rollback.trackers.tensorboard import TensorBoard


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    return RecordedRun(tmp_path / "run", monkeypatch)


def judge(run: RecordedRun, first: int, last: int, loss: float, *, attempt: int = 1, timeline: int = 0) -> None:
    writer = LineWriter(run.paths.metrics)
    for step in range(first, last + 1):
        line = Metric(step=step, batch=2 * step + 1, loss=loss, grad_norm=1.0, verdict="healthy", attempt=attempt,
                      timeline=timeline)  # fmt: skip
        writer.write(metric_line(**dict(line)))
    writer.close()


def track(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["track", *map(str, arguments)])


def accumulated(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def curve(directory: Path, tag: str = "train/loss") -> dict[int, float]:
    events = accumulated(directory).Scalars(tag)
    assert [event.step for event in events] == sorted({event.step for event in events}), "a step is there twice"
    return {event.step: event.value for event in events}


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_shows_the_curve_without_the_discarded_steps(run: RecordedRun, tmp_path: Path) -> None:
    judge(run, 0, 49, 3.0)
    run.tell(52, incident(0, 45, 49))
    judge(run, 40, 59, 2.0, timeline=1)  # back to 40
    judge(run, 50, 54, 1.0, attempt=2, timeline=1)  # killed at 60, went on from 50
    assert track(run.paths.root, "--tensorboard", tmp_path / "tb").exit_code == 0
    expected = {step: 3.0 if step < 40 else 2.0 if step < 50 else 1.0 for step in range(55)}
    assert curve(tmp_path / "tb" / "run") == expected


def test_incidents_are_text_and_skip_windows_are_scalars_and_a_rewind_does_not_take_them_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = eventful_run(tmp_path / "run", monkeypatch)
    assert track(run.paths.root, "--tensorboard", tmp_path / "tb").exit_code == 0
    found = accumulated(tmp_path / "tb" / "run" / "incidents")
    texts = [make_ndarray(event.tensor_proto).item().decode() for event in found.Tensors("incident")]
    assert ["loss 6.5 at step 49" in text for text in texts] == [True, True]
    skips = {event.step: event.value for event in found.Scalars("skip/batches")}
    assert skips == {40: 22.0, 20: 64.0}
    assert {event.value for event in found.Scalars("skip/first_batch")} == {80.0, 40.0}
    assert set(curve(tmp_path / "tb" / "run")) == set(range(100))


def test_what_is_not_finite_is_in_the_curve(run: RecordedRun, tmp_path: Path) -> None:
    judge(run, 0, 4, 3.0)
    judge(run, 5, 5, math.nan)
    track(run.paths.root, "--tensorboard", tmp_path / "tb")
    assert math.isnan(curve(tmp_path / "tb" / "run")[5])


def test_a_run_that_is_converted_twice_is_there_once(run: RecordedRun, tmp_path: Path) -> None:
    judge(run, 0, 9, 3.0)
    for _ in range(2):
        track(run.paths.root, "--tensorboard", tmp_path / "tb")
    assert len(curve(tmp_path / "tb" / "run")) == 10


def test_a_run_that_grows_is_followed(run: RecordedRun, tmp_path: Path) -> None:
    judge(run, 0, 9, 3.0)
    looks: Iterator[int] = iter(range(3))

    def over() -> bool:
        look = next(looks)
        judge(run, 10 + 5 * look, 14 + 5 * look, 2.0)
        return look == 2

    follow(run.paths.root, [TensorBoard(tmp_path / "tb", "run")], over=over, every=0.0)
    assert set(curve(tmp_path / "tb" / "run")) == set(range(25))


def test_attempts_that_were_told_already_can_be_left_out(run: RecordedRun, tmp_path: Path) -> None:
    judge(run, 0, 29, 3.0)
    run.tell(30, incident(0, 25, 29))
    judge(run, 20, 39, 2.0, attempt=2)
    follow(run.paths.root, [TensorBoard(tmp_path / "tb", "run")], after=1, over=lambda: True)
    assert set(curve(tmp_path / "tb" / "run")) == set(range(20, 40))
    assert not (tmp_path / "tb" / "run" / "incidents").exists()


class Hearing:
    """A tracker that notes what it is told, in order: a leg with a step, or with a fact's kind."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, int | str]] = []

    def metric(self, leg: Leg, metric: Metric) -> None:
        self.heard.append((*leg, metric.step))

    def fact(self, leg: Leg, fact: Fact) -> None:
        self.heard.append((*leg, fact.kind))

    def flush(self) -> None:
        pass


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hearing, reader = Hearing(), Reader(tmp_path / "run")
    reader.hand_on([hearing])  # type: ignore[list-item]
    assert hearing.heard == []
    judge(RecordedRun(tmp_path / "run", monkeypatch), 0, 9, 3.0)
    reader.hand_on([hearing])  # type: ignore[list-item]
    assert hearing.heard == [(1, 0, step) for step in range(10)]


def test_of_a_long_run_each_fact_is_told_behind_the_steps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, at_once, in_pieces = eventful_run(tmp_path / "run", monkeypatch), Hearing(), Hearing()
    Reader(run.paths.root).hand_on([at_once])  # type: ignore[list-item]
    monkeypatch.setattr("rollback.rundir.metrics.metric_lines._PIECE", 1 << 11)  # the curve does not fit into one piece
    Reader(run.paths.root).hand_on([in_pieces])  # type: ignore[list-item]
    assert at_once.heard.index((1, 0, "incident")) == at_once.heard.index((1, 0, 49)) + 1
    assert in_pieces.heard == at_once.heard


def test_what_happens_within_a_leg_is_told_at_its_step_also_where_the_steps_come_late(run: RecordedRun) -> None:
    hearing, reader = Hearing(), Reader(run.paths.root)
    run.tell(30, PassedOver(first=60, last=63, step=30, timeline=0))  # in mid-leg, as `--skip 60:63` has it
    judge(run, 0, 24, 3.0)  # the rest is not on disk yet
    reader.hand_on([hearing])  # type: ignore[list-item]
    assert hearing.heard[-1] == (1, 0, 24)
    judge(run, 25, 49, 3.0)
    run.tell(40, incident(0, 35, 39))  # only observed: the leg goes on behind it
    reader.hand_on([hearing])  # type: ignore[list-item]
    steps = [(1, 0, step) for step in range(50)]
    assert hearing.heard == [*steps[:30], (1, 0, "skipped"), *steps[30:40], (1, 0, "incident"), *steps[40:]]
    run.tell(51, PassedOver(first=100, last=101, step=50, timeline=0))  # and the run died of what came then
    reader.hand_on([hearing], last=True)  # type: ignore[list-item]
    assert hearing.heard[-1] == (1, 0, "skipped")


def test_hostile_words_are_code_in_the_text(run: RecordedRun, tmp_path: Path) -> None:
    hostile = "`</code><script>alert(1)</script> [x](javascript:y) \x1b[31m\n# title"
    run.tell(1, incident(0, 45, 49, explanation=hostile))
    run.tell(1, rollback_plan(0, "c000001-s00000020", 20, (60, 60), reason=hostile))
    assert track(run.paths.root, "--tensorboard", tmp_path / "tb").exit_code == 0
    found = accumulated(tmp_path / "tb" / "run" / "incidents")
    for tag in ("incident", "plan/0"):
        text = make_ndarray(found.Tensors(tag)[0].tensor_proto).item().decode()
        lines = text.splitlines()
        assert all(line.startswith("- `") and line.endswith("`") and line.count("`") == 2 for line in lines), text
        assert all(char.isprintable() or char == "\n" for char in text)


# --- Weights & Biases -------------------------------------------------------------------------------------------------


def records(file: Path) -> Iterator[bytes]:
    """Records of a `.wandb` file: seven bytes of heading, then LevelDB's log format in blocks of 32 KiB."""
    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield parts
            parts = b""


def logged(folder: Path) -> dict[str, dict[str, Any]]:
    """What W&B's offline files hold, by name of the run: its group, its history and its summary."""
    from wandb.proto import wandb_internal_pb2

    def values(items: Any) -> dict[str, Any]:
        return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}

    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.rglob("*.wandb")):
        run: dict[str, Any] = {"history": [], "summary": {}}
        for data in records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            match record.WhichOneof("record_type"):
                case "run":
                    run |= {"group": record.run.run_group, "name": record.run.display_name}
                case "history":
                    run["history"].append(values(record.history.item))
                case "summary":
                    run["summary"] |= values(record.summary.update)
                case _:
                    pass
        found[run["name"]] = run
    return found


def test_wandb_has_a_run_for_each_leg_in_one_group_with_steps_that_only_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = eventful_run(tmp_path / "run of 12:30, #1", monkeypatch)  # characters that W&B has no ids of
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    command = [sys.executable, "-m", "rollback", "track", str(run.paths.root), "--wandb", "project"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    legs = logged(tmp_path / "wandb")
    names = ["attempt 1", "attempt 1, after rollback 1", "attempt 1, after rollback 2", "attempt 2, after rollback 2"]
    assert sorted(legs) == names
    assert len({leg["group"] for leg in legs.values()}) == 1
    steps = {name: [row["_step"] for row in leg["history"]] for name, leg in legs.items()}
    assert all(own == sorted(set(own)) for own in steps.values())
    losses = {name: [row["_step"] for row in leg["history"] if "train/loss" in row] for name, leg in legs.items()}
    assert losses[names[0]] == list(range(50))
    assert losses[names[2]] == list(range(20, 70))
    assert losses[names[3]] == list(range(60, 100))
    assert [row["skip/batches"] for row in legs[names[2]]["history"] if "skip/batches" in row] == [64]
    assert "loss 6.5 at step 49" in legs[names[0]]["summary"]["incident/1"]


# --- how it is asked for ----------------------------------------------------------------------------------------------


def test_what_cannot_be_tracked_is_refused_with_the_reason(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no tracker" in str(track(run.paths.root).exception)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name in ("tensorboard", "wandb"):
        for command in (["track", str(run.paths.root)], ["launch"]):
            result = CliRunner().invoke(app, [*command, f"--{name}", "x", __file__])
            if command[0] == "launch":
                assert isinstance(result.exception, UsageError)
                assert f"torch-rollback[{name}]" in (result.exception.hint or "")


@pytest.mark.parametrize("words", ["--tensorboard=", "--tensorboard={run}", "--tensorboard={run}/..", "--wandb= "])
def test_what_would_be_written_nowhere_or_into_the_run_directory_is_refused(run: RecordedRun, words: str) -> None:
    told, before = words.format(run=run.paths.root), sorted(run.paths.root.rglob("*"))
    for command in (["track", str(run.paths.root), told], ["launch", "--run", str(run.paths.root), told, __file__]):
        error = CliRunner().invoke(app, command).exception
        assert isinstance(error, UsageError)
        assert words.partition("=")[0] in error.message
    assert sorted(run.paths.root.rglob("*")) == before


def test_a_tracker_that_fails_is_told_of_at_once_and_only_once_and_fails_nothing_else(tmp_path: Path) -> None:
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    with trackers_beside(tmp_path / "run", ["--tensorboard", str(tmp_path / "tb"), "--no-such-flag"], said.put):
        assert "the run is not touched" in said.get(timeout=60)
    assert said.empty()


def test_where_no_process_can_be_made_for_trackers_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    said: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with trackers_beside(tmp_path / "run", ["--wandb", "mine"], said.append):
        said.append("the run")
    again = f"rollback track {tmp_path / 'run'} --wandb mine"
    told = f"the trackers cannot be started (Resource temporarily unavailable); `{again}` tells them all"
    assert said == [told, "the run"]


def test_a_journal_that_cannot_be_read_keeps_the_trackers_from_starting_and_not_the_job(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.train_journal.mkdir(parents=True)
    said: list[str] = []
    with trackers_beside(paths.root, ["--wandb", "mine"], said.append):
        pass
    (told,) = said
    assert "the trackers cannot be started" in told
    assert "rollback track" in told


def test_where_no_thread_can_be_made_for_trackers_the_run_goes_on_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    (tmp_path / "wandb.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    said, before = list[str](), psutil.Process().children()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with trackers_beside(tmp_path / "run", ["--wandb", "mine"], said.append):
        said.append("the run")
    assert said[0].startswith("the trackers cannot be started (starting a thread (trackers): can't start new thread);")
    assert said[1:] == ["the run"]
    assert psutil.Process().children() == before


def test_trackers_that_do_not_end_are_left_when_a_stop_comes_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    said: list[str] = []
    told = iter([1, 1, 2])  # the stop that ended the run; and one while its trackers end
    with trackers_beside(tmp_path / "run", ["--wandb", "mine"], said.append, lambda: next(told, 2)):
        pass
    again = f"rollback track {tmp_path / 'run'} --wandb mine"
    assert said == [f"the trackers had not ended when one more stop signal came; `{again}` tells them all"]


@pytest.mark.parametrize("error", [wandb.errors.UsageError, wandb.errors.CommError])
def test_what_wandb_refuses_is_an_error_in_words(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(**_: object) -> None:
        raise error("No API key configured.\nUse `wandb login`.")

    judge(run, 0, 4, 3.0)
    monkeypatch.setattr(wandb, "init", refuse)
    found = track(run.paths.root, "--wandb", "mine").exception
    assert isinstance(found, OutputNotWritten)
    assert found.message == "logging to the project mine of W&B: No API key configured. Use `wandb login`."


def test_a_tracker_that_fails_ends_although_the_launch_goes_on(run: RecordedRun, tmp_path: Path) -> None:
    judge(run, 0, 4, 3.0)
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "rollback", "track", str(run.paths.root), "--until-eof"]
    process = subprocess.Popen(
        [*command, "--tensorboard", str(tmp_path / "file" / "tb")], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.wait(60) == ExitCode.IO
        assert process.stderr is not None
        assert b"Fatal Python error" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_of_a_tracker_that_failed_the_error_is_quoted_and_not_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('it is broken')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    said: list[str] = []
    with trackers_beside(tmp_path / "run", ["--wandb", "mine"], said.append):
        pass
    (line,) = said
    assert line.startswith(
        "the trackers failed (--wandb needs wandb, which cannot be imported (it is broken)); the run"
    )


def test_beside_a_launch_only_its_own_attempts_are_told_and_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    judge(run, 0, 29, 3.0)
    with trackers_beside(tmp_path / "run", ["--tensorboard", str(tmp_path / "tb")], print):
        judge(run, 20, 39, 2.0, attempt=2)  # long before the tracker has come up
    assert set(curve(tmp_path / "tb" / "run")) == set(range(20, 40))
