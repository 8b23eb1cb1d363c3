"""How long a job stands still when it goes wrong: from the fault to the next healthy optimizer step, three ways.

    in process    the loss of one batch is NaN: from the end of the step that detects it to the end of the next
                  healthy one, less that step itself; twice in a job
    relaunch      one of two ranks is killed (SIGKILL) under `rollback launch`: from the kill to the end of the next
                  step
    by hand       the same kill under plain `torchrun --max-restarts`, with a script that saves with torch.save and
                  resumes from that, as one writes it by hand

The same model in all three: about 200 MB of parameters and 400 MB of AdamW state, two ranks on CPU, DDP over gloo, a
checkpoint every EVERY steps. Rounds are interleaved, so that a busy moment of the machine hits all ways; medians and
ratios are printed, and where a bar is missed it exits with 1.

A step takes five times as long as a rollback and differs from the next by about one, so what is subtracted is that
very step, timed where it begins, and not an ordinary one. What a rollback leaves to the step after it (cold caches,
say) would not be seen that way: how that step compares with ordinary ones is printed too.

    python scripts/bench_recovery.py [--small] [--rounds 5]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

IN_PROCESS_BAR = 30.0  # times as fast as by hand
RELAUNCH_BAR = 0.7  # of the time by hand
RANKS = 2
EVERY = 4  # steps between checkpoints
FAULTS = {"kill": [10], "nan": [40, 60]}  # batches; a rollback wants a good checkpoint, which takes probation
PROBATION = 15
HORIZON = 4  # steps: each fault is a trouble of its own, not the last one come back, which goes further back
AFTER = 6  # batches
STEP_SECONDS = 1.5  # before a kill no step is shorter, so that the job has trained for a while, as jobs have
SCRIPT = Path(__file__)
WIDTHS = {"full": 3500, "small": 64}


@dataclass(frozen=True)
class Standstill:
    """seconds: that the job stood still. step: what the step after that took, as a multiple of an ordinary one."""

    seconds: float
    step: float | None = None


def main() -> int:
    arguments = parse_arguments()
    if arguments.job:
        run_job(arguments.job, Path(arguments.folder), arguments.width)
        return 0
    console, progress = Console(), Console(stderr=True)
    width = WIDTHS["small" if arguments.small else "full"]
    found: dict[str, list[Standstill]] = {way: [] for way in ("in process", "relaunch", "by hand")}
    for number in range(arguments.rounds):
        progress.print(f"round {number + 1} of {arguments.rounds}")
        for way in found:
            with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
                new = measure(way, Path(folder), width)
            found[way] += new
            progress.print(f"  {way}: {', '.join(f'{each.seconds:.3f}' for each in new)} s")
    seconds = {way: [each.seconds for each in taken] for way, taken in found.items()}
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    console.print(table(seconds, medians, arguments.small))
    faster, share = medians["by hand"] / medians["in process"], medians["relaunch"] / medians["by hand"]
    met = faster >= IN_PROCESS_BAR and share <= RELAUNCH_BAR
    console.print(f"in process: {faster:.1f} times as fast as by hand (bar: {IN_PROCESS_BAR:.0f})")
    console.print(f"relaunch: {share:.2f} of the time by hand (bar: {RELAUNCH_BAR})")
    steps = [each.step for each in found["in process"] if each.step is not None]
    console.print(f"the step after a rollback: {statistics.median(steps):.2f} times an ordinary one")
    return 0 if met or arguments.small else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model, for tests: bars are not judged")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all three ways (default: 5)")
    parser.add_argument("--job", choices=["guarded", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(way: str, folder: Path, width: int) -> list[Standstill]:
    """Run one job: how long it stood still at each of its faults."""
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
    return in_process(marks) if way == "in process" else [relaunched(marks)]


def relaunched(marks: list[dict[str, Any]]) -> Standstill:
    """From the kill to the end of the next step."""
    fault = next(mark["at"] for mark in marks if mark["what"] == "fault")
    # Rank 0, which tells of the steps, may be a moment behind the rank that meets the fault.
    ends = [mark for mark in marks if mark["what"] == "end" and mark["rank"] == 0]
    fallen = {mark["pid"] for mark in ends if mark["at"] < fault}
    return Standstill(next(mark["at"] for mark in ends if mark["pid"] not in fallen) - fault)


def in_process(marks: list[dict[str, Any]]) -> list[Standstill]:
    """From when all ranks have ended the step that detects a fault to when all have begun the next healthy one.

    A fault is detected when the step after it ends (verdicts come a step late), or before a snapshot. The next step is
    one from before the fault.
    """
    own = [[mark for mark in marks if mark["rank"] == rank and mark["what"] != "fault"] for rank in range(RANKS)]
    lengths = [end["at"] - begin["at"] for begin, end in zip(own[0][::2], own[0][1::2], strict=True)]
    found = []
    for fault in FAULTS["nan"]:
        back = [place_back(told, fault) for told in own]
        detected = max(told[place - 1]["at"] for told, place in zip(own, back, strict=True))
        begun = max(told[place]["at"] for told, place in zip(own, back, strict=True))
        healthy = lengths[back[0] // 2] / statistics.median(lengths)
        found.append(Standstill(begun - detected, healthy))
    return found


def place_back(told: list[dict[str, Any]], fault: int) -> int:
    """Where, in what one rank told, the first step begins that it took again after the fault of that batch."""
    met = next(place for place, mark in enumerate(told) if mark["step"] == fault)
    back = next((place for place in range(met, len(told)) if told[place]["step"] < fault), None)
    return back if back is not None else sys.exit(f"in process: no rollback followed on the NaN of batch {fault}")


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
    inputs = torch.randn(RANKS * 2 * (FAULTS[fault][-1] + AFTER), width)
    data = TensorDataset(inputs, inputs.mean(1, keepdim=True))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))

    def mark(what: str, step: int) -> None:
        told = {"what": what, "step": step, "at": time.monotonic(), "rank": rank, "pid": os.getpid()}
        with open(folder / "marks.jsonl", "a") as file:
            file.write(json.dumps(told) + "\n")

    def step_on(batch: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mark("begin", batch)
        began = time.monotonic()
        met = folder / f"fault-{batch}"
        bad = batch in FAULTS[fault] and not met.exists()
        if bad and rank == 1:
            mark("fault", batch)
        loss: torch.Tensor = (model(x) - y).square().mean()
        if bad:
            dist.barrier()  # both ranks have looked
            met.touch()
            if fault == "nan":
                loss = loss * float("nan")
            elif rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        mark("end", batch)
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
        horizon=HORIZON,
        evidence_limit=0,
    )
    for x, y in guard:
        guard.observe(step_on(guard.batch, x, y))
    guard.close()


if __name__ == "__main__":
    sys.exit(main())
