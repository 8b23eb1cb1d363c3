"""Which columns of a log are the step, the loss, the gradient norm and the learning rate, and what they say."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollback.backtest.steps import counted_on
from rollback.backtest.table import Cell, LogTable
from rollback.errors import UsageError
from rollback.sentinel import Hint, Observation, learning_rate_hint
from rollback.wording import first_few

# Most telling first. Names are compared in lower case with everything but letters and digits as one underscore.
_EXACT = {
    "step": "step global_step iteration iterations iter iters train_step training_step trainer_global_step steps "
    "update updates num_updates it batch",
    "loss": "loss train_loss training_loss loss_train lm_loss train_lm_loss total_loss train_loss_step loss_step "
    "train_total_loss ce_loss train_ce_loss train_cross_entropy_loss",
    "grad_norm": "grad_norm gn gnorm gradnorm grad_norm_global global_grad_norm gradient_norm total_norm "
    "total_grad_norm train_grad_norm grad_norm_total grad_norm_before_clip optim_total_grad_norm",
    "lr": "lr learning_rate learningrate train_lr train_learning_rate lr_0 optim_lr",
    "epoch": "epoch train_epoch",
    "hints": "hints hint",
}
_PATTERN = {
    "step": r"(^|_)(step|iteration|iter)$",
    "loss": r"(^|_)loss($|_)",
    "grad_norm": r"(^|_)(grad|gradient)s?_?(norm|l2)($|_)|(^|_)gnorm$",
    "lr": r"(^|_)(lr|learning_rate)($|_)",
    "epoch": r"(^|_)epoch$",
    "hints": r"(?!)",  # none: `$^` would be found in a name without a letter, as `#`
}
_NOT_TRAINING = re.compile(r"(^|_)(val|valid|validation|eval|evaluation|test|dev|aux|scale|per_token_sec)($|_)")
_HINTS = {name.lower(): hint for name, hint in Hint.__members__.items() if hint is not Hint.NONE}

_STEPS = 1 << 52  # what is planned goes on behind the last one
_RESUMES = 10  # more of them, and more than one in as many rows, are none: all would be excused, and little called

Overrides = dict[str, str | None]
"""Names of columns that the user gave, by meaning; None leaves the guess alone."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns in use; None where the log has none."""

    loss: str
    step: str | None = None
    grad_norm: str | None = None
    lr: str | None = None
    epoch: str | None = None
    hints: str | None = None


def find_columns(path: Path, table: LogTable, overrides: Overrides) -> Columns:
    """The columns that matter. Raises UsageError if there is no loss, or none of the name that was asked for."""
    found: dict[str, str | None] = {}
    for meaning in _EXACT:
        wanted = overrides.get(meaning)
        if wanted is not None and wanted not in table:
            raise UsageError(f"{path} has no column {wanted!r}", hint=f"it has {_listed(table)}")
        found[meaning] = wanted if wanted is not None else _guess(meaning, table)
    loss = found.pop("loss")
    if loss is None:
        raise UsageError(
            f"{path} has no column that looks like a loss", hint=f"it has {_listed(table)}; name one with --loss"
        )
    return Columns(loss=loss, **found)


def _listed(table: LogTable) -> str:
    return first_few([*map(repr, table)], 12) or "no columns"


def _guess(meaning: str, table: LogTable) -> str | None:
    plain = {re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): name for name in reversed(table)}
    for candidate in _EXACT[meaning].split():
        if candidate in plain:
            return plain[candidate]
    matching = [name for name in plain if re.search(_PATTERN[meaning], name) and not _NOT_TRAINING.search(name)]
    return plain[min(matching, key=lambda name: ("train" not in name, len(name), name))] if matching else None


