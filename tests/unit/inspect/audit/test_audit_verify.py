"""`rollback audit --verify`: whatever was changed in the record is found, and said where."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from recorded_run import RecordedRun, eventful_run
from rollback.cli import app
from rollback.facts.training import PassedOver, Trouble
from rollback.inspect.audit.verify import check_integrity
from rollback.rundir.metrics.column_file import LINES, ColumnWriter
from rollback.rundir.metrics.metric_lines import metric_line
from rollback.rundir.skip_records import WRITING, SkippedBatch
from rollback.system.lines import LineWriter


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    return eventful_run(tmp_path / "run", monkeypatch)


def verify(run: RecordedRun, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["audit", str(run.paths.root), "--verify", *arguments])


def test_an_untouched_record_is_sound(run: RecordedRun) -> None:
    done = verify(run)
    assert done.exit_code == 0
    assert "sound" in done.stdout
    assert all(line in done.stdout for line in ("train.jsonl: 2", "supervisor.jsonl: 6"))


def test_a_changed_line_is_named_with_its_place(run: RecordedRun) -> None:
    lines = run.paths.train_journal.read_bytes().splitlines(keepends=True)
    changed = next(place for place, line in enumerate(lines) if b'"step":40' in line)
    lines[changed] = lines[changed].replace(b'"step":40', b'"step":41')
    run.paths.train_journal.write_bytes(b"".join(lines))
    done = verify(run, "--json")
    assert done.exit_code == 74
    state = json.loads(done.stdout)["journals"][0]
    place = {"line": changed + 1, "byte": sum(map(len, lines[:changed])), "reason": "the hash chain is broken"}
    assert (state["lines"], state["broken"]) == (changed, place)
    assert f"BROKEN at line {changed + 1}" in verify(run).stdout


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_line_that_is_lost_doubled_or_moved_is_found(run: RecordedRun, data: st.DataObject) -> None:
    whole = run.paths.train_journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    place = data.draw(st.integers(0, len(lines) - 3))
    changed = data.draw(st.sampled_from([
        lines[:place] + lines[place + 1 :],
        lines[: place + 1] + lines[place:],
        [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]],
    ]))  # fmt: skip
    run.paths.train_journal.write_bytes(b"".join(changed))
    try:
        broken = check_integrity(run.paths.root).journals[0].broken
    finally:
        run.paths.train_journal.write_bytes(whole)
    assert broken is not None
    assert broken.line in (place + 1, place + 2)


def test_a_torn_last_line_is_no_damage(run: RecordedRun) -> None:
    whole = run.paths.train_journal.read_bytes()
    run.paths.train_journal.write_bytes(whole[:-9])
    done = verify(run)
    assert done.exit_code == 0
    assert "bytes of a line that a crash tore" in done.stdout


def changed_skips(run: RecordedRun, change: Any) -> str:
    path = run.paths.skip_record(1)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    done = verify(run)
    assert done.exit_code == 1
    assert "rank-00001.jsonl" in done.stdout
    return str(done.stdout)


def test_a_batch_that_a_rank_s_record_lacks_is_named(run: RecordedRun) -> None:
    told = changed_skips(run, lambda lines: lines[:-2])
    assert "it does not have batches 102:103, which the ranks passed over" in told


def test_other_samples_for_the_same_batch_are_named(run: RecordedRun) -> None:
    text = changed_skips(run, lambda lines: [lines[0].replace(b"8010", b"8019"), *lines[1:]])
    assert "batch 80 is there twice, with different samples" in text


def test_a_batch_outside_of_every_window_is_named(run: RecordedRun) -> None:
    writer = LineWriter(run.paths.skip_record(1))
    stray = SkippedBatch(batch=7, epoch=0, offset=7, indices=[1], timeline=0)
    writer.write(stray.model_dump_json())
    writer.close()
    assert "batch 7 is in no window" in changed_skips(run, lambda lines: lines)


def test_a_lost_record_is_named_and_a_hostile_one_is_shown_and_not_obeyed(run: RecordedRun) -> None:
    run.paths.skip_record(0).unlink()
    run.paths.skip_record(1).write_text('{"batch": "\\u001b[31m"}\n')
    done = verify(run)
    assert done.exit_code == 1
    assert "rank-00000.jsonl: it does not have batches 40:103" in done.stdout
    assert all(char.isprintable() or char == "\n" for char in done.stdout)


def test_a_record_that_the_disk_refused_is_named_with_that_reason(run: RecordedRun) -> None:
    run.paths.skip_record(0).unlink()
    run.tell(170, Trouble(doing=WRITING, error="skips/rank-00000.jsonl: No space left on device"))
    done = verify(run)
    assert done.exit_code == 1
    why = "(writing the skip record failed: skips/rank-00000.jsonl: No space left on device)"
    assert f"it does not have batches 40:103, which the ranks passed over {why}" in done.stdout
    other = changed_skips(run, lambda lines: lines[:-2])
    assert (
        "it does not have batches 102:103, which the ranks passed over (writing the skip record failed on rank 0:"
        in (other)
    )


def test_a_passing_over_that_no_window_explains_is_named(run: RecordedRun) -> None:
    run.pass_over(170, 500, 501, attempt=2, timeline=2)
    assert "the skip list does not have all that was passed over: batches 500:501" in verify(run).stdout


def test_metrics_that_are_not_those_of_their_columns_are_named(run: RecordedRun) -> None:
    judged = {"batch": 0, "loss": 1.0, "grad_norm": 1.0, "verdict": "healthy", "attempt": 1, "timeline": 0}
    lines = [metric_line(step=step, **judged) + "\n" for step in range(3 * LINES)]  # type: ignore[arg-type]
    run.paths.metrics.write_text("".join(lines))
    writer = ColumnWriter(run.paths.metrics)
    writer.catch_up(3)
    writer.close()
    assert verify(run).exit_code == 0
    changed = LINES + 7
    lines[changed] = lines[changed].replace("1.0", "1.5", 1)
    run.paths.metrics.write_text("".join(lines))
    done = verify(run)
    assert done.exit_code == 1
    first, end = len("".join(lines[:LINES])), len("".join(lines[: 2 * LINES]))
    assert done.stdout.count("DISAGREES") == 1
    assert f"train.jsonl: bytes {first} to {end - 1} are not the lines of which there are columns" in done.stdout
    run.paths.metrics.unlink()
    assert verify(run).exit_code == 0, "they may be deleted"


def test_attempts_that_go_backwards_are_named(run: RecordedRun) -> None:
    run.tell(170, PassedOver(first=40, last=40, step=20, timeline=2), 1)
    assert "attempt 1 after attempt 2" in verify(run).stdout
