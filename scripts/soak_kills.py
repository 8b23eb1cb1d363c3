"""Kill one rank of a job at random moments, again and again, and compare the end with a run that was left alone.

    python scripts/soak_kills.py --ranks 2 --seeds 0:20 [--kills 5] [--how killed] [--nan surgical] [--out kills.jsonl]

For each seed a job of three epochs runs under `rollback launch`, with a checkpoint every 50 steps, and one of its ranks
is killed several times: in start-up, loading, forward, backward, update, evaluation, snapshot, or wherever it is. Each
rank writes down what it is doing, so that it is known afterwards. At the end the weights, optimizer, random states,
consumed samples of every rank must be those of the undisturbed run, bit for bit.

--how: what befalls the rank. `stopped` and `asleep` are hangs, which the supervisor has to notice first.

--nan: some batches have a NaN loss on one rank, so the job goes back to a checkpoint, too. Many kills then hit such a
return, or the first steps behind a start. Under `surgical` the undisturbed run has the same NaNs, and goes back too;
under `balanced` the window begins at the checkpoint that was restored, which a kill may change, so the other run is
told from the start which batches and samples are left out.

--out keeps the kills of seeds that are done, and goes on behind them. Printed are steps lost by moment. Exits with 1 if
one run differs.
"""

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollback.facts.history import fold
from rollback.facts.training import Attached, LastSnapshotMade
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths

EVERY = 50
EPOCHS, STEPS = 3, 200  # of an epoch
MOMENTS = (
    "start-up",
    "guard",
    "loading",
    "forward",
    "backward",
    "update",
    "behind the update",
    "evaluation",
    "snapshot",
    "return",
)
NAN = (120, 205, 340, 399, 404, 515)
"""Batches with a NaN: also in the first steps of an epoch, so that the way back leads into the one before, and the last
batch of an epoch."""
RETURN = MOMENTS.index("return")
AIMED, SOON = 0.5, 0.2  # shares of the kills that wait for a return or for the first steps of a start, and for these
POLICIES: dict[str, dict[str, Any]] = {
    "": {"rewind": 5, "skip_after": 3},
    "surgical": {"policy": "surgical"},
    "balanced": {"rewind": 5, "skip_after": 3, "max_skipped": "100%"},
}
HOW = {
    "killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "raising": signal.Signals["SIGRTMIN"], "asleep": signal.SIGPROF
}  # fmt: skip
"""What befalls a rank: the signal for it."""
FLAGS = dict.fromkeys(("stopped", "asleep"), ("--hang-after", "30"))
"""Start-up counts, too."""
STARTING = 0.1  # share of the kills that hit a start
WITHIN = 3.0  # seconds behind the first step
_DOING = struct.Struct("<4q")  # pid, moment, step, attempt
LIMIT = 400.0


def main() -> int:
    arguments = parse_arguments()
    if arguments.job:
        run_job(Path(arguments.job))
        return 0
    console = Console()
    first, behind = map(int, arguments.seeds.split(":"))
    out = Path(arguments.out) if arguments.out else None
    done = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    with tempfile.TemporaryDirectory(prefix="soak-kills-") as folder:
        console.print(f"undisturbed, {arguments.ranks} ranks")
        undisturbed = Job(Path(folder, "undisturbed"), arguments.ranks, POLICIES[arguments.nan])
        undisturbed.finish(undisturbed.start())
        for seed in range(first, behind):
            if any(line["seed"] == seed and line["ranks"] == arguments.ranks for line in done):
                continue
            found = kill_in_turn(Path(folder, str(seed)), arguments, seed, undisturbed)
            done += found
            for line in found:
                console.print(json.dumps(line), soft_wrap=True, highlight=False)
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    console.print(table(done))
    return int(any(not line["exact"] for line in done))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="0:4", help="first and last + 1")
    parser.add_argument("--kills", type=int, default=5, help="in each job")
    parser.add_argument("--how", choices=HOW, default="killed", help="what befalls a rank")
    parser.add_argument("--nan", choices=POLICIES, default="", help="batches with a NaN loss, and the policy for them")
    parser.add_argument("--keep", help="a folder that gets the jobs that differ")
    parser.add_argument("--out", help="a file for the kills, one a line")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


