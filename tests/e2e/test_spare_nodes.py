"""Nodes that wait for the place of another one, with a bucket alone and with a shared run directory."""

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path

import hosts
import pytest
from fleet import Fleet
from hosts import hosts_on_a_switch
from s3_server import serving_s3
from test_many_nodes import nodes_of
from toy import Toy, facts, supervisor_facts
from waiting import LIMIT, wait_for

from rollback.checkpoints import ring
from rollback.facts.training import (
    Attached,
    AttemptEnded,
    AttemptStarted,
    Committed,
    Hung,
    NodeReplaced,
    PartBroughtBack,
    Restored,
    SpareNodes,
    Stopped,
)
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.status.status import read_status
from rollback.inspect.why.why import read_attempt_report
from rollback.rundir.requests import Request, now, submit

needs_hosts = pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))


def test_a_node_whose_ranks_die_twice_is_replaced_by_the_spare_and_everybody_is_told(tmp_path: Path) -> None:
    with nodes_of(tmp_path) as nodes:
        flags = ("--spare-nodes", "1")
        three = [nodes.start(0, "die_if_faulty", *flags)]
        assert nodes.leader() == three[0].pid
        three.append(nodes.start(1, "die_if_faulty", *flags, FAULTY="node-2"))
        wait_for(lambda: supervisor_facts(nodes.run, AttemptStarted), nodes.output)  # who comes now has no seat
        three.append(nodes.start(2, "die_if_faulty", *flags))
        assert [process.wait(LIMIT) for process in three] == [0, 0, 0], nodes.output()
        (replaced,) = supervisor_facts(nodes.run, NodeReplaced)
        assert (replaced.node, replaced.by, replaced.rank, replaced.why) == ("node-1", "node-2", 1, "failing")
        told = "node-1 fails again and again: node-2 takes its place (node rank 1)"
        assert f"rollback: {told}" in nodes.output()
        assert read_attempt_report(nodes.run, 2).nodes == [told], nodes.output()
        assert compile_audit(read_run_contents(nodes.run)).attempts[1].nodes == [told]
        assert read_status(nodes.run).spare_nodes == "node-1"


SETTINGS = {
    "policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20,
    "checkpoint_every": "5",
}  # fmt: skip
TOY = Toy(samples=1800, sampler="distributed", patient=False, settings=SETTINGS)


HELD, AFTER = 60, 100  # batches: at the first one the ranks wait until the trouble has come, or may come
JOURNALLED = 4  # steps behind a snapshot, in which its commit comes to the journal


def kill_a_rank(fleet: Fleet) -> None:
    """Rank 1 kills itself."""
    go_on(fleet, [0, 0, 0, 0])
    assert [fact.why for fact in supervisor_facts(fleet.run(0).root, AttemptEnded)] == ["signal", None]


def lose_a_host(fleet: Fleet) -> None:
    """Its supervisor, its rank, its memory, and its disk if it has one of its own."""
    if not fleet.shared:
        fleet.until(lambda: ring.names(fleet.run(3)))  # fetched ahead
    fleet.lose(1)
    go_on(fleet, [0, -signal.SIGKILL, 0, 0])
    (replaced,) = supervisor_facts(fleet.run(0).root, NodeReplaced)
    assert (replaced.node, replaced.by, replaced.rank, replaced.why) == ("node-1", "node-3", 1, "lost"), fleet.told()
    assert supervisor_facts(fleet.run(0).root, SpareNodes)[-1].nodes == ()
    assert facts(fleet.run(0).root, Attached)[-1].step > 0, fleet.told()


def lose_the_leader(fleet: Fleet) -> None:
    """Over a shared directory the spare takes its place. With a bucket alone, who has the endpoint must come back."""
    lost = leader_of(fleet)
    fleet.lose(lost)
    if not fleet.shared:
        fleet.launch(lost)
    codes = [0, 0, 0, 0]
    codes[lost] = -signal.SIGKILL if fleet.shared else 0
    go_on(fleet, codes)
    replaced = [(fact.node, fact.why) for fact in supervisor_facts(fleet.run(0).root, NodeReplaced)]
    assert not fleet.shared or replaced == [(f"node-{lost}", "lost")], fleet.told()
    assert facts(fleet.run(0).root, Attached)[-1].step > 0, fleet.told()


def preempt(fleet: Fleet) -> None:
    """As a scheduler does: SIGTERM to the supervisor of one host."""
    fleet.hosts[2].tell(signal.SIGTERM)
    go_on(fleet, [75, 75, 75, 75])
    assert facts(fleet.run(0).root, Stopped)
    fleet.launch()
    assert fleet.wait() == [0, 0, 0, 0], fleet.told()


def rewind(fleet: Fleet) -> None:
    run = fleet.run(0)
    kept = facts(run.root, Committed)[-1].step
    submit(run, Request(order="rewind", to=kept, who="test", at=now()))
    go_on(fleet, [0, 0, 0, 0])
    assert [fact.step for fact in facts(run.root, Restored)] == [kept], fleet.told()


def hang(fleet: Fleet) -> None:
    """Rank 1 stops itself. There is no spare: whoever waits for it would be taken for a hang."""
    (fleet.folder / "go-on").touch()
    assert fleet.wait(0, 1, 2) == [0, 0, 0], fleet.told()
    (hung,) = supervisor_facts(fleet.run(0).root, Hung)
    assert hung.suspect == 1, fleet.told()


def go_on(fleet: Fleet, codes: list[int]) -> None:
    (fleet.folder / "go-on").touch()
    assert fleet.wait() == codes, fleet.told()


TROUBLES: list[Callable[[Fleet], None]] = [kill_a_rank, lose_a_host, lose_the_leader, preempt, rewind, hang]
SIGNALS = {kill_a_rank: signal.SIGKILL, hang: signal.SIGSTOP}


