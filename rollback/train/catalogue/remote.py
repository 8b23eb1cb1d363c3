"""Checkpoints that are only in the ring at a URL: their list, and the download of one that a plan needs; and, where
each host has a run directory of its own, a checkpoint that not all of them have (`HostCopies`).

Rank 0 downloads in a thread. Meanwhile all ranks meet several times a second, so that no collective takes as long as
the download. If the download fails, the plan is made again without that checkpoint.
"""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import asdict
from typing import Any

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
    """The ring at `url`. Methods are collective unless they say otherwise.

    show: called with what this rank is doing, for its heartbeat.
    """

    def __init__(self, paths: RunPaths, ranks: Ranks, record: Recorder, url: str, show: Callable[[str], None]) -> None:
        self._paths = paths
        self._ranks = ranks
        self._record = record
        self._url = url.rstrip("/")
        self._show = show
        self._tried: set[str] = set()  # rank 0's, as what follows
        self._unreachable: str | None = None

    def offered(self) -> list[PolicyCheckpoint]:
        """The good checkpoints there, oldest first, without those that were fetched or failed for the present plan."""
        there = [asdict(point) for point in self._told()] if self._ranks.is_rank_0 else None
        return [PolicyCheckpoint(**point) for point in self._ranks.from_first(there)]

    def fetch(self, name: str) -> Manifest | str:
        """Download a checkpoint into the run directory's ring. Returns its manifest, or the fault."""
        self._show("fetching")
        download = (
            CheckpointDownload(self._paths, self._url, name)
            if self._ranks.is_rank_0 and not self._unreachable
            else None
        )
        if self._ranks.is_rank_0:
            self._tried.add(name)
        seen = self._ranks.from_first(_end_of(download, self._ranks, self._unreachable))
        if download is not None:
            self._note(name, download, seen)
        self._show("rewinding")
        return Manifest.model_validate(seen["manifest"]) if "manifest" in seen else str(seen["fault"])

    def try_again(self) -> None:
        """Allow again what has failed: another plan is made. Not collective."""
        self._tried.clear()
        self._unreachable = None

    def _told(self) -> list[PolicyCheckpoint]:
        if self._unreachable:
            return []
        try:
            supervisor = fold_journal(self._paths.supervisor_journal).history
        except (OSError, RollbackError) as error:
            say(f"what the ring {self._url} holds is not known: {message_of(error)}")
            return []
        there = good_ones_at(self._url, self._record.history, supervisor)
        return [point for point in there if point.name not in self._tried]

    def _note(self, name: str, download: "CheckpointDownload", seen: dict[str, Any]) -> None:
        if (manifest := seen.get("manifest")) is not None:
            seconds = round(time.monotonic() - download.began, 4)
            size = Manifest.model_validate(manifest).bytes
            fact = Fetched(checkpoint=name, step=manifest["step"], place=self._url, bytes=size, seconds=seconds)
            self._record.note(fact, fact.in_words())
            return
        self._unreachable = None if seen["damaged"] else seen["fault"]
        doing = f"fetching checkpoint {name} from {self._url}"
        self._record.note(Trouble(doing=doing, error=seen["fault"]), f"{doing} failed: {seen['fault']}")