class Job:
    """One run in a folder of its own."""

    def __init__(self, folder: Path, ranks: int, settings: dict[str, Any], *flags: str) -> None:
        folder.mkdir()
        (folder / "settings").write_text(json.dumps(settings))
        self.flags = flags
        self.folder, self.run, self.ranks = folder, folder / "run", ranks
        memory = folder / "memory"
        memory.mkdir()

    def start(self) -> subprocess.Popen[str]:
        launch = ["-m", "rollback", "launch", "--nproc", str(self.ranks), "--run", str(self.run), *self.flags]
        flags = ["--fast-tier", str(self.folder / "memory"), __file__, "--job", str(self.folder)]
        return subprocess.Popen(
            [sys.executable, *launch, *flags], text=True, stdout=subprocess.DEVNULL,
            stderr=(self.folder / "stderr").open("w"), env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        )  # fmt: skip

    def finish(self, job: subprocess.Popen[str]) -> None:
        if job.wait(LIMIT):
            sys.exit(f"the job failed\n{(self.folder / 'stderr').read_text()[-6000:]}")

    def doing(self, rank: int) -> tuple[int, int, int, int]:
        """The pid of a rank, what it is doing, its step and attempt; zeros where it has not begun."""
        try:
            return _DOING.unpack((self.folder / f"doing-{rank}").read_bytes()[: _DOING.size])
        except (OSError, struct.error):
            return 0, 0, 0, 0

    def ends(self) -> list[str]:
        return [(self.folder / f"end-{rank}").read_text() for rank in range(self.ranks)]

    def outcomes(self) -> dict[int, LastSnapshotMade]:
        """By attempt."""
        records = read_journal(RunPaths(self.run).supervisor_journal).records
        return {record.attempt: record.fact for record in records if isinstance(record.fact, LastSnapshotMade)}

    def starts(self) -> dict[int, int]:
        """The step at which each attempt began."""
        records = read_journal(RunPaths(self.run).train_journal).records
        return {record.attempt: record.fact.step for record in records if isinstance(record.fact, Attached)}


def kill_in_turn(folder: Path, arguments: argparse.Namespace, seed: int, undisturbed: Job) -> list[dict[str, Any]]:
    """Run one job, and kill a rank of each of its first attempts."""
    chance = random.Random(f"{arguments.ranks}/{seed}")
    launched = Job(folder, arguments.ranks, POLICIES[arguments.nan], *FLAGS.get(arguments.how, ()))
    job = launched.start()
    killed: dict[int, tuple[int, str, int]] = {}
    pids: set[int] = set()
    starting = False
    while len(killed) < arguments.kills and job.poll() is None:
        rank, aimed = chance.randrange(arguments.ranks), chance.random() if arguments.nan else 1.0
        starting = not starting and chance.random() < STARTING  # two failed starts in a row end the run
        began = -1
        while job.poll() is None:
            pid, doing, step, _ = launched.doing(rank)
            if pid and pid not in pids and (starting or doing):
                began = step if began < 0 else began
                if (starting or aimed >= AIMED) or (aimed < SOON and doing > 0 and step > began) or doing == RETURN:
                    break
            time.sleep(0.002)
        if starting or aimed >= AIMED:
            time.sleep(chance.uniform(0, 0.3 if starting else WITHIN))
        else:
            time.sleep(chance.uniform(0, 0.04))
        pids |= {launched.doing(each)[0] for each in range(arguments.ranks)}
        pid = launched.doing(rank)[0]
        try:
            os.kill(pid, HOW[arguments.how])
        except ProcessLookupError:  # the job is over, or the rank ended with another one
            continue
        _, hit, step, attempt = launched.doing(rank)
        if attempt not in killed:  # else it was about to end anyway
            killed[attempt] = rank, MOMENTS[hit], step
    launched.finish(job)
    exact = launched.ends() == (same_skips(launched) if arguments.nan == "balanced" else undisturbed).ends()
    if not exact and arguments.keep:
        shutil.copytree(folder, Path(arguments.keep, f"{arguments.nan}-{arguments.ranks}-{seed}"))
    outcomes, starts = launched.outcomes(), launched.starts()
    lines = []
    for attempt, (rank, moment, step) in killed.items():
        # None follows if the training had ended.
        start = next((start for later, start in sorted(starts.items()) if later > attempt), step)
        told = outcomes.get(attempt)
        why = told.why_not if told else "nobody tried"
        lines.append(
            {
                "seed": seed, "ranks": arguments.ranks, "how": arguments.how, "rank": rank, "moment": moment,
                "step": step, "resumed": start, "lost": max(0, step - start), "why": why, "exact": exact,
            }
        )  # fmt: skip
    return lines


