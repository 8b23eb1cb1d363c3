"""The follower: starts and ends its own torchrun by the leader's orders."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import filelock

from rollback.errors import NodesMissing, RunInUse
from rollback.ring.helper import Helper
from rollback.rundir.beacon import SILENT_AFTER, Beacon, Watchtower
from rollback.rundir.lock import read_holder
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.evidence import TrainJournal
from rollback.supervisor.diagnosis.hang import GONE
from rollback.supervisor.diagnosis.outcome import Left
from rollback.supervisor.nodes.membership import NodePlace
from rollback.supervisor.nodes.protocol import NodeReport, Orders, RunResult, followers_move
from rollback.supervisor.signals import StopSignals
from rollback.supervisor.torchrun.host import Host, Running

_POLL = 0.1
_LOCK_EVERY = 1.0
_LOOK_EVERY = 1.0
_TELLING = ("T", "t", "D", GONE)  # states of a rank that matter for a hang
_INTRODUCTION = 10.0  # seconds in which the lock's holder must give orders; else it leads no such job


class Follower:
    """A supervisor that follows. Make it while another process holds the run directory's lock."""

    def __init__(
        self,
        paths: RunPaths,
        place: NodePlace,
        host: Host,
        grace: float,
        signals: StopSignals,
        say: Callable[[str], None],
    ) -> None:
        self._paths, self._place, self._host, self._grace = paths, place, host, grace
        self._signals, self._say = signals, say
        self._beacon: Beacon[NodeReport] | None = None
        self._tower = Watchtower(
            paths.nodes, paths.orders.name, Orders, blind=lambda: self._beacon is not None and self._beacon.failing
        )
        self._journal = TrainJournal(paths.train_journal)
        self._lock_looked_at = time.monotonic()
        self._next_look = 0.0
        self._leader = ""

    def follow(self, in_use: RunInUse) -> RunResult | None:
        """Follow the leader. Returns how the run ended; None: the leader is gone.

        in_use: why this supervisor does not lead; it is raised where the holder of the run directory leads no nodes.
        Raises NodesMissing where a known leader stays silent.
        """
        orders = self._introduce(in_use)
        if orders is None:
            return None
        self._leader = orders.leader
        self._host.end_leftovers(self._say)
        self._say(f"{self._place.name}: following {orders.host} (pid {orders.pid})")
        report = NodeReport(
            node=self._place.name, launch=self._place.launch, host=self._place.host, pid=self._place.pid,
            leader=self._leader, attempt=-1, state="ended",
        )  # fmt: skip
        beacon = self._beacon = Beacon(self._paths.node(self._place.name), report, self._say)
        helper = Helper(self._paths, self._place.name, self._say)
        helper.start()
        verdict: RunResult | None = None
        try:
            verdict = self._obey(beacon)
            return verdict
        finally:
            helper.close(over=verdict is not None)
            beacon.put_out()
            self._beacon = None

    def _introduce(self, in_use: RunInUse) -> Orders | None:
        """The orders of the process that holds the lock; None: the lock is free by now."""
        deadline = time.monotonic() + (self._place.timeout if self._leader else _INTRODUCTION)
        while time.monotonic() < deadline:
            orders = self._tower.look().get(self._paths.orders.name)
            holder = read_holder(self._paths) or {}
            if orders is not None and (orders.host, orders.pid) == (holder.get("host"), holder.get("pid")):
                return orders
            if self._lock_is_free():
                return None
            if self._signals.received:
                raise NodesMissing("told to stop while no node led", hint="the same command on all nodes goes on")
            time.sleep(_POLL)
        if not self._leader:
            raise in_use
        raise NodesMissing(
            f"whoever leads {self._paths.root} has been silent for {self._place.timeout:.0f} s and still holds it",
            hint="see to its host; the same command on all nodes goes on where the run was",
        ) from in_use

    def _obey(self, beacon: Beacon[NodeReport]) -> RunResult | None:
        while True:
            orders = self._orders()
            if orders is None:
                return self._without_leader()
            self._tell_of_signals(beacon)
            report = beacon.record
            match followers_move(report.state, report.attempt, orders, self._place.launch):
                case "quit":
                    return orders.verdict
                case "get ready":
                    beacon.show(state="ready", attempt=orders.attempt, states=(), beats={}, stacks=None, left=None)
                case "start":
                    beacon.show(state="running")
                    left = self._attempt(orders, beacon)
                    beacon.show(state="ended", left=left)
                case _:
                    time.sleep(_POLL)

    def _attempt(self, orders: Orders, beacon: Beacon[NodeReport]) -> Left:
        """Run torchrun on this node until it ends or must be ended."""
        nodes = len(orders.members) + 1 if self._place.elastic else None
        with self._host.attempt(orders.attempt, nodes) as running:
            status = self._watch(running, beacon)
        self._host.output.release()
        return self._host.left(status, running)

    def _watch(self, running: Running, beacon: Beacon[NodeReport]) -> int:
        deadline: float | None = None
        kept = False
        while (status := running.poll()) is None:
            orders = self._orders()
            self._tell_of_signals(beacon)
            if not kept and self._journal.has_attached(running.attempt):
                kept = True
                self._host.output.keep()
                self._host.keep_spare()
            self._look_at_ranks(running, beacon, orders)
            move = followers_move("running", running.attempt, orders, self._place.launch) if orders else "end"
            if move in ("end", "quit") or self._signals.insistent:
                return running.kill()
            if move == "tell" or self._signals.received:
                deadline = deadline or time.monotonic() + self._grace
                signals = self._signals.received or [signal.SIGTERM]
                running.tell_ranks_to_stop(signals, guarded=self._host.guarded)
                if time.monotonic() > deadline:
                    return running.kill()
            time.sleep(_POLL)
        return status

    def _look_at_ranks(self, running: Running, beacon: Beacon[NodeReport], orders: Orders | None) -> None:
        """Report what the leader cannot see from its host, and take the stacks once the leader orders it."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY
            states = sorted((rank, state) for rank, state in running.look().items() if state in _TELLING)
            beacon.show(states=tuple(states), beats=running.beats_in_memory())
        if orders is not None and orders.stacks and beacon.record.stacks is None:
            try:
                beacon.show(stacks=running.take_stacks())
            except OSError as error:
                self._say(f"the stacks of the ranks here could not be taken: {error}")
                beacon.show(stacks=())

    def _tell_of_signals(self, beacon: Beacon[NodeReport]) -> None:
        if self._signals.take():
            names = tuple(signum.name for signum in self._signals.received)
            beacon.show(signals=names, insistent=self._signals.insistent)

    def _orders(self) -> Orders | None:
        """The leader's orders; None: it is gone (it is silent, another one leads, or nobody holds the lock)."""
        orders = self._tower.look().get(self._paths.orders.name)
        if orders is not None and orders.leader == self._leader and orders.phase == "over":
            return orders
        if orders is None or orders.leader != self._leader or self._lock_is_free():
            return None
        return orders

    def _without_leader(self) -> RunResult | None:
        if self._signals.received:
            return RunResult(exit_code=75, reason="told to stop while no node led")
        self._say(f"the leader is gone, or silent for {SILENT_AFTER:.0f} s: this node has ended its ranks")
        return None

    def _lock_is_free(self) -> bool:
        """Whether nobody holds the run directory. Checked once a second: the check takes the lock for a moment."""
        if time.monotonic() - self._lock_looked_at < _LOCK_EVERY:
            return False
        self._lock_looked_at = time.monotonic()
        return lock_is_free(self._paths)


def lock_is_free(paths: RunPaths) -> bool:
    lock = filelock.FileLock(paths.lock, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError):
        return False
    lock.release()
    return True
