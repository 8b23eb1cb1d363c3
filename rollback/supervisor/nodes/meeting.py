"""Where the hosts of a job meet: in a run directory that all of them share, or at the endpoint of the rendezvous.

A meeting knows who leads, and has the transport by which leader and followers reach each other; what they say and what
follows from it (`protocol`, `lead`, `follow`) is the same in both.

| | who leads | it is gone when |
|---|---|---|
| `SharedMeeting` | who holds the lock of the run directory | nobody holds the lock, or it is silent |
| `EndpointMeeting` | who has the store at the endpoint | the connection is lost, or it is silent |

`find_meeting` chooses. A supervisor that finds the lock of its run directory taken shares the directory: it need not
ask. One that got the lock shows its orders in both ways, and sees in which way others come.
"""

import contextlib
import time
from collections.abc import Callable

import filelock

from rollback.errors import ExitCode, NodesMissing, reporting
from rollback.rundir.host_records import RecordPublisher, RecordWatcher, SharedDirectory, Transport
from rollback.rundir.lock import read_holder
from rollback.rundir.paths import RunPaths
from rollback.supervisor.nodes.membership import NodePlace, OwnNode
from rollback.supervisor.nodes.protocol import LeaderOrders, NodeReport, RunResult
from rollback.supervisor.nodes.store import StoreTransport
from rollback.supervisor.signals import StopSignals
from rollback.system.mounts import mount_of

_POLL = 0.1
_SAY_AFTER = 10.0
_LEFT_BEHIND = 20.0  # seconds after which one that the others may have left behind looks whether the run is complete
_LOCKS = 60  # how often all hosts together look at the lock, in a second
ORDERS, REPORTS = "orders.json", "node-*.json"


class SharedMeeting:
    """All hosts share the run directory; `apart`: each has one of its own. hosts: how many they are, at most."""

    apart = False

    def __init__(self, paths: RunPaths, hosts: int) -> None:
        self._paths = paths
        self.directory = paths.nodes
        self.transport: Transport = SharedDirectory(paths.nodes, hosts)
        self._lock_every = max(1.0, hosts / _LOCKS)
        self._lock_looked_at = time.monotonic()

    def is_led_by(self, orders: LeaderOrders) -> bool:
        """Whether who gives these orders leads. By the launch's whole name: in containers each start of a host has the
        same pid, and what the last one said may still be there."""
        holder = read_holder(self._paths) or {}
        return orders.leader == ":".join(str(holder.get(part)) for part in ("host", "pid", "start"))

    def is_leaderless(self) -> bool:
        """Whether nobody leads any more: nobody holds the run directory. Checked once a second, by many hosts less
        often: the check takes the lock for a moment. A leader may also fall silent."""
        if time.monotonic() - self._lock_looked_at < self._lock_every:
            return False
        self._lock_looked_at = time.monotonic()
        return _lock_is_free(self._paths)

    def rival(self, own: LeaderOrders) -> LeaderOrders | None:
        """The orders of another one that leads by now; None: this one still does. own: what it gives.

        It has taken the lock while this one held it: this host was cut off from the directory for a while, or its file
        system does not lock between hosts. What a leader says late that has lost its place is passed over."""
        found = RecordWatcher(self.transport, ORDERS, LeaderOrders).look().get(ORDERS, own)
        return None if found.leader == own.leader or self.is_led_by(own) else found

    def keep_up(self) -> str | None:
        """The leader's part: bring up again what has gone down of it. What is to be said of that; None: nothing."""
        return None

    @property
    def words(self) -> str:
        """Where the hosts meet and what they must share, for people."""
        kind = mount_of(self._paths.root.resolve()).kind
        return f"{self._paths.root}, which all must share; here it lies on {kind}"


class EndpointMeeting:
    """Every host has a run directory of its own; they meet in the store at the endpoint. Whose process has the store
    leads: nobody can dispute that, and while the store is gone nobody leads."""

    apart = True

    def __init__(self, store: StoreTransport) -> None:
        self.store = store
        self._is_lost = False

    @property
    def transport(self) -> Transport:
        return self.store

    def is_led_by(self, orders: LeaderOrders) -> bool:
        return True

    def is_leaderless(self) -> bool:
        return self.store.gone is not None

    def rival(self, own: LeaderOrders) -> LeaderOrders | None:
        return None

    def keep_up(self) -> str | None:
        """The process that has the store may be killed, for want of memory or by mistake. The followers lose their
        leader by that, and come again; this one would see them for ever as they were.

        Raises NodesMissing where another process has taken its place meanwhile."""
        if (gone := self.store.gone) is not None:
            self.store.renew()
            if self._is_lost:  # it cannot be made at present: that is tried at every look, and told once
                return None
            self._is_lost = True
            return f"the store at {self.store.place} was lost ({gone}): it is made anew, and the other hosts come again"
        if self._is_lost and self.store.role == "host":
            self._is_lost = False
            return f"the store at {self.store.place} is there again"
        if self.store.role == "guest":
            raise NodesMissing(
                f"the store at {self.store.place} was lost, and another process has it now, which leads",
                hint="start the same command here again",
            )
        return None

    @property
    def words(self) -> str:
        return f"the store at {self.store.place}, which all must reach"


