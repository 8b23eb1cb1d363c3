"""Which cases of a test run by default; the others are soak tests. See also the marker `covering`."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(names: Iterable[str], *chosen: str) -> list[Any]:
    """A parameter for each of `names`; those that are not `chosen` are left to the soak."""
    every = [*names]
    assert set(chosen) <= set(every), set(chosen) - set(every)
    return [pytest.param(name, marks=[] if name in chosen else pytest.mark.soak, id=name) for name in every]


def soak(*cases: object) -> list[Any]:
    """Parameters that are left to the soak; a tuple is one for several names."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.soak) for each in cases]
