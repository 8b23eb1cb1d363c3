"""Writing past the page cache: the same bytes on disk, however the kernel takes them."""

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollback.checkpoints.format import direct
from rollback.checkpoints.format.direct import BLOCK, write_direct
from rollback.checkpoints.format.hashing import hash_of
from rollback.checkpoints.format.manifest import ShardRecord
from rollback.errors import RingUnavailable
from rollback.ring.in_run import copy_shard
from rollback.system.region import Region

SIZE = 3 * BLOCK + 17


@pytest.fixture
def region() -> Region:
    region = Region(SIZE)
    region.view[:] = bytes(place % 251 for place in range(SIZE))
    return region


def check(path: Path, region: Region) -> None:
    written = write_direct(path, region.view)
    assert path.read_bytes() == bytes(region.view)
    assert (written.size, written.digest) == (SIZE, hash_of(region.view))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(size=st.integers(0, 5 * BLOCK), start=st.sampled_from([0, 1, 8, 4096]), seed=st.integers(0, 255))
def test_any_length_from_any_address(tmp_path: Path, size: int, start: int, seed: int) -> None:
    region = Region(start + size)
    region.view[:] = bytes((seed + place) % 256 for place in range(start + size))
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    written = write_direct(path, region.view[start:])
    assert path.read_bytes() == bytes(region.view[start:])
    assert written.digest == hash_of(region.view[start:])


@pytest.mark.parametrize("most", [1, 100, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_writes_that_the_kernel_cuts_short_are_completed(
    tmp_path: Path, region: Region, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    really = os.write

    def short(fd: int, data: Any) -> int:
        piece = bytes(data[:most])
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)  # so that any length is taken
        return really(fd, piece)

    monkeypatch.setattr(os, "write", short)
    check(tmp_path / "file", region)


def test_a_file_system_that_refuses_it_when_the_file_is_opened(
    tmp_path: Path, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def picky(path: Any, flags: int, mode: int = 0o777, **below: Any) -> int:
        fd = really(path, flags & ~os.O_DIRECT, mode, **below)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return fd

    monkeypatch.setattr(os, "open", picky)
    check(tmp_path / "file", region)


def test_a_file_system_that_refuses_it_when_it_is_written(
    tmp_path: Path, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.write

    def picky(fd: int, data: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned as I like it")
        return really(fd, data)

    monkeypatch.setattr(os, "write", picky)
    check(tmp_path / "file", region)


def test_a_full_disk_leaves_no_file(tmp_path: Path, region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="full"):
        write_direct(tmp_path / "file", region.view)
    assert not list(tmp_path.iterdir())


def test_it_is_written_past_the_cache_where_the_file_system_can(
    tmp_path: Path, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = tmp_path / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    calls = []
    really = os.write

    def spy(fd: int, data: Any) -> int:
        if threading.current_thread() is ours:  # others may write where they please
            calls.append((len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return really(fd, data)

    ours = threading.current_thread()
    monkeypatch.setattr(direct.os, "write", spy)
    check(tmp_path / "file", region)
    assert calls == [(3 * BLOCK, True), (17, False)]


def test_an_existing_file_is_not_touched(tmp_path: Path, region: Region) -> None:
    (tmp_path / "file").write_bytes(b"there")
    with pytest.raises(FileExistsError):
        write_direct(tmp_path / "file", region.view)
    assert (tmp_path / "file").read_bytes() == b"there"


@pytest.mark.parametrize("refused_at", [1, 2])
def test_a_copy_that_the_disk_refuses_is_told_as_the_disk_tells_it_with_its_place(
    tmp_path: Path, region: Region, monkeypatch: pytest.MonkeyPatch, refused_at: int
) -> None:
    """Whoever copies checkpoints tries them again; nothing else that goes wrong on the way must be raised instead."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(region.view)
    shard = ShardRecord(file="source", size=SIZE, hash=hash_of(region.view))
    really, writes = os.write, 0

    def refuse(fd: int, data: Any) -> int:
        nonlocal writes
        writes += 1
        if writes == refused_at:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return really(fd, data[:BLOCK])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        with pytest.raises(RingUnavailable, match=f"^writing {target}: File too large$"):
            copy_shard(source, target, shard)
    assert not target.exists()
    copy_shard(source, target, shard)
    assert target.read_bytes() == source.read_bytes()
