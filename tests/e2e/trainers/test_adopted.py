"""`rollback launch --adopt`: plain scripts without a changed line, and what `rollback adopt` makes of them.

A few cases at one rank and at two; `scripts/test --soak tests/e2e/trainers` tries all. What a script consumed is in the
state that is compared: a buffer of its model.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from job_results import LAUNCH
from selection import by_default, soak
from toy import facts, flat, require_same
from warm_server import run_torch_alone, run_warm

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Finished, Incident, Restored
from rollback.rundir.paths import RunPaths

PLAIN = Path(__file__).parent / "plain"
LIMIT = 600.0
SETTINGS = ("--snapshot-every", "5", "--rewind", "5", "--skip-after", "3", "--probation", "8", "--max-skipped", "100%")
OWN_POLICY = ("--snapshot-every", "5", "--probation", "8", "--max-skipped", "100%")
REFUSED = {
    "two optimizers": ("the script has 2 optimizers (SGD, Adam)", "hand it the others by names"),
    "two loaders": ("trains on two loaders: one of 6 batches of a TensorDataset, one of 12 batches", "rollback adopt"),
    "prefetch": ("draws its next batch before optimizer.step()", "num_workers"),
    "a generator that holds a batch back": ("the generator ahead (", "with nothing that holds them in between"),
    "a loop that trains on the batch before": (
        "its loop takes a batch before",
        "with nothing that holds them in between",
    ),
    "a stream": ("trains on a Stream, which is only read in order", "__getitem__"),
    "a loader of its own": ("trains on a Own, which iterates in its own way", "a torch DataLoader"),
    "no loader": (
        "(refused.py, line 39) with a batch that came from no `for` loop over a DataLoader",
        "of next(), of a callable",
    ),
    "a list of its batches": (
        "with a batch that came from no `for` loop over a DataLoader",
        "of next(), of a callable",
    ),
    "a list behind the last epoch": ("batches that its loader does not give it one by one", "rollback adopt"),
    "a list after a pass": ("batches that its loader does not give it one by one", "rollback adopt"),
    "itertools.cycle": ("goes over its loader by itertools.cycle", "begin the loader anew"),
    "an optimizer that comes later": ("a second optimizer, Adam, which was not there at the start", "rollback adopt"),
    "one pass over several epochs": ("takes the batches of one pass over its loader in several", "rollback adopt"),
    "a pass that trains nothing": ("computes no gradients there: under torch.no_grad() it may", "rollback adopt"),
    "a scheduler of each epoch": ("makes a StepLR in its loop over epochs, which the guard does not", "rollback adopt"),
    "a loader of each epoch": ("makes its DataLoader in its loop over epochs, anew for each", "make the loader once"),
    "a loader of each turn": ("one of 6 batches of a TensorDataset (one that is made anew for each", "make it once"),
    "a second training": ("trains on its loader again", "rollback adopt"),
    "a loader twice in each epoch": ("goes over its loader more than once in each of its epochs", "rollback adopt"),
}


@dataclass(frozen=True)
class Case:
    """bad: the place in the data, counted in batches over all epochs, of a NaN on the last rank."""

    bad: int | None = None
    script: str = "epochs.py"
    words: tuple[str, ...] = ()
    settings: tuple[str, ...] = SETTINGS


UNEVEN = ("--samples", "157", "--accumulate", "3", "--scaler")
"""40 batches in an epoch, three to an update, and one that is left over."""
PREPARED = ("--samples", "59", "--accumulate", "4")
CASES = {
    "clean": Case(),
    "clean, accumulation": Case(words=UNEVEN),
    "clean, accelerate": Case(script="accelerated.py", words=PREPARED),
    "in the middle": Case(bad=17),
    "in the last update": Case(bad=-1),
    "at an epoch's tail": Case(bad=29),
    "over an epoch's start": Case(bad=31),
    "over an epoch's start, later": Case(bad=38),
    "surgical": Case(bad=22, settings=(*OWN_POLICY, "--policy", "surgical")),
    "balanced": Case(bad=41, settings=OWN_POLICY),
    "accumulation": Case(bad=17, words=UNEVEN[:-1]),
    "accumulation, over an epoch's start": Case(bad=45, words=(*UNEVEN[:-1], "--own")),
    "accumulation, the last one": Case(bad=-1, words=UNEVEN[:-1]),
    "accelerate, in the middle": Case(bad=17, script="accelerated.py"),
    "accelerate, over an epoch's start": Case(bad=31, script="accelerated.py"),
}
PHASES = {"in the first step": 1, "in a step": 26, "behind an epoch's start": 42, "in the last step": 80}
"""So many batches have been taken, of 40 in an epoch."""


class Job:
    """A plain script in a folder, started in several ways. What rank r ends with is `<name>-<r>.pt`."""

    def __init__(self, folder: Path, case: Case, ranks: int) -> None:
        self.folder, self.case, self.ranks = folder, case, ranks
        folder.mkdir(exist_ok=True)
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        self.spoilt: tuple[str, ...] = ()

    def plain(self, name: str) -> None:
        several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}")
        command = [sys.executable, *(several if self.ranks > 1 else ())]
        self._start(command, PLAIN / self.case.script, name, by=run_torch_alone)

    def launched(self, name: str, *flags: str, script: Path | None = None, words: tuple[str, ...] = ()) -> str:
        command = [*LAUNCH, "--nproc", str(self.ranks), "--restart-budget", "2", "--run", name]
        command += [*self.case.settings, *flags]
        return self._start(command, script or PLAIN / self.case.script, name, *words)

    def spoil(self, log: str) -> None:
        """Put the NaN at a batch of the last rank, by what that has consumed in a clean run."""
        assert self.case.bad is not None
        lines = (self.folder / f"{log}-{self.ranks - 1}.log").read_text().splitlines()
        epoch, sample, *_ = lines[self.case.bad].split()
        self.spoilt = ("--bad", f"{epoch}:{sample}")

    def require_same(self, one: str, other: str) -> None:
        for rank in range(self.ranks):
            require_same(self._portrait(one, rank), self._portrait(other, rank), f"{one} and {other}, rank {rank}")

    def _portrait(self, name: str, rank: int) -> dict[str, str]:
        found: dict[str, Any] = torch.load(self.folder / f"{name}-{rank}.pt", weights_only=True)
        return flat(found)

    def _start(self, command: list[str], script: Path, name: str, *words: str, by: Any = run_warm) -> str:
        done = by(
            [*command, str(script), name, *self.case.words, *self.spoilt, *words], cwd=self.folder, timeout=LIMIT,
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:]
        return str(done.stdout)


def require_exact(folder: Path, case: Case, ranks: int) -> None:
    job = Job(folder, case, ranks)
    job.plain("plain")
    if case.bad is None:
        output = job.launched("adopted", "--adopt=strict")
        job.require_same("adopted", "plain")
    else:
        job.spoil("plain")
        output = job.launched("adopted", "--adopt=strict")
        job.launched("oracle", "--adopt=strict", "--skips-of", "adopted")
        job.require_same("adopted", "oracle")
    run = folder / "adopted"
    assert bool(facts(run, Incident)) == bool(facts(run, Restored)) == (case.bad is not None), output
    assert facts(run, Finished), output


@pytest.mark.parametrize(("name", "ranks"), [("clean, accumulation", 2), ("accumulation, over an epoch's start", 1)])
def test_an_adopted_script_is_the_plain_one_or_that_given_its_skips(tmp_path: Path, name: str, ranks: int) -> None:
    require_exact(tmp_path, CASES[name], ranks)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_each_place_for_a_bad_batch(tmp_path: Path, name: str, ranks: int) -> None:
    require_exact(tmp_path, CASES[name], ranks)


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "words"), [(4, ()), (2, ("--workers", "1")), (2, ("--compile",))])
def test_more_ranks_workers_and_a_compiled_model(tmp_path: Path, ranks: int, words: tuple[str, ...]) -> None:
    require_exact(tmp_path, Case(bad=31, words=words), ranks)


def require_undisturbed(folder: Path, case: Case, phases: list[str]) -> None:
    job = Job(folder, case, 2)
    job.plain("plain")
    for phase in phases:
        name = phase.replace(" ", "-").replace("'", "")
        output = job.launched(name, "--adopt=strict", words=("--kill", f"1:{PHASES[phase]}"))
        assert len(facts(folder / name, Attached)) == 2, output
        job.require_same(name, "plain")


def test_a_rank_that_is_killed_in_the_middle_of_an_accumulation_costs_nothing(tmp_path: Path) -> None:
    """Nor of what the script keeps for itself: a generator of random numbers, an average of the weights."""
    require_undisturbed(tmp_path, Case(words=(*UNEVEN, "--own")), ["in a step"])


@pytest.mark.soak
@pytest.mark.parametrize("script", ["epochs.py", "accelerated.py"])
def test_a_rank_that_is_killed_anywhere_costs_nothing(tmp_path: Path, script: str) -> None:
    words = UNEVEN if script == "epochs.py" else UNEVEN[:-1]
    require_undisturbed(tmp_path, Case(script=script, words=words), list(PHASES))


@pytest.mark.parametrize("script", by_default(("by_trainer.py", "by_lightning.py"), "by_trainer.py"))
def test_a_trainer_of_a_library_is_protected_as_by_a_line_in_the_script(tmp_path: Path, script: str) -> None:
    require_undisturbed(tmp_path, Case(script=script), ["in a step"])


@pytest.mark.parametrize("script", by_default(("by_trainer.py", "by_lightning.py"), "by_lightning.py"))
def test_a_second_training_by_the_same_trainer_goes_on_unprotected(tmp_path: Path, script: str) -> None:
    """And behind a kill the first one stays as it was."""
    job = Job(tmp_path, Case(script=script, words=("--again",)), 1)
    job.plain("plain")
    output = job.launched("killed", "--adopt", words=("--kill", "0:70"))
    assert output.count("not protected from here on: the script trains a second time") == 2, output
    job.require_same("killed", "plain")


@pytest.mark.parametrize("disks", by_default(("shared", "apart"), "apart"))
def test_a_script_that_begins_behind_its_own_snapshot_is_trained_to_its_last_epoch(tmp_path: Path, disks: str) -> None:
    job = Job(tmp_path, Case(script="own_snapshot.py", words=("--apart",) if disks == "apart" else ()), 2)
    job.plain("plain")
    output = job.launched("killed", "--adopt=strict", words=("--kill", "1:26"))
    assert "the script begins with epoch 2 now, and the run began with epoch 0" in output
    job.require_same("killed", "plain")


def test_a_script_over_accelerate_that_resumes_by_itself_goes_on_from_the_runs_checkpoint(tmp_path: Path) -> None:
    """And it may load a folder of its own behind the training."""
    job = Job(tmp_path, Case(script="resumes_itself.py"), 2)
    job.plain("plain")
    output = job.launched("killed", "--adopt=strict", words=("--kill", "1:36"))
    assert "leaves out 4 batches (skip_first_batches), as if it resumed: this is left aside" in output
    job.require_same("killed", "plain")


def test_a_script_that_draws_what_it_passes_over_to_resume_is_refused_before_it_loses_that(tmp_path: Path) -> None:
    run = "--run", "run", "--last-snapshot", "off", "--snapshot-every", "100"  # begins anew, before its own folder
    words = str(PLAIN / "resumes_itself.py"), "killed", "--again", "--kill", "1:36"
    done = refused(tmp_path, "--adopt=strict", *run, *words, ranks=2)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert "does not train on the first batch that it takes of an epoch" in done.stdout
    assert "take that loading out" in done.stdout


def test_a_loop_over_epochs_around_a_training_in_another_file_begins_where_the_run_stands(tmp_path: Path) -> None:
    Job(tmp_path, Case(script="elsewhere.py", words=("3",)), 1).plain("plain")
    for epochs in "2", "3":
        job = Job(tmp_path, Case(script="elsewhere.py", words=(epochs,)), 1)
        job.launched("longer", "--adopt=strict")
    job.require_same("longer", "plain")
    job.launched("killed", "--adopt=strict", words=("33",))
    job.require_same("killed", "plain")


def test_a_loop_that_evaluates_too_counts_each_of_its_loaders(tmp_path: Path) -> None:
    job = Job(tmp_path, Case(script="shared_loop.py"), 1)
    job.plain("plain")
    job.launched("adopted", "--adopt=strict")
    job.require_same("adopted", "plain")


# What is refused ------------------------------------------------------------------------------------------------------


def refused(folder: Path, *words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return run_warm(
        [*LAUNCH, "--nproc", str(ranks), *words], cwd=folder, timeout=LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(
        REFUSED,
        "two loaders",
        "prefetch",
        "a generator that holds a batch back",
        "no loader",
        "a list of its batches",
        "itertools.cycle",
        "an optimizer that comes later",
        "a pass that trains nothing",
        "a scheduler of each epoch",
        "a loader of each epoch",
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
        "two optimizers",
        "a list of its batches",
        *soak("prefetch", "a generator that holds a batch back", "no loader", "a second training"),
    ],
)
def test_or_runs_unprotected_with_a_notice(tmp_path: Path, case: str) -> None:
    script = str(PLAIN / "refused.py")
    plain = run_warm([sys.executable, script, case], capture_output=True, check=True, timeout=LIMIT)
    done = refused(tmp_path, "--adopt", script, case)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "not protected" in done.stdout, done.stdout
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
    assert "the parameters of ranks 0 and 1 differ, though they are replicas, since the first updates" in done.stdout
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


def test_a_count_of_the_scripts_own_ends_its_loop(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt=strict", str(PLAIN / "refused.py"), "a count of its own")
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "counts with `steps`" not in done.stdout, "it is led"
    assert facts(tmp_path / "runs" / "refused", Finished)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("a count beside next", "`taken` by itself (line 129), and ends its loop by it"),
        ("a limit of its own", "`itertools.islice(loader, 0, 4)` by itself (line 133), and ends its loop by it"),
    ],
)
@pytest.mark.parametrize("how", ["--adopt", "--adopt=strict"])
def test_what_a_script_ends_by_is_named_when_training_begins_or_refused(
    tmp_path: Path, how: str, what: str, named: str
) -> None:
    done = refused(tmp_path, how, str(PLAIN / "refused.py"), what)
    assert done.returncode == (ExitCode.DONE if how == "--adopt" else ExitCode.USAGE), done.stdout
    assert f"counts with {named}" in done.stdout
    assert bool(facts(tmp_path / "runs" / "refused", Finished)) == (how == "--adopt"), done.stdout


def test_what_a_script_only_counts_is_named_when_training_begins(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt=strict", str(PLAIN / "refused.py"), "a loop in another file")
    assert done.returncode == ExitCode.DONE, done.stdout
    assert "counts with `seen.batches` by itself (engine.py, line 9)" in done.stdout


def test_a_limit_of_the_batches_of_an_epoch_holds_behind_a_rollback(tmp_path: Path) -> None:
    """Two epochs of 14 of 20 batches. The rollback in the last one leads to its middle, or with a slow disk into the
    first one; in neither is anything left out."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    common = ("--snapshot-every", "1", "--probation", "6")
    first = refused(tmp_path, "--adopt=strict", *common, "--run", "a", str(script), "25")
    again = refused(tmp_path, "--adopt=strict", *common, "--run", "b", "--skips-of", "a", str(script), "-1")
    assert [done.returncode for done in (first, again)] == [ExitCode.DONE] * 2, first.stdout + again.stdout
    assert len(facts(tmp_path / "a", Restored)) == 1
    assert "by itself" not in first.stdout, "its limit is led as its epochs are"
    ends = [line for done in (first, again) for line in done.stdout.splitlines() if line.startswith("weights")]
    assert ends == [ends[0]] * 2
    assert facts(tmp_path / "a", Finished)[-1].step == 27  # of 28 batches one is skipped
    *_, last = (tmp_path / "a" / "metrics" / "train.jsonl").read_text().splitlines()
    assert json.loads(last)["loss"] is not None, "what the script left its last loop behind is judged with its loss"


