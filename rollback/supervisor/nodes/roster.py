"""What a leader knows of its followers: who is there, who takes part in the attempt, who is lost. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rollback.facts.training import SpareNodes
from rollback.supervisor.nodes.membership import NodePlace, differences
from rollback.supervisor.nodes.protocol import NodeReport
from rollback.supervisor.nodes.seats import rank_by_name

FAILURES = 2
"""Failures of a node's ranks, without progress in between, after which another node is better."""


@dataclass
class _Past:
    """What is kept of a launch, whatever it says now."""

    signals_heard: int = 0
    first_beat: int | None = None  # the first one with which it said that its ranks run
    lost_in: int | None = None  # the attempt in which it was lost
    failures: int = 0  # of which its ranks were the first cause, without progress in between
    was_replaced: bool = False  # whether another launch has reported as its node after it


class Roster:
    """own: the place of the leader."""

    def __init__(self, own: NodePlace) -> None:
        self._own = own
        compared = {} if own.spares else own.command
        # Hosts may need paths of their own, so nobody is refused for it. Settings are left out: the ranks compare them.
        self._compared = {part: value for part, value in compared.items() if part != "settings"}
        self._past = defaultdict[str, _Past](_Past)
        self._members: dict[str, str] = {}  # launches, by node
        self._present: dict[str, str] = {}  # the launch that reported last, by node
        self._namesakes: set[str] = set()  # nodes that were told of
        self._unlike: dict[str, str] = {}  # what was last said to be otherwise, by node
        self.reports: dict[str, NodeReport] = {}
        """What each follower says now, by launch."""
        self.running: set[str] = set()
        """The nodes that live and on which ranks run, also under another leader."""
        self.came: set[str] = set()
        """The nodes that have ever followed."""

    def hear(self, reports: Iterable[NodeReport]) -> list[str]:
        """Take in what all nodes say now: whoever says nothing is silent. Returns what is to be said, each once."""
        self.reports, self.running, said = {}, set(), list[str]()
        for report in reports:
            past = self._past[report.launch]
            if report.state == "running":  # what one that is gone said last may lie there for ever: two signs of life
                past.first_beat = report.beat if past.first_beat is None else past.first_beat
                if past.first_beat != report.beat:
                    self.running.add(report.node)
            # What a member that was lost says of that attempt does not count: it may have ended long ago, and its stop
            # signal was for itself then.
            if report.leader == self._own.launch and past.lost_in != report.attempt:
                self.reports[report.launch] = report
                self.came.add(report.node)
                said += self._told_of(report)
        return said

    def _told_of(self, report: NodeReport) -> Iterator[str]:
        node = report.node
        before, self._present[node] = self._present.get(node, report.launch), report.launch
        if report.launch != before:
            self._past[before].was_replaced = True
            # Another launch did so in between, so both live. Only where hosts share a directory a lock prevents that.
            if self._past[report.launch].was_replaced and node not in self._namesakes:
                self._namesakes.add(node)
                yield (
                    f"two supervisors take part as {node}, one of them on {report.host}: give each node a --node-rank "
                    f"of its own, or without it each host a name of its own"
                )
        what = differences(self._compared, report.command)
        told, self._unlike[node] = self._unlike.get(node, ""), what
        if what and what != told:
            yield (
                f"{node} ({report.host}) has other {what} than {self._own.name} ({self._own.host}): their ranks may "
                f"not train the same; unless this is meant, give all hosts the same files and the same command"
            )

    def seat(self, launches: Mapping[str, str]) -> None:
        """Another attempt begins. launches: of the followers that take part, by node."""
        self._members = dict(launches)

    def members(self, attempt: int, *, overdue: bool) -> dict[str, NodeReport | None]:
        """The members' reports on this attempt, by node; None: the member is silent, another launch has replaced it, or
        it had lost its leader for a moment: then it has ended its ranks and comes anew, maybe between two looks. Or it
        lives and does not come to an end though that is overdue, as where a disk there never answers: the others do not
        wait for ever."""
        found = {node: self.reports.get(launch) for node, launch in self._members.items()}
        return {
            node: report if report and report.attempt == attempt and (not overdue or report.state == "ended") else None
            for node, report in found.items()
        }

    def lose(self, nodes: Iterable[str], attempt: int) -> None:
        """These members have not come to the end of this attempt."""
        for node in nodes:
            self._past[self._members[node]].lost_in = attempt

    def new_signals(self) -> list[tuple[str, str]]:
        """Stop signals since the last call: node and signal."""
        new = []
        for launch, report in self.reports.items():
            past = self._past[launch]
            new += [(report.node, name) for name in report.signals[past.signals_heard :]]
            past.signals_heard = len(report.signals)
        return new

    def failed(self, rank: int | None, members: Iterable[NodeReport | None], *, progressed: bool) -> None:
        """An attempt has failed. rank: with which it began, as far as that can be told. members: as `members`.
        progressed: the attempt had got further than all before it."""
        for past in self._past.values() if progressed else ():
            past.failures = 0
        if (report := next((report for report in members if report and rank in report.ranks), None)) is not None:
            self._past[report.launch].failures += 1

    def failing(self) -> set[str]:
        return {report.node for launch, report in self.reports.items() if self._past[launch].failures >= FAILURES}

    def fit(self) -> list[NodeReport]:
        """The followers that may have a seat. Without spares all may: nobody could take the place of one."""
        return [report for report in self.reports.values() if not self._difference(report)]

    def unfit(self) -> dict[str, str]:
        """The other ones, each with what it has otherwise."""
        told = {report.node: self._difference(report) for report in self.reports.values()}
        return {node: what for node, what in told.items() if what}

    def spares(self) -> SpareNodes:
        """The followers without a seat in the attempt."""
        waiting = [report for report in self.reports.values() if report.launch not in self._members.values()]
        other = {report.node: self._difference(report) for report in waiting}
        return SpareNodes(
            nodes=tuple(sorted((node for node, what in other.items() if not what), key=rank_by_name)),
            unfit={node: what for node, what in other.items() if what},
        )

    def _difference(self, report: NodeReport) -> str:
        return differences(self._own.command, report.command) if self._own.spares else ""
