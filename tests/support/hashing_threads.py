"""With how many threads ranks hash what they read."""

from collections.abc import Callable
from typing import Any

import pytest

from rollback.checkpoints.format import shard
from rollback.train.restore import reads


def note_threads(patch: pytest.MonkeyPatch, cores: int) -> list[int]:
    """Let the host have so many cores. The list grows by the number of threads whenever a shard is hashed."""
    used: list[int] = []

    def noting(act: Callable[..., str]) -> Callable[..., str]:
        def note(*given: Any) -> str:
            used.append(given[-1])
            return act(*given)

        return note

    patch.setattr(reads, "cores_here", lambda: cores)
    for name in ("hash_of", "hash_pieces"):
        patch.setattr(shard, name, noting(getattr(shard, name)))
    return used