LIMITED = """
import itertools, sys
import torch

torch.manual_seed(7)
loader = torch.utils.data.DataLoader(torch.randn(40, 2), batch_size=2, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
taken = itertools.count()  # which nobody leads
for epoch in range(2):
    for x in itertools.islice(loader, 14):
        loss = model(x).square().mean() * (float("nan") if taken.__next__() == int(sys.argv[1]) else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print("weights", model.weight.tolist(), torch.get_rng_state().sum())
"""


BY_NEXT_SCRIPT = """
import os, signal, sys
import torch

torch.manual_seed(7)
loader = torch.utils.data.DataLoader(torch.randn(10, 2), batch_size=2, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
updates = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
model.register_parameter("updates", updates)

def train(x):
    if updates.item() == int(sys.argv[1]) and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    updates.add_(1)
    return updates.item() < 28

"""
BY_NEXT = {
    "begun anew where it ends": """
batches = iter(loader)
going = True
while going:
    try:
        x = next(batches)
    except StopIteration:
        batches = iter(loader)
        x = next(batches)
    going = train(x)
print("weights", model.weight.tolist())
""",
    "begun anew for some batches": """
for epoch in range(99):
    batches = iter(loader)
    for _ in range(4):
        x = next(batches)
        if not train(x):
            break
    else:
        continue
    break
print("weights", updates.item() == 28)
""",
}


