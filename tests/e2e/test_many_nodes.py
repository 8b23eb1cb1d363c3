"""A job on several nodes: one decision about attempts, whichever node is told to stop, fails or is lost."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hosts
import pytest
from hosts import CABLE, Host, two_hosts
from job_results import JOB, LAUNCH, Scenarios
from launching import RANK
from selection import soak
from toy import Toy, facts, require_same, supervisor_facts
from waiting import LIMIT, free_port, wait_for
from warm_server import WarmPopen

from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import read_manifest
from rollback.environment import ENV_FAST_TIER
from rollback.facts.training import (
    Attached,
    AttemptEnded,
    AttemptStarted,
    Committed,
    Drained,
    JournalEntry,
    Restored,
    RunEnded,
    Signalled,
)
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths


class Nodes:
    """Nodes of one job on this host, which differ in nothing but their rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.paths = RunPaths(self.run)
        self.port = free_port()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self, node: int, behaviour: str, *flags: str, script: Path = RANK, **environment: str
    ) -> subprocess.Popen[bytes]:
        command = [
            *LAUNCH, "--nnodes", "2", "--node-rank", str(node), "--nproc", "1",
            "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--run", str(self.run), *flags, str(script), behaviour,
        ]  # fmt: skip
        environment = {**os.environ, "NOTES": str(self.folder), "NO_COLOR": "1", **environment}
        with open(self.folder / f"output-{node}", "ab") as output:
            process = WarmPopen(command, env=environment, stdout=output, stderr=output)
        self.started.append(process)
        return process

    def leader(self) -> int:
        """Pid of the supervisor that leads."""
        holder: dict[str, int] = {}

        def found() -> bool:
            if self.paths.holder.is_file():
                holder.update(json.loads(self.paths.holder.read_bytes() or b"{}"))
            return "pid" in holder

        wait_for(found)
        return holder["pid"]

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("output-*")))


@contextmanager
def nodes_of(folder: Path) -> Iterator[Nodes]:
    nodes = Nodes(folder)
    try:
        yield nodes
    finally:
        for process in nodes.started:
            if process.poll() is None:
                process.kill()
                process.wait()


def test_a_stop_signal_on_one_node_stops_all_and_both_say_that_the_run_is_resumable(tmp_path: Path) -> None:
    with nodes_of(tmp_path) as nodes:
        both = [nodes.start(node, "stop_when_told") for node in range(2)]
        wait_for(lambda: len(read_heartbeats(nodes.paths.ranks)) == 2)
        follower = next(process for process in both if process.pid != nodes.leader())
        follower.send_signal(signal.SIGUSR1)
        assert [process.wait(LIMIT) for process in both] == [75, 75], nodes.output()
        (started,) = supervisor_facts(nodes.run, AttemptStarted)
        assert sorted(started.nodes) == ["node-0", "node-1"]
        (told,) = supervisor_facts(nodes.run, Signalled)
        assert (told.signal, told.node) == ("SIGUSR1", f"node-{both.index(follower)}")
        assert supervisor_facts(nodes.run, RunEnded)[0].reason == "saved at step 4"
        assert not nodes.paths.nodes.exists()


def test_whoever_is_left_leads_when_the_leader_was_killed_and_begins_again_when_that_node_is_back(
    tmp_path: Path,
) -> None:
    with nodes_of(tmp_path) as nodes:
        both = [nodes.start(node, "ignore_everything") for node in range(2)]
        wait_for(lambda: len(read_heartbeats(nodes.paths.ranks)) == 2)
        wait_for(lambda: supervisor_facts(nodes.run, AttemptStarted))
        leader = next(process for process in both if process.pid == nodes.leader())
        leader.kill()
        leader.wait()
        node = both.index(leader)
        both[node] = nodes.start(node, "ignore_everything")
        assert [process.wait(LIMIT) for process in both] == [0, 0], nodes.output()
        assert [fact.attempt for fact in records(nodes.run) if isinstance(fact.fact, Attached)] == [1, 2]


