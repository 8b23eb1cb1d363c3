"""Reading into tensors of a device. The CPU stands in for one: streams and registered memory are CUDA's alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollback.checkpoints.format.shard import ShardPiece, ShardReader, write_shard
from rollback.train.restore import device_reads
from rollback.train.restore.device_reads import DeviceRead, read_to_devices
from rollback.train.snapshots.capture import bytes_of
from rollback.train.state import tree

TENSORS = {
    "less than a room": torch.randn(5, 7),
    "as much as one": torch.randn(64),
    "more than two": torch.randn(3, 90, dtype=torch.float64),
    "odd": torch.randint(0, 255, (333,), dtype=torch.uint8),
    "narrow": torch.randn(130).bfloat16(),
    "one number": torch.tensor(3.5),
    "none": torch.empty(0, 4),
}


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_tensors_are_those_of_the_shard(tmp_path: Path, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_reads, "_ROOM", 256)
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


def piece(name: str, item: Tensor) -> ShardPiece:
    return ShardPiece(name, tree.DTYPE_CODE[item.dtype], tuple(item.shape), lambda: [bytes_of(item)])