def same_skips(launched: Job) -> Job:
    """The run that has the skips of that one from the start, and leaves out the same samples, and that nobody kills."""
    found = fold(read_journal(RunPaths(launched.run).train_journal).records)
    left_out = [{"batch": fact.batch, "samples": list(fact.samples)} for fact in found.quarantine]
    skip = [window.model_dump() for window in found.skip_list]
    job = Job(
        launched.folder / "told", launched.ranks, {**POLICIES["balanced"], "skip": skip, "skip_samples": left_out}
    )
    job.finish(job.start())
    return job


def table(lines: list[dict[str, Any]]) -> Table:
    made = Table(title=f"{len(lines)} kills, {sum(line['exact'] for line in lines)} in runs that ended exactly")
    for column in ("ranks", "moment", "kills", "lost steps", "mean", "without loss"):
        made.add_column(column, justify="right")
    groups: dict[tuple[Any, str], list[int]] = defaultdict(list)
    for line in lines:
        groups[line["ranks"], line["moment"]].append(line["lost"])
        groups[line["ranks"], "all"].append(line["lost"])
    for (ranks, moment), lost in sorted(
        groups.items(), key=lambda item: (item[0][0], (*MOMENTS, "all").index(item[0][1]))
    ):
        cells = (len(lost), sum(lost), f"{statistics.mean(lost):.2f}", lost.count(0))
        made.add_row(str(ranks), moment, *map(str, cells))
    return made


# What the ranks run ---------------------------------------------------------------------------------------------------


def run_job(folder: Path) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    import rollback

    settings = json.loads((folder / "settings").read_text())
    bad = NAN if settings.keys() & {"policy", "max_skipped"} else ()
    rank = int(os.environ["RANK"])
    fd = os.open(folder / f"doing-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 4096)
    board, step, attempt = mmap.mmap(fd, 4096), 0, int(os.environ["ROLLBACK_ATTEMPT"])

    def now(moment: str) -> None:
        board[: _DOING.size] = _DOING.pack(os.getpid(), MOMENTS.index(moment), step, attempt)

    now("start-up")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return 4 * ranks * STEPS

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
            now("loading")
            x = torch.sin(torch.arange(8.0) * (index + 1)) + 0.1 * torch.randn(8)
            return x, x.sum(0, keepdim=True) * (1 + 0.1 * random.random()), index

    def during(owner: Any, name: str, moment: str) -> None:
        ordinary: Callable[..., Any] = getattr(owner, name)

        def told(*given: Any, **others: Any) -> Any:
            now(moment)
            try:
                return ordinary(*given, **others)
            finally:
                now("guard")

        setattr(owner, name, told)

    def fail(*_: object) -> None:
        raise RuntimeError("a failure at a random moment")

    signal.signal(HOW["raising"], fail)
    signal.signal(HOW["asleep"], lambda *_: threading.Event().wait())
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.999)
    data = Samples()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, snapshot_every=EVERY, probation=20,
        **settings,
    )  # fmt: skip
    during(guard._loop.schedule, "take_snapshot", "snapshot")
    during(guard._loop.rewinder, "carry_out", "return")
    optimizer.register_step_pre_hook(lambda *_: now("update"))
    optimizer.register_step_post_hook(lambda *_: now("behind the update"))
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    seen = os.open(folder / f"seen-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for epoch in guard.epochs(EPOCHS, rehearse=lambda: next(iter(loader)), resume_between=True):
        sampler.set_epoch(epoch)
        for x, y, ids in guard:
            step = guard.step
            os.write(seen, f"{json.dumps([step, guard.batch, ids.tolist()])}\n".encode())
            now("forward")
            loss = (model(x) - y).square().mean()
            if guard.batch in bad and rank == guard.batch % ranks:
                loss = loss * float("nan")
            now("backward")
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            guard.observe(loss.detach())
            now("guard")
        now("evaluation")
        with torch.no_grad():
            model(torch.randn(4, 8))
        random.random(), np.random.rand()
    steps = guard.step
    guard.close()
    consumed = {}
    for line in (folder / f"seen-{rank}").read_text().splitlines():
        step, batch, ids = json.loads(line)
        consumed[step] = [batch, ids]
    told = {
        "weights": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "steps": steps, "taken": [consumed[number] for number in range(steps)],
    }  # fmt: skip
    ends = {name: hashlib.sha256(_bits(item)).hexdigest()[:16] for name, item in told.items()}
    (folder / f"end-{rank}").write_text(json.dumps(ends))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _bits(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"".join(repr(name).encode() + _bits(item) for name, item in value.items())
    return value.numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode()


if __name__ == "__main__":
    sys.exit(main())
