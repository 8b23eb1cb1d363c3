"""A rank of a job on a device dies, and the other one keeps the state."""

import signal
from pathlib import Path

import pytest
import torch
from on_devices import DEVICES, GROUPS, Group, Supervised
from toy import Toy, facts

from rollback.facts.training import Attached, NoLastSnapshot
from rollback.train.data import rng
from rollback.train.data.raw_random import RawRandom, tree_of

# Dropout draws on the device, and the buffer that moves in every forward lies there.
TOY = Toy(
    samples=800, sampler="distributed", augment=True, patient=False,
    settings={"snapshot_every": 500, "last_snapshot": "on"},
)  # fmt: skip
KILL = 75


def in_memory(folder: Path) -> tuple[str, str]:
    """The flag for a fast tier there."""
    (folder / "memory").mkdir(0o700, exist_ok=True)
    return "--fast-tier", str(folder / "memory")


TWO = [group for group in GROUPS if "two ranks" in str(group.id)]


@pytest.mark.parametrize("group", TWO)
@pytest.mark.parametrize("toy", [TOY, TOY.but(adamw="fused")], ids=["foreach", "fused"])
def test_a_killed_rank_costs_no_step(tmp_path: Path, group: Group, toy: Toy) -> None:
    undisturbed = Supervised(tmp_path / "undisturbed", toy, group)
    undisturbed.launch(*in_memory(tmp_path))
    job = Supervised(tmp_path / "killed", toy, group, signal=[1, KILL, signal.SIGKILL, 1])
    job.launch(*in_memory(tmp_path))
    assert not facts(job.run, NoLastSnapshot)
    assert [fact.step for fact in facts(job.run, Attached)] == [0, KILL]
    job.require(undisturbed)


@pytest.mark.parametrize("group", GROUPS)
def test_marks_change_nothing(tmp_path: Path, group: Group) -> None:
    marked = Supervised(tmp_path / "on", TOY, group)
    marked.launch(*in_memory(tmp_path))
    without = Supervised(tmp_path / "off", TOY.but(settings={**TOY.settings, "last_snapshot": "off"}), group)
    without.launch(*in_memory(tmp_path))
    marked.require(without)


@pytest.mark.parametrize("device", DEVICES)
def test_random_states_are_read_as_they_are_captured(device: str) -> None:
    torch.rand(3, device=device)
    told, parts = RawRandom().read()
    states, captured = tree_of(told, parts), rng.capture()
    assert len(states["cuda"]) == len(captured["cuda"]) == (torch.cuda.device_count() if device == "cuda" else 0)
    assert all(map(torch.equal, states["cuda"], captured["cuda"]))
