"""How much memory the fast tier may take, and what the kernel's groups leave of it."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rollback.checkpoints.fast_tier.sizing import LEAST_SLOTS, bytes_of_tier, free_memory, slots_that_fit
from rollback.system import cgroups

GiB = 1 << 30


@pytest.mark.parametrize(
    ("slot_bytes", "free", "keep", "slots"),
    [
        (100, 10**6, 6, 7),  # one more than the ring keeps: to write into
        (100, 1399, 6, 6),
        (100, 1400, 6, 7),
        (100, 800, 6, 4),
        (100, 799, 6, 0),  # fewer than four are of no use
        (100, 800, 3, 4),
        (0, 100, 6, 7),
        (0, 7, 6, 0),
    ],
)
def test_half_of_what_is_free_is_cut_into_slots(slot_bytes: int, free: int, keep: int, slots: int) -> None:
    assert slots_that_fit(slot_bytes, free, keep) == slots


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB free everywhere but in its control groups, whose directory this is."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=2 * GiB, f_frsize=4))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GiB))
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    return tmp_path


def belongs_to(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """What the kernel says of this process's groups; None where it does not say."""
    really = Path.read_text

    def read(path: Path, *arguments: str) -> str:
        if path != Path("/proc/self/cgroup"):
            return really(path, *arguments)
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)


def limit(group: Path, most: str, used: int, *, cached: int = 0, names: tuple[str, str] = ("max", "current")) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / f"memory.{names[0]}").write_text(f"{most}\n")
    (group / f"memory.{names[1]}").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\nfile 7\ninactive_file {cached // 4}\nactive_file {cached * 3 // 4}\n")


OLD = ("limit_in_bytes", "usage_in_bytes")


@pytest.mark.parametrize(
    ("text", "groups", "free"),
    [
        (None, {}, 8),
        ("", {}, 8),
        ("0::/job/a\n", {}, 8),  # such groups have no limit
        ("0::/job/a\n", {"job/a": ("max", 1, 0)}, 8),
        ("0::/job/a\n", {"job/a": (str(5 * GiB), 1, 0)}, 4),
        ("0::/job/a\n", {"job/a": (str(5 * GiB), 4, 2)}, 3),  # what the kernel caches is given up when asked for
        ("0::/job/a\n", {"job/a": (str(5 * GiB), 6, 0)}, 0),
        ("0::/job/a\n", {"job/a": (str(7 * GiB), 1, 0), "job": (str(4 * GiB), 2, 0)}, 2),  # the tightest counts
        ("0::/job/a\n", {"": (str(3 * GiB), 2, 0)}, 1),
        ("0::/job/a\n", {"other": (str(3 * GiB), 2, 0)}, 8),
        ("0::/\n", {"": (str(3 * GiB), 2, 0)}, 1),
        ("a line\n5:cpu\n0::/job:a\n", {"job:a": (str(3 * GiB), 2, 0)}, 1),
    ],
)
def test_a_control_group_s_limit_holds_and_so_do_those_around_it(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    groups: dict[str, tuple[str, int, int]],
    free: int,
) -> None:
    for name, (most, used, cached) in groups.items():
        limit(machine / name, most, used * GiB, cached=cached * GiB)
    belongs_to(monkeypatch, text)
    assert free_memory(machine) == free * GiB


@pytest.mark.parametrize(
    ("text", "free"),
    [("4:memory:/job\n", 2), ("4:cpu,memory:/job\n", 2), ("4:cpu:/job\n", 8), ("4:cpu:/x\n5:memory:/job\n", 2)],
)
def test_the_older_kind_of_control_groups_is_known_too(
    machine: Path, monkeypatch: pytest.MonkeyPatch, text: str, free: int
) -> None:
    limit(machine / "memory" / "job", str(3 * GiB), GiB, names=OLD)
    belongs_to(monkeypatch, text)
    assert free_memory(machine) == free * GiB


def test_a_group_that_does_not_say_what_it_caches_has_given_up_nothing(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(machine / "job", str(3 * GiB), GiB)
    (machine / "job" / "memory.stat").write_text("anon 5\n")
    belongs_to(monkeypatch, "0::/job\n")
    assert free_memory(machine) == 2 * GiB


def test_the_least_of_file_system_host_and_group_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    belongs_to(monkeypatch, None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * GiB))
    assert free_memory(machine) == 5 * GiB
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=4096))
    assert free_memory(machine) == 3 * 4096


def test_a_copy_of_another_host_s_slot_does_not_change_how_many_slots_the_next_attempt_has(tmp_path: Path) -> None:
    """What slots and copies take is what was free before."""
    assert bytes_of_tier(tmp_path) == 0
    part, free = 8192, 8 * 8192
    assert slots_that_fit(part, free, keep=3) == LEAST_SLOTS
    for name in (*(f"slot-{number:02d}" for number in range(LEAST_SLOTS)), "buddy-00001-00-c000001-s00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_bytes(bytes(part))
        free -= part
    (tmp_path / "tier.json").write_bytes(bytes(part))
    assert bytes_of_tier(tmp_path) == (LEAST_SLOTS + 1) * part
    assert slots_that_fit(part, free + bytes_of_tier(tmp_path), keep=3) == LEAST_SLOTS


def test_what_vanishes_while_a_tier_is_measured_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of another host arrive and leave meanwhile."""
    for name in ("arriving-copy", "slot-00"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(bytes(8192))
    whole, measure = bytes_of_tier(tmp_path), os.lstat

    def leave_first(path: str, **given: Any) -> os.stat_result:
        if os.path.basename(path) == "rank-00000.safetensors":  # all names are known by then
            monkeypatch.undo()
            shutil.rmtree(tmp_path / "arriving-copy")
        return measure(path, **given)

    monkeypatch.setattr(os, "lstat", leave_first)
    assert bytes_of_tier(tmp_path) == whole // 2
