"""What a script's loops carry from iteration to iteration, made what it was where the training stands.

A temperature, a mean of losses, a patience: only the script can set its variables. So where a loop may have come to
another place in the data, by a resume or a rollback, the script asks for them (`rollback.source.instrumentation`), and
checkpoints have them as values of the script.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor, nn

from rollback.source.loop_variables import LoopVariable
from rollback.train.advice.script_tensors import ModelCopies
from rollback.train.guard import Guard
from rollback.train.state.kept_values import KeptAttribute, ToldAtEnd
from rollback.trainers.adopt.enumeration import ScriptProgress
from rollback.trainers.adopt.epoch_loop import EpochLoop
from rollback.trainers.adopt.notices import ScriptNotices
from rollback.trainers.adopt.step_numbers import StepCount
from rollback.trainers.variable_values import (
    ABSENT,
    MISSES,
    ReadVariable,
    decoded,
    is_history,
    is_lost,
    is_meter,
    is_same,
    put,
    state_of,
    value_of,
)


class RestoredVariable(ABC):
    """A variable on one rank, as its script has it. in_place: whether it is the same object all the time. progress:
    what the script is given of the guard. attribute: of which name, where it is an object's."""

    def __init__(self, progress: ScriptProgress, *, in_place: bool = False, attribute: str = "") -> None:
        self._progress, self._in_place, self._attribute = progress, in_place, attribute
        self._to_restore: Mapping[str, Any] | None = None
        """The state that the script is to have, and may not have yet."""
        self.missed = False
        """Whether the script has not what it was: a checkpoint has told that it was too much to be kept, or the object
        that it is an attribute of is not there."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it is; empty: nobody can tell."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._to_restore = state

    def begin_anew(self) -> None:
        """A checkpoint does not have it."""
        self._to_restore = None

    def _given(self, state: Mapping[str, Any], read: ReadVariable) -> tuple[Any, ...]:
        """The value that a state tells of; none: it tells of none, or what the script has is that, also now."""
        self.missed = self.missed or MISSES in state
        if "value" not in state:
            return ()
        try:
            present = read()
        except ABSENT as error:
            if self._attribute and not _is_missing(error, self._attribute):
                self.missed = True
                return ()
            return (decoded(state["value"]),)
        if is_same(self._told(read), state):  # it may be a buffer of a module, too
            return ()
        value = decoded(state["value"])
        return () if self._in_place and put(present, value) is present else (value,)

    def _told(self, read: ReadVariable) -> dict[str, Any]:
        return state_of(read)


class BatchVariable(RestoredVariable, KeptAttribute):
    """In a training loop: what it is at each time."""

    _read: ReadVariable | None = None
    _first: Mapping[str, Any] = MappingProxyType({})
    """As the script of this process had it first."""
    _loaded_at = 0
    """How many times the script had asked for a batch."""

    def state_dict(self) -> dict[str, Any]:
        if self._to_restore is not None:
            return dict(self._to_restore)
        return {"first": True} if self._read is None else self._told(self._read)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded_at = self._progress.draws

    def begin_anew(self) -> None:
        self.load_state_dict({"first": True})

    def is_attribute(self, name: str, value: float) -> bool:
        return self._read is not None and name == self._attribute and is_same(state_of(self._read), {"value": value})

    def restored_value(self, read: ReadVariable, *, behind: bool = False) -> tuple[Any, ...]:
        """What the script is given in place of what it has, where it asks in its loop over batches, or behind it; none:
        nothing."""
        if self._read is None:
            self._first = self._told(read)
        self._read = read
        if self._to_restore is None or self._progress.draws == self._loaded_at:  # else in that loop over other batches
            return ()
        state, self._to_restore = self._to_restore, None
        return self._given(self._first if "first" in state else state, read)


class LoggedVariable(BatchVariable, ToldAtEnd):
    """In a training loop, a number that nothing of the training depends on, as a sum of losses.

    Where a checkpoint lacks it, it stays as it is. So it does behind a loop whose body has run for nothing but its
    names (`rollback.train.pass_rehearsal`): a script may divide by a count of samples. It is missed then.
    """

    def begin_anew(self) -> None:
        self._to_restore = None

    def restored_value(self, read: ReadVariable, *, behind: bool = False) -> tuple[Any, ...]:
        if behind and self._progress.draws != self._loaded_at:  # else it is that loop over other batches
            state, self._to_restore = self._to_restore or {}, None
            wanted = self._first if "first" in state else state
            self.missed = self.missed or (bool(wanted) and not is_same(self._told(read), wanted))
        return super().restored_value(read)

    def _told(self, read: ReadVariable) -> dict[str, Any]:
        match value := value_of(read):
            case bool() | int() | float() | np.number():
                return state_of(lambda: value)
            case Tensor() if value.numel() == 1:
                return state_of(lambda: value) or {MISSES: True}
            case Tensor() | np.ndarray():
                return {MISSES: True}
            case list() | deque() if not value and self._in_place:  # a rollback empties it of what is undone
                return state_of(lambda: value)
        return {MISSES: True} if is_history(value) or is_meter(value) else {}


class EpochVariable(RestoredVariable):
    """In a loop over epochs: what it was at the top of the epoch, by the epoch's place in the loop."""

    _present: Mapping[str, Any] = MappingProxyType({})

    def state_dict(self) -> dict[str, Any]:
        return dict(self._present if self._to_restore is None else self._to_restore)

    def restored_value(self, read: ReadVariable, place: int) -> tuple[Any, ...]:
        """The same where an epoch's body begins. Of another epoch, the script has made it by itself since."""
        state, self._to_restore = self._to_restore, None
        if state is not None and state.get("place") == place:
            self._present = dict(state)
            return self._given(state, read)
        self._present = {**state_of(read), "place": place}
        return ()


