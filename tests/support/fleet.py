"""Hosts of one job. They share nothing but a bucket: each has a disk, a memory and a run directory of its own. Or they
share the run directory."""

import functools
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hosts import CABLE, Host, hosts_on_a_switch
from job_results import JOB, LAUNCH, Scenarios
from toy import Toy, require_same

from rollback.environment import ENV_FAST_TIER
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths

LIMIT = 600.0  # seconds; with all cores busy, a host takes minutes to start


class Fleet:
    """One job on hosts. The first host has the store of the rendezvous.

    ring: the URL of the bucket. shared: the hosts share the run directory instead. each: ranks on every host. spares:
    so many hosts wait. faulty: `(node, batch)`: no rank on that host gets further than this batch.
    """

    def __init__(
        self,
        hosts: tuple[Host, ...],
        folder: Path,
        toy: Toy,
        ring: str | None = None,
        *,
        shared: bool = False,
        each: int = 1,
        spares: int = 0,
        faulty: tuple[int, int] | None = None,
        **more: object,
    ) -> None:
        self.hosts, self.folder, self.toy, self.shared, self.spares = hosts, folder, toy, shared, spares
        self.nodes, self.each = len(hosts) - spares, each
        self.ranks = self.nodes * each
        self.ring = ring or f"file://{folder}/bucket"
        self.scenarios = Scenarios(folder)
        if faulty is not None:
            more["faulty_host"] = [hosts[faulty[0]].name, faulty[1]]
        self.scenarios.add("job", toy, **more)
        self.environment: dict[str, str] = {}

    def run(self, node: int) -> RunPaths:
        """The run directory of a host."""
        return RunPaths(self.folder / ("shared" if self.shared else f"disk-{node}") / "run")

    def leads(self) -> RunPaths:
        """The run directory of the host that has the journals."""
        return next(run for run in map(self.run, range(len(self.hosts))) if run.train_journal.exists())

    def launch(self, *nodes: int, flags: tuple[str, ...] = ()) -> None:
        """Start the job on some of the hosts; on all, if none are named."""
        for node in nodes or range(len(self.hosts)):
            command = [
                *LAUNCH[1:], "--nnodes", str(self.nodes), "--node-rank", str(node), "--nproc", str(self.each),
                "--rdzv-endpoint", f"{self.hosts[0].address}:29400", *([] if self.shared else ["--ring", self.ring]),
                "--spare-nodes", str(self.spares), "--run", str(self.run(node).root), *flags,
                str(JOB), str(self.scenarios.path),
            ]  # fmt: skip
            environment = {"GLOO_SOCKET_IFNAME": CABLE, "NO_COLOR": "1", ENV_FAST_TIER: "auto", "OMP_NUM_THREADS": "1"}
            with open(self.folder / f"output-{node}", "a") as output:
                self.hosts[node].start(command, {**environment, **self.environment}, self.folder, output)

    def lose(self, node: int) -> None:
        """Lose a host: its processes, its memory, and its disk if it has one of its own."""
        self.hosts[node].lose()
        if self.shared:
            return
        shutil.rmtree(self.folder / f"disk-{node}", ignore_errors=True)

    def signal_rank(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.hosts[rank // self.each].tell_all(f"rank {rank}", number)

    def wait(self, *nodes: int) -> list[int]:
        """The exit codes of some of the hosts; of all, if none are named."""
        try:
            return [self.hosts[node].wait(LIMIT) for node in nodes or range(len(self.hosts))]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the job did not end\n{self.told()}") from error

    def reached(self, step: int, attempt: int = 1) -> bool:
        """Whether every rank has shown this step in this attempt, or in a later one."""
        ranks = {
            rank
            for node in range(len(self.hosts))
            for rank, beat in read_heartbeats(self.run(node).ranks).items()
            if beat.attempt >= attempt and beat.step >= step
        }
        return len(ranks) == self.ranks

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, f"what the test waits for did not happen\n{self.told()}"
            assert any(host.running for host in self.hosts), self.told()
            time.sleep(0.02)

    def told(self) -> str:
        outputs = sorted(self.folder.glob("output-*"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-6000:]}" for path in outputs)

    def require_as_undisturbed(self) -> None:
        """The ranks have what they would have without any supervisor and any trouble."""
        for rank, undisturbed in enumerate(_undisturbed(self.toy.to_json(), self.ranks)):
            require_same(self.scenarios.portrait("job", rank), undisturbed, f"rank {rank}")

    def results(self) -> list[dict[str, object]]:
        return [json.loads((self.folder / f"job-{rank}.json").read_text()) for rank in range(self.ranks)]


@functools.cache
def _undisturbed(toy: str, ranks: int) -> list[dict[str, str]]:
    """The portraits of a job's ranks. Many tests have the same job."""
    with tempfile.TemporaryDirectory() as folder:
        scenarios = Scenarios(Path(folder))
        scenarios.add("job", Toy.from_json(toy))
        scenarios.torchrun(ranks)
        return [scenarios.portrait("job", rank) for rank in range(ranks)]


@contextmanager
def fleet_of(count: int, folder: Path, toy: Toy, ring: str | None = None, **more: Any) -> Iterator[Fleet]:
    with hosts_on_a_switch(count) as hosts:
        yield Fleet(hosts, folder, toy, ring, **more)
