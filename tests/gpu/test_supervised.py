"""Jobs on a device under `rollback launch`: killed, told to stop, and ended by what the device itself does.

Ranks are forked from a process that has imported torch, as ever. Had it touched the driver, none of them could train.
"""

import signal
import subprocess
from pathlib import Path

import pytest
from job_results import LAUNCH
from on_devices import DEVICES, GROUPS, LIMIT, Supervised
from toy import Toy, facts

from rollback.facts.training import Attached, Drifted, Incident, Restored, Stopped

COLD = """
import sys
forked = "torch" in sys.modules
import torch
print("forked", forked, torch.ones(3, device=sys.argv[1]).sum().item(), flush=True)
"""
# What is skipped must not depend on which checkpoints a killed run happens to have: only what is bad, each time.
TOY = Toy(
    samples=800, sampler="distributed", augment=True, nan=(60,), patient=False, clip=0.5,
    settings={"policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20},
)  # fmt: skip


@pytest.fixture(scope="module", params=GROUPS)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Supervised:
    job = Supervised(tmp_path_factory.mktemp("jobs") / "undisturbed", TOY, request.param)
    job.launch()
    assert [fact.route for fact in facts(job.run, Restored)] == ["in_process"]
    return job


@pytest.mark.parametrize("batch", [3, 75])
def test_a_killed_rank_costs_nothing(tmp_path: Path, undisturbed: Supervised, batch: int) -> None:
    group = undisturbed.group
    job = Supervised(tmp_path / "killed", TOY, group, signal=[group.ranks - 1, batch, signal.SIGKILL, 1])
    job.launch()
    assert [fact.why for fact in job.ended()][:-1] == ["signal"]
    job.require(undisturbed)


def test_a_job_that_is_told_to_stop_is_saved_and_goes_on(tmp_path: Path, undisturbed: Supervised) -> None:
    job = Supervised(tmp_path / "told", TOY, undisturbed.group, signal=[0, 33, signal.SIGTERM, 1])
    job.launch(code=75)
    (stopped,) = facts(job.run, Stopped)
    job.launch()
    assert facts(job.run, Attached)[-1].step == stopped.step
    job.require(undisturbed)


@pytest.mark.parametrize(("how", "why"), [("assertion", "exception"), ("memory", "out_of_memory")])
def test_what_a_device_does_to_a_rank_is_told_and_costs_nothing(
    tmp_path: Path, undisturbed: Supervised, how: str, why: str
) -> None:
    """After an assertion in a kernel, every further call of that process to its device fails."""
    group = undisturbed.group
    job = Supervised(tmp_path / how, TOY, group, ends=[group.ranks - 1, 75, how])
    job.launch()
    first = job.ended()[0]
    assert (first.why, first.rank, first.batch) == (why, group.ranks - 1, 75)
    job.require(undisturbed)


def test_a_fault_that_ends_the_first_attempt_in_its_rollback_is_planned_once(
    tmp_path: Path, undisturbed: Supervised
) -> None:
    """The next attempt carries out the plan that is on record."""
    job = Supervised(tmp_path / "killed", TOY, undisturbed.group, dies_in_restore=[0, "before"])
    job.launch()
    assert len(facts(job.run, Incident)) == 1
    job.require(undisturbed)


def test_a_bit_that_flips_in_a_replica_is_found(tmp_path: Path, undisturbed: Supervised) -> None:
    if undisturbed.group.ranks == 1:
        pytest.skip("one rank has no replica")
    job = Supervised(tmp_path / "flipped", TOY.but(nan=()), undisturbed.group, flip=[1, 30])
    job.start().communicate(timeout=LIMIT)  # a replica may have come back by the end, or not: no state is kept then
    assert facts(job.run, Drifted)[0].ranks == (0, 1), "of two, none is the majority"


@pytest.mark.parametrize("device", DEVICES)
def test_a_forked_rank_may_use_the_device(tmp_path: Path, device: str) -> None:
    """Started as users do it: nothing here but the launcher has seen to that."""
    (tmp_path / "train.py").write_text(COLD)
    done = subprocess.run(
        [*LAUNCH, "--nproc", "1", "--run", str(tmp_path / "run"), "--restart-budget", "0", "train.py", device],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert "forked True 3.0" in done.stdout, done.stdout
