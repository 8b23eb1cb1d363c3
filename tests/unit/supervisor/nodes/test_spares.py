"""Which nodes take part in an attempt, who waits as a spare, and who comes in for whom."""

import errno
import itertools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from rollback.errors import NodesMissing, RanksDoNotFit, RollbackError, RunDoesNotFit, UsageError
from rollback.facts.training import Fact, NodeReplaced, SpareNodes
from rollback.instructions import MeetingPoint
from rollback.rundir.host_records import read_in_place, write_in_place
from rollback.rundir.identity import JobIdentity, require_same_job
from rollback.rundir.paths import RunPaths
from rollback.supervisor import patience
from rollback.supervisor.diagnosis.outcome import Failures, HostOutcome, RankFailure, Refusal
from rollback.supervisor.nodes import lead
from rollback.supervisor.nodes.lead import Leader
from rollback.supervisor.nodes.meeting import SharedMeeting
from rollback.supervisor.nodes.membership import NodePlace, OwnNode, own_address, place_among_nodes
from rollback.supervisor.nodes.protocol import LeaderOrders, NodeReport, RunResult
from rollback.supervisor.nodes.seats import awaited, replacements, seats
from rollback.train.data.cursor.description import description_of

NODES = st.lists(st.sampled_from([f"node-{number}" for number in range(12)]), unique=True)


@given(NODES, NODES, st.integers(1, 8), st.sets(st.sampled_from([f"node-{n}" for n in range(12)])), st.booleans())
def test_who_stays_keeps_its_seat_and_nobody_sits_twice(
    before: list[str], there: list[str], most: int, failing: set[str], leader_first: bool
) -> None:
    after = seats(before, "node-0", there, most, failing=failing, leader_first=leader_first)
    assert len(after) == len({*after}) == min(most, len({*there, "node-0"}))
    assert "node-0" in after
    assert {*after} <= {*there, "node-0"}
    assert not leader_first or after[0] == "node-0"
    for place, node in enumerate(before[: len(after)]):
        if node in after and not leader_first:
            assert after[place] == node
    left_out = {*there} - {*after}
    for node in after:
        if node in failing and node != "node-0":
            assert left_out <= failing, "nobody that fails is taken while another one waits"
    replaced = replacements(before, after)
    assert {node for node, _ in replaced} <= {*before} - {*after}
    assert {by for _, by in replaced} <= {*after} - {*before}
    assert len(replaced) == min(len({*before} - {*after}), len({*after} - {*before}))


def test_a_spare_gets_the_very_seat_of_the_node_that_is_gone() -> None:
    before = ("node-0", "node-1", "node-2", "node-3")
    after = seats(before, "node-0", ["node-1", "node-3", "node-4", "node-5"], 4)
    assert after == ("node-0", "node-1", "node-4", "node-3")
    assert replacements(before, after) == [("node-2", "node-4")]
    assert seats(after, "node-0", ["node-1", "node-2", "node-3", "node-4", "node-5"], 4) == after, "it comes back"
    assert seats(before, "node-5", ["node-1", "node-2", "node-3"], 4) == ("node-5", "node-1", "node-2", "node-3")
    assert seats(before, "node-0", ["node-1", "node-3"], 4) == ("node-0", "node-1", "node-3"), (
        "with those that are there"
    )


def test_a_node_that_fails_is_not_waited_for_where_a_spare_is_but_the_spare_is() -> None:
    before = ("a", "b", "c")
    everybody = {"a", "b", "c", "d", "e"}
    assert awaited(before, {"a", "b", "c"}, everybody, spares=everybody, failing={"b"}) == ["d"]
    assert awaited(before, {"a", "c", "e"}, everybody, spares=everybody, failing={"b"}) == []
    assert awaited(before, {"a", "b", "c"}, everybody, spares=everybody, failing={"b", "c", "d"}) == ["e"]
    assert awaited(before, {"a", "d", "e"}, everybody, spares=everybody, failing={"b"}) == ["c"]
    assert awaited(before, {"a", "c"}, {"a", "b", "c"}, spares=(), failing={"b"}) == ["b"]
    assert awaited(before, {"a", "d", "e"}, {"a", "b"}, spares=everybody, failing=()) == ["b"]


