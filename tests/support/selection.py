"""Which cases of a test run by default; the others are soak tests. See also the marker `covering`."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(names: Iterable[str], *chosen: str) -> list[Any]:
    """A parameter for each of `names`; those that are not `chosen` are left to the soak."""
    every = [*names]
    assert set(chosen) <= set(every), set(chosen) - set(every)
    return [pytest.param(name, marks=[] if name in chosen else pytest.mark.soak, id=name) for name in every]