def observations(path: Path, table: LogTable, columns: Columns) -> tuple[list[Observation], list[str]]:
    """What the sentinel would have seen: a row for each that has a loss, with the hints that the log implies; and what
    was assumed to read it so, in words.

    The learning rate and the epoch are hints where the log has them; a step that goes back is a resume, or an epoch
    (`steps`). A column `hints` may name the guard's own hints, several of them separated by `|`.
    """
    losses = _numbers(path, table, columns.loss)
    norms = _numbers(path, table, columns.grad_norm)
    given = _steps(path, table, columns)
    rates = _numbers(path, table, columns.lr)
    epochs = _numbers(path, table, columns.epoch)
    named: Sequence[Cell] = table[columns.hints] if columns.hints else ()
    seen: list[Observation] = []
    rate = highest = None
    rows = [row for row, loss in enumerate(losses) if loss is not None or (norms and norms[row] is not None)]
    begun = _begun([epochs[row] for row in rows] if epochs else [])
    counted = counted_on([given[row] for row in rows], begun)
    if (back := len(counted.resumes - counted.restarts)) > max(_RESUMES, len(rows) // _RESUMES):
        raise UsageError(
            f"the rows of {path} are not in the order of column {columns.step!r}: it goes back {back} times in "
            f"{len(rows)} rows",
            hint="sort the rows by it, or choose another column with --step",
        )
    for number, row in enumerate(rows):
        hints = _named_hints(path, named[row]) if named else Hint.NONE
        if rates and rates[row] is not None:
            hints |= learning_rate_hint(rate, rates[row], highest)
            rate = rates[row]
            highest = max(highest or 0.0, rate or 0.0)
        hints |= Hint.EPOCH if number in counted.epochs or number in begun else Hint.NONE
        hints |= Hint.RESUMED if number in counted.resumes else Hint.NONE
        seen.append(Observation(counted.steps[number], losses[row], norms[row] if norms else None, hints))
    if not seen:
        raise UsageError(f"column {columns.loss!r} of {path} is empty", hint="name another with --loss")
    return seen, counted.in_words(columns.step)


def _begun(epochs: Sequence[float | None]) -> frozenset[int]:
    """The rows with which a new epoch begins; a row without one belongs to the epoch before it."""
    known = [(row, epoch // 1) for row, epoch in enumerate(epochs) if epoch is not None]
    return frozenset(row for (_, last), (row, now) in itertools.pairwise(known) if now > last)


def _steps(path: Path, table: LogTable, columns: Columns) -> list[int]:
    """Each row's step; counted where the log has none. A row without one belongs to the step before it.

    Raises UsageError for a number that is no step, as a time in nanoseconds: a run counts up to 2**53.
    """
    given = _numbers(path, table, columns.step)
    if not given:
        return list(range(len(table[columns.loss])))
    steps: list[int] = []
    for row, value in enumerate(given, start=1):
        if value is None or not math.isfinite(value):
            steps.append(steps[-1] if steps else 0)
        elif abs(value) < _STEPS:
            steps.append(int(value))
        else:
            raise UsageError(
                f"column {columns.step!r} of {path} holds {value:g} in record {row}, which is no step",
                hint="choose another column with --step",
            )
    return steps


def _numbers(path: Path, table: LogTable, name: str | None) -> list[float | None]:
    if name is None:
        return []
    for row, cell in enumerate(table[name], start=1):
        if isinstance(cell, str):
            raise UsageError(
                f"column {name!r} of {path} holds {cell[:40]!r} in record {row}, which is no number",
                hint="choose other columns with --loss, --grad-norm, --step, --lr",
            )
    return [cell for cell in table[name] if not isinstance(cell, str)]


def _named_hints(path: Path, cell: Cell) -> Hint:
    hints = Hint.NONE
    for name in str(cell).split("|") if cell is not None else ():
        key = name.strip().lower()
        if key and key not in _HINTS:
            raise UsageError(f"{path} gives a hint {name!r}", hint=f"hints are {', '.join(_HINTS)}")
        hints |= _HINTS.get(key, Hint.NONE)
    return hints
