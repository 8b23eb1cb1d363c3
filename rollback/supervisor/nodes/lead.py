"""The leader: knows which nodes have come, gives them orders, and collects what an attempt left on all nodes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from rollback.errors import NodesMissing, RollbackError, RunDirectoryError
from rollback.rundir.beacon import Beacon, Transport, Watchtower
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import Heartbeat
from rollback.supervisor.diagnosis.outcome import Left
from rollback.supervisor.nodes.gathering import keep_files
from rollback.supervisor.nodes.meeting import ORDERS, REPORTS, EndpointMeeting, Meeting
from rollback.supervisor.nodes.membership import NodePlace
from rollback.supervisor.nodes.protocol import (
    LeadersMove,
    NodeReport,
    Orders,
    RunResult,
    leaders_move,
    merged,
    must_end,
    rank_by_name,
    ready,
)
from rollback.supervisor.torchrun.command import NodeGroup

_POLL = 0.1
_SAY_AFTER = 10.0  # seconds of waiting for other nodes after which the user is told
_STACKS = 15.0  # seconds that followers have for the stacks of their ranks
_FAREWELL = 15.0  # seconds that followers have to read how the run ended


class Nodes:
    """The nodes of a job, for the supervisor that decides. This class is for a job on one node.

    Calls do not wait unless they say so.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes in the attempt; empty for a job on one node."""
        return ()

    @property
    def group(self) -> NodeGroup | None:
        """How torchrun on this node takes part in the attempt; None: as its flags say."""
        return None

    @property
    def transport(self) -> Transport | None:
        """Reaches the other hosts where each has a run directory of its own."""
        return None

    def attached(self) -> None:
        """Tell all nodes that the ranks have attached, so that there is a record."""

    def gather(self, attempt: int, interrupted: Callable[[], bool]) -> bool:
        """Wait until every node is ready for this attempt, and let them start. False: `interrupted` came true.

        Raises NodesMissing where a known node does not come back, RunDirectoryError where nodes never came.
        """
        return True

    def move(self, own: int | None) -> LeadersMove:
        """What the leader does now. own: the status of this node's torchrun."""
        return "wait" if own is None else "settled"

    def stop(self) -> None:
        """Make all ranks stop and save."""

    def states(self) -> dict[int, str]:
        """The ranks on other nodes that are stopped, in an uninterruptible call or gone: as `Running.look`."""
        return {}

    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeats of the ranks on other nodes."""
        return {}

    def take_stacks(self, own: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Make the ranks of all nodes write their stacks. Returns the ranks that did. Waits some seconds.

        own: takes the stacks on this node; may raise OSError.
        """
        return own()

    def signals(self) -> list[tuple[str, str]]:
        """Stop signals of other nodes since the last call: node and signal."""
        return []

    @property
    def insistent(self) -> bool:
        """Whether another node was told to stop twice."""
        return False

    def left(self, own: Left) -> Left:
        """What the attempt left on all nodes, once it is over everywhere."""
        return own

    def farewell(self, verdict: RunResult) -> None:
        """Tell all nodes how the run ended, and wait until they have read it."""


