"""`rollback launch --adopt`: what is refused by name, or runs without protection, with a notice."""

import sys
from pathlib import Path

import pytest
from adopted import LIMIT, PLAIN, refused
from selection import by_default, soak
from toy import facts
from warm_server import run_warm

from rollback.errors import ExitCode
from rollback.facts.training import Finished
from rollback.rundir.paths import RunPaths

REFUSED = {
    "two optimizers": ("the script has 2 optimizers (SGD, Adam)", "hand it the others by names"),
    "two loaders": ("trains on two loaders: one of 6 batches of a TensorDataset, one of 12 batches", "What is refused"),
    "prefetch": ("draws its next batch before optimizer.step()", "num_workers"),
    "a generator that holds a batch back": ("the generator ahead (", "with nothing that holds them in between"),
    "a loop that trains on the batch before": (
        "its loop takes a batch before",
        "with nothing that holds them in between",
    ),
    "a stream": ("trains on a Stream, which is only read in order", "__getitem__"),
    "a loader of its own": ("trains on a Own, which iterates in its own way", "a torch DataLoader"),
    "a loader of torchdata": ("trains on a StatefulDataLoader, which iterates in its own way", "a rollback.Guard"),
    "no loader": (
        "(refused.py, line 39) with a batch that came from no `for` loop over a DataLoader",
        "docs/tutorial.md shows how",
    ),
    "a list of its batches": (
        "with a batch that came from no `for` loop over a DataLoader",
        "docs/tutorial.md shows how",
    ),
    "a list behind the last epoch": ("batches that its loader does not give it one by one", "What is refused"),
    "a list after a pass": ("batches that its loader does not give it one by one", "What is refused"),
    "itertools.cycle": ("goes over its loader by itertools.cycle", "begin the loader anew"),
    "an optimizer that comes later": ("a second optimizer, Adam, which was not there at the start", "What is refused"),
    "one pass over several epochs": ("takes the batches of one pass over its loader in several", "What is refused"),
    "a pass that trains nothing": ("computes no gradients there: under torch.no_grad() it may", "What is refused"),
    "a scheduler of each epoch": (
        "makes a StepLR in its loop over epochs, which the guard",
        "What is refused",
    ),
    "a loader of each epoch": ("makes its DataLoader in its loop over epochs, anew for each", "make the loader once"),
    "a loader of each turn": ("one of 6 batches of a TensorDataset (one that is made anew for each", "make it once"),
    "a second training": ("trains on its loader again", "What is refused"),
    "a loader twice in each epoch": ("goes over its loader more than once in each of its epochs", "What is refused"),
}


@pytest.mark.parametrize(
    "case",
    by_default(
        REFUSED,
        "two loaders",
        "prefetch",
        "a generator that holds a batch back",
        "a loader of torchdata",
        "no loader",
        "itertools.cycle",
        "a pass that trains nothing",
        "a scheduler of each epoch",
        "a loader of each turn",
        "one pass over several epochs",
        "a loader twice in each epoch",
    ),
)
def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path, case: str) -> None:
    done = refused(tmp_path, "--adopt=strict", str(PLAIN / "refused.py"), case)
    met, instead = REFUSED[case]
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert met in done.stdout, done.stdout
    assert instead in done.stdout, done.stdout
    assert "Traceback" not in done.stdout
    assert "the end" not in done.stdout
    assert "has left its loop" not in done.stdout  # it was taken out of it


@pytest.mark.parametrize(
    "case",
    [
        "a list of its batches",
        *soak("two optimizers", "prefetch", "a generator that holds a batch back", "no loader"),
    ],
)
def test_or_runs_unprotected_with_a_notice(tmp_path: Path, case: str) -> None:
    script = str(PLAIN / "refused.py")
    plain = run_warm([sys.executable, script, case], capture_output=True, check=True, timeout=LIMIT)
    done = refused(tmp_path, "--adopt", script, case)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "not protected: " in done.stdout, done.stdout
    assert "\n  hint: " in done.stdout, done.stdout
    assert REFUSED[case][0] in done.stdout
    assert plain.stdout in done.stdout  # the same weights


def test_a_batch_that_the_script_leaves_out_is_not_the_end_of_its_epoch(tmp_path: Path) -> None:
    """It catches what the batch raises, and the end of its rank with the same bare `except:`."""
    done = refused(tmp_path, "--adopt", str(PLAIN / "refused.py"), "a batch that it leaves out")
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert "batch 3 of the data could not be read in 16 tries" in done.stdout, done.stdout
    assert "--skip-samples" in done.stdout
    assert "without protection" not in done.stdout


def test_a_job_that_runs_unprotected_is_no_part_of_the_record_at_the_url(tmp_path: Path) -> None:
    """Else its end would be that of the run there, which the next launch takes for complete."""
    where = "--adopt", "--run", "run", "--ring", f"file://{tmp_path}/bucket", str(PLAIN / "refused.py")
    assert refused(tmp_path, *where, "a count of its own").returncode == ExitCode.DONE
    done = refused(tmp_path, *where, "two optimizers")
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "not protected" in done.stdout, done.stdout
    assert not RunPaths(tmp_path / "run-unprotected").identity.exists()


@pytest.mark.parametrize(("how", "status"), [("--adopt", ExitCode.DONE), ("--adopt=strict", ExitCode.USAGE)])
def test_a_training_of_which_nothing_was_found_is_told_at_its_end(tmp_path: Path, how: str, status: ExitCode) -> None:
    done = refused(tmp_path, how, str(PLAIN / "refused.py"), "an update of its own")
    assert done.returncode == status, done.stdout
    assert done.stdout.count("not protected: the script computes gradients, but goes over no DataLoader") == 1


