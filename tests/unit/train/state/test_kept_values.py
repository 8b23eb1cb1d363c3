"""Values of the script that the guard keeps: what they may be, and that they come back."""

import enum
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollback.errors import RunDoesNotFit, StateRefused, UsageError
from rollback.train.state import tree
from rollback.train.state.kept_values import ScriptState

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


def through_disk(state: dict[str, Any]) -> Any:
    return tree.decode(json.loads(json.dumps(tree.encode(state, "local/kept", {}))), torch.empty)


@given(st.dictionaries(st.text(st.characters(categories=["L"]), min_size=1), plain))
def test_what_is_kept_comes_back_as_it_was(values: dict[str, Any]) -> None:
    script = ScriptState()
    kept = script.add(values)
    state = through_disk(script.state_dict())
    for name in values:
        setattr(kept, name, "something else")
    script.load_state_dict(state)
    assert {name: getattr(kept, name) for name in values} == values


def test_a_change_inside_a_list_is_kept_and_undone() -> None:
    script = ScriptState()
    kept = script.add({"losses": [1.0]})
    kept.losses.append(2.0)
    state = through_disk(script.state_dict())
    kept.losses.append(3.0)
    script.load_state_dict(state)
    assert kept.losses == [1.0, 2.0]


def test_a_checkpoint_from_before_it_was_asked_for_gives_the_first_value() -> None:
    script = ScriptState()
    kept = script.add({"best": math.inf, "losses": []})
    kept.best = 1.0
    kept.losses.append(1.0)
    script.load_state_dict({})
    assert kept.best == math.inf
    assert kept.losses == []


def test_what_a_resumed_script_has_not_asked_for_yet_waits_for_it() -> None:
    script = ScriptState()
    script.load_state_dict({"best": 0.5, "tokens": 7})
    assert script.add({"tokens": 0}).tokens == 7
    state = script.state_dict()
    assert state == {"best": 0.5, "tokens": 7}, "a checkpoint taken meanwhile has it too"
    later = ScriptState()
    later.load_state_dict(state)
    assert later.add({"best": math.inf}).best == 0.5


@pytest.mark.parametrize("number", [torch.tensor(2.5, requires_grad=True), torch.tensor([2.5]), np.float32(2.5)])
def test_a_tensor_or_an_array_of_one_number_is_that_number(number: Any) -> None:
    script = ScriptState()
    kept = script.add({"best": number, "history": [number]})
    assert kept.best == 2.5
    kept.best = 0.0
    kept.best = number
    assert type(kept.best) is float
    kept.history.append(number)
    assert through_disk(script.state_dict()) == {"best": 2.5, "history": [2.5, 2.5]}


def test_an_object_whose_state_is_nested_too_deep_is_refused_for_that() -> None:
    nest: list[Any] = []
    for _ in range(5000):
        nest = [nest]

    class Tree:
        def state_dict(self) -> dict[str, Any]:
            return {"root": nest}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    with pytest.raises(UsageError, match=r"'tree'.* nested too deep"):
        ScriptState().add({"tree": Tree()})
    with pytest.raises(UsageError, match=r"'shared/objects/tree' .* nested too deep"):
        tree.encode({"model": {}, "objects": {"ema": {}, "tree": {"root": nest}}}, "shared", {})


@pytest.mark.parametrize(("state", "told"), [({"seen": 3}, "has 'seen'"), ([1, 2], r"is \[1, 2\]")])
def test_an_object_that_does_not_load_what_was_kept_by_its_name_is_named(state: Any, told: str) -> None:
    """Raised on one rank it is raised on all, which no other error is."""

    class Counts:
        def state_dict(self) -> Any:
            return state

        def load_state_dict(self, state: Any) -> None:
            raise KeyError("count")

    script, resumed = ScriptState(), ScriptState()
    script.add({"counts": Counts()})
    with pytest.raises(StateRefused, match=f"the Counts 'counts' did not load .* KeyError: 'count'. That state {told}"):
        script.load_state_dict({"counts": state})
    resumed.load_state_dict({"counts": state})
    with pytest.raises(RunDoesNotFit, match="the Counts 'counts' did not load"):
        resumed.add({"counts": Counts()})


