"""Checkpoints that are only in the ring at a URL: their list, and the download of one that a plan needs; and, where
each host has a run directory of its own, a checkpoint that not all of them have (`HostCopies`).

A host's first rank downloads in a thread. Meanwhile all ranks meet several times a second, so that no collective takes
as long as the download. If the download fails, the plan is made again without that checkpoint.
"""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import asdict

from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.errors import CheckpointDamaged, CheckpointOutOfReach, CheckpointUnusable, RollbackError, message_of
from rollback.facts.training import Fetched, Trouble
from rollback.policy import PolicyCheckpoint
from rollback.ring.schedule import good_ones_at
from rollback.ring.url.fetch import bring, read_manifest_at
from rollback.ring.url.store import Store
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import WRITING, RunPaths
from rollback.system import files
from rollback.system.threads import in_daemon
from rollback.train.comm.ranks import MEET_EVERY, Ranks
from rollback.train.comm.recorder import Recorder, say

_PATIENCE = 30.0  # seconds for which a request that fails is tried again
_STANDSTILL = 120.0  # seconds without a byte after which a download is given up


class RemoteRing:
    """The good checkpoints of the ring at `url`, for plans. Methods are collective unless they say otherwise.

    show: called with what this rank is doing, for its heartbeat.
    """

    def __init__(self, paths: RunPaths, ranks: Ranks, record: Recorder, url: str, show: Callable[[str], None]) -> None:
        self._paths = paths
        self._ranks = ranks
        self._record = record
        self._url = url.rstrip("/")
        self._copies = HostCopies(paths, ranks, self._url, show)
        self._tried: set[str] = set()
        self._unreachable: CheckpointOutOfReach | None = None

    def offered(self) -> list[PolicyCheckpoint]:
        """The good checkpoints there, oldest first, without those that were fetched or failed for the present plan."""
        there = [asdict(point) for point in self._told()] if self._ranks.is_rank_0 else None
        return [PolicyCheckpoint(**point) for point in self._ranks.from_first(there)]

    def fetch(self, name: str) -> Manifest:
        """Bring a checkpoint into the run directory of every host. Returns its manifest. Raises CheckpointUnusable."""
        if self._unreachable is not None:
            raise self._unreachable
        self._tried.add(name)
        began, is_new = time.monotonic(), self._ranks.is_rank_0 and self._copies.whole(name) is None
        try:
            self._copies.bring(name)
        except CheckpointUnusable as error:
            self._unreachable = error if isinstance(error, CheckpointOutOfReach) else None
            doing = f"fetching checkpoint {name} from {self._url}"
            self._record.note(Trouble(doing=doing, error=error.message), f"{doing} failed: {error.message}")
            raise
        finally:  # what is here now is on record, also where another host did not get it
            if is_new and (come := self._copies.whole(name)) is not None:
                seconds = round(time.monotonic() - began, 4)
                fact = Fetched(checkpoint=name, step=come.step, place=self._url, bytes=come.bytes, seconds=seconds)
                self._record.note(fact, fact.in_words())
        path = self._paths.checkpoint(name)
        here = self._ranks.agreed(lambda: read_manifest(path) if self._ranks.is_rank_0 else None)
        return Manifest.model_validate(self._ranks.from_first(here and here.model_dump(mode="json")))

    def try_again(self) -> None:
        """Allow again what has failed: another plan is made. Not collective."""
        self._tried.clear()
        self._unreachable = None

    def _told(self) -> list[PolicyCheckpoint]:
        if self._unreachable is not None:
            return []
        try:
            supervisor = fold_journal(self._paths.supervisor_journal).history
        except (OSError, RollbackError) as error:
            say(f"what the ring {self._url} holds is not known: {message_of(error)}")
            return []
        there = good_ones_at(self._url, self._record.history, supervisor)
        return [point for point in there if point.name not in self._tried]


