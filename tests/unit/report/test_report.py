"""The report: what is drawn is what happened, the account adds up, and nothing from a run directory is obeyed."""

import base64
import hashlib
import itertools
import json
import math
import os
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_run import LongRun
from typer.testing import CliRunner

from recorded_run import RecordedRun, eventful_run, incident, rollback_plan
from rollback.cli import app
from rollback.errors import UsageError
from rollback.facts.ring import Drained
from rollback.facts.supervisor import Hung
from rollback.facts.training import Advice, AttemptEnded, AttemptStarted, Trouble
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.report.page import make_page, time_parts
from rollback.report.series import nonfinite_ranges, series, stretches, table, thin
from rollback.rundir.metrics.metric_columns import MetricColumns, joined, last_steps, metric_pieces
from rollback.rundir.metrics.metric_lines import Metric, metric_line
from rollback.rundir.stacks import ProcessSeen, write_processes
from rollback.system.lines import LineWriter

values = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


def columns(lines: list[tuple[int, int, int, float | None]]) -> MetricColumns:
    """Of attempt, timeline, step, loss."""
    attempt, timeline, step, loss = (list(each) for each in zip(*lines, strict=True)) if lines else ([], [], [], [])
    numbers = np.array([math.nan if value is None else value for value in loss], float)
    missing = np.array([value is None for value in loss], bool)
    whole = [np.array(each, np.int64) for each in (step, attempt, timeline)]
    return MetricColumns(*whole, numbers, numbers, missing, missing)


# Thinning -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(values, min_size=1, max_size=60), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_thinning_keeps_extremes_and_ends_of_every_bucket_and_all_that_is_asked_for(
    curves: list[tuple[list[float], int]], gap: int
) -> None:
    """Of several stretches at once, each as if it were alone."""
    lengths = [len(curve) for curve, _ in curves]
    starts = np.cumsum([0, *lengths[:-1]])
    steps = np.concatenate([np.arange(length) * gap for length in lengths])
    keep = (steps >= 3 * gap) & (steps <= 5 * gap)
    own = np.concatenate([np.array(curve, float) for curve, _ in curves])
    index = thin(steps, own, starts, np.array([buckets for _, buckets in curves]), keep)
    assert list(index) == sorted(set(index))
    for start, (curve, buckets) in zip(starts, curves, strict=True):
        inside = (index >= start) & (index < start + len(curve))
        _is_thinned(index[inside] - start, np.array(curve, float), buckets, gap)


def _is_thinned(index: np.ndarray, own: np.ndarray, buckets: int, gap: int) -> None:
    steps, finite = np.arange(len(own)) * gap, np.flatnonzero(np.isfinite(own))
    assert set(index) <= set(finite)
    assert len(index) <= 2 * buckets + 2 + 3
    if len(finite):
        kept = own[index]
        assert (kept.min(), kept.max()) == (own[finite].min(), own[finite].max())
        assert {finite[0], finite[-1]} <= set(index)
        assert {i for i in finite if 3 <= i <= 5} <= set(index)
        span = steps[finite[-1]] - steps[finite[0]] + 1
        for bucket in range(buckets):
            inside = [i for i in finite if (steps[i] - steps[finite[0]]) * buckets // span == bucket]
            drawn = [own[i] for i in index if i in set(inside)]
            if inside:
                assert (min(drawn), max(drawn)) == (own[inside].min(), own[inside].max())


@settings(deadline=None)
@given(st.lists(values | st.none(), max_size=200), st.integers(1, 20))
def test_no_value_that_is_not_finite_is_lost(curve: list[float | None], most: int) -> None:
    own = np.array([math.nan if value is None else value for value in curve], float)
    known = np.array([value is not None for value in curve], bool)
    ranges = nonfinite_ranges(np.arange(len(curve)) * 3, own, known, most, undone=False)
    broken = [3 * i for i, value in enumerate(curve) if value is not None and not math.isfinite(value)]
    assert len(ranges) <= most
    assert sum(item.count for item in ranges) == len(broken)
    assert all(any(item.first <= step <= item.last for item in ranges) for step in broken)
    assert all(before.last < after.first for before, after in itertools.pairwise(ranges))
    if len(ranges) < most:  # then none had to be joined, and kinds are not mixed
        assert not any(" and " in item.kind for item in ranges)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=8))
