"""Hosts that share no disk: they meet at the endpoint of the rendezvous, and a bucket has what outlives them."""

import signal
import subprocess
from pathlib import Path

import hosts
import pytest
from disks import disk_of, fill
from fleet import Fleet, fleet_of
from s3_server import serving_s3
from toy import Toy, facts, supervisor_facts

from rollback.checkpoints import ring
from rollback.errors import RunDirectoryError
from rollback.facts.training import Attached, AttemptEnded, Committed, Hung, Quarantined, Restored, Stopped
from rollback.inspect.record.reading import require_run_directory
from rollback.rundir.lock import launch_of
from rollback.rundir.requests import Request, now, submit
from rollback.rundir.skip_records import read_skipped

pytestmark = pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))

SETTINGS = {
    "policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20,
    "checkpoint_every": "5",
}  # fmt: skip
TOY = Toy(samples=520, sampler="distributed", nan=(25,), nan_rank=1, patient=False, settings=SETTINGS)


def test_two_hosts_with_a_bucket_alone_roll_back_and_survive_a_killed_rank(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    with fleet_of(2, tmp_path, TOY, signal=[1, 45, signal.SIGKILL, 1], holds=[40, str(go_on)]) as fleet:
        fleet.launch()
        leader, other = fleet.run(0), fleet.run(1)
        fleet.until(leader.skip_record(1).exists)  # the attempt is not over: that host could be lost with what it has
        go_on.touch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert {(fact.route, fact.tier) for fact in facts(leader.root, Restored)} == {("in_process", "fast")}
        first, second = facts(leader.root, Attached)
        assert (first.tier, second.tier, second.world_size) == (None, "fast", 2)
        (failed, done) = supervisor_facts(leader.root, AttemptEnded)
        assert (failed.why, failed.rank, done.status) == ("signal", 1, 0)
        assert {fact.tier for fact in facts(leader.root, Committed)} == {"fast"}
        assert ring.names(leader), "the final state is where the record is"
        assert not other.train_journal.exists()
        for path in (leader.evidence(0, 1), leader.skip_record(1)):
            assert path.exists(), "what the other host's rank saw and skipped is with the record"
        assert not leader.incident_batch(0, 1).exists(), "what is large stays"
        with pytest.raises(RunDirectoryError, match="its record is on"):
            require_run_directory(other.root)
        assert f"done; `rollback audit {leader.root}` on {fleet.hosts[0].name} tells" in fleet.told()
        fleet.require_as_undisturbed()
        fleet.launch(1, flags=("--node-timeout", "1"))  # its container is started again, where nobody is any more
        assert fleet.wait(1) == [0], fleet.told()
        assert "this command has nothing left to do" in fleet.told()
        assert fleet.told().count(f"done; `rollback audit {leader.root}` on {fleet.hosts[0].name} tells") == 2
        fleet.lose(1)  # and with a new disk, on which nothing says where the record is
        fleet.launch(1, flags=("--node-timeout", "1"))
        assert fleet.wait(1) == [0], fleet.told()
        assert f"`rollback ring list {fleet.ring}` shows its checkpoints" in fleet.told()


@pytest.mark.soak
def test_a_killed_rank_costs_no_run_though_the_disk_of_another_host_is_full(tmp_path: Path) -> None:
    """What that host's run directory needs for another attempt is there already: nothing of it is written again."""
    held, go_on = 30, tmp_path / "go-on"
    troubled = {"signal": [0, 45, signal.SIGKILL, 1], "holds": [held, str(go_on)]}
    with (
        disk_of("20m", tmp_path / "disk-1") as disk,
        fleet_of(2, tmp_path, TOY.but(nan=()), **troubled) as fleet,
    ):
        fleet.launch()
        fleet.until(lambda: fleet.reached(held))
        subprocess.run(fill(disk), shell=True, check=True)
        go_on.touch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert "No space left on device" in fleet.told()
        assert len(facts(fleet.run(0).root, Attached)) == 2, fleet.told()
        fleet.require_as_undisturbed()


@pytest.mark.soak
def test_the_run_goes_on_where_the_process_that_has_the_store_is_killed(tmp_path: Path) -> None:
    """Nothing reaches the leader from then on, so it makes the store anew, and the other host comes again. What that
    host's rank had skipped by then, and seen, comes to the record all the same."""
    with fleet_of(2, tmp_path, TOY.but(samples=3000)) as fleet:
        fleet.launch()
        fleet.until(lambda: fleet.reached(60))
        fleet.hosts[0].tell_all("meeting", signal.SIGKILL)
        assert fleet.wait() == [0, 0], fleet.told()
        assert "it is made anew" in fleet.told()
        lost, done = supervisor_facts(fleet.run(0).root, AttemptEnded)
        assert lost.status != 0, fleet.told()
        assert done.status == 0, fleet.told()
        leader = fleet.run(0)
        assert leader.evidence(0, 1).exists(), fleet.told()
        assert [line.batch for line in read_skipped(leader.skip_record(1), [])] == [25]
        fleet.require_as_undisturbed()


@pytest.mark.soak
def test_a_lost_follower_and_then_a_lost_leader_come_back_with_empty_disks_and_the_run_goes_on(tmp_path: Path) -> None:
    """Three hosts. What was in a lost host's memory is gone for all: the bucket has what they go on from."""
    toy = TOY.but(samples=3000)
    with fleet_of(3, tmp_path, toy) as fleet:
        fleet.launch()
        fleet.until(lambda: fleet.reached(100))
        fleet.lose(2)
        fleet.launch(2)
        fleet.until(lambda: fleet.reached(150, attempt=2))
        fleet.lose(0)
        fleet.launch(0)
        assert fleet.wait() == [0, 0, 0], fleet.told()
        attached = facts(fleet.run(0).root, Attached)
        assert [fact.tier for fact in attached][-1] == "durable", fleet.told()
        assert attached[-1].step > 0
        fleet.require_as_undisturbed()


@pytest.mark.soak
def test_hosts_apart_end_a_hang_go_back_on_request_and_stop_together(tmp_path: Path) -> None:
    """The requests are given at the leader's run directory. A rank of the other host is stopped: nobody's step ends."""
    with fleet_of(2, tmp_path, TOY.but(samples=8000, nan=()), signal=[1, 60, signal.SIGSTOP, 1]) as fleet:
        leader = fleet.run(0)
        fleet.launch(flags=("--hang-after", "8"))
        fleet.until(lambda: fleet.reached(120, attempt=2))
        (hung,) = supervisor_facts(leader.root, Hung)
        assert hung.suspect == 1, fleet.told()
        kept = facts(leader.root, Committed)[-1].step
        submit(leader, Request(order="rewind", to=kept, who="test", at=now()))
        fleet.until(lambda: any(fact.step <= kept for fact in facts(leader.root, Restored)))
        submit(leader, Request(order="stop", who="test", at=now(), launch=launch_of(leader)))
        assert fleet.wait() == [75, 75], fleet.told()
        assert facts(leader.root, Stopped)
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert facts(leader.root, Attached)[-1].step > 0, fleet.told()
        fleet.require_as_undisturbed()


@pytest.mark.soak
def test_an_order_is_carried_out_though_the_leader_that_has_it_is_lost_before_the_bucket_knows(tmp_path: Path) -> None:
    """It came when the run was just ending. The bucket says that the run is complete; the other host has met a leader
    that did not say so."""
    with fleet_of(2, tmp_path, TOY) as fleet:
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        leader = fleet.run(0)
        kept = facts(leader.root, Committed)[-2].step
        submit(leader, Request(order="rewind", to=kept, who="test", at=now()))
        fleet.launch(flags=("--node-timeout", "20"))
        fleet.until(lambda: fleet.told().count("node-1: following") == 2)
        fleet.hosts[0].lose()
        assert fleet.wait(1) == [75], fleet.told()
        fleet.launch()
        assert fleet.wait() == [0, 0], fleet.told()
        assert 15 < facts(leader.root, Restored)[-1].step <= kept, fleet.told()
        fleet.require_as_undisturbed()


@pytest.mark.soak
def test_a_host_that_cannot_reach_the_bucket_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost, comes back, and is cut off from the bucket from the moment it follows."""
    with hosts.hosts_on_a_switch(2) as two:
        bucket = f"{two[0].address.rpartition('.')[0]}.254"
        with serving_s3(monkeypatch, "bucket", bucket):
            fleet = Fleet(two, tmp_path, TOY.but(samples=3000), "s3://bucket/run")
            fleet.launch()
            fleet.until(lambda: fleet.reached(100))
            fleet.lose(1)
            fleet.launch(1)
            fleet.until(lambda: fleet.told().count("node-1: following") == 2)
            route = ["ip", "-n", two[1].name, "route"]
            subprocess.run([*route, "add", "blackhole", bucket], check=True)
            assert fleet.wait() == [75, 75], fleet.told()
            subprocess.run([*route, "del", "blackhole", bucket], check=True)
            fleet.launch()
            assert fleet.wait() == [0, 0], fleet.told()
            assert not facts(fleet.run(0).root, Quarantined), fleet.told()
            fleet.require_as_undisturbed()
