"""Metrics, skip records and heartbeats: read what was written, cut what was torn, pass over what is damaged."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollback.rundir.heartbeats import Heartbeat, HostBeats, read_all_heartbeats, read_heartbeats, write_heartbeat
from rollback.rundir.host_records import LIMIT, read_in_place, write_in_place
from rollback.rundir.metrics.metric_lines import Metric, metric_line, read_last_metrics
from rollback.rundir.paths import RunPaths
from rollback.rundir.skip_records import SkippedBatch, read_skipped
from rollback.system.lines import LineWriter

SKIPPED = [
    SkippedBatch(batch=7, epoch=0, offset=7, indices=[3, 1, 4], timeline=1),
    SkippedBatch(batch=8, epoch=0, offset=8, indices=None, timeline=1),
    SkippedBatch(batch=9, epoch=1, offset=0, indices=[], timeline=1),
]


def write(path: Path, lines: list[str]) -> None:
    writer = LineWriter(path)
    for line in lines:
        writer.write(line)
    writer.flush(durable=True)
    writer.close()


def sound(path: Path) -> list[SkippedBatch]:
    damaged: list[str] = []
    found = list(read_skipped(path, damaged))
    assert not damaged
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "skips" / "rank-00000.jsonl"


numbers = st.none() | st.floats()
metrics = st.builds(
    Metric, step=st.integers(0, 2**53), batch=st.integers(0, 2**53), loss=numbers, grad_norm=numbers,
    verdict=st.sampled_from(["healthy", "watch", "spike", "nonfinite"]), attempt=st.integers(1, 99),
    timeline=st.integers(0, 99),
)  # fmt: skip


@given(metrics)
def test_a_metric_line_reads_as_it_was_written_and_as_pydantic_would_write_it(metric: Metric) -> None:
    line = metric_line(**dict(metric))
    assert repr(Metric.model_validate_json(line)) == repr(metric)
    assert json.loads(line) == json.loads(metric.model_dump_json())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_numbers_that_json_lacks_are_written_as_text(value: float) -> None:
    line = metric_line(step=1, batch=2, loss=value, grad_norm=None, verdict="nonfinite", attempt=1, timeline=0)
    assert json.loads(line)["loss"] in ("NaN", "Infinity", "-Infinity")
    assert repr(Metric.model_validate_json(line).loss) == repr(value)


def test_skipped_batches_come_back_in_order(path: Path) -> None:
    write(path, [skipped.model_dump_json() for skipped in SKIPPED])
    assert sound(path) == SKIPPED


def test_an_absent_file_has_no_lines(path: Path) -> None:
    assert sound(path) == []
    assert read_last_metrics(path) == []


def test_every_byte_prefix_reads_as_its_whole_lines_and_a_writer_goes_on_from_there(path: Path) -> None:
    write(path, [skipped.model_dump_json() for skipped in SKIPPED])
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        assert sound(path) == SKIPPED[:whole]
        write(path, [SKIPPED[0].model_dump_json()])
        assert sound(path) == [*SKIPPED[:whole], SKIPPED[0]]


def test_a_long_torn_tail_is_cut_off_too(path: Path) -> None:
    write(path, [SKIPPED[0].model_dump_json()])
    with open(path, "ab") as file:
        file.write(b"x" * 50_000)
    LineWriter(path).close()
    assert sound(path) == SKIPPED[:1]


def test_a_damaged_line_is_passed_over_and_described(path: Path) -> None:
    lines = [skipped.model_dump_json() for skipped in SKIPPED]
    write(path, [lines[0], '{"batch": "many"}', lines[1], "[" * 100_000, "\0\0\0", lines[2]])
    damaged: list[str] = []
    assert list(read_skipped(path, damaged)) == SKIPPED
    assert [text.split(":")[1] for text in damaged] == [
        " line 2 is damaged",
        " line 4 is damaged",
        " line 5 is damaged",
    ]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_not_a_regular_file_is_refused_at_once(path: Path, make: Any) -> None:
    path.parent.mkdir()
    make(path)
    with pytest.raises((OSError, ValueError)):
        sound(path)


BEAT = Heartbeat(pid=7, host="h", attempt=1, step=5, batch=10, doing="training", monotonic=1.5, start="2")


def test_heartbeats_are_found_by_rank_and_bad_ones_left_out(tmp_path: Path) -> None:
    for rank in (0, 3):
        write_heartbeat(tmp_path / f"rank-{rank:05d}.json", BEAT)
    write_heartbeat(tmp_path / "rank-00003.json", BEAT.model_copy(update={"step": 6}))
    (tmp_path / "rank-00001.json").write_text('{"pid":')
    (tmp_path / "rank-x.json").write_text(BEAT.model_dump_json())
    os.mkfifo(tmp_path / "rank-00002.json")
    assert read_heartbeats(tmp_path) == {0: BEAT, 3: BEAT.model_copy(update={"step": 6})}
    assert read_heartbeats(tmp_path / "nothing") == {}


def test_heartbeats_bring_their_directory_back_and_not_the_run_s(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        write_heartbeat(paths.heartbeat(0), BEAT)
    paths.root.mkdir()
    write_heartbeat(paths.heartbeat(0), BEAT)
    assert read_heartbeats(paths.ranks) == {0: BEAT}


def test_a_heartbeat_is_replaced_without_leaving_anything_else(tmp_path: Path) -> None:
    for _ in range(3):
        write_heartbeat(tmp_path / "rank-00000.json", BEAT)
    assert os.listdir(tmp_path) == ["rank-00000.json"]


def test_what_a_lost_host_said_last_is_not_taken_for_the_rank_that_came_in_its_place(tmp_path: Path) -> None:
    """Its report lies there until the job ends, and by its name it may come behind the other one's."""
    paths = RunPaths(tmp_path)
    paths.nodes.mkdir()
    for node, attempt in (("node-1", 3), ("node-3", 2)):
        beat = Heartbeat(pid=1, host=node, attempt=attempt, step=attempt, batch=0, doing="", monotonic=0.0)
        write_in_place(paths.node(node), HostBeats(beats={1: beat}).model_dump_json().encode())
    assert read_all_heartbeats(paths)[1].host == "node-1"


def test_a_record_that_a_full_disk_does_not_take_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/node-1.json'"):
        write_in_place(tmp_path / "node-1.json", b"{}")


def test_a_record_that_grows_is_taken_where_the_file_system_reserves_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS before 4.2, for one: there the C library reads a byte of each block that is there, and writes one of each
    other block."""

    def in_its_place(fd: int, offset: int, length: int) -> None:
        for at in range(offset, offset + length, 4096):
            if at >= os.fstat(fd).st_size or os.pread(fd, 1, at) == b"\0":
                os.pwrite(fd, b"\0", at)

    monkeypatch.setattr(os, "posix_fallocate", in_its_place)
    for size in (100, 20_000):
        write_in_place(tmp_path / "node-1.json", b"x" * size)
        assert read_in_place(tmp_path / "node-1.json") == b"x" * size


def test_a_record_that_nobody_would_read_is_refused_and_the_one_before_stays(tmp_path: Path) -> None:
    """A file that has once been too large stays so, whatever is written into it later."""
    path = tmp_path / "node-1.json"
    write_in_place(path, b"{}")
    with pytest.raises(OSError, match=f"a record of {LIMIT} bytes.*: '{path}'"):
        write_in_place(path, b"x" * LIMIT)
    assert read_in_place(path) == b"{}"
