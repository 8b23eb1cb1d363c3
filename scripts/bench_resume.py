"""How long it takes to go on at batch 1,000,000 of a shuffled map-style data set, from a new loader to the batch.

Side by side, in one process, without worker processes (their start-up costs every method the same):

- rollback's cursor, from its state;
- permute and slice: the least that a shuffled order can cost, with nothing around it;
- accelerate's skip_first_batches, which iterates the batch sampler (`pip install accelerate` to see it);
- torchdata's StatefulDataLoader, from its state;
- draining a DataLoader.

The fast ones are interleaved, so that a busy moment of the machine hits all of them. Every method must come out at the
batch that its own order has there. Exits with 1 where the cursor's median is above the bar.

    python scripts/bench_resume.py [--batch 1000000] [--repeats 7] [--no-drain]
"""

import argparse
import copy
import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from rollback.train.data.cursor import cursor_for

BAR_SECONDS = 0.15
BATCH_SIZE = 4
SEED = 0


class Numbers(Dataset[int]):
    """Sample i is i, so that what is timed is the loader and not the data."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


Method = tuple[Callable[[], torch.Tensor], list[int]]
"""What is timed and gives the batch, and the samples it must hold."""


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console = Console()
    target = arguments.batch
    dataset = Numbers((target + target // 10) * BATCH_SIZE)

    progress = Console(stderr=True)
    progress.print(f"{len(dataset):,} samples in batches of {BATCH_SIZE}; preparing ...")
    methods: dict[str, Method] = {
        "permute and slice": permute_and_slice(dataset, target),
        "rollback cursor": rollback_cursor(dataset, target),
    }
    if importlib.util.find_spec("accelerate"):
        methods["accelerate skip_first_batches"] = accelerate_skip(dataset, target)
    else:
        progress.print("accelerate is not installed: left out")
    if importlib.util.find_spec("torchdata"):
        methods["torchdata StatefulDataLoader"] = stateful_data_loader(dataset, target)
    else:
        progress.print("torchdata is not installed: left out")

    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(arguments.repeats):
        progress.print(f"round {number + 1} of {arguments.repeats}")
        for name, method in methods.items():
            seconds[name].append(timed(name, method))
    if arguments.drain:
        progress.print("draining, once ...")
        seconds["draining a DataLoader"] = [timed("draining", draining(dataset, target))]

    medians = {name: statistics.median(times) for name, times in seconds.items()}
    console.print(table(target, medians, seconds))
    ours = medians["rollback cursor"]
    verdict = "within" if ours <= BAR_SECONDS else "ABOVE"
    console.print(f"rollback cursor: {ours:.3f} s, {verdict} the bar of {BAR_SECONDS} s")
    return 0 if ours <= BAR_SECONDS else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=1_000_000, help="batch to go on at (default: 1000000)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of all methods but draining (default: 7)")
    parser.add_argument("--no-drain", dest="drain", action="store_false", help="leave out draining, which takes long")
    return parser.parse_args()


def timed(name: str, method: Method) -> float:
    go, expected = method
    start = time.perf_counter()
    batch = go()
    elapsed = time.perf_counter() - start
    if batch.tolist() != expected:
        sys.exit(f"{name} came out at samples {batch.tolist()}, not {expected}: its time means nothing")
    return elapsed


def shuffled_loader(dataset: Numbers) -> DataLoader[int]:
    torch.manual_seed(SEED)
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)


def samples_at(dataset: Numbers, target: int) -> list[int]:
    """What a plain loader with this seed has in batch `target`: it draws a base seed, then its sampler's seed."""
    torch.manual_seed(SEED)
    torch.empty((), dtype=torch.int64).random_()
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    return permuted(len(dataset), generator, target).tolist()


def permuted(length: int, generator: torch.Generator, target: int) -> torch.Tensor:
    return torch.randperm(length, generator=generator)[target * BATCH_SIZE : (target + 1) * BATCH_SIZE]


def permute_and_slice(dataset: Numbers, target: int) -> Method:
    def go() -> torch.Tensor:
        return permuted(len(dataset), torch.Generator().manual_seed(SEED), target)

    return go, go().tolist()


def rollback_cursor(dataset: Numbers, target: int) -> Method:
    cursor = cursor_for(shuffled_loader(dataset))
    cursor.open_epoch()
    for _ in range(target):
        cursor.skip()
    state = cursor.state_dict()

    def go() -> torch.Tensor:
        fresh = cursor_for(shuffled_loader(dataset))
        fresh.load_state_dict(state)
        batch: torch.Tensor = fresh.next()
        return batch

    return go, samples_at(dataset, target)


def accelerate_skip(dataset: Numbers, target: int) -> Method:
    from accelerate import skip_first_batches

    def go() -> torch.Tensor:
        batch: torch.Tensor = next(iter(skip_first_batches(shuffled_loader(dataset), target)))
        return batch

    return go, samples_at(dataset, target)


def stateful_data_loader(dataset: Numbers, target: int) -> Method:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        torch.manual_seed(SEED)
        return StatefulDataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)

    # Its state after one batch, with the counts of `target`: draining it for the true one would take a minute. That
    # the batch is the right one is checked as for every method.
    running = loader()
    next(iter(running))
    state = copy.deepcopy(running.state_dict())
    state["_sampler_iter_yielded"] = state["_num_yielded"] = target
    samples = state["_sampler_iter_state"]
    samples["samples_yielded"] = samples["sampler_iter_state"]["yielded"] = target * BATCH_SIZE
    generator = torch.Generator()
    generator.set_state(samples["sampler_iter_state"]["generator"])

    def go() -> torch.Tensor:
        fresh = loader()
        fresh.load_state_dict(copy.deepcopy(state))
        batch: torch.Tensor = next(iter(fresh))
        return batch

    return go, permuted(len(dataset), generator, target).tolist()


def draining(dataset: Numbers, target: int) -> Method:
    def go() -> torch.Tensor:
        batches = iter(shuffled_loader(dataset))
        for _ in range(target):
            next(batches)
        batch: torch.Tensor = next(batches)
        return batch

    return go, samples_at(dataset, target)


def table(target: int, medians: dict[str, float], seconds: dict[str, list[float]]) -> Table:
    ours = medians["rollback cursor"]
    result = Table(title=f"Going on at batch {target:,} of a shuffled data set", caption="ratio to rollback's cursor")
    result.add_column("method", no_wrap=True)
    result.add_column("median s", justify="right")
    result.add_column("min to max s", justify="right")
    result.add_column("ratio", justify="right")
    for name in sorted(medians, key=lambda name: medians[name]):
        spread = f"{min(seconds[name]):.3f} to {max(seconds[name]):.3f}"
        result.add_row(name, f"{medians[name]:.3f}", spread, f"{medians[name] / ours:.1f}")
    return result


if __name__ == "__main__":
    sys.exit(main())
