"""Reads a ring at a URL like a run directory: copies what is needed into a temporary directory."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoints.format import frozen
from rollback.checkpoints.format.manifest import MANIFEST_LIMIT, read_manifest
from rollback.errors import CheckpointDamaged, CheckpointLeft, OutputNotWritten, UsageError, reporting
from rollback.inspect.ring.checkpoints import Listing, read_listing
from rollback.ring.url import record
from rollback.ring.url.index import Index, checkpoint_key, frozen_key, read_indexes
from rollback.ring.url.store import Store
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.terminal.messages import say

_NEEDED = ("run.json", "journal/", "pins/")
_PATIENCE = 30.0
_ROOM = "make room there, or set TMPDIR to a directory that can be written"


@dataclass(frozen=True)
class ReadableRun:
    """A run directory, or a local copy of what a URL has of one."""

    root: Path
    name: str
    """As the user wrote it."""
    store: Store | None = None
    """Where the shards still are; None: in the directory."""

    @classmethod
    def at(cls, path: Path) -> "ReadableRun":
        return cls(path, str(path))

    def listing(self) -> Listing:
        """As `read_listing`, under the name that the user has given: a URL, not the temporary copy of its record."""
        at_url = {} if self.store is None else {"ring": self.name, "url": None}
        return read_listing(self.root).model_copy(update={"directory": self.name, **at_url})

    @contextmanager
    def shards(self, checkpoint: str) -> Iterator[None]:
        """All shards of a checkpoint, and its frozen weights, exist inside the block.

        Raises CheckpointDamaged, CheckpointLeft, RingUnavailable, OutputNotWritten.
        """
        if self.store is None:
            yield
            return
        paths = RunPaths(self.root)
        directory = paths.checkpoint(checkpoint)
        manifest = read_manifest(directory)
        try:
            doing = f"copying {checkpoint} of {self.name} into a temporary directory"
            with reporting(OutputNotWritten, doing, _ROOM), self.store.told_if_stuck(say):
                try:
                    if (needed := manifest.frozen) is not None and not frozen.is_there(paths, needed):
                        paths.frozen.mkdir(exist_ok=True)  # what many checkpoints have is fetched once
                        self.store.get_file(frozen_key(needed), paths.frozen / needed.file, needed.written)
                    for file in manifest.files:
                        key = checkpoint_key(checkpoint, file.name)
                        self.store.get_files(key, directory / file.name, file.contents)
                except CheckpointDamaged as error:  # or a job that runs has given it up: its manifest goes first
                    if self.store.get(checkpoint_key(checkpoint), MANIFEST_LIMIT) is not None:
                        raise
                    raise CheckpointLeft(f"the checkpoint {checkpoint} has left {self.name} meanwhile") from error
            yield
        finally:
            for file in manifest.files:
                (directory / file.name).unlink(missing_ok=True)


@contextmanager
def readable(place: str) -> Iterator[ReadableRun]:
    """The run at a path, or at the URL of a ring. From a URL, record and manifests are copied; `shards` copies shards.

    Raises UsageError where the URL has no ring, RingUnavailable where it cannot be read, OutputNotWritten.
    """
    if "://" not in place:
        yield ReadableRun(Path(place), place)
        return
    store = Store(place, patience=_PATIENCE)
    with store.told_if_stuck(say):
        indexes = read_indexes(store)
    if not indexes:
        raise UsageError(f"there is no ring at {store.url}", hint="`rollback launch --ring URL` makes one")
    doing = f"copying the record of {store.url} into a temporary directory"
    with ExitStack() as kept:
        with reporting(OutputNotWritten, doing, _ROOM), store.told_if_stuck(say):
            paths = RunPaths(Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="rollback-ring-"))))
            _copy_record(store, indexes[0], paths)
        yield ReadableRun(paths.root, store.url, store)


def _copy_record(store: Store, index: Index, paths: RunPaths) -> None:
    """Raises RingUnavailable, OSError."""
    record.download_beginning_with(store, index, _NEEDED, paths.root)
    for name in index.checkpoints:
        if (manifest := store.get(checkpoint_key(name), MANIFEST_LIMIT)) is not None:
            paths.checkpoint(name).mkdir(parents=True)
            (paths.checkpoint(name) / MANIFEST).write_bytes(manifest)
