"""Heartbeats of one host's ranks in memory, so that a supervisor needs no disk to see which ranks are alive.

A supervisor makes the board, an anonymous file in memory, and passes its path to the ranks by environment: a descriptor
of the supervisor, below /proc. So the board has no name that anybody could remove, lies on no file system that could be
full, and is gone with the last process that has it. Each rank writes its own cell at any time, so a cell carries a hash
of its content. A reader that finds a half-written cell reads it once more:

| bytes | meaning |
|---|---|
| 0-3 | length of the heartbeat; 0: nobody has written here (all numbers little-endian) |
| 4-11 | XXH3-64 of the heartbeat |
| 12-15 | number of the rank |
| 16- | the heartbeat, JSON |
"""

import os
import stat
import struct

import xxhash

from rollback.rundir.heartbeats import Heartbeat

_CELL, _CELLS = 1024, 256
_HEAD = struct.Struct("<IQI")
_TRIES = 8


class HeartbeatBoard:
    """The supervisor's side. `close` it. Raises OSError where there is no memory for it."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("rollback-heartbeats", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _CELL * _CELLS)
        self.clear()

    @property
    def path(self) -> str:
        """The path for the ranks, valid until the board is closed."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def clear(self) -> None:
        """Erase all heartbeats, when no rank writes any more. The first call also reserves the memory."""
        os.pwrite(self._fd, bytes(_CELL * _CELLS), 0)

    def read(self) -> dict[int, Heartbeat]:
        found, whole = {}, os.pread(self._fd, _CELL * _CELLS, 0)
        for place in range(0, len(whole), _CELL):
            cell = whole[place : place + _CELL]
            for _ in range(_TRIES):
                if (told := _read_cell(cell)) is not None:
                    found[told[0]] = told[1]
                    break
                if not any(cell[:4]):
                    break
                cell = os.pread(self._fd, _CELL, place)
        return found

    def close(self) -> None:
        os.close(self._fd)


def board_if_possible() -> HeartbeatBoard | None:
    """A board; None where the system gives no memory for one: heartbeats then come from the run directory."""
    try:
        return HeartbeatBoard()
    except OSError:
        return None


class HeartbeatCell:
    """A rank's side. place: its number among the ranks of its host, from 0 on. Raises OSError or ValueError where there
    is no such board, or no such place on it."""

    def __init__(self, path: str, rank: int, place: int) -> None:
        if not 0 <= place < _CELLS:
            raise ValueError(f"a host's board has {_CELLS} places, and no place {place}")
        self._rank, self._offset = rank, place * _CELL
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != _CELL * _CELLS:
            os.close(self._fd)
            raise ValueError(f"{path} is no board of heartbeats")

    def write(self, heartbeat: Heartbeat) -> None:
        """Write a heartbeat. Raises OSError, and ValueError for a heartbeat that is too long."""
        body = heartbeat.model_dump_json().encode()
        if len(body) > _CELL - _HEAD.size:
            raise ValueError(f"a heartbeat of {len(body)} bytes does not fit its cell")
        os.pwrite(self._fd, _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body), self._rank) + body, self._offset)


def _read_cell(cell: bytes) -> tuple[int, Heartbeat] | None:
    """Rank and heartbeat; None where the cell is empty or half written."""
    length, check, rank = _HEAD.unpack_from(cell)
    body = cell[_HEAD.size : _HEAD.size + length]
    if not length or xxhash.xxh3_64_intdigest(body) != check:
        return None
    try:
        return rank, Heartbeat.model_validate_json(body)
    except ValueError:
        return None
