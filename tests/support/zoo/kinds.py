"""A loader kind: how it is made, how its batches are read, and what is expected of each trial."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

EXACT, REFUSED = "exact", "refused"
IDS = "samples"
"""Of the trial `alone`: the samples are those of a run without a guard, what augmentation draws is not."""
APART = "apart"
"""Of the trial `alone`: the data draw from random states of their own, so that other samples come than without one."""

TRIALS = ("alone", "stopped", "killed", "skipped", "retried")
RESUMED = ("stopped", "killed")
FEWER = ("alone", "stopped", "retried")
"""Of what is costly, since worker processes are started for each epoch, or much like another kind."""
BATCHES, SIZE, EPOCHS = 9, 4, 3
COUNT = BATCHES * SIZE
STEPS = BATCHES * EPOCHS

X = torch.randn(4 * COUNT, 8, generator=torch.Generator().manual_seed(5))


class Samples(Dataset[Any]):
    """Sample i is row i of `X`, and its number."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        return X[index], int(index)


def rows(ids: Iterable[int] | Tensor) -> tuple[Tensor, Tensor]:
    """A batch of these samples."""
    chosen = ids if isinstance(ids, Tensor) else torch.tensor(list(ids))
    return X[chosen], chosen


@dataclass
class Fed:
    """What a script trains from.

    at_epoch: what it calls before each epoch. steps: it trains so many updates in one loop, without epochs. read: takes
    a batch apart into inputs and sample numbers. counted: it loops over `range(n)`, not over `guard.epochs(n)`.
    after: what it calls with the sample numbers after each batch.
    """

    loader: Any
    at_epoch: Callable[[int], object] | None = None
    steps: int | None = None
    read: Callable[[Any], tuple[Tensor, Any]] = tuple
    counted: bool = False
    after: Callable[[list[int]], object] | None = None


@dataclass(frozen=True)
class Kind:
    """make: given whether the script is being started again, so that it can be another one then."""

    name: str
    make: Callable[[bool], Any]
    seeded: bool
    expected: dict[str, str] = field(default_factory=dict)

    def fed(self, again: bool) -> Fed:
        made = self.make(again)
        return made if isinstance(made, Fed) else Fed(made)


KINDS: dict[str, Kind] = {}


def kind(
    name: str, expected: str = EXACT, *, seeded: bool = True, trials: Iterable[str] = TRIALS, **otherwise: str
) -> Callable[[Callable[[bool], Any]], Callable[[bool], Any]]:
    """Enters a loader kind into the zoo. The function gets whether the script is being started again.

    expected: of each of `trials`, unless `otherwise` names the trial. seeded: the script seeds all random states first.
    """

    def enter(make: Callable[[bool], Any]) -> Callable[[bool], Any]:
        assert name not in KINDS
        KINDS[name] = Kind(name, make, seeded, {**dict.fromkeys(trials, expected), **otherwise})
        return make

    return enter
