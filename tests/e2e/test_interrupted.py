"""Attempts that end in the middle, and what the next one makes of what they left behind."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from attempts import DIED, Forker
from selection import by_default, soak
from toy import Toy, facts, require_same, same_skips_from_the_start, skip_list, train

from rollback.errors import RunInUse
from rollback.facts.training import Attached, Concluded, Incident, Planned, Restored, Stopped
from rollback.rundir.paths import RunPaths
from rollback.train.process.heartbeat import HeartbeatWriter

TOY = Toy(240)  # 60 batches, a checkpoint every 10 steps
JOBS = {
    "shuffled": Toy(240, augment=True),
    "workers": Toy(240, workers=2, augment=True),
    "callable": Toy(loader="drawn", max_steps=60),
    "iterator": Toy(loader="iterator", max_steps=60),
    "list": Toy(240, loader="list"),
    "stateful": Toy(240, loader="stateful"),
    "scaler": Toy(240, scaler=True, overflow=(12, 35)),
    "accumulation": Toy(480, accumulate=2),
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    return train(TOY)


@pytest.mark.parametrize("job", by_default(JOBS, "workers", "scaler", "accumulation"))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, forker: Forker, job: str) -> None:
    """Killed twice, the second time before it got as far as the first: the last one to get there counts."""
    toy, run, log = JOBS[job], tmp_path / "run", tmp_path / "log"
    for batch in (38, 31):
        assert forker.status(toy, run, log=str(log), signal=[batch, signal.SIGKILL]) == -signal.SIGKILL
    ended = forker.finish(toy, run, log=log)
    assert [fact.step > 0 for fact in facts(run, Attached)] == [False, True, True]
    require_same(ended, train(toy, tmp_path / "undisturbed"), job)


@pytest.mark.parametrize("job", ["workers", *soak("shuffled", "callable")])
def test_sigterm_stops_at_a_checkpoint_of_that_very_step(tmp_path: Path, forker: Forker, job: str) -> None:
    toy, run, log = JOBS[job], tmp_path / "run", tmp_path / "log"
    assert forker.status(toy, run, log=str(log), signal=[33, signal.SIGTERM]) == 75
    (stopped,) = facts(run, Stopped)
    assert (stopped.reason, stopped.step) == ("preempted", 35)  # 33 is over, its beat is read at the end of 34
    assert RunPaths(run).checkpoint(stopped.checkpoint).is_dir()
    ended = forker.finish(toy, run, log=log)
    assert facts(run, Attached)[-1].step == 35
    require_same(ended, train(toy, tmp_path / "undisturbed"), job)


@pytest.mark.parametrize(
    ("told", "bad"),
    [(48, 49), *soak((33, 33), (33, 34), (47, 48), (48, 48))],
)
def test_sigterm_together_with_a_bad_batch(tmp_path: Path, forker: Forker, told: int, bad: int) -> None:
    """Planned and journalled, but not carried out before the stop; also where it comes with an epoch's last batches."""
    toy, run, log = Toy(200, nan=(bad,), epochs=2), tmp_path / "run", tmp_path / "log"
    assert forker.status(toy, run, log=str(log), signal=[told, signal.SIGTERM]) == 75
    ended = forker.finish(toy, run, log=log)
    assert len(facts(run, Incident)) == len(facts(run, Planned)) == len(facts(run, Restored)) == 1
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), f"told at {told}, bad {bad}")


@pytest.mark.parametrize("batch", [58, *soak(57, 59)])
def test_sigterm_with_the_last_batches_of_all_ends_the_run_as_it_would_have_ended(
    tmp_path: Path, forker: Forker, undisturbed: dict[str, str], batch: int
) -> None:
    toy, run, log = TOY, tmp_path / "run", tmp_path / "log"
    assert forker.status(toy, run, log=str(log), signal=[batch, signal.SIGTERM]) in (0, 75)
    require_same(forker.finish(toy, run, log=log), undisturbed, f"told at {batch}")