def test_of_steps_that_were_run_again_the_last_time_counts(goes: list[tuple[int, int]]) -> None:
    lines = [(1, go, step, 1.0) for go, (first, count) in enumerate(goes) for step in range(first, first + count)]
    own = columns(lines)
    kept: dict[int, int] = {}
    for row, (_, _, step, _) in enumerate(lines):
        kept = {before: each for before, each in kept.items() if before < step}
        kept[step] = row
    parts = stretches(own)
    rows = [row for part in parts for row in range(part.rows.start, part.rows.stop)]
    assert sorted(rows) == list(range(len(lines)))
    assert {row for part in parts if not part.undone for row in range(part.rows.start, part.rows.stop)} == set(
        kept.values()
    )


def test_a_curve_in_numbers_tells_of_the_steps_that_count() -> None:
    own = columns([*((1, 0, step, 1.0 + step) for step in range(10)), (1, 1, 5, math.nan), (1, 1, 6, 3.0)])
    rows = table(own, own.loss, own.no_loss, stretches(own), 2)
    assert [(row.first, row.last, row.lowest, row.highest, row.nonfinite) for row in rows] == [
        (0, 3, 1.0, 4.0, 0),
        (4, 6, 3.0, 5.0, 1),
    ]
    curve = series(own, own.loss, own.no_loss, stretches(own), np.zeros(len(own), bool))
    assert [(item.first, item.kind, item.undone) for item in curve.nonfinite] == [(5, "NaN", False)]
    assert curve.shown == curve.total == 12
    assert not stretches(columns([]))
    assert table(columns([]), np.array([]), np.array([], bool), [], 9) == []


# Reading --------------------------------------------------------------------------------------------------------------


