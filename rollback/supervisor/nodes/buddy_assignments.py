"""The leader's part in copies of snapshots on other hosts: the secret, which host sends to which, and the record."""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.resume import on_record
from rollback.facts.training import Fact, NoBuddyCopy, PartBroughtBack
from rollback.rundir.identity import read_identity
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.supervisor.buddy.wire import Buddies
from rollback.supervisor.last_snapshot import last_snapshot_on_host
from rollback.supervisor.nodes.membership import OwnNode
from rollback.supervisor.nodes.protocol import NodeReport
from rollback.supervisor.patience import patiently

_WANTED = 16  # checkpoints: a buddy has the newest, the one before, or behind a rollback an older one


class BuddyAssignments:
    """own: the leader's. Where it has no buddy, no copies are wanted, and nothing happens here."""

    def __init__(self, own: OwnNode, note: Callable[[Fact], None]) -> None:
        self._paths, self._place, self._buddy, self._say, self._note = own.paths, own.place, own.buddy, own.say, note
        self._brought: PartBroughtBack | None = None
        self._uncopied: dict[str, str | None] = {}
        self._told: set[tuple[int, str]] = set()

    def get_ready(self) -> Buddies | None:
        """The nodes gather: what they must know before any of them asks another one, the secret of the attempt."""
        if self._buddy is None:
            return None
        buddies = Buddies(secret=secrets.token_hex())
        self._buddy.get_ready(buddies)
        return buddies

    def arrange(
        self,
        buddies: Buddies | None,
        seats: Sequence[str],
        there: Iterable[NodeReport],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Buddies | None:
        """Who keeps what in the next attempt, and what may be brought back. there: the reports of the other members.
        interrupted: whether the job is told to stop, so that a disk which refuses is not waited for.

        Raises RunDirectoryError, JournalDamaged.
        """
        if self._buddy is None or buddies is None:
            return None
        there = [*there]
        members = {report.node: (report.host, report.buddy) for report in there if report.node in seats}
        members[self._place.name] = (self._place.host, self._buddy.address)
        identity, folded = patiently(
            lambda: (read_identity(self._paths), fold_journal(self._paths.train_journal)), self._say, interrupted
        )
        history = folded.history
        newest = on_record(history, history.committed)[::-1][:_WANTED]
        # A new leader's host may have nothing.
        kept = (last_snapshot_on_host(self._paths), *(report.kept for report in there))
        return buddies.model_copy(
            update={
                "run": identity.run_id if identity is not None else "",
                "wanted": (*_last_snapshots(kept, history.last_attempt), *newest),
                "addresses": addresses(seats, members),
            }
        )

    def begin(self, seat: int, buddies: Buddies | None, given_up: Callable[[], bool]) -> None:
        """The attempt begins on the leader's own host."""
        if self._buddy is not None:
            self._brought = self._buddy.begin(seat, buddies, given_up)

    def look(self, attempt: int, reports: Iterable[NodeReport | None]) -> None:
        """Journal what is new in an attempt that runs. reports: of the other members."""
        news = [
            (report.node, report.brought_back, report.uncopied)
            for report in reports
            if report is not None and report.attempt == attempt
        ]
        if self._buddy is not None:
            news.append((self._place.name, self._brought, self._buddy.fault))
        for node, brought, reason in news:
            if brought is not None and (attempt, node) not in self._told:
                self._told.add((attempt, node))
                self._note(brought)
                self._say(brought.in_words())
            if reason != self._uncopied.get(node):
                self._note(NoBuddyCopy(node=node, reason=reason))
            self._uncopied[node] = reason

    def rest(self) -> None:
        """The attempt is over on all hosts."""
        self._brought = None
        if self._buddy is not None:
            self._buddy.rest()


def _last_snapshots(hosts: Iterable[LastSnapshotResult | None], attempt: int) -> list[str]:
    """What the ranks of an attempt have kept at its end, on any host. Pure.

    attempt: the newest one that has journalled anything. The next one journals what is kept of it; what an earlier one
    has left, this one has not gone on from.
    """
    kept = {host.checkpoint for host in hosts if host is not None and host.attempt == attempt}
    return sorted(name for name in kept if name is not None)


def addresses(seats: Sequence[str], members: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """Where the buddy of each seat is reached; empty for one that keeps no copies, and for nodes that share a host:
    they share its slots, and a copy there would be lost with them. Pure. members: host and address by node."""
    nodes_on = Counter(members[node][0] for node in seats if node in members)
    found = [members.get(node, ("", "")) for node in seats]
    return tuple(address if nodes_on[host] == 1 else "" for host, address in found)
