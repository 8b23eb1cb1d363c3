"""A rank of a job on a device dies, and the other one keeps the state."""

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from on_devices import DEVICES, GROUPS, LIMIT, Group, Supervised
from random_kills import kill_a_rank
from toy import Toy, facts, supervisor_facts

from rollback.checkpoints.fast_tier.end_marks import EndMark, StepEnd, marks_of, prepare, read_ends
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.facts.training import Attached, LastSnapshotMade, NoLastSnapshot
from rollback.train.data import rng
from rollback.train.data.rng import RawRandom, tree_of
from rollback.train.last_snapshot import device as of_device
from rollback.train.last_snapshot.device import Device, NoAnswer

# Dropout draws on the device, and the buffer that moves in every forward lies there.
TOY = Toy(
    samples=800, sampler="distributed", augment=True, patient=False, clip=0.5,
    settings={"snapshot_every": 500, "last_snapshot": "on"},
)  # fmt: skip
KILL = 75


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in the host's memory: a driver registers no pages of a file on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rollback-tests-") as folder:
        yield Path(folder)


TWO = [group for group in GROUPS if "two ranks" in str(group.id)]


@pytest.mark.parametrize("group", TWO)
@pytest.mark.parametrize("toy", [TOY, TOY.but(adamw="fused")], ids=["foreach", "fused"])
def test_a_killed_rank_costs_no_step(tmp_path: Path, memory: Path, group: Group, toy: Toy) -> None:
    undisturbed = Supervised(tmp_path / "undisturbed", toy, group)
    undisturbed.launch("--fast-tier", str(memory))
    job = Supervised(tmp_path / "killed", toy, group, signal=[1, KILL, signal.SIGKILL, 1])
    job.launch("--fast-tier", str(memory))
    assert not facts(job.run, NoLastSnapshot)
    assert [fact.step for fact in facts(job.run, Attached)] == [0, KILL]
    job.require(undisturbed)


LONG = TOY.but(samples=3200, loop="epochs", epochs=2, between=True)


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> dict[Group, Supervised]:
    """Filled by who needs it."""
    return {}


@pytest.mark.parametrize("group", TWO)
@pytest.mark.parametrize("seed", range(int(os.environ.get("KILLS_OF_TWO", "3"))))
def test_a_rank_killed_at_a_random_moment_costs_no_step(
    tmp_path: Path, memory: Path, undisturbed_long: dict[Group, Supervised], group: Group, seed: int
) -> None:
    """Bit for bit in the end, always. What it has cost is printed: a moment in which nobody can have kept the state is
    one, too."""
    if group not in undisturbed_long:
        undisturbed_long[group] = Supervised(tmp_path / "undisturbed", LONG, group)
        undisturbed_long[group].launch("--fast-tier", str(memory))
    killed = Supervised(tmp_path / "killed", LONG, group)
    job = killed.start("--fast-tier", str(memory))
    kill_a_rank(job, killed.run, group.ranks, random.Random(f"{group.device}/{seed}"), within=4.0)
    output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, output[-8000:]
    killed.require(undisturbed_long[group])
    for made in supervisor_facts(killed.run, LastSnapshotMade):
        print(f"{group.device}, seed {seed}: {made.in_words()}")


@pytest.mark.parametrize("group", GROUPS)
def test_marks_change_nothing(tmp_path: Path, memory: Path, group: Group) -> None:
    marked = Supervised(tmp_path / "on", TOY, group)
    marked.launch("--fast-tier", str(memory))
    without = Supervised(tmp_path / "off", TOY.but(settings={**TOY.settings, "last_snapshot": "off"}), group)
    without.launch("--fast-tier", str(memory))
    marked.require(without)


@pytest.mark.parametrize("device", DEVICES)
def test_random_states_are_read_as_they_are_captured(device: str) -> None:
    torch.rand(3, device=device)
    told, parts = RawRandom().read()
    states, captured = tree_of(told, parts), rng.capture()
    assert len(states["cuda"]) == len(captured["cuda"])
    assert states.get("device") == captured.get("device")
    assert all(map(torch.equal, states["cuda"], captured["cuda"]))
    assert states["cuda"] or device == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("behind", [20, 3000])
def test_what_is_kept_is_copied_while_the_stream_of_the_training_waits(
    memory: Path, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """As for a sum that never comes. behind: kernels that were asked for behind it, in another thread. A device takes
    about a thousand. Who asks for more waits, and keeps others out of the driver: then the device is given up."""
    monkeypatch.setattr(of_device, "_ANSWER", 2.0)
    paths = marks_of(SlotPaths(memory))
    prepare(paths)
    here = torch.device("cuda", torch.cuda.current_device())
    gpu, weights = Device(here, paths, 0), torch.randn(3 << 22, device=here)
    expected = weights.cpu()
    other = torch.ones(8, device=here)
    other.add_(1)
    torch.cuda.synchronize()
    training = torch.cuda.current_stream()
    torch.cuda._sleep(int(1e10))  # cycles: five seconds
    asked = 0

    def ask() -> None:
        nonlocal asked
        while asked < behind:
            other.add_(1)
            asked += 1

    launching = threading.Thread(target=ask, daemon=True)
    launching.start()
    before = -1
    while asked != before and asked < behind:  # it is in the driver and waits there, or all are asked for
        before = asked
        time.sleep(0.2)
    if behind < 1000:
        assert torch.equal(gpu.read(weights), expected)
        assert not training.query(), "it was not waited for"
    else:
        assert asked < behind, "it does not wait"
        with pytest.raises(NoAnswer, match="within 2 s"):
            gpu.read(weights)
    launching.join()
    torch.cuda.synchronize()
    gpu.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stamp_is_there_once_the_gpu_has_come_to_it(memory: Path) -> None:
    paths = marks_of(SlotPaths(memory))
    prepare(paths)
    here = torch.device("cuda", torch.cuda.current_device())
    mark, gpu = EndMark(paths, 0), Device(here, paths, 0)
    late, end = torch.arange(4, dtype=torch.uint8, device=here), StepEnd(1, 0, 8, 8, 0, 0)
    before = end._replace(step=7)
    gpu.add(mark.write(before, b"host" + bytes(4), added=4), before, [late])  # a first launch waits for what runs
    torch.cuda.synchronize()
    torch.cuda._sleep(int(3e9))
    half = mark.write(end, b"host" + bytes(4), added=4)
    gpu.add(half, end, [late])
    assert set(read_ends(paths, 0)) == {before}
    torch.cuda.synchronize()
    assert read_ends(paths, 0) == dict.fromkeys((before, end), b"host\0\1\2\3")
    gpu.close()
    mark.close()
