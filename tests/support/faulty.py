"""An object store in memory that fails as it is told to: `faulty://NAME/...`, a file system of fsspec's.

What is written appears when it is closed, whole, as in S3; `torn` lets half of it appear where the process dies.
"""

import errno
import io
import os
import time
from collections.abc import Callable
from typing import Any, Literal

import fsspec
import pytest

Manner = Literal["once", "for ever", "done but reported as failed", "dies", "dies and tears"]
MANNERS: tuple[Manner, ...] = ("once", "for ever", "done but reported as failed", "dies", "dies and tears")
PASSING: tuple[Manner, ...] = ("once", "done but reported as failed")


def patience(request: pytest.FixtureRequest) -> float:
    """Seconds for which a test tries again. By its parameter `manner`: what passes is waited for, however slow the
    machine is; what does not pass, hardly."""
    parameters = getattr(request.node, "callspec", None)
    return 60.0 if parameters and parameters.params.get("manner") in PASSING else 0.05


class Died(BaseException):
    """The process is no more."""


class Bucket:
    """Objects by key, and what goes wrong with them. `drops`: keys whose objects are acknowledged and not kept."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.operations: list[str] = []
        self.fails_at: int | None = None
        self.manner: Manner = "once"
        self.error: Callable[[], Exception] = lambda: OSError(errno.EIO, os.strerror(errno.EIO))
        self.drops: Callable[[str], bool] = lambda key: False
        self.hides: dict[str, int] = {}
        self.hide_new = 0
        self.delay = 0.0
        self.listed = 0

    def fail(self, at: int, manner: Manner) -> None:
        """From now on, counted anew."""
        self.operations, self.fails_at, self.manner = [], at, manner

    def heal(self) -> None:
        self.fails_at, self.drops, self.hide_new, self.hides, self.delay = None, lambda key: False, 0, {}, 0.0

    def act(self, name: str, key: str, do: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        self.operations.append(f"{name} {key}")
        time.sleep(self.delay)
        number = len(self.operations)
        if self.fails_at is None or number < self.fails_at or (self.manner == "once" and number > self.fails_at):
            return do()
        if self.manner in ("dies", "dies and tears"):
            if number == self.fails_at and self.manner == "dies and tears" and half is not None:
                half()
            raise Died
        if self.manner == "done but reported as failed":
            if number > self.fails_at:
                return do()
            do()
        raise self.error()

    def store(self, key: str, data: bytes) -> None:
        if not self.drops(key):
            self.objects[key] = data
            if self.hide_new:
                self.hides[key] = self.hide_new

    def find(self, key: str) -> bytes:
        if self.hides.get(key, 0) > 0:
            self.hides[key] -= 1
            raise FileNotFoundError(key)
        try:
            return self.objects[key]
        except KeyError:
            raise FileNotFoundError(key) from None


BUCKETS: dict[str, Bucket] = {}


class FaultyFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    protocol = "faulty"

    def _of(self, path: str) -> tuple[Bucket, str]:
        name, _, key = self._strip_protocol(path).strip("/").partition("/")
        if name not in BUCKETS:
            raise FileNotFoundError(f"the bucket {name} does not exist")
        return BUCKETS[name], key

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        bucket, key = self._of(path)
        assert mode == "wb", "small reads and parts go through cat_file"
        return _Upload(bucket, key)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        bucket, key = self._of(path)
        return bytes(bucket.act("get", key, lambda: bucket.find(key)[start:end]))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        bucket, key = self._of(path)
        return {"name": path, "type": "file", "size": len(bucket.act("head", key, lambda: bucket.find(key)))}

    def rm_file(self, path: str) -> None:
        bucket, key = self._of(path)
        bucket.act("delete", key, lambda: bucket.objects.pop(key, None))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        bucket, key = self._of(path)
        bucket.listed += 1
        below = key.rstrip("/") + "/"
        keys = bucket.act(
            "list", key, lambda: {below + k[len(below) :].split("/")[0] for k in bucket.objects if k.startswith(below)}
        )
        if not keys:
            raise FileNotFoundError(path)
        return sorted(f"{path.rstrip('/')}/{found[len(below) :]}" for found in keys)


class _Upload(io.BytesIO):
    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket, self._key = bucket, key

    def __exit__(self, *failure: Any) -> None:
        data, bucket, key = self.getvalue(), self._bucket, self._key
        self.close()
        if failure[0] is None:
            bucket.act("put", key, lambda: bucket.store(key, data), lambda: bucket.store(key, data[: len(data) // 2]))


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


def new_bucket(name: str) -> Bucket:
    """An empty bucket, in place of any of that name."""
    BUCKETS[name] = Bucket()
    return BUCKETS[name]
