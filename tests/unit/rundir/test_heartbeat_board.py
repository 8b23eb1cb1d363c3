"""The board in memory on which ranks show that they live: whole heartbeats or none, whatever the disk does."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollback.rundir.heartbeat_board import HeartbeatBoard, HeartbeatCell
from rollback.rundir.heartbeats import Heartbeat


def beat(step: int, **more: object) -> Heartbeat:
    return Heartbeat(
        pid=1, host="h", attempt=1, step=step, batch=step, doing="training", monotonic=1.5 * step, start="1@b", **more
    )


@pytest.fixture
def board() -> Iterator[HeartbeatBoard]:
    board = HeartbeatBoard()
    yield board
    board.close()


def _write_for_ever(path: str) -> None:
    cell = HeartbeatCell(path, 7, 1)
    step = 0
    while True:
        step = step * 10 + 7 if step < 10**12 else 7  # the length changes with each
        cell.write(beat(step))


def test_what_ranks_have_written_is_read_by_rank_whatever_their_places(board: HeartbeatBoard) -> None:
    assert board.read() == {}
    HeartbeatCell(board.path, 12, 3).write(beat(5))
    HeartbeatCell(board.path, 4, 0).write(beat(6))
    assert board.read() == {12: beat(5), 4: beat(6)}
    HeartbeatCell(board.path, 12, 3).write(beat(70))
    assert board.read()[12] == beat(70)
    board.clear()
    assert board.read() == {}


def test_a_heartbeat_is_read_whole_while_it_is_written(board: HeartbeatBoard) -> None:
    writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(board.path,), daemon=True)
    writer.start()
    try:
        while 7 not in board.read():
            pass
        for _ in range(3000):
            found = board.read()[7]
            assert found == beat(found.step)
            assert set(str(found.step)) == {"7"}
    finally:
        writer.kill()
        writer.join()


def test_what_is_no_board_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"somebody's")
    with pytest.raises(ValueError, match="no board"):
        HeartbeatCell(str(path), 0, 0)
    with pytest.raises(OSError, match="No such file"):
        HeartbeatCell(str(tmp_path / "absent"), 0, 0)
    assert path.read_bytes() == b"somebody's"


def test_a_place_that_is_not_there_and_a_heartbeat_that_is_too_long_are_refused(board: HeartbeatBoard) -> None:
    with pytest.raises(ValueError, match="no place 256"):
        HeartbeatCell(board.path, 0, 256)
    with pytest.raises(ValueError, match="does not fit"):
        HeartbeatCell(board.path, 0, 0).write(beat(1).model_copy(update={"host": "h" * 1000}))
    assert board.read() == {}
