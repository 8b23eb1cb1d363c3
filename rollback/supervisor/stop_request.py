"""Stop requests in the run directory. The ranks see them too; the supervisor enforces the grace."""

from rollback.rundir.lock import launch_of
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Inbox, sound_requests


class StopRequests:
    """Requests to stop this launch, which holds the run directory."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._launch = launch_of(paths)
        self._inbox = Inbox(paths, ())

    def take(self) -> list[str]:
        """Who has asked since the last call."""
        names = list(self._inbox.open())
        for name in names:
            self._inbox.note_answer(name)
        return [request.who for _, request in sound_requests(self._paths, names) if request.stops(self._launch)]
