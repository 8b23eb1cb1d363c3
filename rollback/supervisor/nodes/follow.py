"""The follower: starts and ends its own torchrun by the leader's orders."""

import contextlib
import signal
import time

from rollback.checkpoints.fast_tier import end_marks
from rollback.errors import ExitCode, NodesMissing, RollbackError, RunInUse, UsageError
from rollback.ring.shard_copier import ShardCopier
from rollback.rundir.host_records import SILENT_AFTER, RecordPublisher, RecordWatcher
from rollback.rundir.record_location import forget_record_location, write_record_location
from rollback.supervisor.diagnosis.hang import TELLING
from rollback.supervisor.diagnosis.outcome import HostOutcome
from rollback.supervisor.last_snapshot import last_snapshot_on_host
from rollback.supervisor.nodes.meeting import ORDERS, Meeting
from rollback.supervisor.nodes.membership import OwnNode
from rollback.supervisor.nodes.protocol import (
    LeaderOrders,
    NodeReport,
    RecordPlace,
    RunResult,
    followers_move,
    leaves_alone,
)
from rollback.supervisor.nodes.record_files import RecordFiles, handing_over
from rollback.supervisor.nodes.waiting import FetchAhead, forget_fetched
from rollback.supervisor.signals import StopSignals
from rollback.supervisor.torchrun.command import NodeGroup
from rollback.supervisor.torchrun.host import Host, Running

_POLL = 0.1
_LOOK_EVERY = 1.0
_INTRODUCTION = 10.0  # seconds in which who leads must give orders; else it leads no such job


