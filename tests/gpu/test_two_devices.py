"""A rank whose GPU is not the first one that it sees. Skipped where there are fewer than two."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollback.train.data.cursor.digest import Digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
RESTORES = """
import sys
from pathlib import Path
import torch
from rollback.checkpoints.format.shard import ShardPiece, ShardReader, write_shard
from rollback.train.comm.ranks import Ranks
from rollback.train.restore.reads import reading
from rollback.train.snapshots.capture import bytes_of

torch.cuda.set_device(1)
item, path = torch.randn(64), Path(sys.argv[1])
written = write_shard(path, [ShardPiece("x", "F32", (64,), lambda: [bytes_of(item)])], {})
target = torch.zeros(64, device="cuda:1")
with ShardReader(path, written) as shard, reading(Ranks()) as reads:
    reads.want(shard, "x", target)
assert torch.equal(target.cpu(), item)
print("context on the first one:", torch._C._cuda_hasPrimaryContext(0))
"""


def test_a_restore_takes_no_memory_of_another_rank_s_gpu(tmp_path: Path) -> None:
    """In every process that has a context on a GPU, it costs that half a gigabyte."""
    done = subprocess.run(
        [sys.executable, "-c", RESTORES, tmp_path / "shard"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "context on the first one: False\n", done.stderr


def test_a_batch_on_another_gpu_than_the_thread_s_own_has_its_digest() -> None:
    batch = torch.arange(1 << 13, device="cuda:1")
    torch.cuda.set_device(0)
    expected = Digest(batch.cpu()).value
    with torch.cuda.device(1):
        torch.cuda._sleep(int(1e9))  # the copy comes behind it
    assert Digest(batch).value == expected