@pytest.mark.covering
@pytest.mark.parametrize(
    ("when", "kind"),
    [("before", "incident"), ("after", "incident"), ("before", "plan"), ("after", "plan"), ("before", "restored"),
     ("after", "restored"), ("before", "skipped"), ("after", "skipped"), ("after", "evicted")],
)  # fmt: skip
def test_a_rollback_that_a_crash_interrupts_is_carried_out_by_the_next_start(
    tmp_path: Path, forker: Forker, when: str, kind: str
) -> None:
    toy, run, log = TOY.but(nan=(37,)), tmp_path / "run", tmp_path / "log"
    assert forker.status(toy, run, log=str(log), die=[when, kind, 1]) == DIED
    before = facts(run, Planned)
    ended = forker.finish(toy, run, log=log)
    (plan,) = facts(run, Planned)
    (restored,) = facts(run, Restored)
    assert before in ([], [plan])
    assert [fact.outcome for fact in facts(run, Concluded)] == ["recovered"]
    planned, carried_out = before == [plan], (when, kind) in {("before", "skipped"), ("after", "restored")}
    if kind in ("plan", "restored"):
        assert restored.route == ("relaunch" if planned and not carried_out else "in_process")
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), f"died {when} {kind}")
    on_disk = {path.name for path in (run / "ring").iterdir()}
    assert not on_disk & set(plan.discards), "what the plan cut off is still in the ring"


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["committed", "good", "evicted", "finished"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_around_any_other_fact_costs_nothing_but_a_replay(
    tmp_path: Path, forker: Forker, undisturbed: dict[str, str], when: str, kind: str
) -> None:
    toy, run, log = TOY.with_settings(keep=3), tmp_path / "run", tmp_path / "log"
    assert forker.status(toy, run, log=str(log), die=[when, kind, 1 if kind == "finished" else 3]) == DIED
    require_same(forker.finish(toy, run, log=log), undisturbed, f"died {when} {kind}")


def test_sequence_numbers_only_grow(tmp_path: Path, forker: Forker) -> None:
    """The rollback evicts the newest checkpoints; whoever then numbers from what is left uses a name a second time."""
    toy, run = Toy(280, nan=(57,)).with_settings(rewind=30), tmp_path / "run"
    assert forker.status(toy, run, die=["after", "evicted", 3]) == DIED
    forker.finish(toy, run)
    names = [fact.checkpoint for fact in facts(run) if fact.kind == "committed"]
    assert names == sorted(set(names))


def test_the_second_of_two_on_one_run_directory_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def second(_guard: object, position: int) -> None:
        if position == 20:
            with pytest.raises(RunInUse, match=f"pid {os.getpid()}"):
                train(Toy(120), run)

    train(Toy(120), run, hook=second)
    assert len(facts(run, Attached)) == 1


def test_loader_workers_that_end_with_their_epoch_end_nothing_of_their_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, end = tmp_path / "ended", HeartbeatWriter.end

    def noted(self: HeartbeatWriter, **given: Any) -> None:
        with ended.open("a") as file:
            file.write(f"{os.getpid()}\n")
        end(self, **given)

    monkeypatch.setattr(HeartbeatWriter, "end", noted)
    train(Toy(100, epochs=2, loop="epochs", workers=1), tmp_path / "run")
    assert ended.read_text().split() == [str(os.getpid())]


def test_a_resumed_run_remembers_the_windows_it_has_to_skip(tmp_path: Path, forker: Forker) -> None:
    """Killed between a rollback and its skip window's end, and once more behind it."""
    toy, run, log = TOY.but(nan=(37,)), tmp_path / "run", tmp_path / "log"
    assert forker.status(toy, run, log=str(log), die=["before", "skipped", 1]) == DIED
    assert forker.status(toy, run, log=str(log), signal=[44, signal.SIGKILL]) == -signal.SIGKILL
    ended = forker.finish(toy, run, log=log)
    assert len(skip_list(run)) == 1
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "windows")
