"""Passing over the batches of the skip list."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rollback.config import Settings
from rollback.facts.history import History
from rollback.facts.training import PassedOver, SampleQuarantine, SkipAdded, Window
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.skip_records import WRITING, read_skipped
from rollback.system.lines import LineWriter
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder
from rollback.train.data.cursor import Cursor, cursor_for
from rollback.train.data.skips import SkipList, why_kept
from rollback.train.run import AttachedRun


def opened(samples: int = 20) -> Cursor:
    cursor = cursor_for(DataLoader(range(samples), batch_size=2))
    cursor.open_epoch()
    return cursor


def skips(folder: Path, *windows: tuple[int, int]) -> tuple[SkipList, RunPaths]:
    paths = RunPaths(folder)
    listed = [SkipAdded(window=Window(first=first, last=last), who="test", why="") for first, last in windows]
    run = AttachedRun(paths, Ranks(), Settings(), Recorder(paths, 1, is_rank_0=True), History(added=listed))
    return SkipList(run), paths


def drain(listed: SkipList, cursor: Cursor) -> list[int]:
    """Positions that are handed out to the epoch's end."""
    seen = []
    try:
        while True:
            listed.pass_over(cursor, step=0, timeline=0)
            seen.append(cursor.batch)
            cursor.next()
    except StopIteration:
        return seen[: -1 if seen and seen[-1] == cursor.batch else None]


def test_what_is_passed_over_is_recorded_with_its_samples(tmp_path: Path) -> None:
    listed, paths = skips(tmp_path / "run", (3, 4))
    assert drain(listed, opened()) == [0, 1, 2, 5, 6, 7, 8, 9]
    recorded = list(read_skipped(paths.skip_record(0), []))
    assert [(line.batch, line.epoch, line.offset, line.indices) for line in recorded] == [
        (3, 0, 3, [6, 7]),
        (4, 0, 4, [8, 9]),
    ]
    (fact,) = [r.fact for r in read_journal(paths.train_journal).records]
    assert fact == PassedOver(first=3, last=4, step=0, timeline=0)


def test_a_window_goes_on_in_the_next_epoch(tmp_path: Path) -> None:
    listed, paths = skips(tmp_path / "run", (8, 12))
    cursor = opened()
    assert drain(listed, cursor) == list(range(8))
    cursor.open_epoch()
    assert drain(listed, cursor) == list(range(13, 20))
    facts = [r.fact for r in read_journal(paths.train_journal).records]
    assert [(fact.first, fact.last) for fact in facts] == [(8, 9), (10, 12)]