def test_a_rank_that_dies_on_one_node_ends_the_attempt_on_all_and_the_next_begins_on_all(tmp_path: Path) -> None:
    with nodes_of(tmp_path) as nodes:
        both = [nodes.start(node, "die_once") for node in range(2)]
        assert [process.wait(LIMIT) for process in both] == [0, 0], nodes.output()
        first, second = supervisor_facts(nodes.run, AttemptEnded)
        assert (first.why, first.rank) == ("signal", 1)
        assert second.status == 0


def test_all_nodes_start_what_cannot_be_adopted_without_protection(tmp_path: Path) -> None:
    """The ranks' refusal is the leader's to hear; the others hear it from the leader."""
    with nodes_of(tmp_path) as nodes:
        script = Path(__file__).parent / "trainers" / "plain" / "refused.py"
        both = [nodes.start(node, "two optimizers", "--adopt", script=script) for node in range(2)]
        assert [process.wait(LIMIT) for process in both] == [0, 0], nodes.output()
        assert nodes.output().count("starting the script as torchrun would") == 2


@pytest.mark.soak
def test_nodes_that_share_a_directory_and_have_a_bucket_too_meet_in_the_directory(tmp_path: Path) -> None:
    """Whoever gets the lock cannot know that: it looks for others in both ways."""
    with nodes_of(tmp_path) as nodes:
        bucket = ("--ring", f"file://{tmp_path}/bucket")
        both = [nodes.start(node, "die_once", *bucket) for node in range(2)]
        assert [process.wait(LIMIT) for process in both] == [0, 0], nodes.output()
        first, second = supervisor_facts(nodes.run, AttemptEnded)
        assert (first.why, first.rank, second.status) == ("signal", 1, 0)
        assert len(supervisor_facts(nodes.run, AttemptStarted)[0].nodes) == 2
        assert not nodes.paths.nodes.exists()
        assert not nodes.paths.record_location.exists()


def test_nodes_that_do_not_meet_say_what_they_must_share(tmp_path: Path) -> None:
    with nodes_of(tmp_path) as nodes:
        alone = nodes.start(0, "finish", "--node-timeout", "1")
        assert alone.wait(LIMIT) == 74
        assert "1 of 2 nodes have come within 1 s to" in nodes.output()
        assert "which all must share; here it lies on " in nodes.output()
        assert "hosts that share no run directory need --ring URL" in nodes.output()
        assert not nodes.run.exists()


def test_a_node_whose_script_has_other_content_takes_part_and_is_told_of(tmp_path: Path) -> None:
    other = tmp_path / RANK.name
    other.write_text(f"{RANK.read_text()}# of another day\n")
    with nodes_of(tmp_path) as nodes:
        both = [nodes.start(0, "die_once"), nodes.start(1, "die_once", script=other)]
        assert [process.wait(LIMIT) for process in both] == [0, 0], nodes.output()
        assert len(supervisor_facts(nodes.run, AttemptEnded)) == 2
        assert nodes.output().count(" has other script than node-") == 1, nodes.output()


@pytest.mark.parametrize("other", [*soak(None), "other.key"])
def test_nodes_of_which_one_has_no_key_or_another_one_are_refused_before_anything_is_written(
    tmp_path: Path, other: str | None
) -> None:
    """Else the run is sealed or not as the leader is, and a node ends once it reads what the leader wrote."""
    for name in ("one.key", "other.key"):
        (tmp_path / name).write_bytes(os.urandom(32))
        (tmp_path / name).chmod(0o600)
    (tmp_path / "jobs").mkdir()
    scenarios = Scenarios(tmp_path / "jobs")
    scenarios.add("job", Toy(60))
    with nodes_of(tmp_path) as nodes:
        for node, key in enumerate((other, "one.key")):
            flags = ("--seal", str(tmp_path / key)) if key else ()
            nodes.start(node, str(scenarios.path), *flags, script=JOB)
        assert [process.wait(LIMIT) for process in nodes.started] == [2, 2], nodes.output()
        assert nodes.output().count("the ranks are to train by different settings: seal is ") == 2
        assert not nodes.run.exists()


@pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))
@pytest.mark.parametrize(
    "sharding", [None, pytest.param("fsdp", marks=pytest.mark.soak)], ids=["replicated", "sharded"]
)
def test_a_host_that_is_lost_with_all_its_memory_costs_nothing_once_it_is_back(
    tmp_path: Path, sharding: str | None
) -> None:
    """Each rank is alone on its host, with memory of its own. A rollback, and a rank that dies, go back to what the two
    hosts have in memory; then the host of the follower is lost, then that of the leader."""
    toy = Toy(
        samples=480, sampler="distributed", epochs=2, loop="epochs", between=True, nan=(25, 105), nan_rank=1,
        sharding=sharding, patient=False, settings={
            "policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20,
            "checkpoint_every": "5",
        },
    )  # fmt: skip
    scenarios = Scenarios(tmp_path)
    losses = {"follower": (55, tmp_path / "follower-lost"), "leader": (80, tmp_path / "leader-lost")}
    holds = [place for batch, lost in losses.values() for place in (batch, str(lost))]
    scenarios.add("lost", toy, signal=[1, 40, signal.SIGKILL, 1], holds=holds)
    run = RunPaths(scenarios.run("lost"))

    def launch(host: Host, node: int) -> None:
        command = [
            *LAUNCH[1:], "--nnodes", "2", "--node-rank", str(node), "--nproc", "1",
            "--rdzv-endpoint", "10.77.0.1:29400", "--run", str(run.root), str(JOB), str(scenarios.path),
        ]  # fmt: skip
        environment = {"GLOO_SOCKET_IFNAME": CABLE, "NO_COLOR": "1", ENV_FAST_TIER: "auto"}
        with open(tmp_path / f"output-{node}", "a") as output:
            host.start(command, environment, tmp_path, output)

    def told() -> str:
        return "\n".join(path.read_text() for path in sorted(tmp_path.glob("output-*")))

    with two_hosts() as both:
        for node, host in enumerate(both):
            launch(host, node)
        ended = [1]  # the attempts that ended because a rank died, or a host was lost
        for role, (batch, lost) in losses.items():
            wait_for(lambda held=batch - 15: newest_attempt(run) > ended[-1] and furthest(run) >= held, told)
            ended.append(newest_attempt(run))
            leads = json.loads(run.holder.read_bytes())["host"]
            node = next(node for node, host in enumerate(both) if (host.name == leads) == (role == "leader"))
            both[node].lose()
            lost.touch()
            launch(both[node], node)
        assert [host.wait(LIMIT) for host in both] == [0, 0], told()
    attached = [record for record in records(run.root) if isinstance(record.fact, Attached)]
    after = [next(record.fact for record in attached if record.attempt > attempt) for attempt in ended]
    assert [fact.tier for fact in after] == ["fast", "durable", "durable"], told()
    first = [record.fact for record in records(run.root) if record.attempt == 1]
    back = next(place for place, fact in enumerate(first) if isinstance(fact, Restored))
    held = [fact.step for fact in first[back:] if isinstance(fact, Restored | Committed)]
    assert after[0].step >= max(held), told()
    assert {fact.tier for fact in facts(run.root, Committed)} == {"fast"}, told()
    assert {(fact.route, fact.tier) for fact in facts(run.root, Restored)} == {("in_process", "fast")}, told()
    assert "node_lost" in [fact.why for fact in supervisor_facts(run.root, AttemptEnded)], told()
    newest = facts(run.root, Committed)[-1].checkpoint
    assert newest in [fact.checkpoint for fact in supervisor_facts(run.root, Drained)], told()
    assert all(verifies(run, name) for name in ring.names(run))
    assert not list(run.ring.glob(".*")), "what was left half copied is gone"
    assert not run.nodes.exists()
    undisturbed = Scenarios(tmp_path / "undisturbed")
    undisturbed.folder.mkdir()
    undisturbed.add("lost", toy)
    undisturbed.torchrun(2)
    for rank in range(2):
        require_same(scenarios.portrait("lost", rank), undisturbed.portrait("lost", rank), f"rank {rank}")


@pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))
@pytest.mark.parametrize(
    ("sharding", "on_each", "base"),
    [
        (None, 1, None),
        pytest.param("fsdp", 1, None, marks=pytest.mark.soak),
        pytest.param("hsdp", 2, None, marks=pytest.mark.soak),
        pytest.param("hsdp", 2, "frozen", marks=pytest.mark.soak),
        pytest.param(None, 1, "frozen", marks=pytest.mark.soak),
    ],
    ids=["replicated", "sharded", "replicas on both", "frozen weights and replicas on both", "frozen weights"],
)
def test_two_hosts_without_supervisors_keep_checkpoints_in_memory_and_fill_the_ring_together(
    tmp_path: Path, sharding: str | None, on_each: int, base: str | None
) -> None:
    """Of a part that ranks of both hosts have, one host has a copy: the other gets it from there."""
    toy = Toy(sampler="distributed", nan=(25,), nan_rank=1, augment=True).with_settings(checkpoint_every="10")
    toy = toy.but(samples=360 * on_each, sharding=sharding, width=17, base=base)
    scenarios = Scenarios(tmp_path)
    scenarios.add("bad", toy)
    scenarios.add("fresh", toy, skips_of=str(scenarios.run("bad")))
    with two_hosts() as both, open(tmp_path / "output", "a") as output:
        for node, host in enumerate(both):
            command = [
                "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                f"--nproc-per-node={on_each}", "--rdzv-endpoint=10.77.0.1:29400", str(JOB), str(scenarios.path),
            ]  # fmt: skip
            host.start(command, {"GLOO_SOCKET_IFNAME": CABLE, ENV_FAST_TIER: "auto"}, tmp_path, output)
        assert [host.wait(LIMIT) for host in both] == [0, 0], (tmp_path / "output").read_text()
    run = RunPaths(scenarios.run("bad"))
    assert {fact.tier for fact in facts(run.root, Committed)} == {"fast"}
    assert [(fact.route, fact.tier) for fact in facts(run.root, Restored)] == [("in_process", "fast")]
    assert facts(run.root, Committed)[-1].checkpoint in [fact.checkpoint for fact in facts(run.root, Drained)]
    assert all(verifies(run, name) for name in ring.names(run))
    assert not run.nodes.exists()
    assert run.frozen.exists() == (base is not None and sharding is None), "sharded, they are stored as all parts are"
    for rank in range(2 * on_each):
        require_same(scenarios.portrait("bad", rank), scenarios.portrait("fresh", rank), f"rank {rank}")


def verifies(run: RunPaths, name: str) -> bool:
    """Whether a checkpoint of the ring is what its manifest says. Raises CheckpointDamaged where it is not."""
    for shard in ring.open_shards(run.checkpoint(name), read_manifest(run.checkpoint(name))):
        shard.close()
    return True


def newest_attempt(run: RunPaths) -> int:
    return max((beat.attempt for beat in read_heartbeats(run.ranks).values()), default=0)


def furthest(run: RunPaths) -> int:
    """The step that all ranks of the newest attempt have shown to have reached."""
    beats = [beat.step for beat in read_heartbeats(run.ranks).values() if beat.attempt == newest_attempt(run)]
    return min(beats) if len(beats) == 2 else -1


def records(run: Path) -> list[JournalEntry]:
    return read_journal(RunPaths(run).train_journal).records
