"""The step column of a log: counted on where it starts again with each epoch, as a batch index does."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_FEWEST_WRAPS = 2  # one return to the start may be a new run in an old file
_ALIKE = 0.1  # epochs end at nearly the same batch; runs that crashed do not


@dataclass(frozen=True)
class StepColumn:
    """Steps that only go back where the run did."""

    steps: list[int]
    epochs: frozenset[int] = frozenset()
    """Rows with which an epoch begins."""
    resumes: frozenset[int] = frozenset()
    """Rows with which the run goes on from an earlier step."""

    def in_words(self, column: str | None) -> list[str]:
        """What was assumed about it; nothing where nothing had to be."""
        if not self.epochs:
            return []
        return [
            f"column {column!r} starts again {len(self.epochs)} times at about the same step: taken as the batch of an "
            "epoch, and counted on"
        ]


def counted_on(given: Sequence[int]) -> StepColumn:
    """Tell epochs from resumes. A step below the one before it has gone back: to the column's start at least twice
    and each time from about the same step, which makes epochs, or else to a checkpoint."""
    back = [row for row in range(1, len(given)) if given[row] < given[row - 1]]
    if not back:
        return StepColumn(list(given))
    forward = [after - before for before, after in itertools.pairwise(given) if after > before]
    stride = int(median(forward)) if forward else 1
    wraps = [row for row in back if given[row] <= min(given) + stride]
    ends = [given[row - 1] for row in wraps]
    length = median(ends) - min(given) if ends else 0
    alike = all(abs(end - min(given) - length) <= _ALIKE * length for end in ends)
    if len(wraps) < _FEWEST_WRAPS or not alike:
        return StepColumn(list(given), resumes=frozenset(back))
    steps, before = [], 0
    begins = frozenset(wraps)
    for row, step in enumerate(given):
        if row in begins:
            before += given[row - 1] - step + stride
        steps.append(before + step)
    return StepColumn(steps, begins, frozenset(back) - begins)
