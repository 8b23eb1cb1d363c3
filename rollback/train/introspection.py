"""What the threads of this process run at present, what of it is the user's own, and which objects there are."""

import gc
import importlib.util
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rollback.system.collector import no_collection

_ONE = threading.Lock()
_FEW = 16
_OURS = os.path.dirname(importlib.util.find_spec("rollback").origin or "")  # type: ignore[union-attr]
_LIBRARIES = tuple(os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), _OURS))
_PACKAGES = tuple(os.path.join(os.sep, name, "") for name in ("site-packages", "dist-packages"))


def is_own(filename: str) -> bool:
    """Whether it is a file of the user's: not of Python, of an installed package, or of rollback."""
    return not filename.startswith((*_LIBRARIES, "<")) and not any(folder in filename for folder in _PACKAGES)


def is_of_own_file(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_own(file)


def own_callers() -> Iterator[FrameType]:
    """The frames of the user's own files in which this is called, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def first_caller_outside(*packages: str) -> FrameType | None:
    """The innermost frame in which this is called that is of none of these packages."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages:
        frame = frame.f_back
    return frame


def own_variables() -> Iterator[tuple[str, Any]]:
    """The variables of these frames by name, and what the user's own objects, and short lists and dicts, hold there."""
    for frame in own_callers():
        for name, thing in [*locals_of(frame), *frame.f_globals.items()]:
            yield name, thing
            for place, held in _held_by(thing):
                yield f"{name}{place}", held


def locals_of(frame: FrameType) -> list[tuple[str, Any]]:
    """Up to CPython 3.12 a function's frame keeps the dict that is made for this, and what is in it, until it ends."""
    variables = frame.f_locals
    found = [*variables.items()]
    if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()
    return found


def _held_by(thing: Any) -> list[tuple[str, Any]]:
    if type(thing) in (list, tuple, dict):  # others, as of lazy imports, may do something when they are asked
        if len(thing) > _FEW:
            return []
        items = [*(thing.items() if type(thing) is dict else enumerate(thing))]  # at once: a thread may be filling it
        return [(f"[{_key_in_words(key)}]", held) for key, held in items]
    if not is_of_own_file(type(thing)) or not type(thing).__dictoffset__:
        return []
    return [(f".{name}", held) for name, held in [*vars(thing).items()]]


def _key_in_words(key: object) -> str:
    try:
        return repr(key)
    except Exception:  # noqa: BLE001 - a class of the script's
        return f"a {type(key).__name__}"


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread; None: it has none.

    CPython up to 3.11 holds a lock meanwhile that a search for reference cycles may need, and waits for itself for ever
    then (python/cpython#106883). So there is none meanwhile, and one thread asks at a time.
    """
    with _ONE, no_collection():
        return sys._current_frames().get(thread)


def instances(belongs: Callable[[type], bool]) -> list[Any]:
    """All objects whose own class is one for which `belongs` is true.

    `gc.get_objects` has half-made tuples of other threads, too. Such a thread ends with a SystemError where somebody
    holds the tuple that it fills from a generator. So that list is let go of within one call, in which no other thread
    runs, and objects are found by their references to their classes.
    """
    kinds = {kind for kind in set(map(type, gc.get_objects())) if belongs(kind)}
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
