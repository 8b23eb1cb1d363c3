"""What the garbage collector knows of objects."""

from collections.abc import Iterator
from typing import Any

from rollback.system.collector import instances


class Thing:
    pass


class Derived(Thing):
    __slots__ = ("other",)


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
