"""Disks of a given size that a test mounts, fills and takes away (tmpfs). Only root may, and not everywhere."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def disk_of(size: str, at: Path) -> Iterator[Path]:
    """A disk of `size` (as mount takes it) mounted at `at`, which is made; it is gone behind the block."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "rollback-test", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def may_mount() -> bool:
    if os.geteuid() != 0:
        return False
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


def fill(disk: Path) -> str:
    """A shell command that leaves not one byte free on a disk."""
    return f"cat /dev/zero > {disk}/filler 2> /dev/null; test -s {disk}/filler"
