"""Objects below a URL, by key: written and read in parts, hashed on the way, retried where that may help.

fsspec promises no more about errors than that they are exceptions, so they are sorted into classes here, once. fsspec
handles credentials and endpoints: environment variables, its configuration files, the cloud's own.
"""

import contextlib
import io
import math
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import tenacity

from rollback.checkpoints.format.hashing import ShardHash
from rollback.checkpoints.format.shard import Written, read_verified
from rollback.errors import CheckpointDamaged, CheckpointUnusable, RingUnavailable, RollbackError
from rollback.ring.url.urls import require_url
from rollback.system import files
from rollback.system.durable import sync_directory
from rollback.system.threads import called_every

_PART = 8 << 20
_BLOCK = 16 << 20  # of an upload in parts; larger where a shard would else have more parts than S3 allows
_MOST_PARTS = 9000
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0
PATIENCE = 60.0
STUCK = 5.0
"""Seconds."""
_DRAWS_PAUSES = ("botocore.retryhandler", "gcsfs.retry")
_T = TypeVar("_T")
_dice = random.Random()

# What trying again does not mend. botocore's are named, since it is imported only where S3 is used.
_FINAL = (
    RollbackError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError,
    ImportError, TypeError,
)  # fmt: skip
_FINAL_BY_NAME = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"}
# Of a file system with directories; an object store has none, and "making" one might make a bucket.
_WITH_DIRECTORIES = {"file", "local", "sftp", "ssh", "smb"}


@dataclass(frozen=True)
class Source:
    """What goes into an object: a file, or a shard in a pack, which begins at `start`."""

    path: Path
    expected: Written
    start: int | None = None


