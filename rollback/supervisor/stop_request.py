"""Being told to stop by a request in the run directory. The ranks see it too; the supervisor keeps the time."""

from __future__ import annotations

from rollback.rundir.lock import launch_of
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Inbox, sound_requests


class StopRequests:
    """Requests to stop the launch that holds the run directory, which must be this one."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._launch = launch_of(paths)
        self._inbox = Inbox(paths, ())

    def take(self) -> list[str]:
        """Who asked since the last call. What is no such request is the ranks' to refuse."""
        names = list(self._inbox.open())
        for name in names:
            self._inbox.note_answer(name)
        return [request.who for _, request in sound_requests(self._paths, names) if request.stops(self._launch)]
