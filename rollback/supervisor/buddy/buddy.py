"""One host's part in keeping copies of snapshots and end marks on other hosts: it sends its own, and keeps those of
another one.

The buddy of a seat is the host in the next seat. So each host keeps one copy and sends one, whatever their number.
"""

from collections.abc import Callable
from pathlib import Path

from rollback.facts.training import PartBroughtBack
from rollback.rundir import seal
from rollback.rundir.paths import RunPaths
from rollback.supervisor.buddy.bring_back import bring_back
from rollback.supervisor.buddy.sender import BuddySender, MarkSender, ToBuddy
from rollback.supervisor.buddy.server import BuddyServer
from rollback.supervisor.buddy.wire import FAULTS, Buddies, in_words


class Buddy:
    """base: the directory in which fast tiers are made. host: where other hosts reach this one. `close` it."""

    def __init__(self, paths: RunPaths, base: Path, node: str, host: str, say: Callable[[str], None]) -> None:
        self._paths, self._base, self._node, self._say = paths, base, node, say
        self._server = BuddyServer(paths)
        self._senders: list[ToBuddy] = []
        self.address = f"{host}:{self._server.port}"
        self.fault: str | None = None
        """Why this host's snapshots are not copied at present, in words."""

    def get_ready(self, buddies: Buddies | None) -> None:
        """The hosts gather for an attempt: from now on its members are answered. Call it before any of them starts."""
        self._server.secret = buddies.secret if buddies is not None else ""

    def begin(self, seat: int, buddies: Buddies | None, given_up: Callable[[], bool]) -> PartBroughtBack | None:
        """An attempt begins: bring back what this host lacks, which is returned, then send what its ranks will save,
        and their marks. Call it before the ranks start. A fault costs the copy and no attempt, and so does `given_up`.
        """
        own, address = ("", "")
        if buddies is not None:
            own, address = buddies.addresses[seat], buddies.addresses[(seat + 1) % len(buddies.addresses)]
        if buddies is None:
            self._tell("the leader was started without --replicas")
        elif len(buddies.addresses) == 1:
            self._tell("no other host takes part in this attempt")
        elif not own:
            self._tell("another node of this job is on this host, or on one of the same name")
        elif not address:
            self._tell("the host that should keep them keeps none: without --replicas, or with two nodes on it")
        else:
            brought = self._bring_back(seat, buddies, address, given_up)
            self._senders = [BuddySender(self._paths, address, seat, buddies.secret, self._tell, self._say)]
            if seal.present() is None:  # marks have none
                self._senders.append(MarkSender(self._paths, address, seat, buddies.secret, self._say))
            return brought
        return None

    def _bring_back(
        self, seat: int, buddies: Buddies, address: str, given_up: Callable[[], bool]
    ) -> PartBroughtBack | None:
        if not buddies.wanted:
            return None
        try:
            return bring_back(self._paths, self._base, self._node, seat, buddies, address, given_up)
        except FAULTS as error:
            where = address.rpartition(":")[0]
            self._say(f"bringing this host's part of the newest snapshot back from {where}: {in_words(error)}")
            return None

    def rest(self) -> None:
        """The attempt is over on this host. What it keeps of others stays, and nothing more arrives."""
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.close()
        self._server.rest()

    def close(self) -> None:
        self.rest()
        self._server.close()

    def _tell(self, fault: str | None) -> None:
        if fault is not None and fault != self.fault:
            self._say(f"the snapshots of this host are in no other host's memory: {fault}")
        self.fault = fault
