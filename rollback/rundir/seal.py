"""The seal: HMAC-SHA256 over what a start reads of a run, with a key that is in no run directory.

The environment names the key's file (`ROLLBACK_SEAL`), for this process and, through it, the ranks. With a key,
run.json, every line of the journals and every manifest must bear the seal. Without the key a sealed run can be read,
but nothing is restored from it. docs/format.md, "The seal", has the bytes.
"""

import hmac
import os
import stat
from functools import lru_cache
from pathlib import Path

from rollback.errors import UsageError, reporting

ENV_SEAL = "ROLLBACK_SEAL"
_LEAST, _MOST = 32, 4096  # bytes
_HINT = "head -c 32 /dev/urandom > KEYFILE; chmod 600 KEYFILE"


class Seal:
    """A key. Each kind of content is sealed differently, so no content passes for another kind."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, what: str, content: str) -> str:
        """64 hex digits. what: `run`, `train`, `supervisor` or `manifest`."""
        return hmac.new(self._key, f"rollback {what}\0{content}".encode("utf-8", "surrogatepass"), "sha256").hexdigest()

    @property
    def name(self) -> str:
        """Tells this key from others, and nothing about it."""
        return f"key {self.of('name', '')[:8]}"

    def is_on(self, what: str, content: str, stated: object) -> bool:
        return isinstance(stated, str) and hmac.compare_digest(self.of(what, content).encode(), stated.encode())


def present() -> Seal | None:
    """The seal that the environment names. Raises UsageError where its file cannot be used."""
    path = os.environ.get(ENV_SEAL)
    return _read(path) if path else None


@lru_cache(maxsize=8)
def _read(path: str) -> Seal:
    with reporting(UsageError, f"reading the key of the seal {path}", _HINT):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"the key of the seal {path} is not a regular file", hint=_HINT)
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
                mode = f"{stat.S_IMODE(status.st_mode):o}"
                raise UsageError(
                    f"the key of the seal {path} is not private (mode {mode}, user {status.st_uid})",
                    hint="it must belong to this user or root and be closed to all others: chmod 600",
                )
            key = file.read(_MOST + 1)
    if not _LEAST <= len(key) <= _MOST:
        raise UsageError(f"the key of the seal {path} does not have {_LEAST} to {_MOST} bytes", hint=_HINT)
    return Seal(key)


def use(path: Path, run: Path | None = None) -> None:
    """Seal and verify with this key from now on, in this process and its children.

    run: the run directory, in which the key must not lie. Raises UsageError.
    """
    real = os.path.realpath(path)
    if run is not None and Path(real).is_relative_to(os.path.realpath(run)):
        raise UsageError(f"the key of the seal {path} lies in the run directory", hint="keep it where no run writes")
    _read(real)
    os.environ[ENV_SEAL] = real


def in_words(seals: int) -> list[str]:
    """A sentence about a record with so many sealed lines, all of which were verified; none for a record without
    seals."""
    if not seals:
        return []
    if present() is None:
        return [f"the record is sealed; without its key (rollback --seal KEYFILE, or {ENV_SEAL}) it is not verified"]
    return ["the record is sealed, and its seal is verified"]