@pytest.mark.parametrize("loop", by_default(tuple(BY_NEXT), "begun anew where it ends"))
def test_a_loop_that_takes_its_batches_by_next_goes_on_in_a_later_epoch(tmp_path: Path, loop: str) -> None:
    """Epochs of five batches, and a kill in the fourth one. Where the run stands the optimizer says, which is kept."""
    script = tmp_path / "by_next.py"
    script.write_text(BY_NEXT_SCRIPT + BY_NEXT[loop])
    runs = [refused(tmp_path, "--adopt=strict", "--snapshot-every", "1", "--run", str(at), str(script), str(at))
            for at in (-1, 17)]  # fmt: skip
    assert [done.returncode for done in runs] == [ExitCode.DONE] * 2, runs[1].stdout
    assert len(facts(tmp_path / "17", Attached)) == 2, "the second attempt goes on to the end"
    ends = [line for done in runs for line in done.stdout.splitlines() if line.startswith("weights")]
    assert ends == [ends[0]] * 2


def test_a_rollback_into_the_first_epoch_has_the_scheduler_that_its_body_makes(tmp_path: Path) -> None:
    """As torchvision's detection does. Its constructor sets the learning rate, behind what was put back."""
    script = tmp_path / "warmed.py"
    script.write_text(WARMED)
    common = ("--snapshot-every", "5", "--probation", "8", "--rewind", "14", "--policy", "surgical")
    first = refused(tmp_path, "--adopt=strict", *common, "--run", "a", str(script), "21")
    again = refused(tmp_path, "--adopt=strict", *common, "--run", "b", "--skips-of", "a", str(script), "-1")
    assert [done.returncode for done in (first, again)] == [ExitCode.DONE] * 2, first.stdout + again.stdout
    assert "the script has made its LinearLR anew" in first.stdout
    assert len(facts(tmp_path / "a", Incident)) == 1
    ends = [line for done in (first, again) for line in done.stdout.splitlines() if line.startswith("weights")]
    assert ends == [ends[0]] * 2


