"""One host's part in keeping copies of snapshots on other hosts: it sends its own, and keeps those of another one.

The buddy of a seat is the host in the next seat. So each host keeps one copy and sends one, whatever their number.
"""

from collections.abc import Callable
from pathlib import Path

from rollback.errors import RollbackError
from rollback.facts.training import PartBroughtBack
from rollback.rundir.paths import RunPaths
from rollback.supervisor.buddy.bring_back import bring_back
from rollback.supervisor.buddy.sender import BuddySender
from rollback.supervisor.buddy.server import BuddyServer
from rollback.supervisor.buddy.wire import Buddies


class Buddy:
    """base: the directory in which fast tiers are made. host: where other hosts reach this one. `close` it."""

    def __init__(self, paths: RunPaths, base: Path, node: str, host: str, say: Callable[[str], None]) -> None:
        self._paths, self._base, self._node, self._say = paths, base, node, say
        self._server = BuddyServer(paths)
        self._sender: BuddySender | None = None
        self.address = f"{host}:{self._server.port}"
        self.fault: str | None = None
        """Why this host's snapshots are not copied at present, in words."""

    def begin(self, seat: int, buddies: Buddies) -> PartBroughtBack | None:
        """An attempt begins: bring back what this host lacks, which is returned, then send what its ranks will save.
        Call it before the ranks start. A fault costs the copy and no attempt."""
        self._server.secret = buddies.secret
        brought = None
        if buddies.run:
            try:
                brought = bring_back(self._paths, self._base, self._node, seat, buddies)
            except (OSError, RollbackError) as error:
                fault = error.message if isinstance(error, RollbackError) else str(error)
                self._say(f"bringing this host's part of the newest snapshot back from another host: {fault}")
        count = len(buddies.addresses)
        address = buddies.addresses[(seat + 1) % count]
        if count == 1:
            self._tell("no other host takes part in this attempt")
        elif not address:
            self._tell("the host that should keep them was started without --replicas")
        else:
            self._sender = BuddySender(self._paths, address, seat, buddies.secret, self._tell, self._say)
        return brought

    def rest(self) -> None:
        """The attempt is over on this host. What it keeps of others stays."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def close(self) -> None:
        self.rest()
        self._server.close()

    def _tell(self, fault: str | None) -> None:
        if fault is not None and fault != self.fault:
            self._say(f"the snapshots of this host are in no other host's memory: {fault}")
        self.fault = fault
