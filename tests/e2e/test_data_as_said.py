"""Reports of data that were others than the script said, each with the script as it was reported."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from attempts import Forker
from selection import by_default
from toy import facts

from rollback.facts.training import Advice

STARTER = Path(__file__).parents[1] / "support" / "starter.py"
SCRIPT = Path(__file__).parent / "jobs" / "as_said.py"
SAMPLES, EPOCHS = 80, 3


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with Forker(STARTER) as forker:
        yield forker


@dataclass
class Job:
    """The script in a folder of its own."""

    folder: Path
    forker: Forker

    def run(self, name: str, *, under: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
        """Start it: its exit code, and what it printed. under: what stands between `python` and the script."""
        output = self.folder / "printed.txt"
        output.unlink(missing_ok=True)
        status = self.forker.ask({
            "arguments": [*under, str(SCRIPT), name], "cwd": str(self.folder), "output": str(output),
            "environment": {"NOTES": str(self.folder), "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **environment},
        })  # fmt: skip
        return status, output.read_text()

    @property
    def run_directory(self) -> Path:
        return self.folder / "runs" / SCRIPT.stem

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"trained-{rank}.jsonl").read_text().splitlines()]

    def effective(self, rank: int = 0) -> list[dict[str, Any]]:
        """What counts: a step that was done again undoes itself and what came after it."""
        kept: list[dict[str, Any]] = []
        for line in self.lines(rank):
            kept = [earlier for earlier in kept if earlier["step"] < line["step"]]
            kept.append(line)
        return kept

    def seen(self, ranks: int) -> list[Counter[int]]:
        """How often each sample was trained on, in each epoch, over all ranks."""
        seen = [Counter[int]() for _ in range(EPOCHS)]
        for rank in range(ranks):
            for line in self.effective(rank):
                seen[line["epoch"]].update(line["ids"])
        return seen


@pytest.fixture
def job(tmp_path: Path, forker: Forker) -> Job:
    return Job(tmp_path, forker)


def launch(ranks: int) -> tuple[str, ...]:
    return ("-m", "rollback", "launch", "--nproc", str(ranks))


# Each sample once an epoch, whatever happens --------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_default(["wrapper", "subclass", "epoch_of_another_name"], "epoch_of_another_name"))
def test_after_a_kill_in_the_second_epoch_each_sample_is_trained_on_once_an_epoch(job: Job, name: str) -> None:
    status, printed = job.run(name, under=launch(2), KILL="34")
    assert (job.folder / "killed").exists()
    assert status == 0, printed
    assert job.seen(2) == [Counter(range(SAMPLES))] * EPOCHS


# Other data at the next start -----------------------------------------------------------------------------------------


def test_a_split_that_was_not_seeded_is_refused_before_it_is_trained_on(job: Job) -> None:
    job.run("split", under=launch(1), KILL="34")  # started again at once, by the supervisor
    assert (job.folder / "killed").exists()
    status, printed = job.run("split", under=launch(1))
    assert status == 78, printed
    assert len({i for line in job.lines() for i in line["ids"]}) <= 40


def test_a_file_that_was_written_anew_is_refused_before_it_is_trained_on(job: Job) -> None:
    data = job.folder / "data.json"
    data.write_text(json.dumps(list(range(40))))
    job.run("file", KILL="34")
    before = job.lines()
    data.write_text(json.dumps([(i + 3) % 40 for i in range(40)]))
    status, printed = job.run("file")
    assert status != 0
    assert "RunDoesNotFit" in printed
    assert job.lines() == before


# Workers --------------------------------------------------------------------------------------------------------------


def test_each_epoch_and_each_rank_has_its_own_worker_seeds_and_the_same_again_after_a_kill(job: Job) -> None:
    status, printed = job.run("worker_seeds", under=launch(2), KILL="34")
    assert (job.folder / "killed").exists()
    assert status == 0, printed
    seeds = {(rank, line["epoch"]): set() for rank in range(2) for line in job.lines(rank)}
    for rank in range(2):
        for line in job.lines(rank):
            seeds[rank, line["epoch"]].update(line["seeds"])
    assert all(len(found) == 1 for found in seeds.values()), seeds
    assert len(set.union(*seeds.values())) == 2 * EPOCHS, seeds


# Loops ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prefetching", "prefetching_while_accumulating"])
def test_a_loop_that_fetches_the_next_batch_before_backward_is_refused_in_the_first_updates(
    job: Job, name: str
) -> None:
    status, printed = job.run(name)
    assert status != 0
    assert "UsageError" in printed
    assert job.lines()[-1]["step"] <= 3


def test_the_launcher_says_so_and_ends_with_2(job: Job) -> None:
    status, printed = job.run("prefetching", under=launch(1))
    assert status == 2, printed
    assert "before optimizer.step()" in printed
    assert len(job.lines()) <= 6


@pytest.mark.parametrize(
    "name",
    ["all_of_an_update_first", "some_left_out", "accumulating", "several_forwards", "evaluated_in_between"],
)
def test_a_loop_that_only_looks_like_it_is_not_refused(job: Job, name: str) -> None:
    status, printed = job.run(name)
    assert status == 0, printed
    assert Counter(i for line in job.lines() for i in line["ids"]) == Counter(list(range(SAMPLES)) * EPOCHS)


# An evaluation that draws ---------------------------------------------------------------------------------------------


def test_an_evaluation_that_draws_from_where_the_data_are_drawn_is_said_at_once_and_once(job: Job) -> None:
    status, printed = job.run("evaluating")
    assert status == 0, printed
    said = [line for line in printed.splitlines() if "other batches than" in line and line.startswith("rollback:")]
    assert len(said) == 1, printed
    assert printed.index(said[0]) < [at for at in range(len(printed)) if printed.startswith("evaluated", at)][1]
    (advice,) = [fact for fact in facts(job.run_directory, Advice) if "other batches than" in fact.text]
    assert advice.text in said[0]


def test_without_it_the_data_are_those_of_a_run_without_a_guard_and_nothing_is_said(job: Job) -> None:
    for environment in ({}, {"PLAIN": "1"}):
        status, printed = job.run("not_evaluating", **environment)
        assert status == 0, printed
        assert "other batches than" not in printed
    assert (job.folder / "drawn-True.jsonl").read_text() == (job.folder / "drawn-False.jsonl").read_text()
