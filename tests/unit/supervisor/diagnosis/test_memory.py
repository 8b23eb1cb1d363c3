"""Finding and reading the kernel's count of OOM kills, on cgroup file systems as they look in the field."""

from pathlib import Path

import pytest

from rollback.supervisor.diagnosis.memory import OomCounters, counter_files, parse_counter

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2 = "low 0\nhigh 12\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n"


@pytest.mark.parametrize(("text", "expected"), [(V1, 3), (V2, 3), ("", None), ("oom_kill\n", None), ("oom 9\n", None)])
def test_the_counter_is_found_in_both_formats(text: str, expected: int | None) -> None:
    assert parse_counter(text) == expected


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/user.slice/job.scope\n", "user.slice/job.scope/memory.events", V2),
        ("0::/\n", "memory.events", V2),
        ("0::/docker/abc\n", "memory.events", V2),
        ("9:cpu:/x\n4:memory:/job/step\n0::/\n", "memory/job/step/memory.oom_control", V1),
        ("4:memory:/docker/abc\n", "memory/memory.oom_control", V1),
        ("3:cpu,memory:/job\n0::/\n", "memory/job/memory.oom_control", V1),
    ],
    ids=["v2", "v2 at its root", "v2 in a container", "v1", "v1 in a container", "v1 with two controllers"],
)
def test_kills_are_counted_from_the_first_look_on(tmp_path: Path, membership: str, file: str, text: str) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(membership)
    counter = root / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text)
    counters = OomCounters(root, proc)
    counters.watch([7])
    assert counters.kills() == 0
    counter.write_text(text.replace("oom_kill 3", "oom_kill 5"))
    counters.watch([7])
    assert counters.kills() == 2


def test_what_cannot_be_read_counts_none(tmp_path: Path) -> None:
    counters = OomCounters(tmp_path, tmp_path)
    counters.watch([1, 2])
    assert counters.kills() == 0
    assert counter_files("0::/x\n", tmp_path)[0] == tmp_path / "x" / "memory.events"