class ScriptVariables:
    """Those of a watched script, and the counts of its iterations. loops: its loops over epochs, by where they are.
    notices: told of those that cannot be kept."""

    def __init__(
        self, progress: ScriptProgress, loops: Mapping[tuple[str, int] | None, EpochLoop], notices: ScriptNotices
    ) -> None:
        self._progress, self._loops, self._notices = progress, loops, notices
        self._model: nn.Module | None = None
        self._copies: ModelCopies | None = None
        self._lost: set[tuple[str, str]] = set()
        self._counts: dict[tuple[str, str], StepCount] = {}
        self._known: dict[tuple[str, str], tuple[LoopVariable, RestoredVariable]] = {}

    def add(self, name: str, filename: str, variable: LoopVariable) -> None:
        """One of a file that is about to run."""
        of_batches = BatchVariable if variable.affects_training else LoggedVariable
        kind = of_batches if variable.by_batch else EpochVariable
        attribute = variable.name.rpartition(".")[2] if "." in variable.name else ""
        self._known[filename, name] = variable, kind(self._progress, in_place=variable.in_place, attribute=attribute)

    def keep(self, guard: Guard, model: nn.Module, step_counts: Iterable[tuple[str, str]]) -> None:
        """The guard of a model is made: it keeps them from now on, and gives them what they were. step_counts: file and
        name of each count."""
        self._model, self._copies = model, ModelCopies(model)
        self._counts = {place: StepCount() for place in step_counts}
        kept: dict[tuple[str, str], StepCount | RestoredVariable] = {
            place: restored for place, (_, restored) in self._known.items()
        }
        kept |= self._counts
        named: dict[str, StepCount | RestoredVariable] = {}
        for (filename, name), value in kept.items():
            text = f"{name} of {os.path.basename(filename)}"
            named[text if text not in named else f"{text} {len(named)}"] = value
        guard.keep(**named)

    def count_of(self, name: str, filename: str) -> StepCount | None:
        """None: there is no guard yet."""
        return self._counts.get((filename, name))

    def by_batch(self, read: ReadVariable, name: str, filename: str, behind: bool = False) -> tuple[Any, ...]:
        """What the script is given for a variable of a loop over batches, if anything. behind: where it asks there."""
        variable, restored = self._known[filename, name]
        assert isinstance(restored, BatchVariable)
        given = restored.restored_value(read, behind=behind)
        if restored.missed:
            restored.missed = False
            self._tell_missed(variable, filename, read)
        if self._progress.guard is not None and self._progress.begins_update:
            self._tell_lost(name, filename, read)
        return given

    def by_epoch(self, read: ReadVariable, name: str, filename: str, line: int) -> tuple[Any, ...]:
        """The same where an epoch's body begins, of a loop that begins at that line."""
        _, restored = self._known[filename, name]
        assert isinstance(restored, EpochVariable)
        if (loop := self._loops.get((filename, line))) is None:
            return ()
        given = restored.restored_value(read, loop.place)
        if loop.place:
            self._tell_lost(name, filename, read)
        return given

    def _tell_missed(self, variable: LoopVariable, filename: str, read: ReadVariable) -> None:
        value = value_of(read)
        if variable.affects_training:
            self._notices.tell_unkept(variable, filename, value)
        elif not self._is_models(value):
            self._notices.tell_missed(variable, filename)

    def _is_models(self, value: Any) -> bool:
        """Whether it is one of the model's tensors, which every checkpoint has."""
        model = self._model
        return model is not None and any(value is item for item in (*model.buffers(), *model.parameters()))

    def _tell_lost(self, name: str, filename: str, read: ReadVariable) -> None:
        """Tell of it once, if it is lost. So is a moving average of the weights, or the like, that is another object in
        each step: the guard has found the first one alone."""
        if (filename, name) in self._lost:
            return
        (variable, _), value = self._known[filename, name], value_of(read)
        if variable.affects_training or not variable.by_batch:
            if is_lost(value, affects_training=variable.affects_training):
                self._lost.add((filename, name))
                if not self._is_models(value):
                    self._notices.tell_unkept(variable, filename, value)
        elif not variable.in_place and type(value) in (list, tuple, dict) and self._copies and self._copies.has(value):
            self._lost.add((filename, name))
            self._notices.tell_copied(variable, filename)


def _is_missing(error: Exception, name: str) -> bool:
    """Whether an object is there that lacks this attribute alone."""
    return isinstance(error, AttributeError) and error.name == name and error.obj is not None
