"""A data set of another length: refused, or accepted by the operator's word, which is on record."""

from pathlib import Path

import pytest
import torch
from launching import launching
from toy import Toy, consumed, facts, files, train

from rollback.errors import ExitCode, RunDoesNotFit
from rollback.facts.training import Accepted, Attached, Restored

TOY = Toy(sampler="sequential")  # 400 samples, 100 batches
GROWN = TOY.but(samples=440)
LOG = "log"


class Killed(Exception):
    pass


def until(batch: int, toy: Toy, run: Path) -> None:
    """Train until a batch comes by, and end there without a word."""

    def end(_guard: object, position: int) -> None:
        if position == batch:
            raise Killed

    with pytest.raises(Killed):
        train(toy, run, hook=end, log=run.with_name(LOG))


def test_one_sample_more_or_less_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    until(25, TOY, run)
    before = files(run)
    for samples in (399, 401):
        with pytest.raises(RunDoesNotFit, match=f"data, length: the run has 400, this job {samples}") as refused:
            train(TOY.but(samples=samples), run)
        assert "--accept-data-change" in (refused.value.hint or "")
    assert files(run) == before


def test_accepted_it_goes_on_at_its_position_in_the_new_order_and_rolls_back_over_the_change(tmp_path: Path) -> None:
    run = tmp_path / "run"
    until(57, TOY, run)
    until(73, GROWN.with_settings(accept_data_change=True), run)
    (accepted,) = facts(run, Accepted)
    assert (accepted.before, accepted.after) == (
        {"length": 400, "batches": 100}, {"length": 440, "batches": 110},
    )  # fmt: skip
    # Once accepted, it is the run's data. The NaN sends it back to where the data were the old ones.
    portrait = train(GROWN.but(nan=(78,)).with_settings(rewind=35), run, log=run.with_name(LOG))
    assert [fact.step for fact in facts(run, Attached)] == [0, 50, 70]
    assert [fact.step for fact in facts(run, Restored)] == [40]
    assert len(facts(run, Accepted)) == 1
    taken = consumed(portrait)
    assert {position: ids[0] for position, ids in taken.items()} == {position: 4 * position for position in taken}
    assert max(taken) == 109


LARGER_LATER = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import rollback

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader)
for epoch in guard.epochs(3):
    if epoch == 2:
        loader.batch_sampler.batch_size = 8
    for (x,) in guard:
        loss = model(x).square().mean() * (float("nan") if guard.batch == 33 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
torch.save(model.state_dict(), "weights.pt")
"""


def test_a_batch_size_of_a_later_epoch_ends_the_attempt_that_goes_back_over_it_and_not_the_run(tmp_path: Path) -> None:
    """In a new process the script begins with the size of the first epochs."""
    ends = []
    for name, flags in (("back", ()), ("skipped", ("--skip", "33:33"))):
        (folder := tmp_path / name).mkdir()
        (folder / "job.py").write_text(LARGER_LATER)
        with launching(folder, with_torchrun=False, script=folder / "job.py") as launch:
            status, output = launch.finish("", *flags)
        assert status == ExitCode.DONE, output
        ends.append(torch.load(folder / "weights.pt"))
    first, second = facts(tmp_path / "back" / "runs" / "job", Attached)
    assert (first.step, second.step) == (0, 0), "the state from before the NaN's epoch"
    assert torch.equal(ends[0]["weight"], ends[1]["weight"])