def test_columns_are_what_the_lines_say_and_damage_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "train.jsonl"
    writer = LineWriter(path)
    for step, loss in enumerate([1.5, math.nan, math.inf, -math.inf, None, 1e300] * 3):
        norm = None if step % 2 else 0.5
        place = {"step": step, "batch": step, "attempt": 1 + step // 9, "timeline": step // 6}
        writer.write(metric_line(loss=loss, grad_norm=norm, verdict="x", **place))
    writer.flush()
    with open(path, "a") as file:
        file.write('{"step": "7"}\nrubbish\n[1]\n{"step": 18, "batch": 1, "loss": 1')  # the last line is torn
    damaged: list[str] = []
    own = joined(metric_pieces(path, damaged))
    lines = [Metric.model_validate_json(line) for line in path.read_text().splitlines()[:18]]
    assert len(own) == len(lines) == 18
    assert [line.step for line in lines] == own.step.tolist()
    for line, loss, missing in zip(lines, own.loss, own.no_loss, strict=True):
        assert (line.loss is None) == missing
        assert missing or loss == line.loss or (math.isnan(loss) and math.isnan(line.loss or 0.0))
    assert last_steps([own]) == {1: (1, 8), 2: (2, 17)}
    assert [re.findall(r"line (\d+) is damaged", text) for text in damaged] == [["19"], ["20"], ["21"]]
    assert len(joined(metric_pieces(tmp_path / "none", damaged))) == 0


# The account ----------------------------------------------------------------------------------------------------------


def test_the_account_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eventful_run(tmp_path / "run", monkeypatch)
    contents = read_run_contents(tmp_path / "run")
    audit = compile_audit(contents)
    parts = {part.key: part for part in time_parts(audit)}
    assert sum(part.seconds for part in parts.values()) == pytest.approx(audit.totals.seconds)
    assert parts["rewinds"].seconds + parts["restarts"].seconds == pytest.approx(audit.totals.seconds_lost)
    assert parts["down"].seconds == pytest.approx(audit.totals.seconds_down)
    assert (parts["healthy"].steps, parts["rewinds"].steps, parts["restarts"].steps) == (100, 40, 10)
    assert parts["stalled"].seconds == 0


def test_what_a_hang_kept_waiting_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.tell(0, AttemptStarted(command=("torchrun",), host="node1", pid=1))
    run.attach(0, 1, None, 0)
    run.commit(0, "c000000-s00000000", 0)
    run.judge(0, 19)
    run.tell(80, Hung(suspect=1, reason="rank 1 waits", silent=60.0, limit=60.0, stacks=(1,)))
    run.tell(80, AttemptEnded(status=1, cause="hang: rank 1 waits", step=20, seconds=80.0, why="hang"))
    run.attach(90, 2, "c000000-s00000000", 0)
    run.paths.stacks(1).mkdir(parents=True)
    run.paths.rank_stacks(1, 1).write_text("Thread 0x1\n  File <b>train.py</b>, line 3 in all_reduce\n")
    seen = ProcessSeen(
        rank=1, pid=7, command="python", is_rank=True, state="S", waits_in=None, offset=0, size=60, why_none=None
    )
    write_processes(run.paths.processes(1), [seen])
    contents = read_run_contents(run.paths.root)
    assert {part.key: part.seconds for part in time_parts(compile_audit(contents))} == pytest.approx(
        {"healthy": 0, "rewinds": 0, "restarts": 20, "stalled": 60, "down": 10}
    )
    page = make_page(run.paths.root)
    assert "Attempt 1: stacks of rank 1 (pid 7)" in page
    assert "File &lt;b&gt;train.py&lt;/b&gt;, line 3 in all_reduce" in page


# The page -------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The elements of a page, and what its scripts and styles hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "": []}
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.texts:
            self._open = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data
        else:
            self.texts[""].append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u2028\u202e\"'&amp;{{ 7*7 }}\x00"


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LongRun(tmp_path / "r<b>un", 900, 2, name=HOSTILE + "{}")
    tell = RecordedRun.tell
    own = object.__new__(RecordedRun)
    own.paths, own.at = run.paths, 0.0
    tell(own, 0, Advice(code=HOSTILE, text=HOSTILE))
    tell(own, 0, Trouble(doing=HOSTILE, error=HOSTILE))
    tell(own, 0, incident(9, 800, 804, cause=HOSTILE, rule=HOSTILE, explanation=HOSTILE, timeline=2))
    tell(own, 0, rollback_plan(9, HOSTILE, 700, (1600, 1620), reason=HOSTILE))
    tell(own, 0, AttemptEnded(status=1, cause=HOSTILE, step=1, seconds=1.0))
    text = make_page(run.paths.root)
    page = Page(text)
    assert len(page.texts["script"]) == 2
    assert not set("<>&\u2028") & set(page.texts["script"][0])
    assert len(page.texts["style"]) == 1
    assert not [tag for tag, _ in page.elements if tag in ("img", "link", "iframe", "object", "embed", "base", "form")]
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on") or name == "style"]
    assert not [attrs for _, attrs in page.elements if (attrs.get("href") or "#")[0] != "#" or "src" in attrs]
    assert not {char for char in text if not char.isprintable() and char != "\n"}
    assert "alert(1)" in "".join(page.texts[""])
    assert "{{ 7*7 }}" in "".join(page.texts[""])
    assert any("alert(1)" in entry["title"] for entry in page.data["incidents"])
    assert all(entry["title"].isprintable() for entry in page.data["incidents"])
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", text)


def test_the_policy_allows_this_page_s_own_texts_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventful_run(tmp_path / "run", monkeypatch)
    page = Page(make_page(tmp_path / "run"))
    (policy,) = (attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    for text in (page.texts["style"][0], page.texts["script"][1]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy is not None
        assert f"'sha256-{digest}'" in policy
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_the_page_says_what_the_audit_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eventful_run(tmp_path / "run", monkeypatch)
    text = "".join(Page(make_page(tmp_path / "run")).texts[""])
    for words in (
        "finished at step 100", "loss 6.5 at step 49", "came back as incident 2", "recovered", "it came back",
        "roll back to c000001-s00000020", "rank 1 was killed by signal 9", "undone by rewinds", "back after 2 steps",
        "c000002-s00000040", "discarded",
    ):  # fmt: skip
        assert words in text, words


def test_drained_checkpoints_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = eventful_run(tmp_path / "run", monkeypatch)
    drained = {"checkpoint": "c000003-s00000060", "step": 60, "place": "s3://bucket/<run>"}
    run.tell(110, Drained(bytes=4096, seconds=1.0, **drained), 2)
    page = Page(make_page(run.paths.root))
    text = "".join(page.texts[""])
    assert "good, drained" in text
    assert "1 were copied to the durable ring, s3://bucket/<run>: the last one of step 60." in text
    assert [kind["fate"] for kind in page.data["checkpoints"]].count("drained") == 1


def test_losses_that_no_float32_holds_are_drawn_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    writer = LineWriter(run.paths.metrics)
    losses = [1.0, 1e308, 1e308, 1e308, -1e308, 5e-324, 0.0, 2.0] * 20  # rows of several, whose sum is no number
    for step, loss in enumerate(losses):
        line = {"loss": loss, "grad_norm": None, "verdict": "healthy", "attempt": 1, "timeline": 0}
        writer.write(metric_line(step=step, batch=step, **line))
    writer.flush()
    writer.close()
    page = Page(make_page(run.paths.root))
    (line,) = page.data["curves"][0]["lines"]
    assert np.isfinite(np.frombuffer(base64.b64decode(line["values"]), "<f4")).all()
    assert "inf" not in "".join(page.texts[""]).split()


def test_a_run_without_a_single_step_has_a_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.tell(0, AttemptStarted(command=("torchrun",), host="node1", pid=1))
    assert "No step has been judged" in make_page(run.paths.root)


@pytest.mark.parametrize("command", [["report", "-o"], ["audit", "--output"]])
def test_what_is_no_file_is_written_through_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    eventful_run(tmp_path / "run", monkeypatch)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    done = CliRunner().invoke(app, [*command, str(pipe), str(tmp_path / "run")])
    assert pipe.is_fifo(), "as root, /dev/null would be a file now"
    assert done.exit_code == 0, done.output
    reader.join()
    assert read[0]


def test_the_command_writes_the_file_and_says_how_large_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eventful_run(tmp_path / "run", monkeypatch)
    target = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(target)])
    assert done.exit_code == 0
    assert re.search(r"page\.html: 0\.\d\d MB, made in \d+\.\d s", done.stderr)
    assert target.read_text().startswith("<!doctype html>")
    failed = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(tmp_path / "none" / "page.html")])
    assert isinstance(failed.exception, UsageError)
    assert "there is no directory" in str(failed.exception)


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("long") / "run"
    LongRun(root, 60_000, 50)
    return make_page(root)


def test_what_is_drawn_of_a_long_run_has_every_incident_in_full(long_page: str) -> None:
    page = Page(long_page)
    assert len(long_page) < 5_000_000
    assert len(page.data["incidents"]) == 50
    loss = page.data["curves"][0]
    drawn = {int(step) for line in loss["lines"] for step in np.frombuffer(base64.b64decode(line["steps"]), "<u4")}
    for entry in page.data["incidents"]:
        onset = entry["onset"]
        assert set(range(onset - 100, onset)) <= drawn
        if onset % 2:
            assert [onset + 1, onset + 4, "NaN", 4] in loss["nonfinite"]


@pytest.mark.soak
def test_a_million_steps_with_fifty_incidents_are_less_than_five_megabytes(tmp_path: Path) -> None:
    LongRun(tmp_path / "run", 1_000_000, 50)
    assert len(make_page(tmp_path / "run")) < 5_000_000
