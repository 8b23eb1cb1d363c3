"""The table of skipped samples: a row for each, the same in every format, and nothing in it that a reader obeys."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from typer.testing import CliRunner

from recorded_run import RecordedRun, attached, eventful_run, incident, rollback_plan
from rollback.cli import app
from rollback.errors import OutputNotWritten, UsageError
from rollback.facts.fact import Fact
from rollback.facts.training import Accepted, PassedOver, SampleQuarantine, ScreenedOut, SkipAdded, Window
from rollback.inspect.audit.passings import WindowIndex
from rollback.inspect.audit.samples import COLUMNS, read_samples
from rollback.inspect.audit.tables import harmless, write_csv
from rollback.inspect.audit.verify import check_integrity
from rollback.rundir.skip_records import SkippedBatch
from rollback.system.lines import LineWriter

C1 = "c000001-s00000020"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    return RecordedRun(tmp_path / "run", monkeypatch)


@pytest.fixture
def eventful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    return eventful_run(tmp_path / "run", monkeypatch)


def cli(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def rows_of(run: RecordedRun) -> list[dict[str, Any]]:
    return [dict(zip([c.name for c in COLUMNS], row, strict=True)) for row in read_samples(run.paths.root).rows]


def test_every_skipped_sample_has_one_row_with_its_reason(eventful: RecordedRun) -> None:
    rows = rows_of(eventful)
    # Batches 40 to 103, of which 80 to 101 were passed over twice, two ranks, four samples each.
    assert len(rows) == len({(row["batch"], row["rank"], row["place"]) for row in rows}) == 64 * 2 * 4
    once, twice = (next(row for row in rows if (row["batch"], row["rank"]) == (batch, 1)) for batch in (41, 90))
    assert (once["sample"], once["place"], once["incident"], once["incidents"]) == (4110, 0, 2, [2])
    assert (twice["incident"], twice["incidents"], twice["timeline"], twice["attempt"]) == (2, [1, 2], 2, 1)
    assert (twice["window_first"], twice["window_last"], twice["rule"]) == (40, 103, "loss-level")
    assert (twice["checkpoint"], twice["restored_step"], twice["outcome"]) == (C1, 20, "recovered")
    assert (twice["step"], twice["at"]) == (20, "2030-01-01T00:01:04.000+00:00")


def passed_over_again(run: RecordedRun, between: Fact, ranks: int) -> None:
    """Batches 4 and 5, first by two ranks, then by so many, which then read other samples."""
    run.tell(0, SkipAdded(window=Window(first=4, last=5), who="settings", why="given"))
    for attempt, count in ((1, 2), (2, ranks)):
        run.tell(10 * attempt, attached(None, 0).model_copy(update={"world_size": count}), attempt)
        if attempt == 2:
            run.tell(20, between, 2)
        run.tell(10 * attempt + 1, PassedOver(first=4, last=5, step=4, timeline=0), attempt)
        for rank in range(count):
            writer = LineWriter(run.paths.skip_record(rank))
            for batch in (4, 5):
                indices = [100 * attempt + 10 * batch + i for i in range(rank * 4 // count, (rank + 1) * 4 // count)]
                line = SkippedBatch(batch=batch, epoch=0, offset=batch, indices=indices, timeline=0)
                writer.write(line.model_dump_json())
            writer.close()


@pytest.mark.parametrize("between", [
    Accepted(what="ranks", before={"world_size": 2}, after={"world_size": 1}),
    SampleQuarantine(batch=3, samples=(140,), added=(140,), released=(), who="suspicion", why="two incidents"),
])  # fmt: skip
def test_a_batch_that_holds_other_samples_when_it_is_passed_over_again_has_those_alone(
    run: RecordedRun, between: Fact
) -> None:
    passed_over_again(run, between, 1 if isinstance(between, Accepted) else 2)
    assert [row["sample"] for row in rows_of(run) if row["batch"] == 4] == [240, 241, 242, 243]
    audit = json.loads(cli("audit", run.paths.root, "--json").stdout)
    assert (audit["totals"]["skipped_batches"], audit["totals"]["skipped_samples"]) == (2, 8)
    held = audit["skipped"][0]["indices"].values()
    assert [sample for indices in held for sample in indices] == [240, 241, 242, 243]
    assert audit["notices"] == []
    assert check_integrity(run.paths.root).disagreements == []


def test_every_format_holds_the_same_rows(eventful: RecordedRun, tmp_path: Path) -> None:
    shown: dict[str, list[dict[str, Any]]] = {}
    for form in ("csv", "jsonl", "parquet"):
        done = cli("audit", eventful.paths.root, "--format", form, "-o", tmp_path / form)
        assert done.exit_code == 0, done.output
    shown["jsonl"] = [json.loads(line) for line in (tmp_path / "jsonl").read_text().splitlines()]
    shown["parquet"] = parquet.read_table(tmp_path / "parquet").to_pylist()
    assert shown["jsonl"] == shown["parquet"] == rows_of(eventful)
    with open(tmp_path / "csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["sample"] for row in table] == [str(row["sample"]) for row in shown["jsonl"]]
    assert {row["incidents"] for row in table} == {"2", "1 2"}
    assert cli("audit", eventful.paths.root, "--format", "csv").stdout == (tmp_path / "csv").read_text()


@pytest.mark.parametrize("sample", [1 << 63, 1 << 70])
def test_an_index_that_parquet_cannot_hold_is_refused_with_what_can(
    run: RecordedRun, tmp_path: Path, sample: int
) -> None:
    """As of a sampler that gives hashes."""
    run.attach(0, 1, None, 0)
    writer = LineWriter(run.paths.skip_record(0))
    writer.write(SkippedBatch(batch=50, epoch=0, offset=50, indices=[sample], timeline=0).model_dump_json())
    writer.close()
    run.tell(2, PassedOver(first=50, last=50, step=25, timeline=0))
    assert [row["sample"] for row in rows_of(run)] == [sample]
    result = cli("audit", run.paths.root, "--format", "parquet", "-o", tmp_path / "skipped.parquet")
    assert isinstance(result.exception, UsageError)
    assert "--format csv or jsonl" in (result.exception.hint or "")
    assert not (tmp_path / "skipped.parquet").exists()


def test_the_user_s_windows_and_data_without_indices_have_rows_too(run: RecordedRun) -> None:
    run.attach(0, 1, None, 0)
    run.tell(1, SkipAdded(window=Window(first=50, last=51), who="settings", why="duplicates"))
    writer = LineWriter(run.paths.skip_record(0))
    line = SkippedBatch(batch=50, epoch=0, offset=50, indices=None, timeline=0)
    writer.write(line.model_dump_json())
    writer.close()
    run.tell(2, PassedOver(first=50, last=51, step=25, timeline=0))
    [row] = rows_of(run)
    assert (row["batch"], row["rank"], row["sample"], row["place"], row["by_user"]) == (50, 0, None, None, True)
    assert (row["incident"], row["incidents"], row["reason"]) == (None, [], "settings: duplicates")
    assert "1 of 2 batches" in cli("audit", run.paths.root, "--format", "csv").stderr


def test_the_supervisor_s_windows_are_not_the_user_s(run: RecordedRun) -> None:
    run.attach(0, 1, None, 0)
    run.tell(1, SkipAdded(window=Window(first=50, last=50), who="the supervisor", why="the same exception twice"))
    run.pass_over(2, 50, 50, timeline=0)
    for row in rows_of(run):
        assert (row["by_user"], row["reason"]) == (False, "the supervisor: the same exception twice")


_SOME = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda at: Window(first=at[0], last=sum(at)))


@given(st.lists(_SOME, max_size=12), st.integers(0, 45))
def test_the_windows_that_hold_a_batch_are_found_in_the_order_of_the_record(windows: list[Window], batch: int) -> None:
    assert WindowIndex(windows).holding(batch) == [n for n, window in enumerate(windows) if batch in window]


def test_a_row_does_not_cost_more_where_there_are_more_windows(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attach(0, 1, None, 0)
    writer = LineWriter(run.paths.skip_record(0))
    for batch in range(100):
        run.tell(1, SkipAdded(window=Window(first=batch, last=batch), who="settings", why=str(batch)))
        writer.write(SkippedBatch(batch=batch, epoch=0, offset=batch, indices=None, timeline=0).model_dump_json())
        run.tell(2, PassedOver(first=batch, last=batch, step=25, timeline=0))
    writer.close()
    looks: list[int] = []
    holds = Window.__contains__
    monkeypatch.setattr(Window, "__contains__", lambda self, batch: looks.append(batch) or holds(self, batch))
    assert [row["reason"] for row in rows_of(run)] == [f"settings: {batch}" for batch in range(100)]
    assert len(looks) <= 300


def test_a_window_too_large_to_be_listed_is_a_notice(run: RecordedRun) -> None:
    run.tell(30, SkipAdded(window=Window(first=0, last=2**52), who="user", why="everything"))
    run.tell(31, PassedOver(first=0, last=2**52, step=30, timeline=0))
    assert rows_of(run) == []


HOSTILE = ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "a\x1b[31mb", 'quo"te,comma\nline']


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_in_csv_is_no_formula_and_no_escape_sequence(run: RecordedRun, text: str) -> None:
    run.tell(35, incident(1, 30, 34, value=float("nan"), threshold=-1.5))
    run.tell(35, rollback_plan(1, C1, 20, (60, 60), reason=text))
    run.pass_over(36, 60, 60)
    stream = io.StringIO()
    write_csv(read_samples(run.paths.root).rows, stream)
    shown = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert len(shown) == 8
    assert not shown[0]["reason"].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert shown[0]["reason"].isprintable()
    assert (shown[0]["value"], shown[0]["threshold"]) == ("NaN", "-1.5")  # a number stays one


@given(st.text())
def test_harmless_text_is_printable_and_never_begins_a_formula(text: str) -> None:
    assert harmless(text).isprintable()
    assert not harmless(text).startswith(("=", "+", "-", "@"))
    assert not text.isprintable() or harmless(text) in (text, f"'{text}")


def test_a_large_record_is_read_line_by_line(run: RecordedRun) -> None:
    """Two thousand batches of a thousand samples would take 100 MB and more as objects; the reader may use a few."""
    run.tell(1, SkipAdded(window=Window(first=0, last=1_999), who="user", why="many"))
    writer = LineWriter(run.paths.skip_record(0))
    indices = list(range(1000))
    for batch in range(2_000):
        line = SkippedBatch.model_construct(batch=batch, epoch=0, offset=batch, indices=indices, timeline=0)
        writer.write(line.model_dump_json())
    writer.close()
    code = (
        "import resource, sys; from pathlib import Path; from rollback.inspect.audit.samples import read_samples\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "count = sum(1 for row in read_samples(Path(sys.argv[1])).rows)\n"
        "print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, str(run.paths.root)]
    count, grown = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert count == 2_000_000
    assert grown < 20_000  # KiB


def test_a_file_appears_whole_or_not_at_all(eventful: RecordedRun, tmp_path: Path) -> None:
    target = tmp_path / "skipped.csv"
    target.write_text("before")
    (eventful.paths.train_journal).write_text("damaged\nlines\n")
    assert cli("audit", eventful.paths.root, "--format", "csv", "-o", target).exit_code != 0
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "parquet"], "needs a file"),
        (["--json", "--format", "csv"], "two formats"),
        (["--verify", "--format", "csv"], "text or json"),
        (["--format", "csv", "-o", "RUN/inside.csv"], "inside the run directory"),
        (["-o", "-"], "/dev/stdout"),
        (["--format", "csv", "-o", "missing/skipped.csv"], "no directory"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    eventful: RecordedRun, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(eventful.paths.root.parent)
    result = cli("audit", eventful.paths.root, *(word.replace("RUN", "run") for word in arguments))
    assert isinstance(result.exception, UsageError)
    assert words in str(result.exception)


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_refuses_is_an_error_with_the_place(eventful: RecordedRun, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "skipped.csv"
    (folder / f".{target.name}.{os.getpid()}.tmp").symlink_to("/dev/full")
    result = cli("audit", eventful.paths.root, "--format", "csv", "-o", target)
    assert isinstance(result.exception, OutputNotWritten)
    assert "No space left" in str(result.exception)
    assert list(folder.iterdir()) == []


def test_without_pyarrow_parquet_says_what_to_install(
    eventful: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = cli("audit", eventful.paths.root, "--format", "parquet", "-o", tmp_path / "x")
    assert isinstance(result.exception, UsageError)
    assert "torch-rollback[parquet]" in (result.exception.hint or "")


def test_what_was_screened_out_has_the_reason_of_its_own_update(run: RecordedRun) -> None:
    run.attach(0, 1, None, 0)
    run.tell(1, incident(1, 45, 49))
    run.tell(1, rollback_plan(1, C1, 20, None, screen=Window(first=40, last=120)))
    for number, first in enumerate((90, 92)):
        run.tell(2, ScreenedOut(
            incident=1, window=Window(first=first, last=first + 1), verdict="spike", cause="loss",
            rule="stands-out-loss", value=6.5 + number, threshold=3.25, explanation=f"loss {6.5 + number}",
            step=45, timeline=1, through=120,
        ))  # fmt: skip
        run.pass_over(3, first, first + 1)
    rows = rows_of(run)
    assert len(rows) == 4 * 2 * 4
    last = next(row for row in rows if row["batch"] == 93)
    assert (last["window_first"], last["window_last"], last["value"], last["reason"]) == (92, 93, 7.5, "loss 7.5")
    assert (last["incident"], last["rule"], last["onset_step"]) == (1, "stands-out-loss", 45)
    report = json.loads(cli("audit", run.paths.root, "--json").stdout)
    assert report["incidents"][0]["screen"] == {"first": 40, "last": 120, "batches": 81, "passed_over": 4}
    assert "screen batches 40:120 (4 of 81 were skipped)" in " ".join(cli("audit", run.paths.root).stdout.split())
