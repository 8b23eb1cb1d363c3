"""Copying memory: all of it and nothing beside it, wherever in their pages source and target begin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollback.system import region
from rollback.system.region import Region, address_of, copy

PAGE, PIECE = 4096, 1000
ROOM = 3 * PAGE


@given(source=st.integers(0, PAGE), target=st.integers(0, PAGE), size=st.integers(0, 2 * PAGE))
def test_a_copy_is_whole_and_touches_nothing_else(source: int, target: int, size: int) -> None:
    content = bytes(place * 7 % 251 for place in range(ROOM))
    there, here = Region(ROOM), Region(ROOM)
    there.view[:], here.view[:] = content, b"\xff" * ROOM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region, "_PIECE", PIECE)
        copy(address_of(here.view) + target, address_of(there.view) + source, size)
    assert bytes(here.view) == b"\xff" * target + content[source : source + size] + b"\xff" * (ROOM - target - size)
    there.close()
    here.close()