class HostCopies:
    """Checkpoints of the ring at `url` in the run directory, or in that of each host, where every host has its own.

    A restore reads files of its own host. What is in the slots of all hosts needs no copy; of anything else, each host
    that lacks it gets a copy from the URL first. On the hosts beside rank 0's, the ring of the run directory is no more
    than the place of the last such copy.

    show: called with what this rank is doing, for its heartbeat.
    """

    def __init__(
        self, paths: RunPaths, ranks: Ranks, url: str | None, show: Callable[[str], None] = lambda text: None
    ) -> None:
        self._paths, self._ranks, self._url, self._show = paths, ranks, url, show

    def bring(self, name: str) -> None:
        """Collective: make sure that every host has a checkpoint. Raises CheckpointUnusable, on all ranks."""
        # One that this host has from elsewhere, of another run that was wiped on the other hosts, may have that name.
        here = self.whole(name) if self._ranks.first_in_directory else None
        own = here and here.content
        first = self._ranks.from_first(own)
        gets = self._ranks.first_in_directory and (own is None or own != first)
        if self._ranks.all_of(not gets):
            return
        if self._url is None:
            raise CheckpointDamaged(
                f"not every host has {name} in its run directory, and there is no ring at a URL to get it from"
            )
        self._show("fetching")
        download = CheckpointDownload(self._paths, self._url, name, alone=not self._ranks.is_rank_0) if gets else None
        while not self._ranks.all_of(download is None or download.is_over()):
            pass
        self._show("rewinding")
        self._ranks.agreed(download.require if download is not None else lambda: None)

    def whole(self, name: str) -> Manifest | None:
        """The checkpoint that is here by that name; None: none, or it is not whole."""
        directory = self._paths.checkpoint(name)
        try:
            manifest = read_manifest(directory)
            ring.require_sizes(manifest, directory)
        except (RollbackError, OSError):
            return None
        return manifest


class CheckpointDownload:
    """A rank's download into its run directory. It begins at once, in a thread.

    alone: no other checkpoint is to be in that ring. Else one that is there by that name goes to quarantine behind it:
    a disk that fails for a moment makes sound ones look damaged.
    """

    def __init__(self, paths: RunPaths, url: str, name: str, *, alone: bool = False) -> None:
        say(f"fetching checkpoint {name} from {url}")
        self._moved = time.monotonic()
        self._paths, self._url, self._name, self._alone = paths, url, name, alone
        self._store: Store | None = None
        self._received = 0
        self._ended = in_daemon(self._fetch, "rollback-fetch")

    def is_over(self) -> bool:
        """Wait a moment. Whether it has ended, or is given up, since nothing has come for long."""
        if wait([self._ended], MEET_EVERY).done:
            return True
        received = self._received
        with contextlib.suppress(OSError):  # what is damaged is removed
            received = sum(path.stat().st_size for path in self._paths.ring.glob(f"{WRITING}{self._name}-*/*"))
        if received != self._received:
            self._received, self._moved = received, time.monotonic()
        if time.monotonic() - self._moved < _STANDSTILL:
            return False
        if self._store is not None:
            self._store.give_up()
        return True

    def require(self) -> None:
        """When it is over: raise CheckpointDamaged where the checkpoint is not there, or not what it should be;
        CheckpointOutOfReach where no other one could be fetched either."""
        if not self._ended.done():
            raise CheckpointOutOfReach(f"nothing came for {_STANDSTILL:.0f} s")
        try:
            self._ended.result()
        except CheckpointUnusable:
            raise
        except (RollbackError, OSError) as error:
            raise CheckpointOutOfReach(message_of(error)) from error

    def _fetch(self) -> None:
        try:
            self._make_room()
        except OSError as error:
            raise CheckpointOutOfReach(f"making room for {self._name} in {self._paths.ring}: {error}") from error
        store = self._store = Store(self._url, patience=_PATIENCE)
        manifest = read_manifest_at(store, self._name)
        if manifest is None:
            raise CheckpointDamaged(f"{self._url} has no checkpoint {self._name} any more")
        bring(store, manifest, self._paths, say)

    def _make_room(self) -> None:
        files.make_directory(self._paths.ring)
        for other in ring.names(self._paths) if self._alone else ():
            if other == self._name:  # and is not whole, or another one
                files.remove_directory(self._paths.checkpoint(other))
            else:
                ring.evict(self._paths, other)
