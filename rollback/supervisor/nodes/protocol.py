"""Orders and reports between leader and followers, and the tables of what follows from them. Pure.

The leader's phases: `gather` (who is there?), `run`, `stop` (ranks are to save and leave), `end` (at once), `over`.

What a follower does, by its state and the orders:

| own state \\ orders | gather for a later one | run  | stop | end | over | leader is gone    |
|--------------------|------------------------|------|------|-----|------|-------------------|
| ready              | get ready              | start| pass | pass| quit | succeed           |
| running            | end                    | -    | tell | end | quit | end, then succeed |
| ended              | get ready              | -    | -    | -   | quit | succeed           |

Orders `run`, `stop` and `end` are for the members of the attempt that they name; a follower that runs another attempt
ends it. *get ready*: nothing of an earlier attempt runs here. *pass*: the attempt is over before this host has read
that it may start, so it has ended here too. *tell*: the ranks are told to stop. *succeed*: try to lead.

A stop signal of a follower is one for the whole job, except where the follower waits without a seat
(`leaves_alone`): then it leaves, and the others do not hear of it.

What the leader does while an attempt runs, by its own torchrun and the followers' reports. The first row that holds
counts:

| own torchrun     | followers                          | the leader                                               |
|------------------|------------------------------------|----------------------------------------------------------|
| has ended        | all ended or lost                  | settled: the attempt is over everywhere                  |
| any              | one is lost, or ended and not by 0 | end: kills its own torchrun if it runs, orders `end`     |
| failed           | some running                       | end: orders `end`, waits for the others                  |
| any              | else                               | waits, and watches for a hang: also of the others' ranks |
"""

import signal
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, model_validator

from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult, merged_results
from rollback.errors import ExitCode, RefusalKind, RollbackError, ScriptRefused
from rollback.facts.training import PartBroughtBack
from rollback.rundir.heartbeats import Heartbeat
from rollback.supervisor.buddy.wire import Buddies
from rollback.supervisor.diagnosis.outcome import Failures, HostOutcome

LeaderPhase = Literal["gather", "run", "stop", "end", "over"]
NodeState = Literal["ready", "running", "ended"]
FollowersMove = Literal["wait", "get ready", "start", "pass", "tell", "end", "quit"]
LeadersMove = Literal["wait", "end", "settled"]


class RecordPlace(BaseModel, frozen=True):
    """Where the record of a run is. Without fields: in the run directory of this launch."""

    host: str = ""
    """Another host, with its run directory."""
    directory: str = ""
    url: str = ""
    """The ring's, where this host has no record and has heard of no other one's."""


class RunResult(BaseModel, frozen=True):
    """How a run ended, for all nodes: the exit code of `rollback launch`, and the reason in words."""

    exit_code: ExitCode
    reason: str
    hint: str | None = None
    """What to do next, where it is not that the same command goes on."""
    refuses: RefusalKind | None = None
    """Where it was refused, what: with --adopt, all nodes start a script that is refused without protection."""
    protected: bool = True
    """False: the job was done, and no rank made a guard."""
    record: RecordPlace | None = RecordPlace()
    """None: nothing was recorded."""
    durable: tuple[str, ...] = ()
    """The checkpoints in the durable ring. Hosts without the journals give their memory back by this."""

    @classmethod
    def of_error(cls, error: RollbackError) -> "RunResult":
        return cls(exit_code=error.exit_code, reason=error.message, hint=error.hint, refuses=error.refuses)

    def as_error(self) -> RollbackError:
        kind = ScriptRefused if self.refuses == "script" else RollbackError
        return kind(self.reason, hint=self.hint, exit_code=self.exit_code)


class LeaderOrders(BaseModel, frozen=True):
    """The record `orders.json`: what the leader tells its followers."""

    leader: str
    """The launch that leads."""
    host: str
    pid: int
    phase: LeaderPhase = "gather"
    attempt: int = 0
    members: tuple[str, ...] = ()
    """The launches that take part in the attempt, the leader's among them, in the order of their ranks (`seats`)."""
    master: str = ""
    """HOST:PORT at which the ranks of this attempt meet, on the node of rank 0; empty: torchrun's flags say where, and
    which rank a node has."""
    buddies: Buddies | None = None
    """How the members reach the hosts that keep copies of their snapshots, and what may be brought back from there;
    while nodes are gathered, only the secret is there. None: there are no copies."""
    directory: str = ""
    """The leader's run directory, where the record is. Other hosts write it down for people."""
    ring: str | None = None
    """The URL of the job's ring."""
    attached: bool = False
    """The ranks of this attempt have attached: there is a record from now on."""
    unfit: dict[str, str] = {}
    """The nodes that cannot take part, since they would run something else than the leader; what differs, by node."""
    stacks: bool = False
    """The job hangs: the ranks of the members write their stacks before they are ended."""
    result: RunResult | None = None
    """How the run ended."""
    beat: int = 0
    """Counts the writes."""

    @model_validator(mode="after")
    def _an_address_for_each_seat(self) -> "LeaderOrders":
        if self.buddies is not None and len(self.buddies.addresses) != len(self.members):
            raise ValueError(f"{len(self.buddies.addresses)} addresses of buddies for {len(self.members)} members")
        return self


