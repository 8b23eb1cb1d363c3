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
    "shuffle", "DistributedSampler", "sampler with own random.Random", "augmented in process", "list", "callable",
    "iterable told the epoch", "wrapper over DistributedSampler", "wrapper over shuffle, no length",
    "generator that draws for ever", "opaque objects from a callable", "StatefulDataLoader, shuffle", "nodes, shuffle",
    "hand-written, order of the epoch in its state", "data set that remembers what it has read",
}  # fmt: skip
"""One of each way in which a loader keeps its place: all trials by default."""


def _by_default() -> Iterator[tuple[str, str]]:
    """The others are stopped or go back, in turn, and meet what is expected of one trial and of no other. The rest is
    left to the soak."""
    for number, (name, kind) in enumerate(KINDS.items()):
        words = Counter(kind.expected.values())
        turn = "stopped" if number % 2 == 0 or "retried" not in kind.expected else "retried"
        for trial, word in kind.expected.items():
            if name in IN_FULL or trial == turn or (len(words) > 1 and words[word] == 1):
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


def test_every_kind_is_tried_by_default_and_every_trial() -> None:
    assert {name for name, _ in BY_DEFAULT} == KINDS.keys() >= IN_FULL
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
