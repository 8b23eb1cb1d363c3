"""Random SIGKILLs against supervised runs, until enough of them are survived or the time is up: `scripts/soak`.

A kill is planned by seed: what dies (a rank, all ranks, a loader worker, torchrun, the supervisor, everything at once)
and when (while the attempt starts, in training, while a checkpoint is being written). A run is killed again and again
until it is through; it has survived if it ends bit for bit as one that was never disturbed and leaves no process.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from job_results import JOB, Scenarios
from toy import Toy, require_same
from warm import WarmPython, environment_of, warm_up

from rollback.config import ENV_RUN
from rollback.rundir import tiers
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import read_heartbeats

VICTIMS = {
    "rank": 6, "all ranks": 3, "worker": 2, "nursery": 1, "torchrun": 3, "spare": 1, "supervisor": 3, "everything": 1,
}  # fmt: skip
MOMENTS = {"start-up": 3, "training": 4, "saving": 3}
"""How often each is drawn, relative to the others."""
COLD = 8  # one run in so many starts its processes as users do
KILLS_OF_A_RUN = 40  # then it is left alone, so that it ends
UNDISTURBED_FOR = 1.0  # seconds of training from which the moment of a kill is drawn
LIMIT = 180.0  # a wait that is longer than this has failed

# What is skipped must not depend on which checkpoints a killed run happens to have: only what is bad, each time.
_SURGICAL = {"policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20}
JOBS: tuple[tuple[int, Toy], ...] = (
    (2, Toy(samples=2400, sampler="distributed", epochs=2, loop="epochs", between=True, nan=(100, 450), nan_rank=1,
            patient=False, settings=_SURGICAL)),
    (1, Toy(samples=2400, workers=2, augment=True, nan=(150, 400), patient=False, settings=_SURGICAL)),
    (1, Toy(loader="drawn", accumulate=2, max_steps=500, patient=False, settings=_SURGICAL)),
)  # fmt: skip
"""Number of ranks and the job. All steps take a millisecond or two, so that a checkpoint is nearly always under way."""


_GENERATIONS = ("supervisor", "spare", "torchrun", "nursery", "rank", "worker")


@dataclass(frozen=True)
class Kill:
    """What dies, and when: `share` of the time that the moment leaves. `pick` chooses among several victims."""

    victim: str
    moment: str
    share: float
    pick: float

    def __str__(self) -> str:
        return f"{self.victim} in {self.moment} at {self.share:.2f}"


def plan(seed: int, run: int) -> Iterator[Kill]:
    """The kills of a run, without end. A pure function of its arguments."""
    source = random.Random(f"{seed}/{run}")
    while True:
        (victim,) = source.choices([*VICTIMS], [*VICTIMS.values()])
        (moment,) = source.choices([*MOMENTS], [*MOMENTS.values()])
        yield Kill(victim, moment, source.random(), source.random())


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
            "--restart-budget", "1000", *(["--no-preload"] if self.warm else []), str(JOB), str(self.scenarios.path),
        ]  # fmt: skip
        environment = {**os.environ, "NO_COLOR": "1"}
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
            # A rank that the nursery has forked bears a name.
            found["rank" if self.warm or _name(child).startswith("rank ") else "nursery"].append(child)
        found["worker"] = list(itertools.chain.from_iterable(map(_children, found["rank"])))
        return found

    def training(self) -> bool:
        """Whether a rank of the attempt that now runs has shown that it trains."""
        ranks = {process.pid for process in self.tree()["rank"]}
        return any(beat.pid in ranks and beat.step > 0 for beat in read_heartbeats(self.paths.ranks).values())

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
            time.sleep(0.002)
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
            ends = name not in ("spare", "nursery")  # the attempt goes on without these
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


class Soak:
    """Kills until `kills` are survived, the time is up, or a run ended otherwise than it should have."""

    def __init__(self, folder: Path, seed: int, kills: int, minutes: float, say: Callable[[str], None]) -> None:
        self.folder, self.seed, self.kills, self.say = folder, seed, kills, say
        self.survived: Counter[str] = Counter()
        self.lost: list[str] = []
        self.runs = 0
        register = folder / "register"
        register.mkdir()
        warm_up(register)
        self._oracles: dict[tuple[int, bool], Oracle] = {}
        self.began = time.monotonic()
        self._until = self.began + 60 * minutes

    def over(self) -> bool:
        return self.survived.total() >= self.kills or bool(self.lost) or time.monotonic() > self._until

    def keep_running(self) -> None:
        for number in itertools.count():
            if self.over():
                return
            self.endure(number)

    def endure(self, number: int) -> None:
        """One run: kill it until it is through or enough was killed, and compare."""
        ranks, toy = JOBS[number % len(JOBS)]
        warm = number % COLD != COLD - 1
        oracle = self._oracle(number % len(JOBS), warm)
        job = Undertaking(self.folder / f"run-{number}", ranks, toy, warm)
        try:
            job.launch()
            for kill in itertools.islice(plan(self.seed, number), KILLS_OF_A_RUN):
                enough = self.survived.total() + len(job.killed) >= self.kills
                if enough or self.over() or not job.carry_out(kill, oracle.start_up):
                    break
            job.require_undisturbed_end(oracle)
        except (AssertionError, subprocess.TimeoutExpired, KeyError, OSError) as error:
            self.lost.append(f"run {number} after {job.killed}: {error}\n{job.tail()}")
            self.say(f"run {number} is lost; its folder is kept: {job.folder}")
        else:
            shutil.rmtree(job.folder)
            self.survived.update(job.killed)
            self.runs += 1
            self.say(f"run {number}: {self.account()}")
        finally:
            job.clear_up()

    def _oracle(self, which: int, warm: bool) -> Oracle:
        """Made when first needed: what a job ends with is the same each time, how long it takes to begin is not."""
        if (which, warm) not in self._oracles:
            began = time.monotonic()
            folder = self.folder / f"undisturbed-{which}-{'warm' if warm else 'cold'}"
            self._oracles[which, warm] = undisturbed(folder, *JOBS[which], warm)
            self._until += time.monotonic() - began
            self.began += time.monotonic() - began
        return self._oracles[which, warm]

    def account(self) -> str:
        minutes = max(time.monotonic() - self.began, 0.1) / 60
        total = self.survived.total()
        return f"{total} kills survived in {self.runs} runs, {minutes:.1f} min, {total / minutes:.1f} kills a minute"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="stop when so many are survived (default: 1000)")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no other kill after this time (default: 60)")
    parser.add_argument("--seed", type=int, help="of all that is drawn (default: a new one each time)")
    parser.add_argument("--run", type=int, help="carry out the kills of this run only")
    parser.add_argument("--folder", type=Path, help="where runs are kept while they last (default: a temporary one)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="rollback-soak-", dir=arguments.folder))
    soak = Soak(folder, seed, arguments.kills, arguments.minutes, lambda line: print(line, flush=True))
    if arguments.run is None:
        soak.keep_running()
    else:
        soak.endure(arguments.run)
    for what, count in sorted(soak.survived.items()):
        print(f"{count:6} {what}")
    print(f"seed {seed}: {soak.account()}; {len(soak.lost)} runs lost")
    for account in soak.lost:
        number = account.split()[1]
        print(f"{account}\nplay it again: scripts/soak --seed {seed} --run {number}")
    if not soak.lost:
        shutil.rmtree(folder)
    return 1 if soak.lost else 0


if __name__ == "__main__":
    sys.exit(main())
