"""Python's garbage collector: its search for reference cycles, put off."""

import contextlib
import gc
from collections.abc import Iterator


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
