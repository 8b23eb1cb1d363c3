"""A rank that raises on one particular batch again and again, and one that raises anywhere: what is skipped."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from attempts import Forker
from toy import Toy, facts, history, require_same, same_skips_from_the_start, skipped

from rollback.events import AttemptEnded, Blamed, SkipAdded
from rollback.rundir.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor.blame import blame
from rollback.supervisor.classify import FirstCause, cause, first_cause
from rollback.supervisor.evidence import TrainJournal, gather, rank_ends
from rollback.supervisor.outcome import Failures, Left, RankFailure

TOY = Toy(400, poison=(123,))


@pytest.fixture
def forker() -> Iterator[Forker]:
    with Forker() as started:
        yield started


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
        left = Left(status=1, failures=account)
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
            )
        )  # fmt: skip
        found = blame(first, self.attempt, journal.records)
        if found is not None:
            journal.append(found)
        journal.close()
        return first, found

    def finishes(self) -> dict[str, str]:
        return self.forker.finish(self.toy, self.run, log=self.run.with_suffix(".log"))


@pytest.mark.parametrize(
    "toy",
    [
        pytest.param(TOY, id="read by the rank itself"),
        pytest.param(TOY.but(workers=2, augment=True), id="read by workers"),
        pytest.param(TOY.but(accumulate=2), id="in the middle of an update"),
        pytest.param(TOY.but(poison=(123, 301)), id="two of them"),
    ],
)
def test_a_poisoned_sample_is_skipped_after_two_crashes_and_the_run_is_exact(
    forker: Forker, tmp_path: Path, toy: Toy
) -> None:
    job = Supervised(forker, toy, tmp_path / "run")
    blamed = []
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
        blamed.append(found)
    portrait = job.finishes()
    added = facts(job.run, SkipAdded)
    assert [fact.window for fact in added] == [found.window for found in blamed]
    assert {fact.who for fact in added} == {"the supervisor"}
    assert all(len(found.window) == toy.accumulate for found in blamed)
    passed_over = skipped(job.run)
    assert {i for ids in passed_over.values() for i in ids or ()} >= set(toy.poison)
    assert len(passed_over) == toy.accumulate * len(toy.poison)
    assert sorted(window.first for window in history(job.run).skip_list) == sorted(w.window.first for w in blamed)
    require_same(portrait, same_skips_from_the_start(toy, job.run, tmp_path / "fresh"), "with the skips from the start")


def test_a_random_crasher_is_not_blamed_on_data(forker: Forker, tmp_path: Path) -> None:
    seed = 20
    print(f"seed {seed}")
    dice = random.Random(seed)
    job = Supervised(forker, Toy(400), tmp_path / "run")
    places = sorted(dice.sample(range(20, 90), 4))
    for batch in places[:2]:
        first, found = job.fails(signal=[batch, signal.SIGSEGV])
        assert (first.why, found) == ("signal", None)
    for batch in places[2:]:
        first, found = job.fails(raise_at=batch)
        assert first.record is not None
        assert (first.why, first.record.batch, found) == ("exception", batch, None)
    portrait = job.finishes()
    assert facts(job.run, SkipAdded) == []
    require_same(portrait, same_skips_from_the_start(Toy(400), job.run, tmp_path / "fresh"), "undisturbed")
