"""Updates of many batches, in epochs that are no whole number of them, and a window across an epoch's end."""

from pathlib import Path

import pytest
from job_results import Scenarios
from selection import soak
from toy import Toy, facts, require_same, weights

from rollback.facts.training import Planned

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
