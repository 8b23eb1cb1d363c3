"""Reading into tensors of a device. The CPU stands in for one: streams and registered memory are CUDA's alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollback.checkpoints.format.shard import ShardPiece, ShardReader, write_shard
from rollback.train.restore import reads
from rollback.train.restore.reads import DeviceRead, _DeviceCopier, read_to_devices
from rollback.train.snapshots.capture import bytes_of
from rollback.train.state import tree

TENSORS = {
    "less than a buffer": torch.randn(5, 7),
    "as much as one": torch.randn(64),
    "more than two": torch.randn(3, 90, dtype=torch.float64),
    "odd": torch.randint(0, 255, (333,), dtype=torch.uint8),
    "narrow": torch.randn(130).bfloat16(),
    "one number": torch.tensor(3.5),
    "none": torch.empty(0, 4),
}


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_tensors_are_those_of_the_shard(tmp_path: Path, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_BUFFER_BYTES", 256)
    path = tmp_path / "shard"
    written = write_shard(path, [piece(name, item) for name, item in TENSORS.items()], {})
    memory = memoryview(bytearray(path.read_bytes())) if in_memory else None
    targets = {name: torch.full_like(item, 9) for name, item in TENSORS.items()}
    versions = {name: item._version for name, item in targets.items()}
    with ShardReader(path, written, memory=memory) as shard:
        read_to_devices([DeviceRead(shard, name, item) for name, item in targets.items()])
    for name, item in TENSORS.items():
        assert torch.equal(targets[name], item), name
        assert not item.numel() or targets[name]._version > versions[name], f"autograd is not told of {name}"


def test_a_thread_that_reads_names_its_device_before_its_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else torch would choose the first device as it leaves the stream, and make a context there."""
    entered: list[str] = []

    @contextmanager
    def within(what: Any) -> Iterator[None]:
        entered.append(str(what))
        yield

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __str__(self) -> str:
            return f"stream of {self.device}"

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "stream", within)
    path, item = tmp_path / "shard", torch.randn(5)
    written = write_shard(path, [piece("x", item)], {})
    with ShardReader(path, written, memory=memoryview(bytearray(path.read_bytes()))) as shard:
        _DeviceCopier(torch.device("cuda", 1)).fill(DeviceRead(shard, "x", target := torch.zeros(5)))
    assert torch.equal(target, item)
    assert entered == ["cuda:1", "stream of cuda:1"]


def piece(name: str, item: Tensor) -> ShardPiece:
    return ShardPiece(name, tree.DTYPE_CODE[item.dtype], tuple(item.shape), lambda: [bytes_of(item)])
