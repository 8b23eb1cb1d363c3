"""Checkpoints of the ring at a URL in the run directories of the hosts, where every host has one of its own.

A restore reads files of its own host. What is in the slots of all hosts needs no copy; of anything else, each host that
lacks it gets a copy from the URL first. On the hosts beside rank 0's, the ring of the run directory is no more than the
place of the last such copy.
"""

from collections.abc import Callable

from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import read_manifest
from rollback.errors import CheckpointDamaged, CheckpointOutOfReach, RollbackError
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.train.catalogue.remote import CheckpointDownload, end_of
from rollback.train.comm.ranks import Ranks


class HostCopies:
    """show: called with what this rank is doing, for its heartbeat."""

    def __init__(
        self, paths: RunPaths, ranks: Ranks, url: str | None, show: Callable[[str], None] = lambda text: None
    ) -> None:
        self._paths, self._ranks, self._url, self._show = paths, ranks, url, show

    def bring(self, name: str) -> CheckpointDamaged | None:
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
        seen = end_of(download, self._ranks, fault)
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
            elif not self._ranks.first:
                ring.evict(self._paths, other)