COMMAND = {"script": "1", "arguments": "2", "torch": "2.13"}


class Crew:
    """A leader, and followers as the files that they would write."""

    def __init__(self, folder: Path, nodes: str = "3", **more: object) -> None:
        self.paths = RunPaths(folder)
        place = place_among_nodes({"nnodes": nodes, "node-rank": "0", "rdzv-conf": "last_call_timeout=0.2"}, spares=1)
        assert place is not None
        self.place: NodePlace = replace(place, command=COMMAND, **more)
        self.noted: list[Fact] = []
        self.said: list[str] = []
        own = OwnNode(self.paths, self.place, self.said.append)
        self.leader = Leader(own, SharedMeeting(self.paths, self.place.most), self.noted.append)

    def tell(self, rank: int, attempt: int, **more: object) -> None:
        report = NodeReport(
            node=f"node-{rank}", launch=f"h{rank}:1:1.0", host="h", pid=1, leader=self.place.launch, attempt=attempt,
            master=f"h{rank}:1",
        )  # fmt: skip
        report = report.model_copy(update={"command": COMMAND, **more})
        write_in_place(self.paths.node(report.node), report.model_dump_json().encode())

    def gather(self, attempt: int, limit: float = 20.0) -> tuple[str, ...] | None:
        until = time.monotonic() + limit
        return self.leader.names if self.leader.gather(attempt, lambda: time.monotonic() > until) else None

    def lose(self, rank: int) -> None:
        self.paths.node(f"node-{rank}").unlink()

    @property
    def replaced(self) -> list[tuple[str, str, int, str]]:
        return [(f.node, f.by, f.rank, f.why) for f in self.noted if isinstance(f, NodeReplaced)]

    @property
    def waiting(self) -> SpareNodes:
        return [fact for fact in self.noted if isinstance(fact, SpareNodes)][-1]


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(tmp_path)
    yield crew
    crew.leader._publisher.stop()


def test_a_lost_node_is_replaced_at_once_and_waits_as_a_spare_when_it_is_back(crew: Crew) -> None:
    for rank in (1, 2, 3):
        crew.tell(rank, 1)
    assert crew.gather(1) == ("node-0", "node-1", "node-2")
    assert crew.waiting.nodes == ("node-3",)
    group = crew.leader.group
    assert group is not None
    assert (group.count, group.rank) == (3, 0)
    crew.lose(1)
    for rank in (2, 3):
        crew.tell(rank, 2)
    began = time.monotonic()
    assert crew.gather(2) == ("node-0", "node-3", "node-2")
    assert time.monotonic() - began < 2
    assert crew.replaced == [("node-1", "node-3", 1, "lost")]
    assert crew.waiting.nodes == ()
    for rank in (1, 2, 3):
        crew.tell(rank, 3)
    assert crew.gather(3) == ("node-0", "node-3", "node-2")
    assert crew.waiting.nodes == ("node-1",)
    assert len(crew.replaced) == 1