WARMED = """
import os, sys
import torch

torch.manual_seed(7)
loader = torch.utils.data.DataLoader(torch.randn(40, 2), batch_size=2, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
taken, bad = 0, int(sys.argv[1]) if os.environ.get("ROLLBACK_ATTEMPT") == "1" else -1
for epoch in range(2):
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=15) if epoch == 0 else None
    for x in loader:
        loss = model(x).square().mean() * (float("nan") if taken == bad else 1)
        taken = taken + 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if warm is not None:
            warm.step()
print("weights", model.weight.tolist(), optimizer.param_groups[0]["lr"], torch.get_rng_state().sum())
"""


def test_a_loop_that_calls_train_for_each_batch_begins_in_the_mode_of_the_evaluation_before(tmp_path: Path) -> None:
    script = tmp_path / "modes.py"
    script.write_text(MODES)
    done = refused(tmp_path, "--adopt=strict", "--run", "a", str(script))
    assert done.returncode == ExitCode.DONE, done.stdout
    assert facts(tmp_path / "a", Finished)[-1].step == 20


MODES = """
import torch

loader = torch.utils.data.DataLoader(torch.randn(20, 2), batch_size=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.eval()
for epoch in range(2):
    for x in loader:
        model.train()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
"""


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


def test_a_setting_that_does_not_fit_is_wrong_use_and_no_reason_to_go_without_protection(tmp_path: Path) -> None:
    done = refused(tmp_path, "--adopt", "--probation", "3", str(PLAIN / "refused.py"), "a limit of its own")
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert "set probation to 6 or more" in done.stdout
    assert "not protected" not in done.stdout