def test_a_sign_that_comes_late_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt", str(PLAIN / "refused.py"), "an optimizer that comes later", "120")
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "from here on a rollback or a resume is not exact" in done.stdout


def test_a_training_that_a_loop_over_epochs_goes_on_with_is_trained_to_its_end_without_a_guard(tmp_path: Path) -> None:
    command = str(PLAIN / "refused.py"), "another optimizer behind its first epoch"
    plain = run_warm([sys.executable, *command], capture_output=True, check=True, timeout=LIMIT)
    done = refused(tmp_path, "--adopt", *command)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "not protected from here on: the script trains on its loader again, with another optimizer" in done.stdout
    assert "starting the script as torchrun would" not in done.stdout, done.stdout
    assert plain.stdout in done.stdout  # the same weights


ONE_SIDED = {
    "another loader": "trains on two loaders: one of 6 batches of a TensorDataset, one of 12 batches",
    "another optimizer": "the script has 2 optimizers (SGD, Adam)",
    "an average": "what is kept besides is [] on rank 0 and ['module: AveragedModel'] on rank 1",
    "another optimizer, later": "another training is None on rank 0 and 'trains on its loader again, with another",
}


@pytest.mark.parametrize("case", by_default(ONE_SIDED, "another loader", "another optimizer, later"))
def test_what_one_rank_alone_sees_ends_all_of_them_with_its_message(tmp_path: Path, case: str) -> None:
    done = refused(tmp_path, "--adopt=strict", str(PLAIN / "one_sided.py"), case, ranks=2)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert done.stdout.count(ONE_SIDED[case]) == 1, done.stdout
    assert "the end" not in done.stdout


@pytest.mark.parametrize(
    ("case", "met"),
    [("local SGD", "updates the model inside of no_sync()"), ("a hook with a state", "whose PowerSGDState remembers")],
)
def test_what_ranks_keep_for_themselves_behind_accelerate_is_refused(tmp_path: Path, case: str, met: str) -> None:
    done = refused(tmp_path, "--adopt=strict", str(PLAIN / "unaveraged.py"), case, ranks=2)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert met in done.stdout, done.stdout
    assert "the end" not in done.stdout


def test_ranks_that_each_train_a_model_of_their_own_are_refused_by_name(tmp_path: Path) -> None:
    """Without DDP, behind one seed: they are the same until the first update. No checkpoint would be taken of them."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = refused(tmp_path, "--adopt=strict", "--snapshot-every", "4", str(script), ranks=2)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert "the parameters of ranks 0, 1 differ, though they are replicas, since the first updates" in done.stdout
    assert "wrap the model in DistributedDataParallel" in done.stdout
    assert "the end" not in done.stdout


ALONE = """
import torch

torch.distributed.init_process_group("gloo")
torch.manual_seed(7)
data = torch.randn(80, 2)
loader = torch.utils.data.DataLoader(data, sampler=torch.utils.data.DistributedSampler(data))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("the end")
"""


def test_or_all_ranks_run_unprotected(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt", str(PLAIN / "one_sided.py"), "another optimizer", ranks=2)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "not protected" in done.stdout
    assert done.stdout.count("the end") == 2


def test_a_late_sign_that_one_rank_alone_sees_is_said_by_that_rank(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt", str(PLAIN / "one_sided.py"), "another loader", "110", ranks=2)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "rank 1: the script trains on two loaders" in done.stdout
    assert facts(tmp_path / "runs" / "one_sided", Finished)


def test_a_script_with_a_guard_keeps_it(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt=strict", str(PLAIN / "refused.py"), "a guard of its own")
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "makes a guard by itself" in done.stdout


@pytest.mark.parametrize(
    "words", [("--adopt=lax", "x.py"), ("--adopt", "-m", "this"), ("--adopt", "--no-python", "ls")]
)
def test_what_is_no_script_is_refused_before_anything_starts(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "x.py").touch()
    done = refused(tmp_path, *words)
    assert done.returncode == ExitCode.USAGE
    assert "--adopt" in done.stdout


UNADORNED = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for (x,) in DataLoader(TensorDataset(torch.randn(24, 4)), 4):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_run_that_was_adopted_is_not_gone_on_with_without_it(tmp_path: Path) -> None:
    """The script would begin anew, unprotected, over the files that the run has saved. Asked for no more, a
    complete run is complete."""
    script = tmp_path / "train.py"
    script.write_text(f"# Start it by: rollback launch --adopt train.py\n{UNADORNED}")
    assert refused(tmp_path, "--adopt", str(script)).returncode == ExitCode.DONE
    assert "nothing left to do" in refused(tmp_path, str(script)).stdout
    forgotten = refused(tmp_path, "--keep", "7", str(script))
    assert forgotten.returncode == ExitCode.USAGE, forgotten.stdout
    assert "runs/train was made with --adopt, which this command leaves out" in forgotten.stdout
    assert "hint: add --adopt" in forgotten.stdout
    assert "nothing left to do" in refused(tmp_path, "--adopt", str(script)).stdout
    script.write_text(f"import rollback\n{script.read_text()}")  # it may have a guard of its own by now
    assert "was made with --adopt" not in refused(tmp_path, "--keep", "7", str(script)).stdout


def test_a_setting_that_does_not_fit_is_wrong_use_and_no_reason_to_go_without_protection(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt", "--probation", "3", str(PLAIN / "refused.py"), "a limit of its own")
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert "--probation=3 is no longer than" in done.stdout
    assert "set it to 6 or more" in done.stdout
    assert "not protected" not in done.stdout
