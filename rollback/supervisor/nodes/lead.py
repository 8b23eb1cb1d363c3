"""The leader: knows which nodes have come, gives them orders, and collects what an attempt left on all nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollback.errors import NodesMissing, RollbackError, RunDirectoryError
from rollback.rundir.beacon import Beacon, Watchtower, read_in_place
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import Heartbeat
from rollback.supervisor.diagnosis.outcome import Left
from rollback.supervisor.nodes.membership import NodePlace
from rollback.supervisor.nodes.protocol import (
    LeadersMove,
    NodeReport,
    Orders,
    RunResult,
    leaders_move,
    merged,
    must_end,
    ready,
)
from rollback.system.mounts import mount_of
from rollback.system.small_json import parse_model

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

    def __init__(self, paths: RunPaths, place: NodePlace, say: Callable[[str], None]) -> None:
        self._paths, self._place, self._say = paths, place, say
        self._tower = Watchtower(paths.nodes, "node-*.json", NodeReport, blind=lambda: self._beacon.failing)
        self._members: dict[str, str] = {}
        self._heard: dict[str, int] = {}
        self._ever: set[str] = set()
        self._reports: dict[str, NodeReport] = {}
        orders = Orders(leader=place.launch, host=place.host, pid=place.pid)
        self._beacon = Beacon(paths.orders, orders, say)

    @property
    def names(self) -> tuple[str, ...]:
        return (self._place.name, *self._members.values())

    @property
    def insistent(self) -> bool:
        return any(report.insistent for report in self._reports.values())

    def gather(self, attempt: int, interrupted: Callable[[], bool]) -> bool:
        self._members = {}
        self._beacon.show(phase="gather", attempt=attempt, members=(), stacks=False)
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
        self._members = {launch: there[launch].node for launch in sorted(there)[: self._place.most - 1]}
        self._beacon.show(phase="run", members=tuple(self._members))
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

    def _look(self) -> None:
        """Read the followers' reports, and check that no other supervisor gives orders."""
        try:
            orders = parse_model(read_in_place(self._paths.orders), Orders)
        except (OSError, ValueError):
            orders = self._beacon.record
        if orders.leader != self._place.launch:
            raise RunDirectoryError(
                f"{orders.host} (pid {orders.pid}) gives orders in {self._paths.nodes} too, though only one may hold "
                f"{self._paths.lock}: the file system ({self._file_system}) does not lock between hosts",
                hint="mount it so that locks are shared (NFS without nolock or local_lock, Lustre with -o flock)",
            )
        self._reports = {report.launch: report for report in self._followers()}
        self._ever |= {report.node for report in self._reports.values()}

    def _followers(self) -> list[NodeReport]:
        return [report for report in self._tower.look().values() if report.leader == self._place.launch]

    def _member_reports(self) -> dict[str, NodeReport | None]:
        """The members' reports on this attempt; None: the member is silent, or another launch has replaced it."""
        return {launch: self._reports.get(launch) for launch in self._members}

    @property
    def _file_system(self) -> str:
        return mount_of(self._paths.root.resolve()).kind

    def _who_is_there(self, there: dict[str, NodeReport]) -> str:
        names = ", ".join([self._place.name, *sorted(report.node for report in there.values())])
        return (
            f"waiting for {self._place.most - 1 - len(there)} of {self._place.most} nodes (here: {names}); "
            f"start the same command on them. They meet in {self._paths.root}, which all must share; here it lies on "
            f"{self._file_system}"
        )

    def _missing(self, there: dict[str, NodeReport], waited: float) -> RollbackError:
        lost = sorted(self._ever - {report.node for report in there.values()})
        if lost:
            return NodesMissing(
                f"{', '.join(lost)} has not come back within {waited:.0f} s",
                hint="the run goes on where it was when the same command runs on all nodes again",
            )
        return RunDirectoryError(
            f"{len(there) + 1} of {self._place.least} nodes have come to {self._paths.root} within {waited:.0f} s",
            hint=f"all nodes must share the run directory (here it lies on {self._file_system}) and run "
            "the same command, each with a --node-rank of its own",
        )
