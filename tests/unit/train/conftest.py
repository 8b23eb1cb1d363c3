"""For what must hold of models as they are, and sharded."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from sharding import one_rank


@pytest.fixture(params=[False, True], ids=["plain", "sharded"])
def sharded(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether to shard the model, over this process alone."""
    with one_rank() if request.param else nullcontext():
        yield request.param
