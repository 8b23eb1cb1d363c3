"""Any fact at all: strategies made from the types of the fields, so that a new kind of fact is covered at once."""

import typing
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from rollback.facts import training
from rollback.facts.fact import Count, InitialState, Sharding
from rollback.facts.training import Fact, PassedOver, Window
from rollback.rundir.paths import CheckpointName

FACTS: list[type[Fact]] = list(get_args(get_args(training.AnyFact)[0]))

windows = st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)).map(lambda p: Window(first=p[0], last=p[0] + p[1]))
_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2) | st.integers(-(2**53), 2**53),
    Count: st.integers(0, 2) | st.integers(0, 2**53 - 1),
    str: st.sampled_from([CheckpointName.of(1, 20), CheckpointName.of(2, 40)]) | st.text(),
    float: st.floats(),
    bool: st.booleans(),
    Window: windows,
    type(None): st.none(),
}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of(*map(values, args))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple) if args[1] is ... else st.tuples(*map(values, args))
    if origin is dict:
        held = st.integers() | st.text() if args[1] is Any else values(args[1])
        return st.dictionaries(st.text(), held, max_size=3)
    if annotation in (InitialState, Sharding):
        return st.builds(annotation, **{name: values(hint) for name, hint in hints_of(annotation).items()})
    return _BY_TYPE[annotation]


def hints_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def facts() -> st.SearchStrategy[Fact]:
    return st.one_of(*map(facts_of_kind, FACTS))


def facts_of_kind(kind: type[Fact]) -> st.SearchStrategy[Fact]:
    fields = {name: values(hint) for name, hint in hints_of(kind).items() if name in kind.model_fields}
    if kind is PassedOver:
        ends = windows.map(lambda window: {"first": window.first, "last": window.last})
        return st.builds(lambda rest, ends: PassedOver(**{**rest, **ends}), st.fixed_dictionaries(fields), ends)
    return st.builds(kind, **fields)
