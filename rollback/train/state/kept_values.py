"""Values of the script that belong to its training: the best loss so far, a count of tokens.

Each rank has its own values, as with any variable of the script. A checkpoint keeps those of every rank.
"""

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from rollback.errors import RunDoesNotFit, StateRefused, UsageError
from rollback.train.data.cursor.generators import KeptGenerator, is_generator
from rollback.train.state.stateful import load_into

_AS_IT_IS, _KEYS = frozenset((type(None), bool, int, float, str)), frozenset((str, int))
_OF_NUMBERS = Tensor, np.ndarray, np.generic
GENERATOR = "generator "
"""Begins the name of one of the script's that was found. No name of the script's has a space there."""
_PHASE = "_phase"
"""No name of the script's begins so."""


class KeptValues:
    """Attributes that checkpoints keep: `kept.best`. Only names from `guard.keep` exist.

    Setting a value that cannot be kept raises UsageError. A tensor or an array of one number becomes that number.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        return self._values[self._known(name)]

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[self._known(name)] = _plain(value, name)

    def __dir__(self) -> list[str]:
        return list(self._values)

    def __repr__(self) -> str:
        return f"KeptValues({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def _known(self, name: str) -> str:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"{name!r} is not kept: ask for it with guard.keep({name}=...)")
        return name


class SharedText:
    """Base of what is kept as one text that is the same on all ranks, and may be long. Marks of a step's end, which are
    written anew at each step, leave it out: any rank that is left has it. But a rank may have written more than others,
    as one that alone logs an evaluation: marks have the number of lines."""

    @property
    def lines(self) -> int:
        """0: at a step's end no rank has more than others."""
        return 0

    def state_dict(self) -> str:
        raise NotImplementedError


class ToldAtEnd:
    """Base of what changes behind the backward of each step, and what no training depends on, as a sum of losses. Marks
    that are written in a backward leave it out: who goes on from one has lost it."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


class KeptAttribute:
    """Base of what keeps, and puts back, an attribute of one of the script's objects."""

    def is_attribute(self, name: str, value: float) -> bool:
        """Whether the attribute is called that, and is that now."""
        raise NotImplementedError


