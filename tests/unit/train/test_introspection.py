"""What a thread runs, asked while nobody searches for reference cycles; what the user's own files and others hold."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from rollback.train.introspection import frame_of, instances, is_own, own_variables


def test_no_search_for_cycles_may_begin_in_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = sys._current_frames, list[bool]()

    def frames() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return original()

    monkeypatch.setattr(sys, "_current_frames", frames)
    frame = frame_of(threading.get_ident())
    assert frame is not None
    assert seen == [False]
    assert gc.isenabled()
    assert frame_of(0) is None


def test_a_folder_of_the_users_whose_name_ends_like_one_of_packages_is_the_users_own() -> None:
    assert is_own("/home/me/ml-packages/train.py")
    packages = "lib/python3.11/site-packages", "lib/python3/dist-packages"
    assert not any(is_own(f"/opt/env/{folder}/torch/nn.py") for folder in packages)


class Strange(type):  # noqa: PLW1641
    """Its classes cannot be hashed."""

    def __eq__(cls, other: object) -> bool:
        return False


class Unhashed(metaclass=Strange):
    pass


class Slots:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Unnamed:
    def __repr__(self) -> str:
        raise AttributeError("half made")


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


def test_variables_are_found_with_what_own_objects_and_short_lists_and_dicts_hold() -> None:
    one, two, three = object(), object(), object()
    holder, some, many = Holder(one), {"a": two}, [three] * 17
    strange = Unhashed(), Slots()
    odd = {Unnamed(): two}
    found = {name: thing for name, thing in own_variables() if thing in (one, two, three)}
    by_key = {"some['a']": two, "odd[a Unnamed]": two}
    assert found == {"one": one, "two": two, "three": three, "holder.held": one, **by_key}, (many, strange, odd)
    assert holder
    assert some


def test_a_look_at_the_variables_keeps_nothing_alive() -> None:
    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)
    assert "large" in dict(own_variables())
    del large
    assert gone() is None


class Thing:
    pass


class Derived(Thing):
    __slots__ = ("other",)


class Growing:
    """A key of a dict that gets another one while somebody goes through it, as from a thread of the script's."""

    def __init__(self) -> None:
        self.counts: dict[object, int] = {self: 0}

    def __repr__(self) -> str:
        self.counts[len(self.counts)] = 0
        return "growing"


def test_what_another_thread_fills_meanwhile_may_grow() -> None:
    counts = Growing().counts
    found = dict(own_variables())
    assert found["counts[growing]"] == 0
    assert counts


def test_objects_are_found_by_their_own_class() -> None:
    things = [Thing(), Derived(), Thing()]
    found = instances(lambda kind: issubclass(kind, Thing))
    assert {*map(id, found)} == {*map(id, things)}
    assert instances(lambda kind: kind is Derived) == [things[1]]
    assert instances(lambda kind: kind.__name__ == "there is none") == []


def test_who_looks_for_objects_breaks_no_tuple_that_is_being_filled() -> None:
    """A thread may be filling one from a generator; here it is the same thread, whose result is held meanwhile."""
    held: list[Any] = []

    def filling() -> Iterator[int]:
        yield 0
        held.append(instances(lambda kind: issubclass(kind, tuple | Thing)))
        yield from range(100)

    assert len(tuple(filling())) == 101
