"""A checkpoint that passes verification, and whose tensors the disk then refuses to read."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rollback.checkpoints.format.manifest import read_manifest
from rollback.system import files
from rollback.train.restore import restore
from rollback.train.restore.reader import OpenShards

_READ = 2  # tensors before the refusal: some live ones have the checkpoint's content then, and the others have not


class Attempts:
    """How often the tensors of the checkpoint were to be read; the first of these times failed."""

    count = 0


@contextlib.contextmanager
def unreadable(name: str, times: int, where: Callable[[Path], bool] = lambda shard: True) -> Iterator[Attempts]:
    """So many times, reading the tensors of a checkpoint fails in the middle; not of copies elsewhere."""
    load, attempts = restore._load, Attempts()

    def load_or_fail(reading: OpenShards, *rest: Any) -> None:
        if is_of(reading, name) and where(reading.shards[0].path):
            attempts.count += 1
            if attempts.count <= times:
                with mock.patch("os.preadv", failing(os.preadv)):
                    load(reading, *rest)
                return
        load(reading, *rest)

    with mock.patch.object(restore, "_load", load_or_fail):
        yield attempts


@contextlib.contextmanager
def cut_short(name: str) -> Iterator[None]:
    """The first shard of a checkpoint is cut off when it has just been verified, for good."""
    load = restore._load

    def cut_and_load(reading: OpenShards, *rest: Any) -> None:
        shard = reading.shards[0]
        if is_of(reading, name):
            os.truncate(shard.path, sorted(entry.start for entry in shard.entries.values())[_READ])
        load(reading, *rest)

    with mock.patch.object(restore, "_load", cut_and_load):
        yield


@contextlib.contextmanager
def forbidden(path: Path) -> Iterator[None]:
    """This user may not read a file. (Root may read all, whatever its mode says.)"""
    open_file = files.open_file

    def open_or_refuse(asked: Path, flags: int) -> int:
        if asked == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(asked, flags)

    with mock.patch.object(files, "open_file", open_or_refuse):
        yield


def is_of(reading: OpenShards, name: str) -> bool:
    return read_manifest(reading.shards[0].path.parent, in_slot=True).name == name


def failing(read: Callable[..., int]) -> Callable[..., int]:
    reads: list[int] = []

    def refuse(fd: int, *rest: Any) -> int:
        reads.append(fd)
        if len(reads) > _READ:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, *rest)

    return refuse
