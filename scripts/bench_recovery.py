"""How long a job stands still when it goes wrong: from the fault to the next healthy optimizer step, three ways.

    in process    the loss of one batch is NaN: from the end of the step that detects it to the end of the next
                  healthy one, less the time of an ordinary step
    relaunch      one of two ranks is killed (SIGKILL) under `rollback launch`: from the kill to the end of the next
                  step
    by hand       the same kill under plain `torchrun --max-restarts`, with a script that saves with torch.save and
                  resumes from that, as one writes it by hand

The same model in all three: about 200 MB of parameters and 400 MB of AdamW state, two ranks on CPU, DDP over gloo, a
checkpoint every STEPS steps. Rounds are interleaved, so that a busy moment of the machine hits all ways; medians and
ratios are printed, and where a bar is missed it exits with 1.

    python scripts/bench_recovery.py [--small] [--rounds 3]
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

IN_PROCESS_BAR = 30.0  # times as fast as by hand
RELAUNCH_BAR = 0.7  # of the time by hand
RANKS = 2
EVERY = 4  # steps between checkpoints
FAULT = {"kill": 10, "nan": 40}  # batch with the fault; a rollback wants a good checkpoint, which takes probation
PROBATION = 15
AFTER = 6  # batches
STEP_SECONDS = 1.5  # before a kill no step is shorter, so that the job has trained for a while, as jobs have
SCRIPT = Path(__file__)
WIDTHS = {"full": 3500, "small": 64}


def main() -> int:
    arguments = parse_arguments()
    if arguments.job:
        run_job(arguments.job, Path(arguments.folder), arguments.width)
        return 0
    console, progress = Console(), Console(stderr=True)
    width = WIDTHS["small" if arguments.small else "full"]
    seconds: dict[str, list[float]] = {way: [] for way in ("in process", "relaunch", "by hand")}
    for number in range(arguments.rounds):
        progress.print(f"round {number + 1} of {arguments.rounds}")
        for way, taken in seconds.items():
            with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
                taken.append(measure(way, Path(folder), width))
            progress.print(f"  {way}: {taken[-1]:.3f} s")
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    console.print(table(seconds, medians, arguments.small))
    faster, share = medians["by hand"] / medians["in process"], medians["relaunch"] / medians["by hand"]
    met = faster >= IN_PROCESS_BAR and share <= RELAUNCH_BAR
    console.print(f"in process: {faster:.0f} times as fast as by hand (bar: {IN_PROCESS_BAR:.0f})")
    console.print(f"relaunch: {share:.2f} of the time by hand (bar: {RELAUNCH_BAR})")
    return 0 if met or arguments.small else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model, for tests: bars are not judged")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all three ways (default: 3)")
    parser.add_argument("--job", choices=["guarded", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(way: str, folder: Path, width: int) -> float:
    """Run one job and return how long it stood still."""
    kind = "plain" if way == "by hand" else "guarded"
    job = [str(SCRIPT), "--job", kind, "--folder", str(folder), "--width", str(width)]
    ranks = ["--nproc-per-node", str(RANKS)]
    if way == "by hand":
        start = ["-m", "torch.distributed.run", "--standalone", *ranks, "--max-restarts", "3"]
    else:
        start = ["-m", "rollback", "launch", *ranks, "--run", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_FAULT": "nan" if way == "in process" else "kill"}
    if way == "by hand":
        # Ranks that torchrun restarts share one store with their forerunners and may take the addresses of the dead
        # for each other's, and wait for ever (https://github.com/pytorch/pytorch/issues/135712): a store for each.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        [sys.executable, *start, *job], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{way}: the job failed\n{done.stdout[-4000:]}")
    marks = [json.loads(line) for line in (folder / "marks.jsonl").read_text().splitlines()]
    fault = next(mark["at"] for mark in marks if mark["what"] == "fault")
    steps = [mark for mark in marks if mark["what"] == "step"]
    # Rank 0, which tells of the steps, may be a moment behind the rank that meets the fault.
    if way != "in process":
        fallen = {mark["pid"] for mark in steps if mark["at"] < fault}
        return float(next(mark["at"] for mark in steps if mark["pid"] not in fallen)) - fault
    met = next(number for number, mark in enumerate(steps) if mark["step"] == FAULT["nan"])
    after = [mark["at"] for mark in steps[met:]]
    # The step with the NaN ends, the next one's end detects it (verdicts come a step late), and the one after that is
    # the first healthy one.
    detected, healthy = after[1], after[2]
    ordinary = statistics.median([end - start for start, end in itertools.pairwise(after[2:])])
    return max(healthy - detected - ordinary, 0.0)


def table(seconds: dict[str, list[float]], medians: dict[str, float], small: bool) -> Table:
    made = Table(title="From the fault to the next healthy step" + (", tiny model" if small else ""))
    made.add_column("way", no_wrap=True)
    for heading in ("median s", "min to max s", "of by hand"):
        made.add_column(heading, justify="right")
    for way, taken in seconds.items():
        spread = f"{min(taken):.3f} to {max(taken):.3f}"
        made.add_row(way, f"{medians[way]:.3f}", spread, f"{medians[way] / medians['by hand']:.3f}")
    return made


# What the ranks run ---------------------------------------------------------------------------------------------------


def run_job(kind: str, folder: Path, width: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    fault = os.environ["BENCH_FAULT"]
    inputs = torch.randn(RANKS * 2 * (FAULT[fault] + AFTER), width)
    data = TensorDataset(inputs, inputs.mean(1, keepdim=True))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))

    def mark(what: str, step: int) -> None:
        if rank == 0 or what == "fault":
            with open(folder / "marks.jsonl", "a") as file:
                told = {"what": what, "step": step, "at": time.monotonic(), "pid": os.getpid()}
                file.write(json.dumps(told) + "\n")

    def step_on(batch: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        bad = batch == FAULT[fault] and not (folder / "fault").exists()
        if bad and rank == 1:
            mark("fault", batch)
        loss = (model(x) - y).square().mean()
        if bad:
            dist.barrier()  # both ranks have looked
            (folder / "fault").touch()
            if fault == "nan":
                loss = loss * float("nan")
            elif rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mark("step", batch)
        if fault == "kill":
            time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))
        return loss.detach()

    if kind == "plain":
        train_by_hand(folder, model, optimizer, loader, step_on)
    else:
        train_guarded(model, optimizer, loader, step_on)
    dist.barrier()
    dist.destroy_process_group()
    # No tidy end: now and then torch waits there for ever when DDP is freed, for a thread of gloo that waits
    # for the interpreter lock, which the destructor of DDP's process group holds.
    os._exit(0)


def train_by_hand(folder, model, optimizer, loader, step_on) -> None:  # type: ignore[no-untyped-def]
    """A checkpoint of everything by rank 0 with torch.save, and a resume that reads data up to where it was."""
    import torch
    import torch.distributed as dist

    path, begin = folder / "checkpoint.pt", 0
    if path.exists():
        kept = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        begin = kept["batch"]
    for batch, (x, y) in enumerate(loader):
        if batch < begin:
            continue
        if batch % EVERY == 0 and batch > begin:
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batch": batch}
                torch.save(state, folder / "checkpoint.tmp")
                os.replace(folder / "checkpoint.tmp", path)
            dist.barrier()
        step_on(batch, x, y)


def train_guarded(model, optimizer, loader, step_on) -> None:  # type: ignore[no-untyped-def]
    import rollback

    guard = rollback.Guard(
        model=model,
        optimizer=optimizer,
        loader=loader,
        snapshot_every=EVERY,
        policy="surgical",
        probation=PROBATION,
        evidence_limit=0,
    )
    for x, y in guard:
        guard.observe(step_on(guard.batch, x, y))
    guard.close()


if __name__ == "__main__":
    sys.exit(main())