class ScriptState:
    """The kept values of one rank's script, and those of the last restored checkpoint."""

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self._of_rank: dict[str, Any] = {}
        """Objects that are neither of the following two."""
        self._foretelling: dict[str, Any] = {}
        """Those of them with `coming_state_dict`: in a backward, what `state_dict` will be at that step's end; None: it
        is not known."""
        self._texts: dict[str, SharedText] = {}
        self._at_end: dict[str, ToldAtEnd] = {}
        self._restored: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._kept = KeptValues(self._values)
        self.phase: str | None = None
        """The phase that this rank's script has announced for the step that comes next."""

    def add(self, first: Mapping[str, Any]) -> KeptValues:
        """Keep more values from now on. first: used where the checkpoint has none. See `Guard.keep`. Raises
        RunDoesNotFit where an object refuses its state."""
        for name in first:
            if name in self._first or name in self._objects:
                raise UsageError(
                    f"guard.keep: {name!r} is kept already",
                    hint="ask for each name once; the object that the first call returned has them all",
                )
            if name.startswith("_"):
                raise UsageError(f"guard.keep: {name!r} begins with an underscore", hint="choose another name")
        generators = {name: KeptGenerator(value) for name, value in first.items() if is_generator(value)}
        objects = generators | {name: value for name, value in first.items() if _tells_its_state(value, name)}
        checked = {name: _plain(value, name) for name, value in first.items() if name not in objects}
        self._add_objects(objects)
        self._go_on_with(objects)
        self._first.update(plain(checked))
        self._values.update({name: self._restored.get(name, value) for name, value in checked.items()})
        return self._kept

    def _add_objects(self, objects: Mapping[str, Any]) -> None:
        self._objects.update(objects)
        for name, item in objects.items():
            if isinstance(item, SharedText):
                self._texts[name] = item
            elif isinstance(item, ToldAtEnd):
                self._at_end[name] = item
            else:
                self._of_rank[name] = item
            if hasattr(item, "coming_state_dict"):
                self._foretelling[name] = item

    def is_of_script(self, name: str) -> bool:
        """Whether it is a number, text, list or dict that the script itself changes."""
        return name in self._values

    def is_foretold(self, name: str) -> bool:
        """Whether it is an object that tells ahead what it will be: the state of a Trainer."""
        return name in self._foretelling

    def state_dict(self) -> dict[str, Any]:
        """The values for a checkpoint; also values of an earlier one that the script has not asked for yet."""
        return plain({**self.of_rank(), **self.at_end(), **self.shared_texts()})

    def of_rank(self, coming: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """What the script and its objects tell, neither copied nor looked at, without what is told `at_end`, and with
        the number of lines in place of each shared text. coming: what is foretold in the place of what objects tell
        now."""
        told = {**self._restored, **self._values}
        for name, item in self._of_rank.items():
            told[name] = coming[name] if name in coming else item.state_dict()
        if self.phase is not None:
            told[_PHASE] = self.phase
        for name in self._at_end:
            told.pop(name, None)
        for name, text in self._texts.items():
            told[name] = text.lines
        return told

    def coming(self) -> dict[str, Any] | None:
        """`of_rank` as it will be at the end of the step whose backward is under way; None: that is not known."""
        coming = {name: item.coming_state_dict() for name, item in self._foretelling.items()}
        return None if None in coming.values() else self.of_rank(coming)

    def at_end(self) -> dict[str, dict[str, Any]]:
        """What marks have at a step's end alone."""
        return {name: item.state_dict() for name, item in self._at_end.items()} if self._at_end else {}

    def shared_texts(self) -> dict[str, str]:
        return {name: item.state_dict() for name, item in self._texts.items()} if self._texts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = dict(state)
        self.phase = self._restored.pop(_PHASE, None)
        had = {name: state[name] for name in self._first if name in state}
        self._values.update(copy.deepcopy({**self._first, **had}))
        self._load_objects(self._objects)

    def _load_objects(self, objects: Mapping[str, Any]) -> None:
        for name, item in objects.items():
            if name not in self._restored and hasattr(item, "begin_anew"):
                item.begin_anew()
        for name, item in objects.items():  # last: a generator may be kept by two names
            if name in self._restored:
                load_into(name, item, copy.deepcopy(self._restored[name]))

    def _go_on_with(self, objects: Mapping[str, Any]) -> None:
        """Load what the checkpoint that the run has resumed from has of them. Raises RunDoesNotFit where one refuses
        that: so will each next attempt."""
        try:
            self._load_objects(objects)
        except StateRefused as error:
            raise RunDoesNotFit(error.message, hint=error.hint) from error

    def keep_generators(self, found: Mapping[str, Any]) -> None:
        """Keep random generators of the script from now on. In a run that goes on they are put back as its loop begins:
        what the script draws in front of that is what it drew at the first start."""
        self._add_objects({f"{GENERATOR}{name}": KeptGenerator(generator) for name, generator in found.items()})

    @property
    def _generators(self) -> dict[str, KeptGenerator]:
        return {name: item for name, item in self._objects.items() if isinstance(item, KeptGenerator)}

    def restore_generators(self) -> None:
        """Those among the values, as they were at the last load. Raises RunDoesNotFit as `add`."""
        self._go_on_with(self._generators)

    def generators(self) -> dict[str, dict[str, Any]]:
        """The present states of those among the values, by name."""
        return {name: item.state_dict() for name, item in self._generators.items()}

    def put_generators(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """To draw again as at the time of these."""
        for name in states.keys() & self._generators:
            self._generators[name].load_state_dict(states[name])

    def has_object(self, thing: object) -> bool:
        """Whether it is a generator or an object among the values."""
        kept = (item.generator if isinstance(item, KeptGenerator) else item for item in self._objects.values())
        return any(thing is item for item in kept)

    def has_attribute(self, name: str, value: float) -> bool:
        """Whether an attribute that is called that, and is that now, is among the values."""
        kept = (item for item in self._objects.values() if isinstance(item, KeptAttribute))
        return any(item.is_attribute(name, value) for item in kept)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Kept values by name, as a checkpoint has them. Raises UsageError for one that cannot be kept."""
    return {name: _plain(value, name) for name, value in values.items()}


def _tells_its_state(value: Any, name: str) -> bool:
    """Whether an object can be kept by its state_dict. A state with more than plain values cannot. Raises UsageError
    where it is nested too deep."""
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return False
    try:
        _rebuilt(value.state_dict(), name)
    except RecursionError:
        raise _too_deep(name) from None
    except UsageError:
        return False
    return True


def _plain(value: Any, name: str) -> Any:
    """`value` as numbers, texts, lists, tuples and dicts. Raises UsageError for anything else in it."""
    try:
        return _rebuilt(value, name)
    except RecursionError:
        raise _too_deep(name) from None


def _too_deep(name: str) -> UsageError:
    return UsageError(
        f"guard.keep: {name!r} contains itself, or is nested too deep to be kept",
        hint="keep what is flat, as a list of pairs in place of a tree",
    )


def _rebuilt(value: Any, name: str) -> Any:
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is dict and {*map(type, value)} <= _KEYS:
        return {key: item if type(item) in _AS_IT_IS else _rebuilt(item, name) for key, item in value.items()}
    if kind in (list, tuple):
        return kind([item if type(item) in _AS_IT_IS else _rebuilt(item, name) for item in value])
    if isinstance(value, _OF_NUMBERS) and math.prod(value.shape) == 1 and type(one := value.item()) in _AS_IT_IS:
        return one
    raise UsageError(
        f"guard.keep: {name!r} holds a {type(value).__name__}, which cannot be kept",
        hint="it takes numbers, texts, None, and lists, tuples and dicts of these; tensors and objects are handed over "
        "when the guard is made, as something with state_dict and load_state_dict",
    )