class NodeReport(BaseModel, frozen=True):
    """The record `<node>.json`: what a follower tells its leader."""

    node: str
    launch: str
    """The launch that reports."""
    host: str
    pid: int
    leader: str = ""
    """The launch that it follows."""
    attempt: int = 0
    state: NodeState = "ready"
    master: str = ""
    """HOST:PORT at which the ranks of an attempt could meet on this node."""
    command: dict[str, str] = {}
    """What this node would run: see `membership.command_of`."""
    signals: tuple[str, ...] = ()
    """The stop signals that it got, in order."""
    insistent: bool = False
    """Whether it was told to stop twice."""
    states: tuple[tuple[int, str], ...] = ()
    """The ranks of this node that are stopped, in an uninterruptible call or gone, each with the letter of
    `Running.look`."""
    beats: dict[int, Heartbeat] = {}
    """The heartbeats of the ranks of this node, by rank, from memory."""
    stacks: tuple[int, ...] | None = None
    """The ranks that have written their stacks, once the leader has ordered it."""
    left: HostOutcome | None = None
    """What the attempt left on this node, once it has ended there."""
    kept: LastSnapshotResult | None = None
    """What its ranks have kept at the end of the last attempt that they took part in: told when it gets ready."""
    buddy: str = ""
    """HOST:PORT at which this node keeps a copy of another node's snapshots; empty: it keeps none."""
    brought_back: PartBroughtBack | None = None
    """What it got from another host's memory before this attempt."""
    uncopied: str | None = None
    """Why its snapshots are not copied to another host's memory at present."""
    files: dict[str, str] = {}
    """Small files of this node's own run directory that belong to the record: see `record_files`."""
    beat: int = 0
    """Counts the writes."""

    @property
    def ranks(self) -> set[int]:
        """The ranks of this node, as far as they have been heard of."""
        failed = self.left.failures.failures if self.left is not None and self.left.failures is not None else ()
        return {*self.beats, *(failure.rank for failure in failed)}


def followers_move(state: NodeState, attempt: int, orders: LeaderOrders, launch: str) -> FollowersMove:
    """The first table. attempt: the last one that the follower took part in or got ready for."""
    if orders.phase == "over":
        return "quit"
    member = launch in orders.members and orders.attempt == attempt
    if state == "running":
        if not member or orders.phase in ("gather", "end"):
            return "end"
        return "tell" if orders.phase == "stop" else "wait"
    if orders.phase == "gather":
        return "get ready" if orders.attempt > attempt else "wait"
    if state == "ready" and member:
        return "start" if orders.phase == "run" else "pass"
    return "wait"  # also where an order to start is read again, after the attempt has ended


def leaves_alone(orders: LeaderOrders, *, waits: bool, seated: bool) -> bool:
    """Whether a follower that is told to stop goes, and the others go on. waits: the attempt that is under way, or the
    last one while nodes are gathered for the next, has no part for it. seated: the next one can do without it."""
    return waits and (seated if orders.phase == "gather" else orders.phase != "over")


def leaders_move(own: int | None, members: Mapping[str, NodeReport | None]) -> LeadersMove:
    """The second table. own: the status of the leader's torchrun. members: their reports; None: the node is lost."""
    pending = any(report is not None and report.state != "ended" for report in members.values())
    if own is not None and not pending:
        return "settled"
    return "end" if must_end(own, members) else "wait"


def must_end(own: int | None, members: Mapping[str, NodeReport | None]) -> bool:
    """Whether the attempt must end on all nodes, because it has failed on one of them."""
    return bool(own) or any(
        report is None or (report.left is not None and report.left.status != 0) for report in members.values()
    )


def ready(reports: Iterable[NodeReport], leader: str, attempt: int) -> dict[str, NodeReport]:
    """The followers of this leader that are ready for this attempt, by launch."""
    return {
        report.launch: report
        for report in reports
        if report.leader == leader and report.state == "ready" and report.attempt == attempt
    }


def merged(own: HostOutcome, others: Mapping[str, HostOutcome | None]) -> HostOutcome:
    """What an attempt left on all nodes, as one account. others: by node; None: the node was lost.

    Ranks that a signal ended come before ranks that exited: peers of a dead rank raise at the same moment, and hosts
    have no common clock. Ranks that torchrun or a supervisor ended come last.
    """
    lefts = [own, *(left for left in others.values() if left is not None)]
    accounts = [left.failures for left in lefts if left.failures]
    failures = [failure for each in accounts for failure in each.failures]
    failures.sort(key=lambda failure: (failure.ended or failure.exitcode == -signal.SIGTERM, failure.exitcode >= 0))
    account = None
    if accounts:
        shortage = any(each.shortage for each in accounts)
        account = Failures(error=accounts[0].error, failures=tuple(failures), shortage=shortage)
    lost = tuple(node for node, left in others.items() if left is None)
    return own.model_copy(
        update={
            "status": max((left.status for left in lefts), key=lambda status: (status > 0, status != 0))
            or int(bool(lost)),
            "guarded": any(left.guarded for left in lefts),
            "stopped": tuple(sorted(rank for left in lefts for rank in left.stopped)),
            "oom_hosts": tuple(host for left in lefts for host in left.oom_hosts),
            "torchrun_oom_killed": any(left.torchrun_oom_killed for left in lefts),
            "refusal": next((left.refusal for left in lefts if left.refusal), None),
            "failures": account,
            "lost_nodes": lost,
            "kept": merged_results(left.kept for left in lefts),
            "unrecorded": next((left.unrecorded for left in lefts if left.unrecorded), None),
        }
    )