# Made explicit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("in the middle", 1), *soak(*((name, 2) for name in CASES))])
def test_what_rollback_adopt_prints_applies_and_is_exact(tmp_path: Path, name: str, ranks: int) -> None:
    case = CASES[name]
    job = Job(tmp_path, case, ranks)
    for script in PLAIN.glob("*.py"):
        (tmp_path / script.name).write_text(script.read_text())
    command = [sys.executable, "-m", "rollback", "adopt", case.script]
    diff = run_warm(command, cwd=tmp_path, capture_output=True, check=True).stdout
    job.plain("plain")
    subprocess.run(["patch", "-p0"], input=diff, text=True, cwd=tmp_path, check=True, capture_output=True)
    explicit = tmp_path / case.script
    if case.bad is not None:
        job.spoil("plain")
    job.launched("explicit", script=explicit)
    assert facts(tmp_path / "explicit", Finished)
    if case.bad is None:
        job.require_same("explicit", "plain")
        return
    job.launched("oracle", "--skips-of", "explicit", script=explicit)
    job.require_same("explicit", "oracle")


OWN_COUNTS = """
import itertools, os, signal, sys
import torch

torch.manual_seed(7)
loader = torch.utils.data.DataLoader(torch.randn(20, 2), batch_size=2, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
fault, at = sys.argv[1], 23
calls = itertools.count()  # which nobody leads

def backward(x, *numbers):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + sum(numbers))
    loss = model(x).square().mean()
    strikes = calls.__next__() == at and os.environ.get("ROLLBACK_ATTEMPT") == "1"
    (loss * float("nan") if strikes and fault == "nan" else loss).backward()
    print("trained", *numbers)
    if strikes and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

def train(x, *numbers):
    backward(x, *numbers)
    optimizer.step()
    optimizer.zero_grad()

"""
COUNTED = {
    "updates": """
completed_steps = 0
for epoch in range(9):
    for x in loader:
        train(x, completed_steps)
        completed_steps += 1
        if completed_steps >= 35:
            break
    if completed_steps >= 35:
        break
""",
    "turns of a generator": """
def forever():
    while True:
        yield from loader

batches = forever()
for step in range(35):
    train(next(batches), step)
""",
    "turns of each epoch": """
for epoch in range(4):
    batches = iter(loader)
    for i in range(len(loader) - 1):
        x = next(batches)
        train(x, epoch, i)
""",
    "turns of several, in epochs": """
for epoch in range(5):
    batches = iter(loader)
    for number in range(4):
        micro = []
        for _ in range(3 if number < 3 else 1):
            micro += [next(batches)]
        for x in micro:
            backward(x, epoch, number)
        optimizer.step()
        optimizer.zero_grad()
""",
    "turns of several, which a function is given": """
def update(micro, *numbers):
    for x in micro:
        backward(x, *numbers)
    optimizer.step()
    optimizer.zero_grad()

for epoch in range(5):
    batches = iter(loader)
    for number in range(4):
        update([next(batches) for _ in range(2)], epoch, number)
""",
    "batches that the loop gathers": """
def update(micro, *numbers):
    for x in micro:
        backward(x, *numbers)
    optimizer.step()
    optimizer.zero_grad()

for epoch in range(5):
    micro = []
    for number, x in enumerate(loader):
        micro.append(x)
        if len(micro) == 4:
            update(micro, epoch, number)
            micro = []
    if micro:
        update(micro, epoch)
""",
    "turns of several": """
batches = iter(x for _ in range(9) for x in loader)
done = 0
for number in range(15):
    for _ in range(3):
        backward(next(batches), number)
    optimizer.param_groups[0]["weight_decay"] = done / 100
    optimizer.step()
    optimizer.zero_grad()
    done += 1
""",
    "turns of an iterator that is begun anew": """
batches = iter(loader)
for step in range(35):
    try:
        x = next(batches)
    except StopIteration:
        batches = iter(loader)
        x = next(batches)
    train(x, step)
""",
    "a while by its count": """
batches, step = iter(x for _ in range(9) for x in loader), 0
while step < 35:
    x = next(batches)
    train(x, step)
    step += 1
""",
}