def test_a_lost_node_that_is_back_when_the_run_ends_is_told_so(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would find a run that nobody leads, and begin what has just been stopped."""
    for rank in (1, 2, 3):
        crew.tell(rank, 1)
    assert crew.gather(1)
    crew.lose(1)
    crew.tell(2, 1, state="ended", left=HostOutcome(status=1))
    assert crew.leader.move(1) == "settled"
    assert crew.leader.left(HostOutcome(status=1)).lost_nodes == ("node-1",)
    crew.tell(1, 1, state="ended", left=HostOutcome(status=1))
    for rank in (2, 3):
        crew.lose(rank)
    monkeypatch.setattr(lead, "_FAREWELL", 0.3)
    crew.leader.farewell(RunResult(exit_code=75, reason="told to stop"))
    assert LeaderOrders.model_validate_json(read_in_place(crew.paths.orders)).phase == "over"


def test_a_node_that_is_only_slow_to_end_its_ranks_keeps_its_seat(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (1, 2, 3):
        crew.tell(rank, 1)
    assert crew.gather(1)
    crew.tell(1, 1, state="running")
    for rank in (2, 3):
        crew.tell(rank, 2)
    monkeypatch.setattr(lead, "_SAY_AFTER", 0.1)
    assert crew.gather(2, limit=1.0) is None, "the spare is ready, and it must not have the seat of who is not"
    assert crew.said[-1] == "waiting for node-1, still getting ready for this attempt"
    assert crew.replaced == []
    monkeypatch.setattr(lead, "_ENDS", 0.2)
    assert crew.gather(2) == ("node-0", "node-3", "node-2"), "its ranks do not end at all"
    assert crew.replaced == [("node-1", "node-3", 1, "lost")]


def test_a_node_that_lives_and_never_ends_its_ranks_holds_the_end_of_an_attempt_up_no_longer(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk there never answers: what it was told to do is not done, and its sign of life goes on."""
    for rank in (1, 2):
        crew.tell(rank, 1)
    assert crew.gather(1)
    for rank in (1, 2):
        crew.tell(rank, 1, state="running")
    assert crew.leader.move(1) == "end"
    crew.tell(2, 1, state="ended", left=HostOutcome(status=-9))
    assert crew.leader.move(1) == "end"
    monkeypatch.setattr(lead, "_ENDS", 0.0)
    assert crew.leader.move(1) == "settled"
    assert crew.leader.left(HostOutcome(status=1)).lost_nodes == ("node-1",)


def fail_twice(crew: Crew) -> None:
    for attempt in (1, 2):
        for rank in (1, 2, 3):
            crew.tell(rank, attempt)
        assert crew.gather(attempt) == ("node-0", "node-1", "node-2")
        failure = RankFailure(rank=1, pid=1, exitcode=1, message=None)
        left = HostOutcome(status=1, failures=Failures(error="ChildFailedError", failures=(failure,)))
        crew.tell(1, attempt, state="ended", left=left)
        crew.leader.move(1)
        crew.leader.failed(1, progressed=attempt == 1)


def test_a_node_whose_ranks_fail_twice_without_progress_is_replaced(crew: Crew) -> None:
    fail_twice(crew)
    for rank in (1, 2):
        crew.tell(rank, 3)
    assert crew.gather(3, limit=0.5) is None, "the spare reports, and is ready a moment later than the node that fails"
    crew.tell(3, 3)
    assert crew.gather(3) == ("node-0", "node-3", "node-2")
    assert crew.replaced == [("node-1", "node-3", 1, "failing")]
    assert crew.waiting.nodes == ("node-1",)


def test_a_node_that_fails_trains_again_where_its_spare_does_not_get_ready(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "_RETURN", 0.5)
    fail_twice(crew)
    for rank in (1, 2):
        crew.tell(rank, 3)
    assert crew.gather(3) == ("node-0", "node-1", "node-2")
    assert crew.replaced == []


def test_a_spare_that_dies_is_told_and_more_spares_than_asked_for_wait(crew: Crew) -> None:
    for rank in (1, 2, 3, 4):
        crew.tell(rank, 1)
    crew.gather(1)
    assert crew.waiting.nodes == ("node-3", "node-4")
    crew.lose(3)
    crew.leader.move(None)
    assert crew.waiting.nodes == ("node-4",)
    assert crew.said[-1] == "spare nodes: node-4"


def test_a_spare_that_would_run_something_else_takes_nobody_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "_SAY_AFTER", 0.0)
    crew = Crew(tmp_path, timeout=1.0)
    other = {"command": {**COMMAND, "script": "other", "torch": "2.12"}}
    for rank in (1, 2):
        crew.tell(rank, 1)
    crew.tell(3, 1, **other)
    crew.gather(1)
    assert crew.waiting == SpareNodes(nodes=(), unfit={"node-3": "script, torch"})
    assert "node-3 cannot take part: it has other script, torch" in crew.said[-1]
    assert crew.leader._publisher.record.unfit == {"node-3": "script, torch"}, "for it to tell who has started it"
    crew.lose(1)
    crew.tell(2, 2)
    crew.tell(3, 2, **other)
    with pytest.raises(
        NodesMissing, match="node-1 has not come back within 1 s; node-3 cannot take part: it has other script, torch"
    ):
        crew.gather(2)
    assert crew.said[-1].startswith("waiting for 1 of 3 nodes (here: node-0, node-2)")
    assert crew.said[-1].endswith("; node-3 cannot take part: it has other script, torch")
    crew.leader._publisher.stop()