class CheckpointDownload:
    """A rank's download into its run directory. It begins at once, in a thread."""

    def __init__(self, paths: RunPaths, url: str, name: str) -> None:
        say(f"fetching checkpoint {name} from {url}")
        self.began = self._moved = time.monotonic()
        self._paths, self._url, self._name = paths, url, name
        self._store: Store | None = None
        self._received = 0
        self._ended = in_daemon(self._fetch, "rollback-fetch")

    def look(self) -> dict[str, Any]:
        """Wait a moment. Returns an empty mapping while the download goes on, and `manifest` at its end. If it fails:
        `fault`, and whether the checkpoint is `damaged`; if it is not, no other one can be fetched either."""
        wait([self._ended], MEET_EVERY)
        if not self._ended.done():
            return self._look_for_movement()
        try:
            return {"manifest": self._ended.result().model_dump(mode="json")}
        except (RollbackError, OSError) as error:
            return {"fault": message_of(error), "damaged": isinstance(error, CheckpointUnusable)}

    def _look_for_movement(self) -> dict[str, Any]:
        received = self._received
        with contextlib.suppress(OSError):  # what is damaged is removed
            received = sum(path.stat().st_size for path in self._paths.ring.glob(f"{WRITING}{self._name}-*/*"))
        if received != self._received:
            self._received, self._moved = received, time.monotonic()
        if time.monotonic() - self._moved < _STANDSTILL:
            return {}
        if self._store is not None:
            self._store.give_up()
        return {"fault": f"nothing came for {_STANDSTILL:.0f} s", "damaged": False}

    def _fetch(self) -> Manifest:
        store = self._store = Store(self._url, patience=_PATIENCE)
        manifest = read_manifest_at(store, self._name)
        if manifest is None:
            raise CheckpointDamaged(f"{self._url} has no checkpoint {self._name} any more")
        bring(store, manifest, self._paths, say)
        return manifest


def _end_of(download: CheckpointDownload | None, ranks: Ranks, fault: str | None) -> dict[str, Any]:
    """Collective: what becomes of this rank's download, as `look` tells it; `fault` where it has none. All ranks meet
    several times a second meanwhile, so that no collective takes as long as a download."""
    while True:
        seen = download.look() if download is not None else {"fault": fault}
        if ranks.all_of(bool(seen)):
            return seen


class HostCopies:
    """Checkpoints of the ring at `url` in the run directories of the hosts, where every host has one of its own.

    A restore reads files of its own host. What is in the slots of all hosts needs no copy; of anything else, each host
    that lacks it gets a copy from the URL first. On the hosts beside rank 0's, the ring of the run directory is no more
    than the place of the last such copy.

    show: called with what this rank is doing, for its heartbeat.
    """

    def __init__(
        self, paths: RunPaths, ranks: Ranks, url: str | None, show: Callable[[str], None] = lambda text: None
    ) -> None:
        self._paths, self._ranks, self._url, self._show = paths, ranks, url, show

    def bring(self, name: str) -> CheckpointUnusable | None:
        """Collective: make sure that every host has a checkpoint. Returns the fault; None: all have it."""
        # One that this host has from elsewhere, of another run that was wiped on the other hosts, may have that name.
        own = self._whole(name) if self._ranks.first_in_directory else None
        first = self._ranks.from_first(own)
        gets = self._ranks.first_in_directory and (own is None or own != first)
        if self._ranks.all_of(not gets):
            return None
        if self._url is None:
            return CheckpointDamaged(
                f"not every host has {name} in its run directory, and there is no ring at a URL to get it from"
            )
        self._show("fetching")
        fault, download = None, None
        if gets:
            try:
                self._make_room(name)
                download = CheckpointDownload(self._paths, self._url, name)
            except OSError as error:
                fault = f"making room for {name} in {self._paths.ring}: {error}"
        seen = _end_of(download, self._ranks, fault)
        out_of_reach = self._ranks.first_fault(None if seen.get("damaged") else seen.get("fault"))
        damaged = self._ranks.first_fault(seen.get("fault") if seen.get("damaged") else None)
        self._show("restoring")
        if damaged is not None:
            return CheckpointDamaged(damaged)
        return CheckpointOutOfReach(out_of_reach) if out_of_reach is not None else None

    def _whole(self, name: str) -> str | None:
        """Which checkpoint it is (`Manifest.content`); None: it is not here, or not whole."""
        directory = self._paths.checkpoint(name)
        try:
            manifest = read_manifest(directory)
            ring.require_sizes(manifest, directory)
        except (RollbackError, OSError):
            return None
        return manifest.content

    def _make_room(self, name: str) -> None:
        files.make_directory(self._paths.ring)
        for other in ring.names(self._paths):
            if other == name:  # and is not whole, or another one
                files.remove_directory(self._paths.checkpoint(other))
            elif not self._ranks.is_rank_0:
                ring.evict(self._paths, other)
