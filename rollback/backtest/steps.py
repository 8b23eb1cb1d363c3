"""The step column of a log: counted on where it starts again with each epoch, as a batch index does."""

import itertools
from collections.abc import Collection, Sequence
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
    restarts: frozenset[int] = frozenset()
    """Those of them that go back to the column's start, as another run in the same log does."""
    told: bool = False
    """The log itself says where epochs begin."""

    def in_words(self, column: str | None) -> list[str]:
        """What was assumed about it; nothing where nothing had to be."""
        words = []
        if self.epochs:
            where = "where the epoch goes up" if self.told else "at about the same step"
            words.append(
                f"column {column!r} starts again {_times(self.epochs)} {where}: taken as the batch of an epoch, and "
                "counted on"
            )
        if self.resumes:
            words.append(
                f"column {column!r} goes back: taken as a resume {_times(self.resumes)}, so a step may stand for "
                "several rows"
            )
        if self.restarts:
            words.append(
                f"column {column!r} goes back to its start {_times(self.restarts)}, and no epochs were seen in that: "
                "if another run begins there, give it a log of its own"
            )
        return words


def counted_on(given: Sequence[int], begun: frozenset[int] = frozenset()) -> StepColumn:
    """Tell epochs from resumes. A step below the one before it has gone back.

    begun: rows with which the log says that an epoch begins. An epoch it is if any of them is such a step, else to the
    column's start at least twice and each time from about the same step; all others go back to a checkpoint.
    """
    back = [row for row in range(1, len(given)) if given[row] < given[row - 1]]
    if not back:
        return StepColumn(list(given))
    forward = [after - before for before, after in itertools.pairwise(given) if after > before]
    stride = int(median(forward)) if forward else 1
    told = begun.intersection(back)
    to_start = [row for row in back if given[row] <= min(given) + stride]
    begins = told or _alike(given, to_start)
    steps, before = [], 0
    for row, step in enumerate(given):
        if row in begins:
            before += given[row - 1] - step + stride
        steps.append(before + step)
    return StepColumn(steps, begins, frozenset(back) - begins, frozenset(to_start) - begins, bool(told))


def _alike(given: Sequence[int], wraps: list[int]) -> frozenset[int]:
    """The rows at which the column starts again, if they make epochs."""
    if len(wraps) < _FEWEST_WRAPS:
        return frozenset()
    lengths = [given[row - 1] - min(given) for row in wraps]
    length = median(lengths)
    return frozenset(wraps if all(abs(each - length) <= _ALIKE * length for each in lengths) else ())


def _times(rows: Collection[int]) -> str:
    return "once" if len(rows) == 1 else f"{len(rows)} times"