class Follower:
    """A supervisor that follows. Make it while another process leads. grace: seconds that its ranks have to stop."""

    def __init__(self, own: OwnNode, host: Host, grace: float, signals: StopSignals, meeting: Meeting) -> None:
        self._paths, self._place, self._say, self._buddy = own.paths, own.place, own.say, own.buddy
        self._host, self._grace, self._signals = host, grace, signals
        self._meeting, self._ring = meeting, own.ring if meeting.apart else None
        self._publisher: RecordPublisher[NodeReport] | None = None
        self._watcher = RecordWatcher(
            meeting.transport,
            ORDERS,
            LeaderOrders,
            writes_fail=lambda: self._publisher is not None and self._publisher.failing,
        )
        self._files = RecordFiles(own.paths, own.say) if meeting.apart else None
        self._next_look, self._next_beats = 0.0, 0.0
        self._ahead: FetchAhead | None = None
        self._fetches_ahead = True  # until no thread can be made for it
        self._last: LeaderOrders | None = None  # of who leads, or led before
        self._waits = False  # the last attempt that was ordered has no part for this node
        self._unlike = ""  # what this node would run otherwise than who leads, as it was last said

    @property
    def called(self) -> int:
        """The last attempt for which the leader has called its nodes; 0: none."""
        return self._last.attempt if self._last is not None else 0

    def follow(self, in_use: RunInUse | None = None) -> RunResult | None:
        """Follow the leader. Returns how the run ended; None: the leader is gone.

        in_use: why this supervisor does not lead, where the run directory is shared; it is raised where its holder
        leads no nodes. Raises NodesMissing where a known leader stays silent.
        """
        orders = self._introduce(in_use)
        if orders is None:
            return None
        self._last = orders
        self._host.end_leftovers(self._say)
        self._say(f"{self._place.name}: following {orders.host} (pid {orders.pid})")
        report = NodeReport(
            node=self._place.name, launch=self._place.launch, host=self._place.host, pid=self._place.pid,
            leader=orders.leader, attempt=-1, state="ended", command=dict(self._place.command),
            buddy=self._buddy.address if self._buddy is not None else "",
        )  # fmt: skip
        copier = ShardCopier(
            self._paths, self._place.name, self._say, self._meeting.transport, self._ring, lambda: self._waits
        )
        copier.start()  # before the leader sees this node, and waits for it
        name = self._paths.node(self._place.name).name
        try:
            publisher = self._publisher = RecordPublisher(self._meeting.transport, name, report, self._say)
        except RollbackError:
            copier.close(over=False, durable=())
            raise
        result: RunResult | None = None
        try:
            result = self._obey(publisher)
            if result is None or result.record is None or not self._meeting.apart:
                return result
            there = RecordPlace(host=self._last.host, directory=self._last.directory)
            return result.model_copy(update={"record": there})
        finally:
            self._end_waiting(over=result is not None)
            over = result is not None and not self._leaves_alone(self._last)  # else the others need what is in memory
            copier.close(over=over, durable=result.durable if result else ())
            publisher.stop()
            self._publisher = None

    def _introduce(self, in_use: RunInUse | None) -> LeaderOrders | None:
        """The orders of who leads; None: nobody leads by now."""
        patience = self._place.timeout if self._last is not None else _INTRODUCTION
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            orders = self._watcher.look().get(ORDERS)
            if orders is not None and self._meeting.is_led_by(orders):
                self._require_same_ring(orders)
                return orders
            if self._meeting.is_leaderless():
                return None
            if self._signals.received:
                raise NodesMissing("told to stop while no node led", hint="the same command on all nodes goes on")
            time.sleep(_POLL)
        if self._last is None and in_use is not None:
            raise in_use
        raise NodesMissing(
            f"whoever leads has been silent for {patience:.0f} s, and still holds {self._meeting.words}",
            hint="see to its host; the same command on all nodes goes on where the run was",
        ) from in_use

    def _require_same_ring(self, orders: LeaderOrders) -> None:
        """Before anything is said to who leads: in a job that trains this host would take the place of its namesake."""
        other = (orders.ring or "").rstrip("/") != (self._ring or "").rstrip("/")
        if self._meeting.apart and orders.ring is not None and other:
            raise UsageError(
                f"{orders.host} leads at {self._meeting.words}, and its job has --ring {orders.ring} where this one "
                f"has {self._ring}",
                hint="give each job an --rdzv-endpoint of its own, on its first host; and all hosts of one the same "
                "--ring",
            )

    def _obey(self, publisher: RecordPublisher[NodeReport]) -> RunResult | None:
        while True:
            orders = self._orders()
            if orders is None:
                return self._without_leader()
            if self._signals.received and self._leaves_alone(orders):
                publisher.stop()  # before what takes time: the next attempt must not be given to it
                gathers = orders.phase == "gather"
                others = "begin the next attempt once enough of them are there" if gathers else "go on without it"
                reason = f"told to stop while {self._place.name} waited without a seat: the others {others}"
                return RunResult(exit_code=ExitCode.RESUMABLE, reason=reason)
            self._tell_of_signals(publisher)
            self._tell_of_difference(orders)
            report = publisher.record
            match followers_move(report.state, report.attempt, orders, self._place.launch):
                case "quit":
                    return orders.result
                case "get ready":
                    if self._buddy is not None:
                        self._buddy.get_ready(orders.buddies)
                    publisher.show(
                        state="ready", attempt=orders.attempt, states=(), beats={}, stacks=None, left=None,
                        kept=last_snapshot_on_host(self._paths), brought_back=None,
                        master=self._place.new_master(self._say),
                    )  # fmt: skip
                case "start":
                    self._end_waiting(over=False)
                    if self._files is not None:
                        self._files.arrived()
                    publisher.show(state="running", files={})
                    left = self._attempt(orders, publisher)
                    files = self._files.all() if self._files is not None else {}
                    publisher.show(state="ended", left=left, files=files)
                case "pass":
                    publisher.show(state="ended", left=HostOutcome(status=0, guarded=False))
                case _:
                    if orders.phase == "run" and self._waits:
                        self._wait_as_spare(orders)
                    time.sleep(_POLL)

    def _wait_as_spare(self, orders: LeaderOrders) -> None:
        """An attempt runs without this node: have at hand what its ranks will need if it takes another one's place."""
        self._host.keep_standby(orders.attempt)
        if self._ahead is None and self._ring is not None and self._fetches_ahead:
            what = "as a spare" if self._place.spares else "for the next attempt, since one is under way"
            try:
                self._ahead = FetchAhead(self._paths, self._ring, self._say)
            except RollbackError as error:  # it costs a download that comes later
                self._say(f"{self._place.name} waits {what}; no checkpoint is fetched ahead: {error.message}")
                self._fetches_ahead = False
                return
            self._write_record_location(orders)
            self._say(f"{self._place.name} waits {what}; the newest checkpoint is fetched ahead")

    def _write_record_location(self, orders: LeaderOrders) -> None:
        """For who looks into this host's run directory."""
        if self._files is not None:
            has = self._files.handed_over
            write_record_location(self._paths, orders.host, orders.directory, self._say, has=has)

    def _end_waiting(self, *, over: bool) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
            with contextlib.suppress(OSError):
                if over and not self._paths.identity.exists():  # no rank has run here
                    forget_record_location(self._paths)
                    forget_fetched(self._paths)

    def _attempt(self, orders: LeaderOrders, publisher: RecordPublisher[NodeReport]) -> HostOutcome:
        """Run torchrun on this node until it ends or must be ended."""
        group = None
        if orders.master:
            group = NodeGroup(len(orders.members), orders.members.index(self._place.launch), orders.master)
        try:
            if self._buddy is not None:
                seat = orders.members.index(self._place.launch)
                brought = self._buddy.begin(seat, orders.buddies, lambda: self._must_not_wait(orders.attempt))
                publisher.show(brought_back=brought, uncopied=self._buddy.fault)
            with contextlib.ExitStack() as until_over, self._host.attempt(orders.attempt, group) as running:
                status = self._watch(running, publisher, until_over)
            publisher.show(beats=running.beats())  # where the ranks were last, and not some seconds before
        finally:
            if self._buddy is not None:
                self._buddy.rest()
        self._host.output.release()
        return self._host.left(status, running)

    def _must_not_wait(self, attempt: int) -> bool:
        orders = self._orders()
        told = orders is None or followers_move("running", attempt, orders, self._place.launch) != "wait"
        return told or bool(self._signals.received)

    def _watch(self, running: Running, publisher: RecordPublisher[NodeReport], until_over: contextlib.ExitStack) -> int:
        deadline: float | None = None
        kept = False
        while (status := running.poll()) is None:
            orders = self._orders()
            self._tell_of_signals(publisher)
            if not kept and orders is not None and orders.attached:
                kept = True
                self._host.output.keep()
                self._host.keep_standby(running.attempt)
                if self._files is not None:
                    try:
                        until_over.enter_context(handing_over(self._files, publisher, self._meeting.transport.every))
                    except RollbackError as error:  # all of it is handed over when the attempt is over
                        self._say(f"{self._place.name} hands over nothing of the record meanwhile: {error.message}")
                    self._write_record_location(orders)
            self._look_at_ranks(running, publisher, orders)
            move = followers_move("running", running.attempt, orders, self._place.launch) if orders else "end"
            if self._signals.insistent:
                return running.kill(None)
            if move in ("end", "quit"):
                return running.kill()
            if move == "tell" or self._signals.received:
                deadline = deadline or time.monotonic() + self._grace
                signals = self._signals.received or [signal.SIGTERM]
                running.tell_ranks_to_stop(signals, guarded=self._host.guarded)
                if time.monotonic() > deadline:
                    return running.kill(end_marks.GRACE_IS_OVER)
            running.await_end(_POLL)
        return status

    def _look_at_ranks(
        self, running: Running, publisher: RecordPublisher[NodeReport], orders: LeaderOrders | None
    ) -> None:
        """Report what the leader cannot see from its host, and take the stacks once the leader orders it."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY
            states = tuple(sorted((rank, state) for rank, state in running.look().items() if state in TELLING))
            uncopied = self._buddy.fault if self._buddy is not None else None
            told = publisher.record.states, publisher.record.uncopied
            if (states, uncopied) != told or time.monotonic() >= self._next_beats:
                self._next_beats = time.monotonic() + self._meeting.transport.every
                publisher.show(states=states, uncopied=uncopied, beats=running.beats())
        if orders is not None and orders.stacks and publisher.record.stacks is None:
            try:
                publisher.show(stacks=running.take_stacks())
            except OSError as error:
                self._say(f"the stacks of the ranks here could not be taken: {error}")
                publisher.show(stacks=())

    def _tell_of_signals(self, publisher: RecordPublisher[NodeReport]) -> None:
        if self._signals.take():
            names = tuple(signum.name for signum in self._signals.received)
            publisher.show(signals=names, insistent=self._signals.insistent)

    def _tell_of_difference(self, orders: LeaderOrders) -> None:
        """Who has started this node looks at its terminal, and not at the leader's."""
        unlike = orders.unfit.get(self._place.name, "")
        if unlike and unlike != self._unlike:
            self._say(
                f"{self._place.name} cannot take part: it has other {unlike} than {orders.host}, which leads; stop it, "
                "and start it with the same command"
            )
        self._unlike = unlike

    def _orders(self) -> LeaderOrders | None:
        """The leader's orders; None: it is gone (it is silent, another one leads, or nobody does)."""
        orders, last = self._watcher.look().get(ORDERS), self._last
        assert last is not None
        if orders is not None and orders.leader != last.leader and not self._meeting.is_led_by(orders):
            orders = last  # one that led before was cut off, and says late what it had to say
        if orders is None or orders.leader != last.leader:
            return None
        self._last = orders
        if orders.members:
            self._waits = self._place.launch not in orders.members
        return orders if orders.phase == "over" or not self._meeting.is_leaderless() else None

    def _leaves_alone(self, orders: LeaderOrders) -> bool:
        return leaves_alone(orders, waits=self._waits, seated=self._place.seated)

    def _without_leader(self) -> RunResult | None:
        if self._signals.received:
            return RunResult(exit_code=ExitCode.RESUMABLE, reason="told to stop while no node led")
        lost = self._last.host if self._meeting.apart and self._last is not None else None
        what = f"; if {lost} is lost, start the same command there again: all meet there" if lost is not None else ""
        self._say(f"the leader is gone, or silent for {SILENT_AFTER:.0f} s: this node has ended its ranks{what}")
        return None
