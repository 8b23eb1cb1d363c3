"""The cores that a process may use."""

import os
from pathlib import Path

import pytest

from rollback.system.cgroups import cores_here


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), (None, 4), ("", 4)],
)
def test_cores_are_those_that_this_process_may_use_and_its_container_grants(
    monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5} if pid == 0 else {0})

    def read(path: Path) -> str:
        assert path == Path("/sys/fs/cgroup/cpu.max")
        if quota is None:
            raise FileNotFoundError(path)
        return quota

    monkeypatch.setattr(Path, "read_text", read)
    assert cores_here() == cores
