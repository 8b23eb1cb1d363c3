"""What a spare node does while it waits: it has what its ranks will need at hand."""

import threading
from collections.abc import Callable

from rollback.checkpoints import ring
from rollback.errors import RollbackError, message_of
from rollback.ring.url.fetch import bring, read_manifest_at
from rollback.ring.url.index import read_indexes
from rollback.ring.url.store import Store
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.system import files
from rollback.system.threads import lower_priority, start_thread

_EVERY = 5.0


class FetchAhead:
    """A thread that keeps the newest checkpoint of the ring at a URL in a run directory of this host's own, in which no
    rank runs. `close` it before one does.

    It reads the ring's index every 5 seconds, and each new checkpoint once. say: called from the thread. Raises
    RollbackError where no thread can be made.
    """

    def __init__(self, paths: RunPaths, url: str, say: Callable[[str], None]) -> None:
        self._paths, self._url, self._say = paths, url, say
        self._store = Store(url)
        self._ended = threading.Event()
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="rollback-fetch-ahead", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """End the thread, also in the middle of a download: the ranks then fetch what they need."""
        self._ended.set()
        self._store.give_up()
        self._thread.join()

    def _run(self) -> None:
        lower_priority()
        while not self._ended.is_set():
            try:
                self._fetch()
                self._told = ""
            except (RollbackError, OSError) as error:
                text = message_of(error)
                if text != self._told and not self._ended.is_set():
                    self._say(f"fetching the newest checkpoint from {self._url} ahead: {text}")
                self._told = text
            self._ended.wait(_EVERY)

    def _fetch(self) -> None:
        indexes = read_indexes(self._store)
        names = map(CheckpointName, indexes[0].checkpoints) if indexes else ()
        name = max(names, key=lambda name: name.sort_key, default=None)
        if name is None or ring.is_complete(self._paths.checkpoint(name)):
            return
        files.remove_directory(self._paths.checkpoint(name))
        manifest = read_manifest_at(self._store, name)
        if manifest is None:
            return  # evicted since
        files.make_directory(self._paths.ring)
        bring(self._store, manifest, self._paths, lambda text: None)
        forget_fetched(self._paths, but=name)


def forget_fetched(paths: RunPaths, but: str | None = None) -> None:
    """Remove the checkpoints that were fetched into a run directory without a record. Raises OSError."""
    for name in ring.names(paths):
        if name != but:
            ring.evict(paths, name)
