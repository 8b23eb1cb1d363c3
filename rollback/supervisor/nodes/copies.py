"""The leader's part in copies of snapshots on other hosts: which host sends to which, and the record of it."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from rollback.facts.training import Fact, NoBuddyCopy, PartBroughtBack
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import RunPaths
from rollback.supervisor.buddy.buddy import Buddy
from rollback.supervisor.buddy.wire import Buddies
from rollback.supervisor.nodes.protocol import NodeReport


class Copies:
    """buddy: of the leader's own host, `node`; None: no copies are wanted, and nothing happens here."""

    def __init__(
        self,
        paths: RunPaths,
        node: str,
        buddy: Buddy | None,
        note: Callable[[Fact], None],
        say: Callable[[str], None],
    ) -> None:
        self._paths, self._node, self._buddy, self._note, self._say = paths, node, buddy, note, say
        self._secret = secrets.token_hex()
        self._uncopied: dict[str, str | None] = {}
        self._told: set[tuple[int, str]] = set()

    def arrange(self, seats: Sequence[str], there: Mapping[str, NodeReport]) -> Buddies | None:
        """Who keeps what in the next attempt. there: the reports of the other members. Raises RunDirectoryError."""
        if self._buddy is None:
            return None
        identity = read_identity(self._paths)
        addresses = {report.node: report.buddy for report in there.values()} | {self._node: self._buddy.address}
        run = identity.run_id if identity is not None else ""
        return Buddies(secret=self._secret, run=run, addresses=tuple(addresses.get(node, "") for node in seats))

    def begin(self, seat: int, buddies: Buddies | None) -> None:
        """The attempt begins on the leader's own host."""
        if self._buddy is not None and buddies is not None and (brought := self._buddy.begin(seat, buddies)):
            self._take_down(brought)

    def look(self, attempt: int, reports: Iterable[NodeReport | None]) -> None:
        """Journal what is new. reports: of the other members."""
        uncopied = {self._node: self._buddy.fault if self._buddy is not None else None}
        for report in reports:
            if report is not None and report.attempt == attempt:
                uncopied[report.node] = report.uncopied
                if report.brought_back is not None and (attempt, report.node) not in self._told:
                    self._told.add((attempt, report.node))
                    self._take_down(report.brought_back)
        for node, reason in uncopied.items():
            if reason is not None and reason != self._uncopied.get(node):
                self._note(NoBuddyCopy(node=node, reason=reason))
            self._uncopied[node] = reason

    def rest(self) -> None:
        """The attempt is over on the leader's own host."""
        if self._buddy is not None:
            self._buddy.rest()

    def _take_down(self, brought: PartBroughtBack) -> None:
        self._note(brought)
        self._say(brought.in_words())