@pytest.mark.parametrize(
    "counts", by_default(tuple(COUNTED), "updates", "turns of a generator", "turns of several, in epochs")
)
def test_what_a_script_counts_is_what_it_was_behind_a_kill_and_a_rollback(tmp_path: Path, counts: str) -> None:
    """Its learning rate and its end go by it."""
    script = tmp_path / "counted.py"
    weights = "print('weights', *map(torch.Tensor.tolist, model.parameters()))\n"
    script.write_text(OWN_COUNTS + COUNTED[counts] + weights)
    common = "--adopt=strict", "--snapshot-every", "5", "--probation", "6", "--policy", "balanced"
    plain = run_torch_alone(
        [sys.executable, str(script), "none"], cwd=tmp_path, timeout=LIMIT, stdout=subprocess.PIPE, text=True
    )
    killed = refused(tmp_path, *common, "--run", "killed", str(script), "kill")
    nan = refused(tmp_path, *common, "--run", "nan", str(script), "nan")
    told = refused(tmp_path, *common, "--run", "told", "--skips-of", "nan", str(script), "none")
    assert [done.returncode for done in (plain, killed, nan, told)] == [ExitCode.DONE] * 4, killed.stdout + nan.stdout
    assert len(facts(tmp_path / "killed", Attached)) == 2
    assert len(facts(tmp_path / "nan", Incident)) == 1
    ends = [done.stdout[done.stdout.index("weights") :].splitlines()[0] for done in (plain, killed, nan, told)]
    assert (ends[0], ends[2]) == (ends[1], ends[3])
    assert "by itself" not in killed.stdout + nan.stdout


GATHERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(129, 2)))

def update(micro):
    for (x,) in micro:
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

for epoch in range(2):
    micro = []
    for i, (x,) in enumerate(loader):
        micro.append((x * float("nan") if (epoch, i) == NAN else x,))
        if len(micro) == 4:
            update(micro)
            micro = []
    if micro:
        update(micro)
print("weights", *map(torch.Tensor.tolist, model.parameters()))
"""


def test_an_epoch_may_be_shorter_than_an_update_of_what_is_gathered(tmp_path: Path) -> None:
    """The rest is the first update of all."""
    script = tmp_path / "gathers.py"
    script.write_text(GATHERS.replace("NAN", "None").replace("129", "3"))
    done = refused(tmp_path, "--adopt=strict", "--run", "short", str(script))
    assert (done.returncode, "weights" in done.stdout) == (ExitCode.DONE, True), done.stdout


@pytest.mark.soak
def test_a_rollback_leaves_no_batch_in_a_list_that_it_has_skipped(tmp_path: Path) -> None:
    """In an epoch's last update the NaN shows when the script has a batch of the next one in hand."""
    script = tmp_path / "gathers.py"
    script.write_text(GATHERS.replace("NAN", "(1, 126)"))
    common = "--adopt=strict", "--snapshot-every", "5", "--probation", "6", "--policy", "balanced"
    nan = refused(tmp_path, *common, "--run", "nan", str(script))
    told = refused(tmp_path, *common, "--run", "told", "--skips-of", "nan", str(script))
    assert [done.returncode for done in (nan, told)] == [ExitCode.DONE] * 2, nan.stdout
    assert len(facts(tmp_path / "nan", Incident)) == 1
    ends = [done.stdout[done.stdout.index("weights") :].splitlines()[0] for done in (nan, told)]
    assert ends[0] == ends[1]


CARRIES = """
import os, signal, sys
import torch

torch.manual_seed(7)
data = torch.randn(40, 2)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.Module.register_buffer(model, "updates", torch.zeros(1))


def train_one_epoch(beta):
    temperature, baseline = 1.0, 0.0
    for x in loader:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if int(model.updates) == int(sys.argv[1]) and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (loss * temperature + 0.01 * (loss - baseline) * beta).backward()
        optimizer.step()
        model.updates += 1
        temperature *= 0.9
        baseline = 0.9 * baseline + 0.1 * loss.item()
    return baseline


def main():
    beta, best, patience, history = 0.5, float("inf"), 2, []
    for epoch in range(9):
        mean = train_one_epoch(beta)
        beta = min(1.0, beta + 0.2)
        history.append(round(mean, 9))
        if mean < best * 0.5:
            best, patience = mean, 2
        else:
            patience -= 1
        if not patience:
            break
    print(f"end: {epoch} {history} {model.weight.tolist()}")


main()
"""


@pytest.mark.parametrize("killed_at", [17, 20])
def test_what_a_scripts_loops_carry_is_what_it_was_behind_a_kill(tmp_path: Path, killed_at: int) -> None:
    """In an epoch's midst, and with an epoch's first batch: the code behind the one before has run, and runs again."""
    (tmp_path / "carries.py").write_text(CARRIES)
    plain = subprocess.run(
        [sys.executable, "carries.py", "-1"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    words = ("--adopt=strict", "--snapshot-every", "5", "--run", "killed", str(tmp_path / "carries.py"), str(killed_at))
    done = refused(tmp_path, *words)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert len(facts(tmp_path / "killed", Attached)) == 2, done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("end")] == plain.stdout.splitlines()
    assert "by itself" not in done.stdout
