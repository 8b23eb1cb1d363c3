"""The leader: knows which nodes have come, gives them orders, and collects what an attempt left on all nodes."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult, merged_results
from rollback.errors import NodesMissing, RollbackError, RunDirectoryError
from rollback.facts.training import Fact, NodeReplaced, SpareNodes
from rollback.rundir.heartbeats import Heartbeat
from rollback.rundir.host_records import RecordPublisher, RecordWatcher, Transport
from rollback.supervisor.diagnosis.outcome import HostOutcome
from rollback.supervisor.nodes.buddy_assignments import BuddyAssignments
from rollback.supervisor.nodes.meeting import ORDERS, REPORTS, EndpointMeeting, Meeting, first_orders
from rollback.supervisor.nodes.membership import OwnNode
from rollback.supervisor.nodes.nodes import Nodes
from rollback.supervisor.nodes.protocol import LeadersMove, NodeReport, RunResult, leaders_move, merged, must_end, ready
from rollback.supervisor.nodes.record_files import RecordKeeper
from rollback.supervisor.nodes.roster import Roster
from rollback.supervisor.nodes.seats import awaited, rank_by_name, replacements, seats
from rollback.supervisor.torchrun.command import NodeGroup

_POLL = 0.1
_SAY_AFTER = 10.0  # seconds of waiting for other nodes after which the user is told
_STACKS = 15.0  # seconds that followers have for the stacks of their ranks
_FAREWELL = 15.0  # seconds that followers have to read how the run ended
# Seconds that a new leader waits for a node with a seat before a spare gets it, and that a spare has to come in for a
# node that fails. At an endpoint a try to meet takes ten.
_RETURN, _RETURN_APART = 5.0, 15.0
_ENDS = 120.0  # that it has to end its ranks before it counts as lost: torchrun and a last snapshot take 30 each


class Leader(Nodes):
    """A supervisor that leads. Make it while holding the run directory's lock. note: journals a fact."""

    def __init__(self, own: OwnNode, meeting: Meeting, note: Callable[[Fact], None] = lambda fact: None) -> None:
        self._paths, self._place, self._say, self._meeting, self._note = own.paths, own.place, own.say, meeting, note
        self._assignments = BuddyAssignments(own, note)
        self._least, self._most = own.place.least, own.place.most
        self._seats: tuple[str, ...] = ()
        self._fitting: tuple[str, ...] = ()  # the seats with which the job has trained last
        self._spares: SpareNodes | None = None
        self._watcher = RecordWatcher(
            meeting.transport, REPORTS, NodeReport, writes_fail=lambda: self._publisher.failing
        )
        self._roster = Roster(own.place)
        self._keeper = RecordKeeper(own.paths, own.say)
        self._told_to_end: float | None = None
        self._overtaken = False
        orders = first_orders(own, own.ring if meeting.apart else None)
        self._publisher = RecordPublisher(meeting.transport, ORDERS, orders, own.say)

    @property
    def names(self) -> tuple[str, ...]:
        return self._seats

    @property
    def group(self) -> NodeGroup | None:
        master = self._publisher.record.master
        return NodeGroup(len(self._seats), self._seats.index(self._place.name), master) if master else None

    @property
    def transport(self) -> Transport | None:
        return self._meeting.transport if self._meeting.apart else None

    def attached(self) -> None:
        self._fitting = self._seats
        self._publisher.show(attached=True)

    @property
    def insistent(self) -> bool:
        return any(report.insistent for report in self._roster.reports.values())

    def resume(self, nodes: Sequence[str]) -> None:
        self._seats = self._fitting = tuple(nodes)

    def failed(self, rank: int | None, *, progressed: bool) -> None:
        self._roster.failed(rank, self._members().values(), progressed=progressed)

    def take_another_number(self) -> str | None:
        fitting = len(self._fitting)
        if self._least <= fitting < len(self._seats):  # others have come since
            self._seats, self._most = self._fitting, fitting
            return f"going on with {fitting} nodes, with which it fits; the others wait for the place of one of them"
        self._least = max(self._least, len(self._seats) + 1)
        return "waiting for more nodes, with which it fits" if self._least <= self._most else None

    def gather(self, attempt: int, interrupted: Callable[[], bool]) -> bool:
        self._roster.seat({})
        self._told_to_end = None
        buddies = self._assignments.get_ready()
        self._publisher.show(
            phase="gather", attempt=attempt, members=(), master="", buddies=buddies, attached=False, stacks=False
        )
        began, said = time.monotonic(), None
        came, since = 0, began
        while True:
            self.look()
            there = ready(self._roster.fit(), self._place.launch, attempt)
            if len(there) > came:
                came, since = len(there), time.monotonic()  # after each node that comes, wait for another one
            called = time.monotonic() - since > self._place.last_call
            enough = len(there) >= self._most - 1 or (len(there) >= self._least - 1 and called)
            slow = self._awaited(there, time.monotonic() - began) if enough else []
            if enough and not slow:
                break
            if interrupted() or any(report.signals for report in self._roster.reports.values()):
                return False
            waited = time.monotonic() - began
            if waited > self._place.timeout and len(there) < self._least - 1:
                raise self._missing(there, waited)
            if waited > _SAY_AFTER and said != (unfit := self._unfit()):  # one that comes and is of no use is told of
                self._say(f"{self._who_is_missing(there, slow)}{unfit}")
                said = unfit
            time.sleep(_POLL)
        try:
            self._seat(there, interrupted)
        except RollbackError:
            if interrupted():
                return False
            raise
        self._assignments.begin(self._seats.index(self._place.name), self._publisher.record.buddies, interrupted)
        return True

    def _awaited(self, there: Mapping[str, NodeReport], waited: float) -> list[str]:
        """The nodes that end their ranks, of whatever attempt: two would write one run directory. Else those that will
        be ready soon, and without which a seat would get another node than it should."""
        if waited > _ENDS:
            return []
        if self._roster.running:
            return sorted(self._roster.running, key=rank_by_name)
        if not self._place.spares and self._most == self._place.most:  # else some wait for a seat
            return []
        fit = {report.node for report in self._roster.fit()}
        coming, spares = fit, set[str]()
        if waited <= (_RETURN_APART if self._meeting.apart else _RETURN):
            coming, spares = fit | ({*self._seats} - self._roster.came), fit
        here = {report.node for report in there.values()} | {self._place.name}
        return awaited(self._seats, here, coming, spares=spares, failing=self._roster.failing())

    def _seat(self, there: Mapping[str, NodeReport], interrupted: Callable[[], bool]) -> None:
        """Give the nodes of the attempt their ranks, and order them to start. What is new is journalled first."""
        before, own = self._seats, self._place
        launches = {report.node: launch for launch, report in there.items()} | {own.name: own.launch}
        self._keep_files(there.values())  # of those too that were taken for lost when the last attempt ended
        failing = self._roster.failing()
        apart = self._meeting.apart
        self._seats = seats(before, own.name, launches, self._most, failing=failing, leader_first=apart)
        self._roster.seat({node: launches[node] for node in self._seats if node != own.name})
        for node, by in replacements(before, self._seats) if own.spares else ():
            rank = self._seats.index(by)
            fact = NodeReplaced(node=node, by=by, rank=rank, why="failing" if node in failing else "lost")
            self._note(fact)
            self._say(fact.in_words())
        self._look_at_spares()
        first = launches[self._seats[0]]
        master = ""
        if apart or own.seated:
            master = there[first].master if first in there else self._new_master(interrupted)
        buddies = self._assignments.arrange(self._publisher.record.buddies, self._seats, there.values(), interrupted)
        members = tuple(launches[node] for node in self._seats)
        self._publisher.show(phase="run", members=members, master=master, buddies=buddies)

    def _look_at_spares(self) -> None:
        """Journal which nodes wait, where that has changed."""
        if not self._place.spares:
            return
        if (spares := self._roster.spares()) != self._spares:
            self._spares = spares
            self._note(spares)
            self._say(f"spare nodes: {spares.in_words()}")

    def _unfit(self) -> str:
        """In words, to be put behind others."""
        unfit = sorted(self._roster.unfit().items())
        return "".join(f"; {node} cannot take part: it has other {what}" for node, what in unfit)

    def move(self, own: int | None) -> LeadersMove:
        self.look()
        self._look_at_spares()
        members = self._members()
        self._keep_files(members.values())
        self._assignments.look(self._publisher.record.attempt, members.values())
        if must_end(own, members):
            self.end()
        return leaders_move(own, members)

    def stop(self) -> None:
        if self._publisher.record.phase == "run":
            self._publisher.show(phase="stop")

    def end(self) -> None:
        self._told_to_end = self._told_to_end or time.monotonic()
        self._publisher.show(phase="end")

    def states(self) -> dict[int, str]:
        return {rank: state for report in self._members().values() if report for rank, state in report.states}

    def beats(self) -> dict[int, Heartbeat]:
        reports = [report for report in self._members().values() if report]
        return {rank: beat for report in reports for rank, beat in report.beats.items()}

    @property
    def lag(self) -> float:
        return self._meeting.transport.every + self._meeting.transport.pace

    def take_stacks(self, own: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        self._publisher.show(stacks=True)
        taken = own()
        deadline = time.monotonic() + _STACKS
        while any(report and report.stacks is None for report in self._members().values()):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
            self.look()
        others = [report.stacks or () for report in self._members().values() if report]
        return tuple(sorted({*taken, *(rank for ranks in others for rank in ranks)}))

    def signals(self) -> list[tuple[str, str]]:
        return self._roster.new_signals()

    def left(self, own: HostOutcome) -> HostOutcome:
        self._assignments.rest()
        reports = self._members()
        self._roster.lose((node for node, report in reports.items() if report is None), self._publisher.record.attempt)
        self._keep_files(reports.values())
        return merged(own, {node: report.left if report else None for node, report in reports.items()})

    def _keep_files(self, reports: Iterable[NodeReport | None]) -> None:
        """What other hosts hand over of the record: meanwhile, and all of it once the attempt has ended there."""
        for report in reports if self._meeting.apart else ():
            if report is not None:
                self._keeper.keep(report.launch, f"{report.node} ({report.host})", report.files)

    def last_snapshot(self, own: LastSnapshotResult | None, attempt: int) -> LastSnapshotResult | None:
        others = (report.kept for report in self._roster.reports.values())
        return merged_results([own, *(kept for kept in others if kept is not None and kept.attempt == attempt)])

    def farewell(self, result: RunResult) -> None:
        if self._overtaken:  # the record is another leader's
            self._publisher.stop(remove=False)
            return
        self._publisher.show(phase="over", result=result)
        deadline = time.monotonic() + _FAREWELL
        while follow := any(report.leader == self._place.launch for report in self._watcher.look().values()):
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL)
        # A node that has not read it yet will find the file, and the lock free.
        self._publisher.stop(remove=not follow)

    def look(self) -> None:
        if (told := self._meeting.keep_up()) is not None:
            self._say(told)
        if (rival := self._meeting.rival(self._publisher.record)) is not None:
            self._overtaken = True
            raise RunDirectoryError(
                f"{rival.host} (pid {rival.pid}) leads this run now, though this one holds {self._paths.lock}: either "
                f"this host was cut off from it for a while, or its file system does not lock between hosts",
                hint="start the same command here again; if it comes back at once, mount the file system so that locks "
                "are shared (NFS without nolock or local_lock, Lustre with -o flock)",
            )
        for line in self._roster.hear(self._watcher.look().values()):
            self._say(line)
        if (unfit := self._roster.unfit()) != self._publisher.record.unfit:
            self._publisher.show(unfit=unfit)

    def _members(self) -> dict[str, NodeReport | None]:
        since = self._told_to_end
        overdue = since is not None and time.monotonic() - since > _ENDS
        return self._roster.members(self._publisher.record.attempt, overdue=overdue)

    def _new_master(self, interrupted: Callable[[], bool]) -> str:
        """Where the ranks of this attempt meet, on this host."""
        if isinstance(self._meeting, EndpointMeeting):
            return replace(self._place, address=self._meeting.store.point.host).new_master(self._say, interrupted)
        return self._place.new_master(self._say, interrupted)

    def _who_is_missing(self, there: dict[str, NodeReport], slow: Sequence[str]) -> str:
        if slow:
            return f"waiting for {', '.join(slow)}, still getting ready for this attempt"
        names = ", ".join([self._place.name, *sorted(report.node for report in there.values())])
        return (
            f"waiting for {self._most - 1 - len(there)} of {self._most} nodes (here: {names}); "
            f"start the same command on them. They meet in {self._meeting.words}"
        )

    def _missing(self, there: dict[str, NodeReport], waited: float) -> RollbackError:
        known = {*self._seats} & self._roster.came if self._seats else self._roster.came
        lost = sorted(known - {report.node for report in there.values()})
        also = self._unfit()
        if lost:
            return NodesMissing(
                f"{', '.join(lost)} has not come back within {waited:.0f} s{also}",
                hint="the run goes on where it was when the same command runs on all nodes again",
            )
        return RunDirectoryError(
            f"{len(there) + 1} of {self._least} nodes have come within {waited:.0f} s to {self._meeting.words}{also}",
            hint="run the same command on all nodes, each with a --node-rank of its own; hosts that share no run "
            "directory need --ring URL and a rendezvous of torch's own (--rdzv-endpoint)",
        )