class Store:
    """Objects below a URL. `patience`: seconds for which a failing operation is retried (default: PATIENCE).

    Every method raises RingUnavailable where the URL cannot be reached or used, and after `give_up`. Use it from one
    thread at a time; any thread may call `give_up`.
    """

    def __init__(self, url: str, *, patience: float | None = None) -> None:
        require_url(url)
        self.url = url.rstrip("/")
        self.patience = PATIENCE if patience is None else patience
        self._given_up = threading.Event()
        self._through = time.monotonic()
        """When an operation, or a part of a file, was through."""
        self._asked: float | None = None
        """When the present operation began; None: none is under way."""
        self._protocol = urlsplit(url).scheme
        self._refused = True  # connected with the first operation: some file systems reach for the network then

    def _connect(self) -> None:
        """Read the credentials, among other things."""
        import fsspec

        options = {"auto_mkdir": True} if self._protocol in ("file", "local") else {}
        try:
            # An instance of its own without a cache of listings: whether an object is there is asked, not remembered.
            self._fs, self._root = fsspec.core.url_to_fs(
                self.url, skip_instance_cache=True, use_listings_cache=False, **options
            )
        except Exception as error:
            raise self._explain("opening the ring", "", error) from error
        self._refused = False
        _leave_random_numbers_alone()

    def give_up(self) -> None:
        """Cancel the present operation as soon as its current request has ended, and refuse all later ones."""
        self._given_up.set()

    @property
    def refused(self) -> bool:
        """Whether trying again would not have mended what the last failure was."""
        return self._refused

    @contextlib.contextmanager
    def if_stuck(self, act: Callable[[], None]) -> Iterator[None]:
        """In this block: call it once, in a thread, when nothing has got through for `STUCK` seconds.

        What fails is tried again, by the file system itself as well, and that takes minutes. Who holds something
        meanwhile wants to know sooner.
        """
        self._through = time.monotonic()
        with _called_once(act, lambda: self._through):
            yield

    def told_if_stuck(self, say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
        """In this block: tell people, once, what they wait for, however patient the file system is. What takes long
        between two operations, as to verify what is here already, is no such wait."""

        def since() -> float:
            return math.inf if (asked := self._asked) is None else max(asked, self._through)

        text = f"nothing has got through to {self.url} for {STUCK:.0f} s; it is tried again"
        return _called_once(lambda: say(text), since)

    def probe(self, *, writing: bool = True) -> None:
        """Raise RingUnavailable unless objects can be read, written and deleted there.

        Each call has a key of its own: several nodes of a job probe at the same moment.
        """
        body = os.urandom(16).hex().encode()
        key = f"rollback-probe-{body.decode()}"
        if not writing:
            self.get(key, 1 << 10)
            return
        self.put(key, body)
        if self.get(key, 1 << 10) != body:
            raise RingUnavailable(f"the ring {self.url} does not give back what was written to {key}")
        self.delete(key)

    def put(self, key: str, data: bytes) -> None:
        def write() -> None:
            with self._writing(key, len(data)) as sink:
                sink.write(data)

        self._attempt("writing", key, write)

    def put_files(self, key: str, sources: Sequence[tuple[int, Source]]) -> None:
        """Write files into one object, in parts: where each begins there, in order, and zeros between them. Nobody may
        change a file meanwhile.

        Raises CheckpointUnreadable where a file cannot be read, CheckpointDamaged where its content is not what is
        expected: it was damaged, or another file has taken its place. The object is then deleted again.
        """
        last, end_piece = sources[-1]

        def write() -> None:
            with self._writing(key, last + end_piece.expected.size) as sink:
                end = 0
                for begin, source in sources:
                    sink.write(bytes(begin - end))
                    for part in read_verified(source.path, source.expected, source.start):
                        self.require_not_given_up()
                        sink.write(part)
                        self._through = time.monotonic()
                    end = begin + source.expected.size

        try:
            self._attempt("writing", key, write)
        except CheckpointUnusable:
            self.delete(key)
            raise

    def get(self, key: str, limit: int) -> bytes | None:
        """Content of a small object; None where it is missing. Raises CheckpointDamaged where it is over `limit`."""

        def read() -> bytes:
            # One byte more than is believed, so that a larger one shows without being held in memory.
            return bytes(self._fs.cat_file(self._path(key), start=0, end=limit + 1))

        try:
            data = self._attempt("reading", key, read)
        except FileNotFoundError:
            return None
        if len(data) > limit:
            raise CheckpointDamaged(f"{self.url}/{key} has more than the {limit} bytes that are believed")
        return data

    def size(self, key: str) -> int | None:
        """Size of an object in bytes; None where it is missing."""
        try:
            return int(self._attempt("asking for the size of", key, lambda: self._fs.info(self._path(key))["size"]))
        except FileNotFoundError:
            return None

    def get_file(self, key: str, path: Path, expected: Written) -> None:
        """Read an object into a new file. Raises as `get_files`."""
        self.get_files(key, path, [(0, expected)])

    def get_files(self, key: str, path: Path, contents: Sequence[tuple[int, Written]]) -> None:
        """Read an object of `put_files` into a new file, in parts, and sync it. A part that fails is retried by itself.

        Raises CheckpointDamaged unless sizes and hashes are as expected; the size is compared before any disk space is
        used. Raises OSError where the file cannot be written.
        """
        last, ends = contents[-1]
        whole, size = last + ends.size, self.size(key)
        if size != whole:
            found = "is missing" if size is None else f"has {size} bytes; {whole} were written"
            raise CheckpointDamaged(f"{self.url}/{key} {found}")
        require_room(path.parent, whole)
        try:
            with os.fdopen(files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as sink:
                for start, expected in contents:
                    sink.seek(start)
                    self._read_into(sink, key, start, expected)
                sink.flush()
                os.fsync(sink.fileno())
        except CheckpointDamaged:
            files.unlink(path)
            raise

    def _read_into(self, sink: IO[bytes], key: str, start: int, expected: Written) -> None:
        digest, end = ShardHash(), start + expected.size
        for begin in range(start, end, _PART):
            part = self._part(key, begin, min(end, begin + _PART))
            digest.update(part)
            sink.write(part)
        if digest.hexdigest() != expected.digest:
            raise CheckpointDamaged(f"{self.url}/{key} has hash {digest.hexdigest()}; {expected.digest} was written")

    def _part(self, key: str, start: int, end: int) -> bytes:
        try:
            part = self._attempt(
                "reading", key, lambda: bytes(self._fs.cat_file(self._path(key), start=start, end=end))
            )
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self.url}/{key} has gone while it was read") from None
        if len(part) != end - start:
            raise CheckpointDamaged(f"{self.url}/{key} gave {len(part)} bytes of {end - start} at {start}")
        return part

    def delete(self, key: str) -> None:
        """Delete an object; it may be missing."""
        with contextlib.suppress(FileNotFoundError):
            self._attempt("deleting", key, lambda: self._fs.rm_file(self._path(key)))

    def names(self, folder: str, *, patiently: bool = True) -> list[str]:
        """Names in a folder, as far as a listing shows them: it may be out of date. patiently: with retries."""
        patience = self.patience if patiently else 0.0
        try:
            found = self._attempt("listing", folder, lambda: self._fs.ls(self._path(folder), detail=False), patience)
        except FileNotFoundError:
            return []
        return [path.rpartition("/")[2] for path in found]

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"

    def _writing(self, key: str, size: int) -> Any:
        path = self._path(key)
        if self._protocol in _WITH_DIRECTORIES:
            self._fs.makedirs(self._fs._parent(path), exist_ok=True)
        return _synced(self._fs.open(path, "wb", block_size=max(_BLOCK, size // _MOST_PARTS)), path)

    def require_not_given_up(self) -> None:
        """Raise RingUnavailable after `give_up`."""
        if self._given_up.is_set():
            raise RingUnavailable(f"using the ring {self.url}: its time was up")

    def _attempt(self, doing: str, key: str, act: Callable[[], _T], patience: float | None = None) -> _T:
        """Do it, and retry with growing, random pauses while the error may go away. patience: not the store's.

        Raises FileNotFoundError where there is no such object to read; where a file system does not tell the two apart,
        or no such bucket.
        """

        def once() -> _T:
            self.require_not_given_up()
            if self._refused:  # somebody may have put new credentials in the place of those that had run out
                self._connect()
            return act()

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_go_away),
            wait=_pause,
            stop=tenacity.stop_any(
                tenacity.stop_after_delay(self.patience if patience is None else patience),
                tenacity.stop_when_event_set(self._given_up),
            ),
            sleep=tenacity.sleep_using_event(self._given_up),
            reraise=True,
        )
        self._asked = time.monotonic()
        try:
            done = retrying(once)
        except RollbackError:
            raise
        except Exception as error:
            missing = isinstance(error, FileNotFoundError) and not _lacks_bucket(error)
            if missing and doing != "writing":
                raise
            self._refused = not missing and not _may_go_away(error)
            raise self._explain(doing, key, error) from error
        finally:
            self._asked = None
        self._through = time.monotonic()
        return done

    def _explain(self, doing: str, key: str, error: Exception) -> RingUnavailable:
        place = f"{self.url}/{key}" if key else self.url
        why = "its file system cannot do that" if isinstance(error, NotImplementedError) else str(error)
        return RingUnavailable(
            f"{doing} {place}: {why or type(error).__name__}",
            hint="check the URL, the credentials, and that the bucket exists and is reachable from this machine",
        )


def _called_once(act: Callable[[], None], since: Callable[[], float]) -> contextlib.AbstractContextManager[None]:
    """In this block: `act` is called once, in a thread, when `STUCK` seconds have passed since that time."""
    calls = [act]

    def watch() -> None:
        if calls and time.monotonic() - since() > STUCK:
            calls.pop()()

    return called_every("rollback-stuck", STUCK / 10, watch)


def _may_go_away(error: BaseException) -> bool:
    """Whether it makes sense to try again."""
    return isinstance(error, Exception) and not isinstance(error, _FINAL) and type(error).__name__ not in _FINAL_BY_NAME


def _lacks_bucket(error: BaseException) -> bool:
    """Whether the answer was that there is no such bucket, as S3's are: s3fs raises the same for a missing object."""
    response = getattr(error.__cause__, "response", None) or {}
    return bool(response.get("Error", {}).get("Code") == "NoSuchBucket")


def _pause(state: tenacity.RetryCallState) -> float:
    """Random, up to twice as long each time. tenacity's own pauses would use the script's random numbers."""
    return _dice.uniform(0, min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(state.attempt_number, 20)))


def _leave_random_numbers_alone() -> None:
    """Make the libraries draw the pauses between their retries from random numbers of our own.

    In rank 0 they would otherwise change what the script draws. They take the numbers from their module's `random`.
    """
    for name in _DRAWS_PAUSES:
        if (module := sys.modules.get(name)) is not None:
            module.random = _dice  # type: ignore[attr-defined]


@contextlib.contextmanager
def _synced(file: Any, path: str) -> Iterator[Any]:
    """A file being written that is synced before it is closed, where it has a descriptor: fsspec's own are not."""
    local = False
    with file as sink:
        yield sink
        with contextlib.suppress(io.UnsupportedOperation, AttributeError):
            file.flush()
            os.fsync(file.fileno())
            local = True
    if local:
        sync_directory(Path(os.path.realpath(os.path.dirname(path))))


def require_room(directory: Path, size: int) -> None:
    """Raise RingUnavailable unless `size` bytes fit onto the disk of `directory`: the stated size may be wrong."""
    free = shutil.disk_usage(directory).free
    if size > free:
        raise RingUnavailable(
            f"fetching {size} bytes into {directory}: its disk has {free} bytes left",
            hint="make room there, or use another disk: --run DIR for a run, TMPDIR for a temporary directory",
        )
