"""Updates of many batches, in epochs that are no whole number of them, and a window across an epoch's end."""

from pathlib import Path

import pytest
import torch
from job_results import Scenarios
from selection import soak
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toy import Toy, facts, require_same, skip_list, weights

import rollback
from rollback.facts.training import Incident, Planned

TOY = Toy(392, epochs=2, sampler="distributed", accumulate=4, settings={"snapshot_every": 5, "skip_after": 20})


@pytest.mark.parametrize(
    "by_epoch", [True, *soak(False)], ids=["counted anew in each epoch", "counted from epoch to epoch"]
)
def test_a_window_across_an_epoch_s_end_leaves_the_ranks_alike(tmp_path: Path, by_epoch: bool) -> None:
    """The script makes a shorter update of what an epoch leaves, in step on all ranks; and so it does after a window.

    In epochs of 49 batches, updates of 4 leave one. A script that met that end out of step would apply the gradients
    that it has on this rank alone.
    """
    job = Scenarios(tmp_path)
    across, within = (TOY.but(by_epoch=by_epoch, nan=(batch,)) for batch in (41, 90))
    for name, toy in (("across", across), ("within", within)):
        job.add(name, toy)
        job.add(f"{name}-fresh", toy, skips_of=str(job.run(name)))
    job.torchrun(2)
    (plan,) = facts(job.run("across"), Planned)
    assert plan.skip.first < 49 <= plan.skip.last
    for name in ("across", "within"):
        first, second = (job.portrait(name, rank) for rank in (0, 1))
        parameters = [key for key in weights(first) if "num_batches" not in key and "running" not in key]
        require_same({k: first[k] for k in parameters}, {k: second[k] for k in parameters}, f"{name}: the ranks")
        for rank in (0, 1):
            require_same(job.portrait(name, rank), job.portrait(f"{name}-fresh", rank), f"{name}: as if from the start")


def with_a_criterion(run: Path, *, bad: int = -1, **settings: object) -> list[float]:
    """Updates of three batches, counted by their position in the stream, in epochs of ten. The loss has parameters, in
    a module of its own. Returns all parameters at the end."""
    torch.manual_seed(3)
    x = torch.randn(40, 6)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, criterion = nn.Linear(6, 1), nn.Linear(1, 1)
    trained = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=loader, criterion=criterion, run=run, snapshot_every=1, rewind=1,
        probation=6, skip_after=1, max_skipped="100%", **settings,
    )  # fmt: skip
    for _ in guard.epochs(4):
        for x, y in guard:
            loss = (criterion(model(x)) - y).square().mean() / (0.0 if guard.batch == bad else 3.0)
            loss.backward()
            guard.observe(loss)
            if (guard.batch + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    guard.close()
    return [value for item in trained for value in item.flatten().tolist()]


def test_what_an_epoch_leaves_of_an_undone_time_is_in_no_update_of_the_replay(tmp_path: Path) -> None:
    """The last update of an epoch is judged at its end, when the batch behind it has left gradients in all modules."""
    ended = with_a_criterion(tmp_path / "run", bad=8)
    assert len(facts(tmp_path / "run", Incident)) == 1, "the replay has met gradients that are not finite"
    assert ended == with_a_criterion(tmp_path / "given", skip=skip_list(tmp_path / "run"))
