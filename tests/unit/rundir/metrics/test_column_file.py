"""The metrics in columns, beside their lines: readers find what the lines say, whatever became of the columns."""

import random
from pathlib import Path

import numpy as np
import pytest
from selection import soak

from rollback.rundir.metrics import column_file, metric_columns
from rollback.rundir.metrics.column_file import LINES, ColumnWriter, column_path
from rollback.rundir.metrics.metric_columns import MetricColumns, joined, metric_pieces
from rollback.rundir.metrics.metric_lines import metric_line

VALUES = [1.5, None, float("nan"), float("inf"), -0.0, 1e300]


def line(step: int) -> str:
    loss, norm = VALUES[step % 5 if step % 97 else 1], VALUES[(step // 3) % 6]
    return metric_line(
        step=step, batch=2 * step + 1, loss=loss, grad_norm=norm, verdict="healthy", attempt=1 + step // 3000,
        timeline=step // 2000,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Metrics of some blocks and a rest, which two attempts have left."""
    path = tmp_path / "train.jsonl"
    for first, last in ((0, 2 * LINES + 300), (2 * LINES + 300, 4 * LINES + 700)):
        writer = ColumnWriter(path)
        with path.open("a") as file:
            for step in range(first, last):
                file.write(line(step) + "\n")
        writer.catch_up(100)
        writer.close()
    return path


def same(one: MetricColumns, other: MetricColumns) -> bool:
    names = one.__dataclass_fields__
    return all(np.array_equal(getattr(one, n), getattr(other, n), equal_nan="l" in n or "g" in n) for n in names)


def read_metric_columns(path: Path, damaged: list[str]) -> MetricColumns:
    return joined(metric_pieces(path, damaged))


def by_lines(path: Path) -> tuple[MetricColumns, list[str]]:
    columns = column_path(path).read_bytes()
    column_path(path).unlink()
    damaged: list[str] = []
    found = read_metric_columns(path, damaged)
    column_path(path).write_bytes(columns)
    return found, damaged


def test_what_has_columns_is_not_parsed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    really = metric_columns.columns_of

    def note(lines: list[bytes]) -> object:
        parsed.append(len(lines))
        return really(lines)

    monkeypatch.setattr(metric_columns, "columns_of", note)
    damaged: list[str] = []
    found = read_metric_columns(path, damaged)
    assert (sum(parsed), len(found), damaged) == (700, 4 * LINES + 700, [])
    assert same(found, by_lines(path)[0])


@pytest.mark.parametrize("which", ["lines", "columns"])
@pytest.mark.parametrize("seed", [*range(3), *soak(*range(3, 12))])
def test_whatever_is_damaged_readers_find_what_the_lines_say(path: Path, which: str, seed: int) -> None:
    chance = random.Random(f"{which} {seed}")
    file = path if which == "lines" else column_path(path)
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content))
    match seed % 3:
        case 0:
            content[place] ^= 1 << chance.randrange(8)
        case 1:
            del content[place:]
        case _:
            del content[place : place + chance.randrange(1, 100_000)]
    written = read_metric_columns(path, [])
    file.write_bytes(content)
    damaged: list[str] = []
    found = read_metric_columns(path, damaged)
    expected, told = by_lines(path)
    in_place = which == "lines" and seed % 3 == 0 and (place // 150 + 1) % LINES  # not in the last line of a block
    assert (same(found, expected) and damaged == told) or (in_place and same(found, written) and damaged == [])


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 5000, 43_071, 43_073, 100_000])
def test_a_writer_that_was_killed_in_a_block_is_followed_by_one_that_goes_on(path: Path, cut: int) -> None:
    whole = column_path(path).read_bytes()
    column_path(path).write_bytes(whole[:cut])
    writer = ColumnWriter(path)
    writer.catch_up(1)
    writer.catch_up(100)
    writer.close()
    assert column_path(path).read_bytes() == whole


def test_lines_that_a_crash_took_back_take_their_columns_with_them(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(b"".join(content.splitlines(keepends=True)[: 2 * LINES - 5]))
    ColumnWriter(path).close()
    assert len(column_path(path).read_bytes()) == column_file._SIZE
    with path.open("a") as file:
        file.writelines(line(step) + "\n" for step in range(9000, 9000 + LINES))
    writer = ColumnWriter(path)
    writer.catch_up(100)
    writer.close()
    assert same(read_metric_columns(path, []), by_lines(path)[0])


def test_damaged_lines_get_no_columns_and_are_told_each_time(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[LINES + 3] = b'{"step": true}\n'
    path.write_bytes(b"".join(lines))
    column_path(path).unlink()
    writer = ColumnWriter(path)
    writer.catch_up(100)
    writer.close()
    damaged: list[str] = []
    assert same(read_metric_columns(path, damaged), by_lines(path)[0])
    assert len(damaged) == 1
    assert f"line {LINES + 4} is damaged" in damaged[0]
    assert len(column_path(path).read_bytes()) == 3 * column_file._SIZE


def test_a_disk_that_takes_no_columns_stops_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    column_path(path).unlink()
    monkeypatch.setattr(column_file, "write_all", refuse)
    writer = ColumnWriter(path)
    writer.catch_up(100)
    writer.catch_up(100)
    writer.close()
    assert len(read_metric_columns(path, [])) == 4 * LINES + 700
