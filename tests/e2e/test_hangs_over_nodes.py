"""A job on two hosts that hangs because of a rank on the host that does not lead."""

import json
import os
import sys
from pathlib import Path

import hosts
import pytest
from hosts import CABLE, two_hosts
from test_hangs import IMPATIENT
from toy import supervisor_facts
from waiting import LIMIT, wait_for
from warm_server import run_warm

from rollback.facts.training import AttemptEnded, Hung
from rollback.rundir.paths import RunPaths

JOB = Path(__file__).parent / "jobs" / "stuck.py"


@pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))
def test_a_hang_on_two_hosts_is_told_with_the_stacks_of_both(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    with two_hosts() as both:
        for node, host in enumerate(both):
            command = [
                "-c", IMPATIENT, "launch", "--nnodes", "2", "--node-rank", str(node), "--nproc", "2",
                "--rdzv-endpoint", "10.77.0.1:29400", "--restart-budget", "0", "--run", str(run.root), str(JOB),
                both[1].name,
            ]  # fmt: skip
            with open(tmp_path / f"output-{node}", "a") as output:
                host.start(command, {"GLOO_SOCKET_IFNAME": CABLE, "NO_COLOR": "1"}, tmp_path, output)
            wait_for(run.orders.is_file)
        codes = [host.wait(2 * LIMIT) for host in both]
        told = "\n".join(path.read_text() for path in sorted(tmp_path.glob("output-*")))
        assert codes == [1, 1], told
        leader, follower = (host.name for host in both)
    (hung,), (ended,) = (supervisor_facts(run.root, kind) for kind in (Hung, AttemptEnded))
    assert (ended.why, ended.host) == ("stopped", follower), told
    assert (hung.suspect, hung.stacks) == (ended.rank, tuple(rank for rank in range(4) if rank != ended.rank))
    account = why(run, "--json")
    processes = {process["rank"]: process for process in json.loads(account)["processes"] if process["is_rank"]}
    assert sorted(processes) == [0, 1, 2, 3]
    assert processes[ended.rank]["state"] in ("T", "t")
    assert all("wait_for_all" in processes[rank]["stacks"] for rank in hung.stacks)
    assert leader != follower
    assert f"rank       {ended.rank}, on host {follower}" in why(run)


def why(run: RunPaths, *arguments: str) -> str:
    command = [sys.executable, "-m", "rollback", "why", str(run.root), *arguments]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    return run_warm(command, env=environment, capture_output=True, check=True, timeout=LIMIT).stdout
