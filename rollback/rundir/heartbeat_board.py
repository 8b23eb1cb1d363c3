"""Heartbeats of one host's ranks in memory: what a supervisor judges their life by needs no disk.

A supervisor makes the board, an anonymous file in memory, and tells its ranks by environment where it is: a descriptor
of its own, below /proc. So it has no name that anybody could remove, lies on no file system that could be full, and is
gone with the last process that has it. Each rank writes a cell of its own, whenever it likes, so a cell carries a hash
of what is in it, and one that is just being written is read once more:

| bytes | meaning |
|---|---|
| 0-3 | length of the heartbeat; 0: nobody has written here (all numbers little-endian) |
| 4-11 | XXH3-64 of the heartbeat |
| 12-15 | number of the rank |
| 16- | the heartbeat, JSON |
"""

from __future__ import annotations

import os
import stat
import struct

import xxhash

from rollback.rundir.records import Heartbeat

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
        """Where ranks find it, for as long as it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def clear(self) -> None:
        """Forget all heartbeats, when no rank writes any more. The memory is there from the first time on."""
        os.pwrite(self._fd, bytes(_CELL * _CELLS), 0)

    def read(self) -> dict[int, Heartbeat]:
        """All heartbeats by rank."""
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
    """A board; None where the system gives no memory for one: then heartbeats are read from the run directory."""
    try:
        return HeartbeatBoard()
    except OSError:
        return None


class HeartbeatCell:
    """A rank's side. place: among the ranks of its host, from 0 on. Raises OSError or ValueError where there is no such
    board, or no place on it."""

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
        """Raises OSError, and ValueError for a heartbeat that is too long."""
        body = heartbeat.model_dump_json().encode()
        if len(body) > _CELL - _HEAD.size:
            raise ValueError(f"a heartbeat of {len(body)} bytes does not fit its cell")
        os.pwrite(self._fd, _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body), self._rank) + body, self._offset)


def _read_cell(cell: bytes) -> tuple[int, Heartbeat] | None:
    """Rank and heartbeat; None where there is none, or not yet a whole one."""
    length, check, rank = _HEAD.unpack_from(cell)
    body = cell[_HEAD.size : _HEAD.size + length]
    if not length or xxhash.xxh3_64_intdigest(body) != check:
        return None
    try:
        return rank, Heartbeat.model_validate_json(body)
    except ValueError:
        return None
