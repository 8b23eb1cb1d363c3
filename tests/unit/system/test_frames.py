"""What a thread runs, asked while nobody searches for reference cycles."""

import gc
import sys
import threading
from types import FrameType

import pytest

from rollback.system.frames import frame_of


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