@needs_hosts
@pytest.mark.soak
@pytest.mark.parametrize("shared", [False, True], ids=["bucket", "shared directory"])
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_three_hosts_and_a_spare_end_with_what_undisturbed_training_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[Fleet], None], shared: bool
) -> None:
    """Each host has a network, processes, a name and memory of its own; with a disk of its own and a bucket behind S3's
    protocol, or with a run directory that all share."""
    more: dict[str, object] = {"holds": [HELD, str(tmp_path / "go-on")]}
    if trouble in SIGNALS:
        more["signal"] = [1, AFTER, SIGNALS[trouble], 1]
    with hosts_on_a_switch(4) as four:
        if shared:
            go_through(Fleet(four, tmp_path, TOY, shared=True, spares=1, **more), trouble)
            return
        with serving_s3(monkeypatch, "bucket", f"{four[0].address.rpartition('.')[0]}.254") as s3:
            go_through(Fleet(four, tmp_path, TOY, "s3://bucket/run", spares=1, **more), trouble)
            assert any(request.startswith("PUT /bucket/run/") for request in s3.requests)


def go_through(fleet: Fleet, trouble: Callable[[Fleet], None]) -> None:
    """The last host comes when the others train: it is the one that waits."""
    flags = ("--hang-after", "20") if trouble is hang else ()
    fleet.launch(0, 1, 2, flags=flags)
    fleet.until(lambda: fleet.reached(20))
    if trouble is not hang:
        fleet.launch(3, flags=flags)
        leader = fleet.run(0).root
        fleet.until(lambda: [fact.nodes for fact in supervisor_facts(leader, SpareNodes)][-1:] == [("node-3",)])
        fleet.until(lambda: fleet.reached(HELD))
    trouble(fleet)
    fleet.require_as_undisturbed()


def leader_of(fleet: Fleet) -> int:
    name = json.loads(fleet.run(0).holder.read_bytes())["host"]
    return next(node for node, host in enumerate(fleet.hosts) if host.name == name)


@needs_hosts
@pytest.mark.soak
@pytest.mark.parametrize("shared", [False, True], ids=["bucket", "shared directory"])
def test_a_lost_host_costs_one_snapshot_at_most_where_another_host_has_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """The durable ring has nothing but the start: all that is newer is in the memory of hosts. There is no last
    snapshot, which would cost nothing."""
    settings = {**SETTINGS, "checkpoint_every": "1000", "last_snapshot": "off"}
    toy = Toy(samples=1800, sampler="distributed", patient=False, settings=settings)
    more: dict[str, object] = {"holds": [HELD + JOURNALLED, str(tmp_path / "go-on")], "slow": 0.05}
    with hosts_on_a_switch(4) as four:
        if shared:
            lose_it_with_a_copy(Fleet(four, tmp_path, toy, shared=True, spares=1, **more))
            return
        with serving_s3(monkeypatch, "bucket", f"{four[0].address.rpartition('.')[0]}.254"):
            lose_it_with_a_copy(Fleet(four, tmp_path, toy, "s3://bucket/run", spares=1, **more))


def lose_it_with_a_copy(fleet: Fleet) -> None:
    fleet.launch(0, 1, 2, flags=("--replicas", "2"))
    fleet.until(lambda: fleet.reached(20))
    fleet.launch(3, flags=("--replicas", "2"))
    leader = fleet.run(0).root
    fleet.until(lambda: [fact.nodes for fact in supervisor_facts(leader, SpareNodes)][-1:] == [("node-3",)])
    fleet.until(lambda: fleet.reached(HELD + JOURNALLED))
    newest = facts(leader, Committed)[-1].step
    fleet.until(lambda: copied_of(fleet, newest) == {0, 1, 2})
    fleet.lose(1)
    go_on(fleet, [0, -signal.SIGKILL, 0, 0])
    (brought,) = supervisor_facts(leader, PartBroughtBack)
    assert (brought.node, brought.step) == ("node-3", newest), fleet.told()
    attached = facts(leader, Attached)[-1]
    assert (attached.step, attached.tier) == (newest, "fast"), fleet.told()
    fleet.require_as_undisturbed()


def copied_of(fleet: Fleet, step: int) -> set[int]:
    """The seats of whose part of a snapshot another host has a whole copy."""
    found = set()
    for host in fleet.hosts:
        for path in host.memory.glob("rollback-*/*/buddy-*/manifest.json"):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(path.read_bytes())["step"] == step:
                    found.add(int(path.parent.name.split("-")[1]))
    return found


@needs_hosts
@pytest.mark.soak
def test_a_host_that_comes_later_and_with_which_the_batches_do_not_fit_ends_no_run(tmp_path: Path) -> None:
    """Of a range of nodes: it is there when a rank is killed, so it is tried with it once."""
    go_on = tmp_path / "go-on"
    flags = ("--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=3")
    with hosts_on_a_switch(3) as three:
        fleet = Fleet(three, tmp_path, TOY, signal=[1, AFTER, signal.SIGKILL, 1], holds=[HELD, str(go_on)])
        fleet.ranks = 2
        fleet.launch(0, 1, flags=flags)
        fleet.until(lambda: fleet.reached(HELD))
        fleet.launch(2, flags=flags)
        fleet.until(lambda: "node-2 waits for the next attempt" in fleet.told())
        go_on.touch()
        assert fleet.wait() == [0, 0, 0], fleet.told()
        assert "going on with 2 nodes, with which it fits" in fleet.told()
        resumed = facts(fleet.run(0).root, Attached)[-1]
        assert (resumed.tier, resumed.world_size) == ("fast", 2), fleet.told()
        fleet.require_as_undisturbed()
