"""A process that dies at its Nth file operation, without a process.

That operation is not done (a write is done by half), and neither is anything after it, clean-up handlers included.
Other threads than the one that made it count as other processes. Where the power goes with it, every file that was
written to and not synced since comes back empty, under the name that it had last: file systems may write names before
contents. Or they write contents first: then every name that was given in a directory not synced since is lost, the
latest first.
"""

import fcntl
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OPERATIONS = ["mkdir", "rmdir", "unlink", "rename", "replace", "fsync", "ftruncate", "write", "open"]


class Died(BaseException):
    """The process is no more."""


class Mortal:
    """Counts file operations and dies at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._thread = threading.get_ident()
        self.count = 0
        self.dies_at: int | None = None
        self._unsynced: set[int] = set()
        self._names: list[tuple[int, str, tuple[int, str] | None]] = []  # directory, name; where it was before
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._mortal(name, getattr(os, name)))

    def _mortal(self, name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if (name == "open" and not (args[1] & os.O_CREAT)) or threading.get_ident() != self._thread:
                return really(*args, **kwargs)
            self.count += 1
            if self.dies_at is None or self.count < self.dies_at:
                self._note(name, args, kwargs)
                return really(*args, **kwargs)
            if name == "write" and self.count == self.dies_at:
                fcntl.fcntl(args[0], fcntl.F_SETFL, fcntl.fcntl(args[0], fcntl.F_GETFL) & ~os.O_DIRECT)  # any length
                really(args[0], args[1][: len(args[1]) // 2])
            raise Died

        return operation

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before an operation is done: what a power failure would take back."""
        if self.dies_at is None:
            return
        if name == "write":
            self._unsynced.add(os.fstat(args[0]).st_ino)
        elif name == "fsync":
            synced = os.fstat(args[0]).st_ino
            self._unsynced.discard(synced)
            self._names = [given for given in self._names if given[0] != synced]
        elif name in ("rename", "replace", "mkdir", "open"):
            folder = kwargs.get("dir_fd", kwargs.get("dst_dir_fd"))
            path = _whole(args[1] if name.startswith("re") else args[0], folder)
            source = _whole(args[0], kwargs.get("src_dir_fd"))
            before = (_inode(source.parent), source.name) if name == "rename" else None
            if not path.exists():
                self._names.append((_inode(path.parent), path.name, before))

    def live(self, act: Callable[[], object]) -> int:
        """Do it undisturbed; the number of operations it took."""
        self.count, self.dies_at = 0, None
        act()
        return self.count

    def die(self, at: int, act: Callable[[], object]) -> None:
        self.count, self.dies_at = 0, at
        self._unsynced.clear()
        self._names.clear()
        with pytest.raises(Died):
            act()
        self.dies_at = None

    def lose_names(self, root: Path) -> None:
        """After `die`: names that were given since then are lost where their directory was not synced."""
        for directory, name, before in reversed(self._names):
            homes = {_inode(path): path for path in (root, *root.rglob("*")) if path.is_dir()}
            path = homes[directory] / name
            if before is not None:
                path.rename(homes[before[0]] / before[1])
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def lose_power(self, root: Path) -> None:
        """After `die`: what was not synced since then is lost."""
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced:
                os.truncate(path, 0)


def _whole(path: str | Path, folder: int | None) -> Path:
    """A path that may be below a descriptor."""
    return Path(path) if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}")) / path


def _inode(path: Path) -> int:
    return path.stat().st_ino
