"""A supervised run of a tiny job, and how its processes are killed: what `attack.py` is made of.

A kill says what dies (a rank, all ranks, a loader worker, torchrun, the supervisor, everything at once) and when (while
the attempt starts, in training, while a checkpoint is being written).
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from job_results import JOB, Scenarios
from toy import Toy, require_same
from warm import WarmPython, environment_of

from rollback.checkpoints import tiers
from rollback.environment import ENV_RUN
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths

VICTIMS = {
    "rank": 6, "all ranks": 3, "worker": 2, "fork server": 1, "torchrun": 3, "spare": 1, "supervisor": 3,
    "everything": 1,
}  # fmt: skip
MOMENTS = {"start-up": 3, "training": 4, "saving": 3}
"""How often each is drawn, relative to the others."""
UNDISTURBED_FOR = 0.5  # seconds of training from which the moment of a kill is drawn
LIMIT = 180.0  # a wait that is longer than this has failed

WORDS = ("--restart-budget", "1000")

# What is skipped must not depend on which checkpoints a killed run happens to have: only what is bad, each time.
_SURGICAL = {"policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20}
JOBS: tuple[tuple[int, Toy], ...] = (
    (1, Toy(loader="drawn", accumulate=2, nan=(70,), max_steps=150, patient=False, settings=_SURGICAL)),
    (2, Toy(samples=600, sampler="distributed", epochs=2, loop="epochs", between=True, nan=(40, 110), nan_rank=1,
            patient=False, settings=_SURGICAL)),
    (1, Toy(samples=600, workers=2, augment=True, nan=(50, 120), patient=False, settings=_SURGICAL)),
)  # fmt: skip
"""Number of ranks and the job. All steps take a millisecond or two, so that a checkpoint is nearly always under way."""


_GENERATIONS = ("supervisor", "spare", "torchrun", "fork server", "rank", "worker")


@dataclass(frozen=True)
class Kill:
    """What dies, and when: `share` of the time that the moment leaves. `pick` chooses among several victims."""

    victim: str
    moment: str
    share: float
    pick: float

    def __str__(self) -> str:
        return f"{self.victim} in {self.moment} at {self.share:.2f}"


@dataclass(frozen=True)
class Oracle:
    """An undisturbed run: what it ended with on each rank, and how many seconds it took to begin."""

    portraits: list[dict[str, str]]
    start_up: float


@dataclass
class Undertaking:
    """A run that is being killed: its processes, and what was done to them."""

    folder: Path
    ranks: int
    toy: Toy
    warm: bool
    supervisor: Any = field(init=False)
    killed: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.scenarios = Scenarios(self.folder)
        self.scenarios.add("run", self.toy)
        self.run = self.scenarios.run("run")
        self.paths = RunPaths(self.run)
        self.output = self.folder / "output.txt"

    def launch(self) -> None:
        """The same command as ever."""
        command = [
            sys.executable, "-m", "rollback", "launch", "--nproc", str(self.ranks), "--run", str(self.run),
            *WORDS, str(JOB), str(self.scenarios.path),
        ]  # fmt: skip
        environment = {**os.environ, "NO_COLOR": "1", **self.environment}
        with open(self.output, "ab") as output:
            start: Callable[..., Any] = WarmPython if self.warm else subprocess.Popen
            self.supervisor = start(command, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def tree(self) -> dict[str, list[psutil.Process]]:
        """The living processes of the run by what they are."""
        found: dict[str, list[psutil.Process]] = {name: [] for name in _GENERATIONS}
        if self.ended():
            return found
        found["supervisor"] = [psutil.Process(self.supervisor.pid)]
        children = _children(found["supervisor"][0])
        # Of two, the next attempt's torchrun has no children yet.
        found["torchrun"] = [child for child in children if _children(child)][:1] or children[:1]
        found["spare"] = [child for child in children if child not in found["torchrun"]]
        for child in itertools.chain.from_iterable(map(_children, found["torchrun"])):
            # A rank that the fork server has forked bears a name.
            found["rank" if _name(child).startswith("rank ") else "fork server"].append(child)
        found["worker"] = list(itertools.chain.from_iterable(map(_children, found["rank"])))
        return found

    def training(self) -> bool:
        """Whether a rank of the attempt that now runs has shown that it trains."""
        beats = {beat.pid for beat in read_heartbeats(self.paths.ranks).values() if beat.step > 0}
        # `tree` reads of every process of the machine who its parent is, so it comes last.
        return any(map(psutil.pid_exists, beats)) and any(process.pid in beats for process in self.tree()["rank"])

    def saving(self) -> bool:
        """A checkpoint is being written, as far as it can be seen: in the fast tier one nearly always is."""
        return tiers.fast_tier_of(self.paths) is not None or any(self.paths.ring.glob(".writing-*"))

    def ended(self) -> bool:
        return self.supervisor.poll() is not None

    def wait(self, condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
        """Wait until the condition holds or the supervisor ends; whether it holds."""
        deadline = time.monotonic() + seconds
        while not self.ended():
            if condition():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return False

    def carry_out(self, kill: Kill, start_up: float) -> bool:
        """Kill what is to be killed when it is to be; False where the run was through before."""
        attempt = self.tree()["torchrun"]
        if kill.moment == "start-up":
            until = time.monotonic() + kill.share * start_up
            self.wait(lambda: time.monotonic() > until)
        else:
            assert self.wait(self.training) or self.ended(), "an attempt did not begin to train"
            until = time.monotonic() + kill.share * UNDISTURBED_FOR
            self.wait(lambda: time.monotonic() > until)
            if kill.moment == "saving":
                self.wait(self.saving, 2.0)
        if self.ended():
            return False
        tree = self.tree()
        name, victims = _victims(kill, tree)
        for process in victims:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.killed.append(f"{name} in {kill.moment}")
        if tree["supervisor"][0] in victims:
            self.supervisor.wait()
            self.launch()
        else:
            # The next kill belongs to the next attempt: what is killed twice in the same breath dies once.
            before = attempt or tree["torchrun"]
            ends = name not in ("spare", "fork server")  # the attempt goes on without these
            self.wait(lambda: self.tree()["torchrun"] not in ([], before), LIMIT if ends else 0.0)
        return True

    def survivors(self) -> list[psutil.Process]:
        """Processes that belong to this run, whoever their parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if environment_of(process).get(ENV_RUN) == str(self.run) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def require_undisturbed_end(self, oracle: Oracle) -> None:
        assert self.supervisor.wait(LIMIT) == 0, f"exit code {self.supervisor.returncode}\n{self.tail()}"
        for rank in range(self.ranks):
            require_same(self.scenarios.portrait("run", rank), oracle.portraits[rank], f"rank {rank}")
        assert not (left := self.survivors()), f"processes that outlived their run: {left}"

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-4000:]

    def clear_up(self) -> None:
        if not self.ended():
            self.supervisor.kill()
            self.supervisor.wait()
        for process in self.survivors():
            process.kill()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _victims(kill: Kill, tree: dict[str, list[psutil.Process]]) -> tuple[str, list[psutil.Process]]:
    """Who dies. What does not exist yet, or not in this job, is replaced by what would have started it."""
    if kill.victim == "everything":
        return kill.victim, [process for processes in tree.values() for process in processes]
    if kill.victim == "all ranks" and tree["rank"]:
        return kill.victim, tree["rank"]
    aim = _GENERATIONS.index("rank" if kill.victim == "all ranks" else kill.victim)
    name = next(name for name in reversed(_GENERATIONS[: aim + 1]) if tree[name])
    return name, [tree[name][int(kill.pick * len(tree[name]))]]


def undisturbed(folder: Path, ranks: int, toy: Toy, warm: bool) -> Oracle:
    job = Undertaking(folder, ranks, toy, warm)
    began = time.monotonic()
    job.launch()
    assert job.wait(job.training), job.tail()
    start_up = time.monotonic() - began
    assert job.supervisor.wait(LIMIT) == 0, job.tail()
    return Oracle([job.scenarios.portrait("run", rank) for rank in range(ranks)], start_up)
