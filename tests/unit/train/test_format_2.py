"""A run directory of format 2 goes on.

`format-2.tar.xz` was written by the last version with that format: `train(Path("run"), 4)`.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toy import facts

import rollback
from rollback.errors import RunDirectoryError, RunDoesNotFit
from rollback.facts.training import Attached, Committed
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.rundir.paths import READS

FIXTURE = Path(__file__).parent / "format-2.tar.xz"


def train(run: Path, steps: int) -> dict[str, Tensor]:
    """All numbers are sums of few powers of two, so that every machine comes to the same bits."""
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    data = DataLoader([torch.tensor([float(n), 1.0 + n % 2]) for n in range(24)], batch_size=2)
    torch.manual_seed(0)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=data, run=run, max_steps=steps, snapshot_every=100, fast_tier="off"
    )
    for batch in guard:
        loss = (model(batch) * torch.randint(3, (1,))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
    guard.close()
    states = {f"momentum of {n}": optimizer.state[p]["momentum_buffer"] for n, p in model.named_parameters()}
    return {**{name: item.clone() for name, item in model.state_dict().items()}, **states}


@pytest.fixture
def of_format_2(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, filter="data")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["format"] == 2
    return tmp_path / "run"


def test_a_run_of_format_2_goes_on_bit_for_bit(of_format_2: Path, tmp_path: Path) -> None:
    assert verify(ReadableRun.at(of_format_2)).exit_code == 0
    undisturbed = train(tmp_path / "undisturbed", 10)
    ended = train(of_format_2, 10)
    assert all(torch.equal(ended[name], undisturbed[name]) for name in undisturbed)
    *_, resumed = facts(of_format_2, Attached)
    assert (resumed.checkpoint, resumed.step, resumed.batch) == (facts(of_format_2, Committed)[1].checkpoint, 4, 4)
    assert verify(ReadableRun.at(of_format_2)).exit_code == 0


def test_a_format_that_is_not_known_is_refused_with_what_to_do(of_format_2: Path) -> None:
    identity = of_format_2 / "run.json"
    identity.write_text(identity.read_text().replace('"format":2', '"format":9').replace('"format": 2', '"format": 9'))
    before = {path: path.read_bytes() for path in of_format_2.rglob("*") if path.is_file()}
    with pytest.raises((RunDoesNotFit, RunDirectoryError)) as refused:
        train(of_format_2, 10)
    assert "format 9" in refused.value.message
    assert READS in str(refused.value)
    assert refused.value.hint
    assert {path: path.read_bytes() for path in of_format_2.rglob("*") if path.is_file()} == before
