"""What a host keeps in memory of its ranks."""

from pathlib import Path

import pytest

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.slots import SlotPaths


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir(0o700)
    return folder


@pytest.fixture
def marks(memory: Path) -> end_marks.EndMarkPaths:
    paths = end_marks.marks_of(SlotPaths(memory))
    end_marks.prepare(paths)
    return paths