def test_without_a_spare_a_range_of_nodes_goes_on_with_those_that_are_there_or_waits_for_more(tmp_path: Path) -> None:
    crew = Crew(tmp_path, nodes="2:3")
    for rank in (1, 2):
        crew.tell(rank, 1)
    assert crew.gather(1) == ("node-0", "node-1", "node-2")
    crew.leader.attached()
    crew.lose(2)
    crew.tell(1, 2)
    assert crew.gather(2) == ("node-0", "node-1")
    assert crew.leader.take_another_number() == "waiting for more nodes, with which it fits"
    crew.tell(1, 3)
    assert crew.gather(3, limit=1.0) is None
    crew.tell(2, 3)
    assert crew.gather(3) == ("node-0", "node-1", "node-2")
    assert crew.leader.take_another_number() is None, "more than all there are none"
    crew.leader._publisher.stop()


def test_where_a_job_does_not_fit_with_a_node_that_came_later_those_go_on_that_have_trained(tmp_path: Path) -> None:
    """Who came later waits, also where it is ready first, and has the seat of one that is lost."""
    crew = Crew(tmp_path, nodes="2:3", spares=0)
    crew.tell(2, 1)
    assert crew.gather(1) == ("node-0", "node-2")
    crew.leader.attached()
    for rank in (1, 2):
        crew.tell(rank, 2)
    assert crew.gather(2) == ("node-0", "node-2", "node-1")
    told = crew.leader.take_another_number()
    assert told == "going on with 2 nodes, with which it fits; the others wait for the place of one of them"
    crew.tell(1, 3)
    crew.tell(2, 2)
    assert crew.gather(3, limit=1.0) is None
    crew.tell(2, 3)
    assert crew.gather(3) == ("node-0", "node-2")
    crew.leader.attached()
    crew.lose(2)
    crew.tell(1, 4)
    assert crew.gather(4) == ("node-0", "node-1")
    crew.leader._publisher.stop()


def test_a_fixed_number_of_nodes_takes_no_other_one(tmp_path: Path) -> None:
    crew = Crew(tmp_path, nodes="3")
    crew.leader.resume(("node-0", "node-1"))
    for rank in (1, 2):
        crew.tell(rank, 1)
    assert crew.gather(1) == ("node-0", "node-1", "node-2")
    assert crew.leader.take_another_number() is None
    crew.leader._publisher.stop()


def test_a_new_leader_gives_those_that_had_a_seat_a_moment_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path)
    crew.leader.resume(("node-9", "node-1", "node-2"))
    for rank in (2, 3):
        crew.tell(rank, 1)
    assert crew.gather(1, limit=1.0) is None
    crew.tell(1, 1)
    monkeypatch.setattr(lead, "_RETURN", 0.1)  # it is over
    assert crew.gather(1) == ("node-0", "node-1", "node-2"), "it leads, so it takes the seat of the leader that is gone"
    assert crew.replaced == [("node-9", "node-0", 0, "lost")]
    crew.leader._publisher.stop()


@pytest.mark.parametrize(("nodes", "spares"), [("3", 1), ("2:4", 0)])
def test_a_new_leader_begins_nothing_while_a_node_that_lives_still_ends_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, spares: int
) -> None:
    """It lost the leader before, too, and what it still runs writes the same run directory. It may take a minute."""
    monkeypatch.setattr(lead, "_RETURN", 0.3)
    crew = Crew(tmp_path, nodes, spares=spares)
    crew.leader.resume(("node-9", "node-1", "node-2"))
    beats, until = itertools.count(), time.monotonic() + 2

    def goes_on() -> bool:
        crew.tell(1, 7, leader="h9:1:1.0", state="running", beat=next(beats))
        return time.monotonic() > until

    goes_on()
    for rank in (2, 3):
        crew.tell(rank, 8)
    assert not crew.leader.gather(8, goes_on)
    crew.tell(1, 8)
    assert crew.gather(8) == ("node-0", "node-1", "node-2", "node-3")[: crew.place.most]
    crew.leader._publisher.stop()