class Leader(Nodes):
    """A supervisor that leads. Make it while holding the run directory's lock."""

    def __init__(self, paths: RunPaths, place: NodePlace, say: Callable[[str], None], meeting: Meeting) -> None:
        self._paths, self._place, self._say, self._meeting = paths, place, say, meeting
        self._tower = Watchtower(meeting.transport, REPORTS, NodeReport, blind=lambda: self._beacon.failing)
        self._members: dict[str, str] = {}
        self._heard: dict[str, int] = {}
        self._ever: set[str] = set()
        self._reports: dict[str, NodeReport] = {}
        orders = Orders(leader=place.launch, host=place.host, pid=place.pid, directory=str(paths.root))
        self._beacon = Beacon(meeting.transport, ORDERS, orders, say)

    @property
    def names(self) -> tuple[str, ...]:
        return (self._place.name, *self._members.values())

    @property
    def group(self) -> NodeGroup | None:
        count = len(self.names)
        if self._meeting.apart:
            return NodeGroup(count, 0, self._beacon.record.master)
        return NodeGroup(count) if self._place.elastic else None

    @property
    def transport(self) -> Transport | None:
        return self._meeting.transport if self._meeting.apart else None

    def attached(self) -> None:
        self._beacon.show(attached=True)

    @property
    def insistent(self) -> bool:
        return any(report.insistent for report in self._reports.values())

    def gather(self, attempt: int, interrupted: Callable[[], bool]) -> bool:
        self._members = {}
        self._beacon.show(phase="gather", attempt=attempt, members=(), master="", attached=False, stacks=False)
        began, said = time.monotonic(), False
        enough, since = 0, began
        while True:
            self._look()
            there = ready(self._reports.values(), self._place.launch, attempt)
            if len(there) > enough:
                enough, since = len(there), time.monotonic()  # after each node that comes, wait for another one
            called = time.monotonic() - since > self._place.last_call
            if len(there) >= self._place.most - 1 or (len(there) >= self._place.least - 1 and called):
                break
            if interrupted() or any(report.signals for report in self._reports.values()):
                return False
            waited = time.monotonic() - began
            if waited > self._place.timeout and len(there) < self._place.least - 1:
                raise self._missing(there, waited)
            if waited > _SAY_AFTER and not said:
                self._say(self._who_is_there(there))
                said = True
            time.sleep(_POLL)
        order = sorted(there, key=lambda launch: (rank_by_name(there[launch].node), launch))
        self._members = {launch: there[launch].node for launch in order[: self._place.most - 1]}
        self._beacon.show(phase="run", members=tuple(self._members), master=self._new_master())
        return True

    def move(self, own: int | None) -> LeadersMove:
        self._look()
        members = self._member_reports()
        if must_end(own, members):
            self._beacon.show(phase="end")
        return leaders_move(own, members)

    def stop(self) -> None:
        if self._beacon.record.phase == "run":
            self._beacon.show(phase="stop")

    def states(self) -> dict[int, str]:
        return {rank: state for report in self._member_reports().values() if report for rank, state in report.states}

    def beats(self) -> dict[int, Heartbeat]:
        reports = [report for report in self._member_reports().values() if report]
        return {rank: beat for report in reports for rank, beat in report.beats.items()}

    def take_stacks(self, own: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        self._beacon.show(stacks=True)
        taken = own()
        deadline = time.monotonic() + _STACKS
        while any(report and report.stacks is None for report in self._member_reports().values()):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
            self._look()
        others = [report.stacks or () for report in self._member_reports().values() if report]
        return tuple(sorted({*taken, *(rank for ranks in others for rank in ranks)}))

    def signals(self) -> list[tuple[str, str]]:
        new = []
        for report in self._reports.values():
            new += [(report.node, name) for name in report.signals[self._heard.get(report.launch, 0) :]]
            self._heard[report.launch] = len(report.signals)
        return new

    def left(self, own: Left) -> Left:
        reports = self._member_reports()
        for report in reports.values():
            if report is not None and report.files and self._meeting.apart:
                keep_files(self._paths, report.files, f"{report.node} ({report.host})", self._say)
        return merged(
            own, {self._members[launch]: report.left if report else None for launch, report in reports.items()}
        )

    def farewell(self, verdict: RunResult) -> None:
        self._beacon.show(phase="over", verdict=verdict)
        deadline = time.monotonic() + _FAREWELL
        while self._followers() and time.monotonic() < deadline:
            time.sleep(_POLL)
        # A node that has not read it yet will find the file, and the lock free.
        self._beacon.put_out(remove=not self._followers())

    def put_out(self) -> None:
        """Give no more orders."""
        self._beacon.put_out()

    def _look(self) -> None:
        """Read the followers' reports, and check that no other supervisor gives orders."""
        if (rival := self._meeting.rival(self._beacon.record)) is not None:
            raise RunDirectoryError(
                f"{rival.host} (pid {rival.pid}) gives orders in {self._paths.nodes} too, though only one may hold "
                f"{self._paths.lock}: its file system does not lock between hosts",
                hint="mount it so that locks are shared (NFS without nolock or local_lock, Lustre with -o flock)",
            )
        self._reports = {report.launch: report for report in self._followers()}
        self._ever |= {report.node for report in self._reports.values()}

    def _followers(self) -> list[NodeReport]:
        return [report for report in self._tower.look().values() if report.leader == self._place.launch]

    def _member_reports(self) -> dict[str, NodeReport | None]:
        """The members' reports on this attempt; None: the member is silent, or another launch has replaced it."""
        return {launch: self._reports.get(launch) for launch in self._members}

    def _new_master(self) -> str:
        """Where the ranks of this attempt meet: in a store of its own, so that no key of an earlier one is in it."""
        if not isinstance(self._meeting, EndpointMeeting):
            return ""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{self._meeting.store.point.host}:{probe.getsockname()[1]}"

    def _who_is_there(self, there: dict[str, NodeReport]) -> str:
        names = ", ".join([self._place.name, *sorted(report.node for report in there.values())])
        return (
            f"waiting for {self._place.most - 1 - len(there)} of {self._place.most} nodes (here: {names}); "
            f"start the same command on them. They meet in {self._meeting.words}"
        )

    def _missing(self, there: dict[str, NodeReport], waited: float) -> RollbackError:
        lost = sorted(self._ever - {report.node for report in there.values()})
        if lost:
            return NodesMissing(
                f"{', '.join(lost)} has not come back within {waited:.0f} s",
                hint="the run goes on where it was when the same command runs on all nodes again",
            )
        return RunDirectoryError(
            f"{len(there) + 1} of {self._place.least} nodes have come within {waited:.0f} s to {self._meeting.words}",
            hint="run the same command on all nodes, each with a --node-rank of its own; hosts that share no run "
            "directory need --ring URL and a rendezvous of torch's own (--rdzv-endpoint)",
        )
