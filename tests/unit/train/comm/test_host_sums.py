"""What the ranks of one host add up in memory that they share: by threads here, but for what a process does."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from open_files import open_below

from rollback.rundir.failures import class_of_exception
from rollback.system.processes import name_process
from rollback.train.comm import host_sums
from rollback.train.comm.host_sums import HostSums, _make, _open, _rows_begin, share
from rollback.train.comm.ranks import Ranks
from rollback.train.process.heartbeat import Movement

WIDTH = 5


def size_for(world_size: int) -> int:
    return _rows_begin(world_size) + 2 * world_size * WIDTH * 8


def read_all(sums: HostSums) -> list[list[float]]:
    return [row.tolist() for row in sums.rows()]


@contextlib.contextmanager
def ranks_of_a_host(
    world_size: int, processes: list[str] | None = None, patience: float = 60
) -> Iterator[list[HostSums]]:
    size, names = size_for(world_size), processes or [name_process(os.getpid())] * world_size
    with contextlib.ExitStack() as held:
        told = _make(held, size)
        made = [HostSums(rank, WIDTH, _open(size, *told), names, patience) for rank in range(world_size)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


@given(world_size=st.integers(2, 5), seed=st.integers(0, 1000))
def test_each_rank_reads_what_all_have_put_in_each_step_however_fast_it_is(world_size: int, seed: int) -> None:
    steps = 30
    given = np.random.default_rng(seed).normal(size=(steps, world_size, WIDTH))
    read: list[list[Any]] = [[] for _ in range(world_size)]

    def train(rank: int, sums: HostSums) -> None:
        pauses = np.random.default_rng(seed + rank).integers(0, 3, steps)
        for step in range(steps):
            sums.put(given[step, rank].tolist())
            time.sleep(0.0001 * float(pauses[step]))
            read[rank].append(read_all(sums))

    with ranks_of_a_host(world_size) as made:
        threads = [threading.Thread(target=train, args=(rank, sums)) for rank, sums in enumerate(made)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rank in range(world_size):
        assert np.array_equal(np.stack(read[rank]), given)


def test_who_waits_for_a_late_one_does_not_seem_to_move_and_nothing_is_left_of_the_wait() -> None:
    movement, moved = Movement(), []

    def watches() -> bool:
        return any(each.name == "rollback-late-ranks" for each in threading.enumerate())

    with ranks_of_a_host(2) as (first, second):

        def come_late() -> None:
            while not watches() or movement.seen():
                time.sleep(0.02)
            for _ in range(4):
                time.sleep(host_sums._LOOK_EVERY / 2)
                moved.append(movement.seen())
            second.put([2.0] * WIDTH)

        late = threading.Thread(target=come_late)
        late.start()
        first.put([1.0] * WIDTH)
        assert read_all(first) == [[1.0] * WIDTH, [2.0] * WIDTH]
        late.join()
    assert moved == [False] * 4
    assert not watches()


def test_who_has_ended_without_its_part_is_named_and_who_ended_behind_it_is_not_missed() -> None:
    ended = subprocess.Popen(["sleep", "100"])
    names = [name_process(os.getpid()), name_process(os.getpid()), name_process(ended.pid)]
    ended.kill()
    ended.wait()
    with ranks_of_a_host(3, names) as (first, second, third):
        for sums in (second, third, first):
            sums.put([1.0] * WIDTH)
        assert read_all(first) == [[1.0] * WIDTH] * 3
        second.rows()
        for sums in (first, third):
            sums.put([2.0] * WIDTH)
        late = threading.Timer(2 * host_sums._LOOK_EVERY, lambda: second.put([2.0] * WIDTH))
        late.start()
        assert read_all(first) == [[2.0] * WIDTH] * 3, "it has ended, and is not the one that is late"
        late.join()
        second.rows()
        for sums in (first, second):
            sums.put([3.0] * WIDTH)
        with pytest.raises(RuntimeError, match="rank 2 has ended without its part") as raised:
            first.rows()
    assert class_of_exception("builtins.RuntimeError", str(raised.value)) == "lost_peer"


@contextlib.contextmanager
def alarms(handler: Any, after: float, every: float = 0) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_signals_do_not_make_who_waits_seem_to_move_and_are_handled_behind_the_wait() -> None:
    movement, moved, handled, watched = Movement(), [], [], []
    with ranks_of_a_host(2) as (first, second):

        def come_late() -> None:
            while not any(each.name == "rollback-late-ranks" for each in threading.enumerate()) or movement.seen():
                time.sleep(0.02)
            watched.append(time.monotonic())
            for _ in range(4):
                time.sleep(0.1)
                moved.append(movement.seen())
            watched.append(time.monotonic())
            second.put([2.0] * WIDTH)

        late = threading.Thread(target=come_late)
        late.start()
        first.put([1.0] * WIDTH)
        with alarms(lambda *_: handled.append(time.monotonic()), 0.02, 0.02):
            assert read_all(first) == [[1.0] * WIDTH, [2.0] * WIDTH]
            late.join()
    assert moved == [False] * 4
    assert [moment for moment in handled if watched[0] < moment < watched[1]] == []
    assert handled[0] < watched[0], "it is handled where the wait has just begun"
    assert handled[-1] > watched[1]


def test_a_wait_that_a_handler_breaks_off_begins_again_and_ends_as_it_should() -> None:
    class Enough(Exception):
        pass

    def enough(*_: object) -> None:
        raise Enough

    with ranks_of_a_host(3) as (first, second, third):
        first.put([1.0] * WIDTH)
        second.put([2.0] * WIDTH)
        with alarms(enough, 0.03), pytest.raises(Enough):
            first.rows()
        third.put([3.0] * WIDTH)
        expected = [[1.0] * WIDTH, [2.0] * WIDTH, [3.0] * WIDTH]
        for _ in range(2):
            for sums in (first, second, third):
                assert read_all(sums) == expected, "also where it is asked once more"
        for number, sums in enumerate((third, first, second)):
            sums.put([float(number)] * WIDTH)
        assert read_all(second) == [[1.0] * WIDTH, [2.0] * WIDTH, [0.0] * WIDTH]


def test_a_handler_that_makes_calls_of_its_own_changes_nothing(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with ranks_of_a_host(2) as (first, second):
        first.put([1.0] * WIDTH)
        late = threading.Timer(0.08, lambda: second.put([2.0] * WIDTH))
        late.start()
        with alarms(lambda *_: libc.access(str(tmp_path / "nothing").encode(), 0), 0.01, 0.01):
            assert read_all(first) == [[1.0] * WIDTH, [2.0] * WIDTH]
        late.join()


def test_who_dies_before_it_has_told_of_its_part_has_put_it() -> None:
    killed = subprocess.Popen(["sleep", "100"])
    names = [name_process(os.getpid()), name_process(killed.pid)]
    with ranks_of_a_host(2, names) as (first, second):
        second._wake = lambda rank: None  # type: ignore[method-assign]

        def put_and_die() -> None:
            while not any(each.name == "rollback-late-ranks" for each in threading.enumerate()):
                time.sleep(0.02)
            second.put([2.0] * WIDTH)
            killed.kill()
            killed.wait()

        late = threading.Thread(target=put_and_die)
        late.start()
        first.put([1.0] * WIDTH)
        assert read_all(first) == [[1.0] * WIDTH, [2.0] * WIDTH]
        late.join()


def test_a_wake_that_is_lost_is_given_again() -> None:
    ended = subprocess.Popen(["sleep", "100"])
    names = [name_process(os.getpid()), name_process(ended.pid)]
    ended.kill()
    ended.wait()
    with ranks_of_a_host(2, names, patience=5) as (first, _):
        wake, given = first._wake, []
        first.put([1.0] * WIDTH)

        def wake_but_not_at_first(rank: int) -> None:
            given.append(rank)
            if len(given) > 1:
                wake(rank)

        first._wake = wake_but_not_at_first  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            first.rows()
        assert given[:2] == [1, 1], "it was not waited for until patience was over"


@pytest.mark.parametrize("after", [0.05, 0.3], ids=["at once", "while the others are watched"])
def test_who_closes_it_while_another_thread_waits_ends_the_wait(after: float) -> None:
    with ranks_of_a_host(2) as (first, _):
        first.put([1.0] * WIDTH)
        late = threading.Timer(after, first.close)
        late.start()
        with pytest.raises(RuntimeError, match="while the guard was closed"):
            first.rows()
        late.join()


def test_counts_may_begin_again() -> None:
    with ranks_of_a_host(2) as (first, second):
        for sums in (first, second):
            sums._puts = (1 << 32) - 3
            sums._counts[sums._rank] = sums._puts
        for number in range(6):
            first.put([float(number)] * WIDTH)
            threading.Timer(0.01, second.put, ([-float(number)] * WIDTH,)).start()
            assert read_all(first) == [[number] * WIDTH, [-number] * WIDTH]
            second.rows()


def test_patience_has_an_end() -> None:
    with ranks_of_a_host(2, patience=0.2) as (first, _):
        first.put([1.0] * WIDTH)
        with pytest.raises(RuntimeError, match="part of rank 1") as raised:
            first.rows()
    assert class_of_exception("builtins.RuntimeError", str(raised.value)) == "timeout"


def test_another_file_at_that_path_is_left_as_it_is(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        told = _make(held, size_for(2))
        other = tmp_path / "other"
        for content in (bytes(size_for(2)), b"short"):
            other.write_bytes(content)
            with pytest.raises(OSError, match="another file"):
                _open(size_for(2), str(other), told[1])
            assert other.read_bytes() == content
        with pytest.raises(OSError, match="another file"):
            _open(size_for(2), str(tmp_path), told[1])
        assert open_below(tmp_path) == 0


class _TwoRanks(Ranks):
    """This rank's answers to the other one's, which are given."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__()
        self.world_size, self.rank, self._answers = 2, 1, answers

    def from_first(self, value: Any) -> Any:
        return self._answers.pop(0)

    def from_each(self, value: Any) -> list[Any]:
        return [self._answers.pop(0), value]


def test_where_one_rank_has_not_got_the_memory_none_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as held:
        told = _make(held, size_for(2))
        name = name_process(os.getpid())
        assert share(_TwoRanks([None, name]), WIDTH) is None, "the first has none"
        assert share(_TwoRanks([told, None]), WIDTH) is None, "the first has not opened it"
        assert share(_TwoRanks([["/proc/self/fd/nothing", told[1]], name]), WIDTH) is None
        shared = share(_TwoRanks([told, name]), WIDTH)
        assert shared is not None
        shared.close()
        with monkeypatch.context() as patched:
            patched.setattr(host_sums, "is_running", lambda name: False)
            assert share(_TwoRanks([told, name]), WIDTH) is None, "each is hidden from the other in /proc"
        with monkeypatch.context() as patched:
            patched.setattr(os, "readlink", lambda path: "1")
            assert share(_TwoRanks([told, name]), WIDTH) is None, "its number says nothing to the others"
        with monkeypatch.context() as patched:
            patched.setattr(host_sums, "_ABLE", False)
            assert share(_TwoRanks([told, name]), WIDTH) is None, "this rank's processor keeps no such order"
        apart = _TwoRanks([])
        apart.host_count = 2
        assert share(apart, WIDTH) is None
