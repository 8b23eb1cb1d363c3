"""What operators ask of a job on two nodes: all ranks do it alike, and every node ends as it should."""

import os
from pathlib import Path

from asking import answers, hand_in
from job_results import JOB, LAUNCH, Scenarios
from test_many_nodes import Nodes, nodes_of
from toy import Toy, facts, require_same, skipped, supervisor_facts
from waiting import LIMIT, wait_for
from warm_server import WarmPopen

from rollback.facts.training import Attached, AttemptStarted, Restored, RunEnded, Signalled, Stopped
from rollback.rundir.heartbeats import read_heartbeats

TOY = Toy(samples=448, sampler="distributed", augment=True)  # 56 batches of two ranks
SKIP = {"order": "skip", "skip": [36, 39], "why": "a bad shard"}
REWIND = {"order": "rewind", "to": 25, "skip": [30, 34], "why": "a hunch"}
STOP = {"order": "stop", "why": "maintenance"}


def test_a_skip_a_rewind_and_a_stop_are_carried_out_on_all_nodes_and_the_run_is_exact(tmp_path: Path) -> None:
    scenarios = Scenarios(tmp_path)
    scenarios.add("asked", TOY, ask=[12, SKIP, 27, REWIND, 46, STOP])
    run = scenarios.run("asked")
    with nodes_of(tmp_path) as nodes:
        nodes.run = run
        assert codes(nodes, scenarios.path) == [75, 75], nodes.output()
        assert codes(nodes, scenarios.path) == [0, 0], nodes.output()
        output = nodes.output()
    told = [text for _, text in sorted(answers(run).items())]
    assert all(carried_out for carried_out, _ in answers(run).values()), told
    assert len(told) == 3, told
    (restored,), (stopped,) = facts(run, Restored), facts(run, Stopped)
    assert (restored.step, restored.route) == (20, "in_process")
    assert [fact.step for fact in facts(run, Attached)] == [0, stopped.step]
    assert [fact.exit_code for fact in supervisor_facts(run, RunEnded)] == [75, 0], output
    undisturbed = Scenarios(tmp_path / "undisturbed")
    undisturbed.folder.mkdir()
    undisturbed.add("fresh", TOY, skips_of=str(run))
    undisturbed.torchrun(2)
    for rank in range(2):
        assert len(skipped(run, rank)) == 9
        require_same(scenarios.portrait("asked", rank), undisturbed.portrait("fresh", rank), f"rank {rank}")


def test_a_stop_that_was_asked_for_reaches_ranks_on_all_nodes_that_do_not_look_for_it_themselves(
    tmp_path: Path,
) -> None:
    with nodes_of(tmp_path) as nodes:
        both = [nodes.start(node, "stop_when_told") for node in range(2)]
        wait_for(lambda: len(read_heartbeats(nodes.paths.ranks)) == 2)
        wait_for(lambda: supervisor_facts(nodes.run, AttemptStarted))
        hand_in(nodes.run, "stop")
        assert [process.wait(LIMIT) for process in both] == [75, 75], nodes.output()
        (told,) = supervisor_facts(nodes.run, Signalled)
        assert (told.signal, told.node) == ("rollback stop by ann@site", None)
        assert supervisor_facts(nodes.run, RunEnded)[0].reason == "saved at step 4"


def codes(nodes: Nodes, scenarios: Path) -> list[int]:
    """Launch the job on both nodes and wait for its end: their exit codes."""
    started = []
    for node in range(2):
        command = [
            *LAUNCH, "--nnodes", "2", "--node-rank", str(node), "--nproc", "1",
            "--rdzv-endpoint", f"127.0.0.1:{nodes.port}", "--run", str(nodes.run), str(JOB), str(scenarios),
        ]  # fmt: skip
        with open(nodes.folder / f"output-{node}", "ab") as output:
            environment = {**os.environ, "NO_COLOR": "1"}
            started.append(WarmPopen(command, env=environment, stdout=output, stderr=output))
    nodes.started += started
    return [process.wait(2 * LIMIT) for process in started]