def test_a_generator_that_became_one_of_another_kind_is_named_where_its_loop_begins() -> None:
    script, resumed = ScriptState(), ScriptState()
    script.keep_generators({"noise": np.random.default_rng(0)})
    resumed.load_state_dict(script.state_dict())
    resumed.keep_generators({"noise": torch.Generator()})
    with pytest.raises(RunDoesNotFit, match="'generator noise' did not load"):
        resumed.restore_generators()


class Phase(enum.IntEnum):
    WARM = 1


within_itself: list[Any] = []
within_itself.append({"again": within_itself})


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3), {1, 2}, object(), [print], {"deep": torch.zeros(2)}, b"raw", {(1, 2): 3}, Phase.WARM,
        within_itself,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_where_it_is_said(value: Any) -> None:
    script = ScriptState()
    with pytest.raises(UsageError, match="best") as caught:
        script.add({"fine": 1, "best": value})
    assert caught.value.hint
    assert script.state_dict() == {}, "nothing was taken"
    kept = script.add({"best": 0})
    with pytest.raises(UsageError, match="best"):
        kept.best = value
    assert kept.best == 0


def test_a_name_is_asked_for_once() -> None:
    script = ScriptState()
    script.add({"best": 0})
    with pytest.raises(UsageError, match="'best' is kept already"):
        script.add({"tokens": 0, "best": 1})
    with pytest.raises(UsageError, match="underscore"):
        script.add({"_best": 0})


def test_a_name_that_was_not_asked_for_is_a_slip() -> None:
    kept = ScriptState().add({"best": 0})
    with pytest.raises(AttributeError, match="bets"):
        kept.bets = 1
    with pytest.raises(AttributeError, match="bets"):
        kept.bets  # noqa: B018
    assert repr(kept) == "KeptValues(best=0)"
    assert "best" in dir(kept)


class Counting:
    """An object that is kept: of a loop that wants to know when it was put elsewhere."""

    def __init__(self) -> None:
        self.count, self.moved = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": torch.tensor(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.moved = state["count"], self.moved + 1


def test_an_object_is_kept_by_what_it_says_of_itself_and_told_where_it_was() -> None:
    script, counting = ScriptState(), Counting()
    script.add({"counting": counting, "best": 1.0})
    counting.count = 3
    state = through_disk(script.state_dict())
    counting.count = 8
    script.load_state_dict(state)
    assert (counting.count, counting.moved) == (3, 1)
    resumed, again = ScriptState(), Counting()
    resumed.load_state_dict(state)
    resumed.add({"counting": again})
    assert (again.count, again.moved) == (3, 1)
    with pytest.raises(UsageError, match="kept already"):
        resumed.add({"counting": again})


def test_an_object_of_which_no_checkpoint_knows_stays_as_it_is() -> None:
    script, counting = ScriptState(), Counting()
    script.add({"counting": counting})
    script.load_state_dict({})
    assert counting.moved == 0


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand(1, generator=one).item()),
    "python": (lambda: random.Random(1), lambda one: one.gauss(0, 1)),
    "older numpy": (lambda: np.random.RandomState(1), lambda one: one.normal()),
    **{
        kind.__name__: (lambda kind=kind: np.random.Generator(kind(1)), lambda one: (one.normal(), one.integers(9)))
        for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
}


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("by", ["add", "keep_generators"])
def test_a_generator_draws_what_it_drew_behind_a_restore_and_anew_from_before_it_was_kept(kind: str, by: str) -> None:
    make, draw = GENERATORS[kind]
    script, generator = ScriptState(), make()
    getattr(script, by)({"rngs['a/b']": generator})
    first = draw(generator)
    state = through_disk(script.state_dict())
    then = [draw(generator), draw(generator)]
    script.load_state_dict(state)
    assert [draw(generator), draw(generator)] == then
    script.restore_generators()
    assert [draw(generator), draw(generator)] == then
    script.load_state_dict({})
    assert draw(generator) == first


class Foretelling:
    """A sum that a training adds to behind its backward."""

    total, coming = 1.0, None

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def coming_state_dict(self) -> dict[str, Any] | None:
        return None if self.coming is None else {"total": self.coming}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def test_in_a_backward_an_object_may_know_its_state_at_the_steps_end() -> None:
    script, total = ScriptState(), Foretelling()
    assert script.coming() == script.of_rank()
    script.add({"best": 0.5, "total": total})
    assert script.coming() is None
    total.coming = 3.5
    assert script.coming() == {"best": 0.5, "total": {"total": 3.5}}
    assert script.of_rank() == {"best": 0.5, "total": {"total": 1.0}}
