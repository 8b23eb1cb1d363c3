"""What ranks hand to their guards, where it is not the same, or does not stay so: all are refused, and none waits."""

from pathlib import Path

from in_ranks import in_two_ranks

RANK = """
import json, sys, torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.utils.data import DataLoader
import rollback
from rollback.config import SamplesFrom
from rollback.errors import RollbackError
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
first, told = dist.get_rank() == 0, []
LISTED = {"skip_samples": (SamplesFrom(batch=0, samples=(7,)),)}
for of_first, of_second in (
    ({}, {"scheduler": 5}), ({"init": "model"}, {}), ({"run": "runs/12-00-00"}, {"run": "runs/12-00-01"}),
    ({}, {"run": None}), ({"loader": DataLoader(range(9)), **LISTED}, {"loader": DataLoader(range(5)), **LISTED}),
):
    model = nn.Linear(4, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "loader": [], "run": sys.argv[1]}
    try:
        rollback.Guard(**given | (of_first if first else of_second))
    except RollbackError as error:
        told.append([type(error).__name__, error.message])
replicas = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(replicas.parameters())
for of_first, of_second in ((replicas, replicas.module), (replicas.module, replicas)):
    try:  # in what the guard sees of a script given by -c, there is no variable that has the other one
        rollback.Guard(model=of_first if first else of_second, optimizer=optimizer, loader=[], run=sys.argv[1])
    except RollbackError as error:
        told.append([type(error).__name__, error.message])
model = nn.Linear(4, 1)
nn.init.ones_(model.weight), nn.init.ones_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(2, 4)] * 4, run=sys.argv[1] + "-later")
try:
    for x in guard:
        loss = model(x).mean()
        if first:  # the optimizer of the other rank gets no state
            loss.backward()
        optimizer.step()
        guard.observe(loss)
except RollbackError as error:
    told.append([type(error).__name__, error.message])
print(json.dumps(told))
dist.destroy_process_group()
"""


def test_what_is_wrong_on_one_rank_or_not_alike_is_refused_on_all(tmp_path: Path) -> None:
    first, second = in_two_ranks(RANK, tmp_path / "run", cwd=tmp_path)
    assert first == second
    (of_one_rank, of_init, of_run, of_first_run, of_data, of_inside, of_first_inside, of_update) = first
    assert of_one_rank[0] == "UsageError"
    assert "scheduler= is a int" in of_one_rank[1]
    assert "init is given on rank 0 and None on rank 1" in of_init[1]
    assert "run is runs/12-00-00 on rank 0 and runs/12-00-01 on rank 1" in of_run[1]
    assert f"run is {tmp_path / 'run'}"[:60] in of_first_run[1]
    assert "and None on rank 1" in of_first_run[1]
    assert "the data set has 5 samples, and no sample 7" in of_data[1]
    assert "1 around or in model on rank 0, and 0 on rank 1 (" in of_inside[1]
    assert "0 around or in model on rank 0, and 1 on rank 1 (" in of_first_inside[1]
    assert "'state.0.momentum_buffer' is not there on rank 1" in of_update[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run-later"]
