"""A rank that raises on one particular batch again and again, and one that raises anywhere: what is skipped."""

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from attempts import Forker
from job_results import LAUNCH, LIMIT
from toy import Toy, facts, require_same, same_skips_from_the_start, skipped
from warm_server import run_warm

from rollback.facts.training import AttemptEnded, Blamed, SampleQuarantine, SkipAdded
from rollback.rundir.journal.journal import Journal, read_journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.blamed_data import blame
from rollback.supervisor.diagnosis.evidence import TrainJournal, gather, rank_ends
from rollback.supervisor.diagnosis.first_cause import FirstCause, cause, first_cause
from rollback.supervisor.diagnosis.outcome import Failures, HostOutcome, RankFailure

TOY = Toy(200, poison=(123,))


class Supervised:
    """Attempts of one toy, with the supervisor's decisions in between and nothing else of it: no torchrun."""

    def __init__(self, forker: Forker, toy: Toy, run: Path) -> None:
        self.forker, self.toy, self.run, self.paths = forker, toy, run, RunPaths(run)
        self.attempt = 0

    def fails(self, **request: object) -> tuple[FirstCause, Blamed | None]:
        """An attempt that must fail: its first cause, and the batch that is blamed."""
        self.attempt += 1
        log = self.run.with_suffix(".log")
        status = self.forker.status(self.toy, self.run, log=str(log), **request)
        assert status != 0, Path(str(self.run) + ".txt").read_text()
        account = Failures(error="", failures=(RankFailure(rank=0, pid=1, exitcode=status, message=None),))
        left = HostOutcome(status=1, failures=account)
        evidence = gather(
            self.paths, TrainJournal(self.paths.train_journal), self.attempt, left=left, told_to_stop=False
        )
        first = first_cause(evidence, rank_ends(self.paths, self.attempt, left))
        assert first is not None
        journal = Journal(self.paths.supervisor_journal, self.attempt)
        record = first.record
        journal.append(
            AttemptEnded(
                status=1, cause=cause(evidence, first), step=evidence.step, seconds=1.0, why=first.why, rank=first.rank,
                batch=record.batch if record else None, fingerprint=record.fingerprint if record else None,
                samples=tuple(record.unreadable or record.samples) if record else (),
            )
        )  # fmt: skip
        found = blame(first, self.attempt, read_journal(self.paths.supervisor_journal).records)
        if found is not None:
            journal.append(found)
        journal.close()
        return first, found

    def finishes(self) -> dict[str, str]:
        return self.forker.finish(self.toy, self.run, log=self.run.with_suffix(".log"))


@pytest.mark.parametrize(
    "toy",
    [
        pytest.param(TOY, id="read by the rank itself", marks=pytest.mark.soak),
        pytest.param(TOY.but(workers=2, augment=True), id="read by workers", marks=pytest.mark.soak),
        pytest.param(TOY.but(accumulate=2), id="in the middle of an update"),
        pytest.param(TOY.but(poison=(123, 151)), id="two of them", marks=pytest.mark.soak),
        pytest.param(TOY.but(epochs=3), id="in three epochs"),
    ],
)
def test_a_poisoned_sample_is_left_out_after_two_crashes_in_all_epochs_and_the_run_is_exact(
    forker: Forker, tmp_path: Path, toy: Toy
) -> None:
    job = Supervised(forker, toy, tmp_path / "run")
    for _ in toy.poison:
        first, found = job.fails()
        assert (first.why, found) == ("exception", None)
        again, found = job.fails()
        assert again.record is not None
        assert first.record is not None
        assert again.record.fingerprint == first.record.fingerprint
        assert again.record.doing == "reading"
        assert "cannot be decoded" in again.text
        assert found is not None
        assert {*found.samples} <= {*toy.poison}
        assert len(found.samples) == 1
    portrait = job.finishes()
    added = facts(job.run, SampleQuarantine)
    assert sorted(sample for fact in added for sample in fact.added) == sorted(toy.poison)
    assert {fact.who for fact in added} == {"the supervisor"}
    assert skipped(job.run) == {}, "a neighbour stands in for it, and nothing is lost"
    require_same(portrait, same_skips_from_the_start(toy, job.run, tmp_path / "fresh"), "left out from the start")


def test_a_sample_at_which_the_step_raises_is_found_by_what_the_batches_have_in_common(
    forker: Forker, tmp_path: Path
) -> None:
    """Which sample it is cannot be told from one batch: that is skipped. The next epoch tells."""
    toy = Toy(200, epochs=3, breaking=(123,))
    job = Supervised(forker, toy, tmp_path / "run")
    assert job.fails()[1] is None
    _, skips = job.fails()
    assert skips is not None
    assert skips.samples == ()
    _, leaves_out = job.fails()
    assert leaves_out is not None
    assert leaves_out.samples == (123,)
    portrait = job.finishes()
    assert [*skipped(job.run)] == [skips.batch]
    require_same(portrait, same_skips_from_the_start(toy, job.run, tmp_path / "fresh"), "told from the start")


CATCHES = """
import os
import torch
from torch.utils.data import DataLoader, Dataset
import rollback

class Samples(Dataset):
    tries = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 17:
            Samples.tries += 1
            if Samples.tries <= int(os.environ["BAD_TRIES"]):
                raise ValueError("cannot be decoded")
        return torch.ones(8) * index / 40

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=DataLoader(Samples(), batch_size=4))
for epoch in guard.epochs(2):
    batches = iter(guard)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except Exception:
            continue
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
"""


@pytest.mark.parametrize(("tries", "code"), [(3, 0), (10**9, 2)], ids=["a few times", "for ever"])
def test_a_script_that_catches_what_reading_raises_may_try_again_but_not_without_end(
    tmp_path: Path, tries: int, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CATCHES)
    done = run_warm(
        [*LAUNCH, "--nproc", "1", "--run", str(tmp_path / "run"), str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "BAD_TRIES": str(tries)}, timeout=LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-4000:]
    assert ("batch 4 of the data could not be read" in done.stdout) == (code != 0)


def test_with_quarantine_off_the_batch_is_skipped(forker: Forker, tmp_path: Path) -> None:
    toy = TOY.with_settings(quarantine="off")
    job = Supervised(forker, toy, tmp_path / "run")
    job.fails()
    job.fails()
    portrait = job.finishes()
    assert facts(job.run, SampleQuarantine) == []
    ((_, samples),) = skipped(job.run).items()
    assert 123 in (samples or ())
    require_same(portrait, same_skips_from_the_start(toy, job.run, tmp_path / "fresh"), "skipped from the start")


def test_a_random_crasher_is_not_blamed_on_data(forker: Forker, tmp_path: Path) -> None:
    seed = 20
    print(f"seed {seed}")
    dice, toy = random.Random(seed), Toy(260)
    job = Supervised(forker, toy, tmp_path / "run")
    places = sorted(dice.sample(range(20, 60), 4))
    for batch in places[:2]:
        first, found = job.fails(signal=[batch, signal.SIGSEGV])
        assert (first.why, found) == ("signal", None)
    for batch in places[2:]:
        first, found = job.fails(raise_at=batch)
        assert first.record is not None
        assert (first.why, first.record.batch, found) == ("exception", batch, None)
    portrait = job.finishes()
    assert facts(job.run, SkipAdded) == []
    require_same(portrait, same_skips_from_the_start(toy, job.run, tmp_path / "fresh"), "undisturbed")
