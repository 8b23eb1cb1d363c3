"""Sixty-four ranks under eight supervisors, all on this machine: killed, hung, sent back, told to stop; exact."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from job_results import JOB, LAUNCH, Scenarios
from toy import Toy, facts, require_same, supervisor_facts
from waiting import free_port
from warm_server import WarmPopen

from rollback.facts.training import Attached, AttemptEnded, Committed, Restored, Stopped
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Request, now, submit

LIMIT = 1800.0  # seconds for each step of the test: of 64 processes, a core has dozens
TOY = Toy(
    batch_size=2, sampler="distributed", patient=False, settings={
        "policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20,
    },
)  # fmt: skip
KILLED, HELD, HELD_AGAIN = 15, 30, 45  # batches


@pytest.mark.soak
@pytest.mark.parametrize(("nodes", "on_each"), [(2, 2), (8, 8)], ids=["2 x 2", "8 x 8"])
def test_many_ranks_under_many_supervisors_end_with_what_undisturbed_ones_have(
    tmp_path: Path, nodes: int, on_each: int
) -> None:
    ranks = nodes * on_each
    toy, killed, stopped = TOY.but(samples=ranks * 2 * 60), ranks - 3, ranks // 5
    scenarios = Scenarios(tmp_path, limit=LIMIT)
    run = RunPaths(scenarios.run("job"))
    gates = [tmp_path / "first", tmp_path / "second"]
    holds = [HELD, str(gates[0]), HELD_AGAIN, str(gates[1])]
    scenarios.add("job", toy, signal=[killed, KILLED, signal.SIGKILL, 1], holds=holds)
    port = free_port()

    def start() -> list[subprocess.Popen[bytes]]:
        environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        started = []
        for node in range(nodes):
            command = [
                *LAUNCH, "--nnodes", str(nodes), "--node-rank", str(node), "--nproc", str(on_each),
                "--rdzv-endpoint", f"127.0.0.1:{port}", "--hang-after", str(60 + 3 * ranks),
                "--run", str(run.root),
                str(JOB), str(scenarios.path),
            ]  # fmt: skip
            with open(tmp_path / f"output-{node}", "ab") as output:
                started.append(WarmPopen(command, env=environment, stdout=output, stderr=output))
        return started

    def told() -> str:
        return "\n".join(path.read_text()[-1500:] for path in sorted(tmp_path.glob("output-*")))

    def until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, told()
            time.sleep(0.2)

    def reached(batch: int, attempt: int) -> bool:
        beats = read_heartbeats(run.ranks).values()
        return sum(beat.attempt >= attempt and beat.batch >= batch for beat in beats) == ranks

    supervisors = start()
    try:
        until(lambda: reached(HELD, 2))
        os.kill(read_heartbeats(run.ranks)[stopped].pid, signal.SIGSTOP)
        gates[0].touch()
        until(lambda: reached(HELD_AGAIN, 3))
        kept = facts(run.root, Committed)[-1].step
        submit(run, Request(order="rewind", to=kept, who="test", at=now()))
        gates[1].touch()
        until(lambda: facts(run.root, Restored))
        supervisors[-1].send_signal(signal.SIGTERM)
        codes = {supervisor.wait(LIMIT) for supervisor in supervisors}
        assert codes == {75}, told()
        assert facts(run.root, Stopped)
        supervisors = start()
        assert [supervisor.wait(LIMIT) for supervisor in supervisors] == [0] * nodes, told()
    finally:
        for supervisor in supervisors:
            if supervisor.poll() is None:
                supervisor.kill()
                supervisor.wait()
    ends = [(fact.why, fact.rank) for fact in supervisor_facts(run.root, AttemptEnded)]
    assert ends[:2] == [("signal", killed), ("stopped", stopped)], told()
    assert [fact.world_size for fact in facts(run.root, Attached)] == [ranks] * 4
    undisturbed = Scenarios(tmp_path / "undisturbed", limit=LIMIT)
    undisturbed.folder.mkdir()
    undisturbed.add("job", toy)
    undisturbed.torchrun(ranks, warm=False)
    for rank in range(ranks):
        require_same(scenarios.portrait("job", rank), undisturbed.portrait("job", rank), f"rank {rank}")
