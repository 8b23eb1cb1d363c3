"""Python's garbage collector: its search for reference cycles, put off; and the objects that it knows."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """None in the block. Facts have no cycles, and the search would walk over all of a long run's again and again: it
    takes a third of the time in which they are read, and more of what is made from them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def instances(belongs: Callable[[type], bool]) -> list[Any]:
    """All objects whose own class is one for which `belongs` is true.

    `gc.get_objects` has half-made tuples of other threads, too. Such a thread ends with a SystemError where somebody
    holds the tuple that it fills from a generator. So that list is let go of within one call, in which no other thread
    runs, and objects are found by their references to their classes.
    """
    kinds = {kind for kind in set(map(type, gc.get_objects())) if belongs(kind)}
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