def test_what_a_node_that_is_gone_said_last_holds_no_new_leader_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "_RETURN", 0.3)
    crew = Crew(tmp_path)
    crew.leader.resume(("node-9", "node-1", "node-2"))
    crew.tell(1, 7, leader="h9:1:1.0", state="running", beat=4)
    for rank in (2, 3):
        crew.tell(rank, 8)
    assert crew.gather(8, limit=5.0) == ("node-0", "node-3", "node-2")
    crew.leader._publisher.stop()


def test_the_ranks_meet_on_the_node_of_rank_0_whoever_leads(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.leader.resume(("node-1", "node-0", "node-2"))
    for rank in (1, 2):
        crew.tell(rank, 1)
    assert crew.gather(1) == ("node-1", "node-0", "node-2")
    group = crew.leader.group
    assert group is not None
    assert (group.count, group.rank, group.master) == (3, 1, "h1:1")
    assert crew.waiting.nodes == (), "the leader before it may have journalled others"
    crew.leader._publisher.stop()


def test_numbers_of_nodes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--node-rank 9: with --nnodes 8 and --spare-nodes 1 it is 0 to 8"):
        place_among_nodes({"nnodes": "8", "node-rank": "9"}, spares=1)
    assert place_among_nodes({"nnodes": "8", "node-rank": "8"}, spares=1)
    alone = place_among_nodes({"nnodes": "1", "node-rank": "1"}, spares=1)
    assert alone is not None
    assert (alone.most, alone.spares, alone.seated) == (1, 1, True)


def test_the_address_of_a_host_is_that_by_which_it_reaches_the_endpoint() -> None:
    place = place_among_nodes({"nnodes": "2", "rdzv-endpoint": "127.0.0.1:29400"})
    assert place is not None
    assert place.address == own_address(place.endpoint) == "127.0.0.1"
    assert own_address(MeetingPoint("::1", 29400, None, "")) == "::1"
    given = place_among_nodes({"nnodes": "2", "rdzv-endpoint": "127.0.0.1:29400", "local-addr": "10.0.0.7"})
    assert given is not None
    assert given.new_master(print).startswith("10.0.0.7:")


def test_a_port_for_the_ranks_is_waited_for_where_the_system_has_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is told to stop waits for none."""
    refusals, said, make_socket = [errno.EMFILE, errno.EIO], list[str](), socket.socket

    def refused(*given: Any) -> socket.socket:
        if refusals:
            raise OSError(refusals[-1], os.strerror(refusals.pop()))
        return make_socket(*given)

    monkeypatch.setattr(patience, "_POLL", 0.0)
    monkeypatch.setattr(socket, "socket", refused)
    place = NodePlace(least=2, most=2, name="n", launch="l", host="h", pid=1, timeout=1.0, address="10.0.0.7")
    assert place.new_master(said.append).startswith("10.0.0.7:")
    told = "looking for a free port, at which ranks can meet: Input/output error; it is tried again for 10 s"
    assert said == [told]
    refusals.append(errno.EMFILE)
    with pytest.raises(RollbackError, match=os.strerror(errno.EMFILE)):
        place.new_master(said.append, lambda: True)


def job(ranks: int, batch: int, objects: tuple[str, ...] = ()) -> JobIdentity:
    """With the description of a real loader: the more ranks there are, the fewer batches each of them has."""
    sampler = DistributedSampler(range(1120), num_replicas=ranks, rank=0)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(range(1120), batch_size=batch, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    data = {"kind": "map-style", **description_of(loader)}
    return JobIdentity(world_size=ranks, model=[], optimizer={}, objects=[*objects], data=data)


def test_a_job_that_fits_but_for_its_number_of_ranks_says_so_to_the_supervisor(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(RanksDoNotFit) as caught:
        require_same_job(paths, job(8, 4), job(7, 4))
    assert Refusal.model_validate(caught.value.fields).refuses == "ranks"
    assert Refusal.model_validate(caught.value.fields).as_error(reached=0).exit_code == 78
    for another in (job(7, 4, ("scheduler",)), job(7, 5), job(8, 5)):
        with pytest.raises(RunDoesNotFit) as other:
            require_same_job(paths, job(8, 4), another)
        assert not isinstance(other.value, RanksDoNotFit)
