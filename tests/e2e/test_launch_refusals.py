"""A job that does not fit its run directory: one message, the documented exit code, and nothing changed on disk."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launch, launching, tree

from rollback.errors import ExitCode
from rollback.facts.training import AttemptStarted, Finished
from rollback.rundir.journal.journal import read_journal

TINY = Path(__file__).parent / "jobs" / "tiny.py"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended by itself."""
    folder = tmp_path_factory.mktemp("finished")
    with launching(folder, with_torchrun=False, script=TINY) as job:
        code, output = job.finish("")
        assert code == ExitCode.DONE, output
        facts = [record.fact for record in read_journal(job.paths.train_journal).records]
        assert isinstance(facts[-1], Finished)
        assert len(job.facts(AttemptStarted)) == 1
    return folder


@pytest.fixture
def job(finished: Path, tmp_path: Path) -> Iterator[Launch]:
    """The same job, with a copy of that run to do with as a test likes."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    with launching(tmp_path, with_torchrun=False, script=TINY) as launch:
        yield launch


def refused(job: Launch, arguments: str, *flags: str, ranks: int = 1) -> tuple[int, str]:
    """Exit code and the one error message of a launch that leaves the run directory as it was."""
    before = tree(job.folder)
    code, output = job.finish(arguments, *flags, ranks=ranks)
    assert tree(job.folder) == before
    assert output.count("rollback: error:") == 1, output
    assert "Traceback" not in output
    return code, output[output.index("rollback: error:") :]


def test_another_model_is_refused_with_the_difference(job: Launch) -> None:
    code, message = refused(job, "--width 6")
    assert code == ExitCode.UNFIT
    assert "[1, 4] in the run" in message
    assert "[1, 6] in this job" in message
    assert "--run DIR" in message


def test_another_world_size_is_refused_with_the_difference(job: Launch) -> None:
    with launching(job.folder, with_torchrun=True, script=TINY) as real:
        code, message = refused(real, "", ranks=2)
    assert code == ExitCode.UNFIT
    assert "world size: the run has 1 rank, this job 2" in message


def test_a_run_without_a_usable_checkpoint_is_refused(job: Launch) -> None:
    for shard in job.paths.ring.glob("*/*.safetensors"):
        shard.write_bytes(b"")
    code, message = refused(job, "")
    assert code == ExitCode.NO_CHECKPOINT
    assert str(job.paths.ring) in message


def test_a_setting_of_the_script_that_cannot_be_is_a_usage_error(job: Launch) -> None:
    code, message = refused(job, "--keep 1")
    assert code == ExitCode.USAGE
    assert "setting keep" in message


def test_a_damaged_journal_is_refused_before_anything_is_started(job: Launch) -> None:
    journal = job.paths.train_journal
    journal.write_bytes(journal.read_bytes().replace(b'"step":0', b'"step":1', 1))
    code, message = refused(job, "")
    assert code == ExitCode.IO
    assert "runs/tiny/journal/train.jsonl: line 1" in message


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--replicas", "2", "--fast-tier", "/dev/shm"), "this job has one node"),
        (("--nnodes", "2", "--replicas", "3"), "by one more at most"),
        (("--nnodes", "2", "--replicas", "2", "--fast-tier", "off"), "--fast-tier is off"),
    ],
)
def test_copies_that_nobody_could_keep_are_a_usage_error(job: Launch, flags: tuple[str, ...], said: str) -> None:
    code, message = refused(job, "", *flags)
    assert code == ExitCode.USAGE
    assert said in message


@pytest.mark.parametrize("flag", ["--master-port", "--rdzv-endpoint"])
def test_a_port_that_another_process_has_is_refused_before_anything_is_made(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, launching(tmp_path, with_torchrun=False, script=TINY) as job:
        port = other.getsockname()[1]
        code, message = refused(job, "", f"{flag}={port if flag == '--master-port' else f'localhost:{port}'}")
    assert code == ExitCode.USAGE
    assert f"listens at port {port}" in message
    assert f"ss -ltnp 'sport = :{port}'" in message


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_training_in_one_job_does_not_get_the_weights_of_the_first(tmp_path: Path, ranks: int) -> None:
    """A loop over folds or seeds, or a guard that is made anew in each epoch: the launch has one run directory."""
    with launching(tmp_path, with_torchrun=ranks > 1, script=TINY) as job:
        code, output = job.finish("--again", ranks=ranks)
        assert code == ExitCode.USAGE, output
        assert "a second guard in one job" in output
        assert "`rollback launch --run DIR` once for each" in output
        assert "a second guard was made" not in output
        assert len(job.facts(AttemptStarted)) == 1
        finished = [
            record.fact for record in read_journal(job.paths.train_journal).records if record.fact.kind == "finished"
        ]
        assert len(finished) == 1, "the first training is complete and kept"


HARDER = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset
import rollback

class Harder(Sampler):
    count = 8
    def __iter__(self):
        return reversed(range(self.count))  # the first one shows the stage, wherever the run resumes
    def __len__(self):
        return self.count
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]

model, sampler, died = torch.nn.Linear(1, 1), Harder(), sys.argv[1]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(64, 1)), sampler=sampler)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, stage=sampler, snapshot_every=1)
for epoch in guard.epochs(3):
    sampler.count += 8
    for (x,) in guard:
        if guard.step == 21 and not os.path.exists(died):
            open(died, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
        guard._loop.checkpoints.snapshots.wait()  # else the newest checkpoint may be of the epoch's start
"""


def test_data_in_another_order_than_before_the_crash_end_the_job_and_not_each_attempt_anew(tmp_path: Path) -> None:
    """A curriculum that goes on by itself in front of each loop: when the run resumes, it is a stage further."""
    script = tmp_path / "harder.py"
    script.write_text(HARDER)
    with launching(tmp_path, with_torchrun=False, script=script) as job:
        code, output = job.finish(str(tmp_path / "died"))
        assert code == ExitCode.UNFIT, output
        assert "give the loader a state_dict" in output  # the rest depends on where it died
        assert output.count("rollback: error:") == 1
        assert "Traceback" not in output
        assert len(job.facts(AttemptStarted)) == 2
