"""Tensors and samples that a script's training loop carries from iteration to iteration, and on which the training
depends: a mean of losses by which the loss is divided, a list of batches to replay, the state that a recurrent model
goes on with.

Each iteration may put another tensor in place of the last one, or begin with none, so values alone do not tell it from
what is made anew in each iteration. The source does (`rollback.source.loop_variables`).
"""

import ast
import builtins
import functools
import linecache
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor

from rollback.errors import UsageError
from rollback.source.instrumentation import BY_BATCH
from rollback.source.loop_variables import loop_variables
from rollback.source.loops import ScriptLoops
from rollback.source.syntax import Loop, takes_or_names
from rollback.train.advice.script_tensors import tensors_of
from rollback.train.introspection import locals_of, own_callers

_ITEMS = 8  # of a list, a dict and the like that are looked at: those of a list of samples are alike
_DEPTH = 3  # of lists within lists


class CarriedTensors:
    """Those of the loops that run now. handed: whether somebody else keeps an object with all that it has."""

    def __init__(self, handed: Callable[[object], bool]) -> None:
        self._handed = handed
        self._marks: dict[str, object] = {}
        """Of each variable, when this was last asked."""

    def changed(self) -> dict[str, list[Any]]:
        """What the training loops hold in which this is called and held otherwise, or not, when it was last asked:
        tensors, arrays and samples by the name of their variable. Of an adopted script nothing: there all that is
        carried is kept, or told of."""
        if hasattr(builtins, BY_BATCH):
            return {}
        held = dict(self._held())
        marks = {name: _mark_of(value) for name, (value, _) in held.items()}
        before, self._marks = self._marks, marks
        return {name: within for name, (_, within) in held.items() if name in before and before[name] != marks[name]}

    def _held(self) -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
        for frame in own_callers():
            for name, lines in _needed_in(frame.f_code.co_filename):
                if frame.f_lineno in lines:
                    value = _value_of(name, frame, self._handed)
                    yield name, (value, [*_samples_in(value)])


@functools.cache
def _needed_in(filename: str) -> list[tuple[str, range]]:
    """The variables on which the training depends that the loops of a file carry, and the lines of their loop."""
    try:
        variables = loop_variables(ScriptLoops("".join(linecache.getlines(filename))))
    except (SyntaxError, UsageError, RecursionError):  # it has changed, or is nested too deeply to be read here
        return []
    needed = [item for item in variables if item.affects_training and item.name not in _batches_of(item.loop)]
    return [(item.name, range(item.loop.lineno, (item.loop.end_lineno or 0) + 1)) for item in needed]


def _batches_of(loop: Loop) -> set[str]:
    """What an iteration sets by `next`: behind a resume it is taken again."""
    given = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    taking = [node for node in given if takes_or_names(node.value)]
    targets = [item for node in taking for target in node.targets for item in ast.walk(target)]
    return {item.id for item in targets if isinstance(item, ast.Name)}


def _value_of(name: str, frame: FrameType, handed: Callable[[object], bool]) -> Any:
    """None: it has none, or it is kept. Properties of objects are not asked: that might do something."""
    root, *attributes = name.split(".")
    value = dict(locals_of(frame)).get(root, frame.f_globals.get(root))
    for attribute in attributes:
        if handed(value):
            return None
        value = getattr(value, "__dict__", {}).get(attribute)
    return None if handed(value) else value


def _mark_of(value: Any) -> object:
    """Another one where the value is another, or is written to."""
    size = len(value) if isinstance(value, list | tuple | deque | dict) else 0
    versions = [
        (id(item), item._version if isinstance(item, Tensor) and not item.is_inference() else 0)
        for item in _samples_in(value)
    ]
    return size, versions


def _samples_in(held: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The tensors and arrays in it, and what else a list holds that is no number: numbers alone are mostly told."""
    if isinstance(held, Tensor):
        yield from tensors_of(held).values()
    elif isinstance(held, np.ndarray):
        yield held
    elif depth and (isinstance(held, list | tuple | deque | dict) or is_dataclass(held)):
        items = [getattr(held, each.name, None) for each in fields(held)] if is_dataclass(held) else held
        for item in [*islice(items.values() if isinstance(items, dict) else items, _ITEMS)]:
            within = [*_samples_in(item, depth - 1)]
            is_sample = isinstance(held, list | deque) and isinstance(item, str | list | tuple | dict)
            yield from within or ([item] if is_sample else [])