Meeting = SharedMeeting | EndpointMeeting


def first_orders(own: OwnNode, ring: str | None) -> LeaderOrders:
    """What a supervisor shows that may lead: who it is, where its record would be, and the job's ring."""
    place, directory = own.place, own.paths.address
    return LeaderOrders(leader=place.launch, host=place.host, pid=place.pid, directory=directory, ring=ring)


def _lock_is_free(paths: RunPaths) -> bool:
    lock = filelock.FileLock(paths.lock, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError):
        return False
    lock.release()
    return True


class Patience:
    """Of a supervisor that waits for others to meet. The arguments are those of `find_meeting`."""

    def __init__(
        self, timeout: float, say: Callable[[str], None], nothing_left: Callable[[], str | None], *, again: bool
    ) -> None:
        self._timeout, self._say, self._nothing_left = timeout, say, nothing_left
        self._began, self._said = time.monotonic(), ""
        self._look_at = min(_LEFT_BEHIND, timeout) if again else timeout

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    def result(self, place: str, unreached: str, paths: RunPaths) -> RunResult | None:
        """Nobody has come yet: how the run has ended, if it has. Raises NodesMissing at the end of the patience.

        unreached: why nobody was reached at that place; it may be known late, and is then said."""
        where = f"{place} ({unreached})" if unreached else place
        over = self.waited > self._timeout
        if over or self.waited > self._look_at:
            self._look_at = 2 * self.waited  # a look reads all of the run's journals
            if (told := self._nothing_left()) is not None:
                return RunResult(exit_code=ExitCode.DONE, reason=told)
        if over:
            raise NodesMissing(
                f"nobody has come within {self.waited:.0f} s to {where} or to {paths.root}",
                hint="start the same command on all hosts; all must reach that endpoint, or share that directory",
            )
        if self.waited > _SAY_AFTER and (not self._said or (unreached and self._said == place)):
            self._said = where
            self._say(f"waiting for other nodes: they meet at {where}, or in {paths.root} if they share it")
        return None


def find_meeting(
    own: OwnNode, signals: StopSignals, nothing_left: Callable[[], str | None], *, again: bool
) -> tuple[Meeting, bool] | RunResult:
    """For a supervisor that holds the lock of its run directory: where the hosts meet, and whether it leads. Or how the
    run has ended, where nobody comes since it is complete.

    nothing_left: the reason in words why nothing is started, by the ring's URL. again: whether this launch has followed
    a leader: the others may be at their end already.

    Without a ring at a URL, hosts that share nothing could not go on from anywhere: then they share the directory. The
    same where the rendezvous has no endpoint of torch's store.

    Raises NodesMissing where nobody comes in either way, or a stop signal comes first.
    """
    paths, place, say = own.paths, own.place, own.say
    shared = SharedMeeting(paths, place.most)
    if own.ring is None or place.endpoint is None:
        return shared, True
    hint = "raise the limits of processes and open files (ulimit -u, ulimit -n), or make room in memory"
    with reporting(NodesMissing, f"starting the process that reaches the store at {place.endpoint.host}", hint):
        store = StoreTransport(place.endpoint)
    orders = first_orders(own, own.ring)
    publisher, other = RecordPublisher(shared.transport, ORDERS, orders, say), None
    chosen: tuple[Meeting, bool] | None = None
    patience, unreached = Patience(place.timeout, say, nothing_left, again=again), ""
    try:
        while chosen is None:
            if store.role == "host" and other is None:
                other = RecordPublisher(store, ORDERS, orders, say)
            if store.gone is not None and store.role is None and place.endpoint.is_host:
                raise NodesMissing(
                    f"the store of the rendezvous cannot be had at {store.place}: {store.gone}",
                    hint="see what uses that port here: ss -ltnp; or name another --rdzv-endpoint on all hosts",
                )
            if store.gone is not None:  # nobody has it yet, or the process that had it was killed
                unreached = store.gone
                store.renew()
            chosen = _choose(shared, store, place, patience.waited)
            if signals.received:
                raise NodesMissing("told to stop while nodes were waited for", hint="the same command goes on")
            if chosen is None:
                if (told := patience.result(store.place, unreached, paths)) is not None:
                    return told
                time.sleep(_POLL)
    finally:
        # Who follows already must not take its leader for lost.
        publisher.stop(remove=chosen is None or chosen[0].apart)
        if other is not None:
            other.stop(remove=False)
        if chosen is None or not chosen[0].apart:
            store.close()
        with contextlib.suppress(OSError):  # others use it
            paths.nodes.rmdir()
    return chosen


def _choose(
    shared: SharedMeeting, store: StoreTransport, place: NodePlace, waited: float
) -> tuple[Meeting, bool] | None:
    """Who has come in which way; None: nobody yet."""
    reports = RecordWatcher(shared.transport, REPORTS, NodeReport).look().values()
    if any(report.leader == place.launch for report in reports):
        return shared, True
    if store.role == "guest" and store.read(ORDERS):
        return EndpointMeeting(store), False
    alone = place.least == 1 and waited > place.last_call
    if store.role == "host" and (store.read(REPORTS) or alone):
        store.mirror = shared.directory
        return EndpointMeeting(store), True
    return None