class Counted(list[Window]):
    """Counts how often a window is looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Window]:
        for window in super().__iter__():
            self.looks += 1
            yield window


def test_a_batch_behind_thousands_of_windows_costs_no_look_at_each(tmp_path: Path) -> None:
    listed, _ = skips(tmp_path / "run")
    listed.windows = counted = Counted(Window(first=first, last=first + 2) for first in range(0, 50_000, 10))
    cursor = opened(samples=200)
    while cursor.batch < 90:
        listed.pass_over(cursor, step=0, timeline=0)
        listed.digest_before(60_000 + cursor.batch)
        cursor.next()
    assert counted.looks < 3 * len(counted)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=6), st.lists(st.integers(0, 70), max_size=8))
def test_a_digest_tells_of_the_windows_before_a_batch_in_whatever_order_it_is_asked(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[int, int]], asked: list[int]
) -> None:
    windows = [(first, first + length) for first, length in found]
    listed, _ = skips(tmp_path_factory.mktemp("run"), *windows)
    for batch in asked:
        afresh, _ = skips(tmp_path_factory.mktemp("run"), *windows)
        assert listed.digest_before(batch) == afresh.digest_before(batch)
        assert bool(listed.digest_before(batch)) == any(first < batch for first, _ in windows)
        window = listed.window_at(batch)
        assert (window is not None) == any(first <= batch <= last for first, last in windows)
        assert window is None or batch in window


def test_it_is_on_disk_before_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, paths = skips(tmp_path / "run", (0, 1))
    synced: list[Path] = []
    really_sync = os.fsync

    def note_and_sync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        really_sync(fd)

    monkeypatch.setattr(os, "fsync", note_and_sync)
    listed.pass_over(opened(), step=0, timeline=0)
    assert paths.skip_record(0) in synced
    assert len(list(read_skipped(paths.skip_record(0), []))) == 2


def test_a_disk_that_refuses_is_told_of_once_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed, paths = skips(tmp_path / "run", (0, 5))
    paths.skip_record(0).mkdir(parents=True)
    assert drain(listed, opened()) == [6, 7, 8, 9]
    assert capsys.readouterr().err.count("skip record") == 1
    (trouble,) = [record.fact for record in read_journal(paths.train_journal).records if record.fact.kind == "trouble"]
    assert (trouble.doing, str(paths.skip_record(0)) in trouble.error) == (WRITING, True), "for who audits the run"


def test_lines_that_the_disk_refused_are_in_the_record_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed, paths = skips(tmp_path / "run", (0, 1), (4, 5))
    cursor = opened()
    with monkeypatch.context() as full:

        def refuse(writer: LineWriter, *, durable: bool = False) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(LineWriter, "flush", refuse)
        listed.pass_over(cursor, step=0, timeline=0)
    assert drain(listed, cursor) == [2, 3, 6, 7, 8, 9]
    assert [line.batch for line in read_skipped(paths.skip_record(0), [])] == [0, 1, 4, 5]
    assert capsys.readouterr().err.count("No space left on device") == 1


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=5))
def test_exactly_the_batches_outside_all_windows_are_handed_out(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int]]
) -> None:
    windows = [(first, first + length) for first, length in drawn]
    listed, _ = skips(tmp_path_factory.mktemp("skips"), *windows[:-1])
    for first, last in windows[-1:]:
        listed.add(Window(first=first, last=last))
    inside = {batch for first, last in windows for batch in range(first, last + 1)}
    assert drain(listed, opened()) == [batch for batch in range(10) if batch not in inside]


def test_the_digest_before_a_batch_is_of_what_was_skipped_before_it(tmp_path: Path) -> None:
    listed, _ = skips(tmp_path / "run", (3, 4))
    other, _ = skips(tmp_path / "other", (3, 4), (9, 12))
    assert listed.digest_before(3) == 0
    assert listed.digest_before(5) == other.digest_before(5) != 0
    assert listed.digest_before(13) != other.digest_before(13)


def left_out(batch: int, *samples: int) -> SampleQuarantine:
    return SampleQuarantine(batch=batch, samples=samples, added=samples, released=(), who="test", why="")


def test_what_is_left_out_is_journalled_and_no_longer_given(tmp_path: Path) -> None:
    listed, paths = skips(tmp_path / "run")
    cursor = opened()
    listed.leave_out(left_out(3, 7))
    assert [line.fact for line in read_journal(paths.train_journal).records] == listed.quarantine == [left_out(3, 7)]
    listed.announce(cursor)
    drawn = [sample for _ in range(10) for sample in cursor.next().tolist()]
    assert 7 not in drawn
    assert len(drawn) == 20


def test_the_first_batch_without_a_sample_is_another_one_and_those_before_it_are_not(tmp_path: Path) -> None:
    listed, _ = skips(tmp_path / "run")
    listed.leave_out(left_out(3, 7))
    one = listed.digest_before(3)
    assert listed.digest_before(2) == 0
    assert listed.digest_before(3) == listed.digest_before(4) == one != 0
    listed.leave_out(left_out(3, 7, 9))
    assert listed.digest_before(3) != one


def test_a_window_that_grows_is_another_one(tmp_path: Path) -> None:
    listed, _ = skips(tmp_path / "run", (3, 4))
    one = listed.digest_before(9)
    listed.add(Window(first=5, last=6))
    assert listed.digest_before(9) == skips(tmp_path / "other", (3, 6))[0].digest_before(9) != one


class WritesDownWhatIsRead(Dataset[int]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        with self.path.open("a") as file:
            print(index, file=file)
        return index


@pytest.mark.parametrize(("first", "last"), [(3, 3), (3, 4), (5, 6), (6, 8)])
def test_what_is_announced_is_passed_over_and_no_worker_reads_it_ahead(tmp_path: Path, first: int, last: int) -> None:
    read = tmp_path / "read"
    cursor = cursor_for(DataLoader(WritesDownWhatIsRead(read), batch_size=2, num_workers=1))
    cursor.open_epoch()
    listed, _ = skips(tmp_path / "run", (0, 1))
    listed.pass_over(cursor, step=0, timeline=0)
    assert cursor.next().tolist() == [4, 5]  # the worker may be two batches further
    listed.add(Window(first=first, last=last))
    listed.announce(cursor)
    assert drain(listed, cursor) == [batch for batch in range(3, 10) if not first <= batch <= last]
    cursor.close()
    assert not {str(sample) for sample in range(max(10, 2 * first), 2 * last + 2)} & {*read.read_text().split()}


def test_a_sample_is_left_out_only_of_a_data_set_that_has_it() -> None:
    cursor = opened()
    assert why_kept([0, 7, 19], cursor) is None
    assert why_kept([7, 25, 20], cursor) == "the data set has 20 samples, and no sample 20"


def test_a_stream_has_no_samples_that_could_be_left_out() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(20))

    reason = why_kept([7], cursor_for(DataLoader(Stream(), batch_size=2)))
    assert reason == "this loader's batches have no data set indices that could be left out"
