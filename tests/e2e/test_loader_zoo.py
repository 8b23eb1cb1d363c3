"""No kind of data loader ends in silently wrong data: what is killed, stopped or rolled back trains on the same batches
as an undisturbed run, bit for bit, or is refused before it trains on others.

The kinds, and what is expected of each, are in tests/support/zoo; so are the trials. One kind alone, and the rest of
all trials:

    scripts/test tests/e2e/test_loader_zoo.py -k 'in_order'
    scripts/test --soak tests/e2e/test_loader_zoo.py

and as a table, with what happened: `PYTHONPATH=tests/support python tests/e2e/test_loader_zoo.py [part of a name]`.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from attempts import Forker
from zoo import iterable, mapstyle, stateful  # noqa: F401 - they enter their kinds
from zoo.kinds import KINDS, TRIALS
from zoo.trials import PROGRAM, Specimen

_WIDTH = 72
IN_FULL = {
    "shuffle", "augmented in process", "list", "callable", "iterable told the epoch", "wrapper over shuffle, no length",
    "StatefulDataLoader, shuffle", "nodes, shuffle", "hand-written, order of the epoch in its state",
}  # fmt: skip
"""One of each way in which a loader keeps its place: all trials by default."""

ALIKE = {
    "sequential": "shuffle",
    "with replacement, own generator": "shuffle, own generator",
    "SubsetRandomSampler": "WeightedRandomSampler",
    "DistributedSampler, set_epoch forgotten": "DistributedSampler, plain range loop",
    "sampler with own numpy generator": "sampler with own random.Random",
    "sampler that keeps set_epoch as _epoch, plain range loop": "sampler that keeps set_epoch as _epoch",
    "sampler that shuffles in set_epoch": "DistributedSampler",
    "buckets by length, shuffled": "batch_sampler",
    "batch sampler that yields from a list it owns": "batch sampler that clears the list it yields",
    "sampler that yields tuples": "sampler that yields strings",
    "workers": "augmented in workers",
    "persistent workers, prefetch_factor": "augmented in persistent workers, nothing seeded",
    "custom collate": "collate that draws (mixup)",
    "augmented in workers, worker_init_fn seeds": "augmented in workers",
    "augmented by get_worker_info().seed and the sample's number": "augmented in workers",
    "Subset and ConcatDataset": "shuffle",
    "TensorDataset": "shuffle",
    "random_split, seeded": "random_split, nothing seeded",
    "data set told the epoch, in workers": "iterable told the epoch",
    "iterable, batch_size=None": "batch_size=None",
    "iterable, last batch short, length known": "iterable",
    "ChainDataset": "iterable",
    "iterable, other batch size at resume": "other batch size at resume",
    "callable, other batch size at resume": "callable, other data at resume",
    "wrapper over DistributedSampler, plain range loop": "wrapper over DistributedSampler",
    "DataLoader subclass with its own __iter__, workers, nothing seeded": "DataLoader subclass with its own __iter__",
    "objects with tensors from a callable": "opaque objects from a callable",
    "StatefulDataLoader": "StatefulDataLoader, shuffle",
    "StatefulDataLoader, shuffle, nothing seeded": "StatefulDataLoader, shuffle",
    "StatefulDataLoader, shuffle, own generator": "StatefulDataLoader, shuffle",
    "StatefulDataLoader, workers": "StatefulDataLoader, other number of workers at resume",
    "StatefulDataLoader, persistent workers, snapshot_every_n_steps=3": "StatefulDataLoader, augmented in workers",
    "StatefulDataLoader, augmented in process": "StatefulDataLoader, augmented in workers",
    "StatefulDataLoader, other batch size at resume": "other batch size at resume",
    "StatefulDataLoader, samples moved between attempts": "samples moved between attempts",
    "StatefulDataLoader, iterable without state": "StatefulDataLoader, iterable shared out to workers",
    "StatefulDataLoader, stateful iterable": "StatefulDataLoader, stateful iterable in workers",
    "StatefulDataLoader, stateful iterable in workers, snapshot_every_n_steps=4":
        "StatefulDataLoader, stateful iterable in workers",
    "nodes": "nodes, shuffle",
    "nodes, MultiNodeWeightedSampler": "nodes, threads and prefetching",
    "hand-written, with state": "hand-written, order of the epoch in its state",
}  # fmt: skip
"""Kinds that are read in the way of another one, from other data or by another sampler: left to the soak."""


def _by_default() -> Iterator[tuple[str, str]]:
    """The others, without those in `ALIKE`, are stopped or go back, in turn, and meet what is expected of one trial and
    of no other. The rest is left to the soak."""
    for number, (name, kind) in enumerate(KINDS.items()):
        if name in ALIKE:
            continue
        words = Counter(kind.expected.values())
        turn = "stopped" if number % 2 == 0 or "retried" not in kind.expected else "retried"
        for trial, word in kind.expected.items():
            if name in IN_FULL or trial == turn or words.total() == 1 or (len(words) > 1 and words[word] == 1):
                yield name, trial


BY_DEFAULT = {*_by_default()}
CASES = [
    pytest.param(name, trial, id=f"{name} - {trial}", marks=[] if (name, trial) in BY_DEFAULT else pytest.mark.soak)
    for name, kind in KINDS.items()
    for trial in TRIALS
    if trial in kind.expected
]


@pytest.fixture(scope="module")
def specimen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Specimen]]:
    """One for each kind, since its trials are all compared with one undisturbed run."""
    with Forker(PROGRAM) as forker:
        yield cache(lambda name: Specimen(name, tmp_path_factory.mktemp("kind"), forker))


@pytest.mark.parametrize(("name", "trial"), CASES)
def test_what_is_trained_on_is_right_or_refused(specimen: Callable[[str], Specimen], name: str, trial: str) -> None:
    outcome = specimen(name).outcome(trial)
    assert outcome.word == KINDS[name].expected[trial], outcome.why


def test_every_kind_or_one_like_it_is_tried_by_default_and_every_trial() -> None:
    tried = {name for name, _ in BY_DEFAULT}
    assert tried | ALIKE.keys() == KINDS.keys()
    assert tried >= {*IN_FULL, *ALIKE.values()}
    assert {trial for _, trial in BY_DEFAULT} == {*TRIALS}


def table(chosen: str) -> int:
    """Print what becomes of each kind in each trial, and why where it is not as expected; how many are not."""
    counted: Counter[str] = Counter()
    unexpected = 0
    print(f"{'':{_WIDTH}}" + "".join(f"{trial:12}" for trial in TRIALS))
    with tempfile.TemporaryDirectory() as folder, Forker(PROGRAM) as forker:
        for number, (name, kind) in enumerate(KINDS.items()):
            if chosen not in name:
                continue
            at = Path(folder) / str(number)
            at.mkdir()
            specimen = Specimen(name, at, forker)
            outcomes = {trial: specimen.outcome(trial) for trial in TRIALS if trial in kind.expected}
            counted.update(outcome.word for outcome in outcomes.values())
            amiss = {trial for trial, outcome in outcomes.items() if outcome.word != kind.expected[trial]}
            unexpected += len(amiss)
            words = {trial: f"{'!' if trial in amiss else ''}{outcome.word}" for trial, outcome in outcomes.items()}
            print(f"{name:{_WIDTH}}" + "".join(f"{words.get(trial, ''):12}" for trial in TRIALS).rstrip())
            for trial in [trial for trial in TRIALS if trial in amiss]:
                print(f"    {trial}, expected {kind.expected[trial]}: {outcomes[trial].why[:200]}", flush=True)
    print(f"\n{len(KINDS)} kinds, {counted.total()} trials: {dict(counted)}; {unexpected} not as expected (!)")
    return unexpected


if __name__ == "__main__":
    os.environ["ROLLBACK_FAST_TIER"] = "off"
    table(sys.argv[1] if len(sys.argv) > 1 else "")
