"""What the threads of this process run at present."""

import sys
import threading
from types import FrameType

from rollback.system.collector import no_collection

_ONE = threading.Lock()


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread; None: it has none.

    CPython up to 3.11 holds a lock meanwhile that a search for reference cycles may need, and waits for itself for ever
    then (python/cpython#106883). So there is none meanwhile, and one thread asks at a time.
    """
    with _ONE, no_collection():
        return sys._current_frames().get(thread)
