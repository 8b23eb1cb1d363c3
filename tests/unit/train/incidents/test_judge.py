"""Decisions at a step's end, on one rank with real parts and numbers of our choice."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollback.config import Settings
from rollback.errors import CheckpointDamaged, CheckpointOutOfReach, CheckpointUnusable
from rollback.facts.history import History
from rollback.facts.training import Advice, BecameGood, CheckpointLost, Fact, Incident, Planned, Quarantined, Window
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.sentinel import Hint, Sentinel
from rollback.train.advice.advisor import Advisor
from rollback.train.advice.unkept_state import UnkeptState
from rollback.train.catalogue.catalogue import Catalogue
from rollback.train.comm.pulse import Pulse
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder
from rollback.train.data.cursor import cursor_for
from rollback.train.data.skips import SkipList
from rollback.train.incidents.decisions import Decision, Halt, Rewind, StepSpan
from rollback.train.incidents.evidence import IncidentEvidence
from rollback.train.incidents.judge import Judge
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.run import AttachedRun
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.image import Image
from rollback.train.state.nonfinite import FiniteCheck
from rollback.train.state.state import TrainingState
from rollback.train.updates.optimizer import Updates
from rollback.wording import AdviceText

NAN = float("nan")


class Steps:
    """A judge that is fed with losses, one for each step."""

    def __init__(self, folder: Path, settings: Settings | None = None, batches_per_step: int = 1) -> None:
        self.paths = RunPaths(folder)
        ranks, settings = Ranks(), settings or Settings(probation=8, rewind=0)
        for directory in (self.paths.ring, self.paths.ranks):
            directory.mkdir(parents=True)
        self.record = record = Recorder(self.paths, 1, is_rank_0=True)
        self.snapshots = Snapshots(self.paths, ranks, FiniteCheck((), repr), 0, 1)
        self.catalogue = Catalogue(settings.probation)
        run = AttachedRun(self.paths, ranks, settings, record, History())
        self.checkpoints = CheckpointManager(run, self.snapshots, self.catalogue)
        model = torch.nn.Linear(1, 1)
        optimizer, sentinel = torch.optim.SGD(model.parameters()), Sentinel(settings.sensitivity)
        state = TrainingState(model, optimizer, {}, cursor_for([1]), sentinel)
        advisor = Advisor(state, Updates(optimizer, None, model), model, UnkeptState(state, {}, []))
        self.judge = Judge(
            run, Pulse(ranks, torch.device("cpu")), sentinel, FiniteCheck((), repr), self.checkpoints,
            IncidentEvidence(run, model, 0), advisor, SkipList(run), lambda *_: None,
        )  # fmt: skip
        self.step = 0
        self.per_step = batches_per_step

    def end_with(self, loss: float, *, stop: bool = False, dropped: bool = False) -> Decision | None:
        first = self.step * self.per_step
        span = StepSpan(self.step, first, first + self.per_step - 1, self.per_step, Hint.NONE)
        self.step += 1
        return self.judge.end_step(span, torch.tensor(loss), None, stop=stop, scaler_skipped=dropped)

    def snapshot(self) -> None:
        image = Image({}, {}, {}, {})
        self.snapshots.await_ready(image)
        timeline, batch = self.judge.timeline, self.step * self.per_step
        flight = self.snapshots.start_snapshot(image, step=self.step, batch=batch, epoch=0, timeline=timeline)
        self.checkpoints.expect(flight)
        self.checkpoints.await_landing()

    def facts(self, kind: type[Fact]) -> list[Fact]:
        return [r.fact for r in read_journal(self.paths.train_journal).records if isinstance(r.fact, kind)]


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    steps = Steps(tmp_path / "run")
    yield steps
    steps.snapshots.close()


def test_a_step_is_judged_when_the_next_one_ends(steps: Steps) -> None:
    steps.snapshot()
    assert steps.end_with(NAN) is None
    decision = steps.end_with(1.0)
    assert isinstance(decision, Rewind)
    assert (decision.incident.onset_step, decision.incident.step, decision.plan.step) == (0, 1, 0)


def test_a_step_does_not_go_through_all_phases_that_were_ever_announced(steps: Steps) -> None:
    """A script may announce one with each epoch."""

    class Counted(set[int]):
        gone_through = 0

        def __iter__(self) -> Iterator[int]:
            self.gone_through += 1
            return super().__iter__()

    steps.snapshot()
    steps.judge._phases = phases = Counted(range(100, 10_000, 50))
    for _ in range(5):
        steps.end_with(1.0)
    steps.judge.judge_ahead([steps.judge._pulse.sent()])  # type: ignore[list-item]
    assert not phases.gone_through


def test_the_plan_is_in_the_journal_before_anybody_is_told(steps: Steps) -> None:
    steps.snapshot()
    steps.end_with(NAN)
    assert isinstance(steps.judge.judge_pending(), Rewind)
    assert len(steps.facts(Incident)) == len(steps.facts(Planned)) == 1


def test_without_a_good_checkpoint_there_is_nothing_to_go_back_to(steps: Steps) -> None:
    steps.end_with(1.0)
    steps.snapshot()
    steps.end_with(NAN)
    decision = steps.judge.judge_pending()
    assert isinstance(decision, Halt)
    assert (decision.giving_up, decision.save) == ("no_checkpoint", False)


@pytest.mark.parametrize(
    ("fault", "kept"), [(CheckpointOutOfReach("no answer"), True), (CheckpointDamaged("torn"), False)]
)
def test_a_planned_checkpoint_that_a_host_cannot_reach_is_no_damaged_one(
    steps: Steps, fault: CheckpointUnusable, kept: bool
) -> None:
    steps.snapshot()
    steps.end_with(1.0)
    steps.snapshot()
    steps.end_with(NAN)
    failed = steps.judge.judge_pending()
    assert isinstance(failed, Rewind)
    name = failed.plan.checkpoint
    assert name is not None
    again = steps.judge.plan_without(name, fault, failed)
    assert not isinstance(again, Rewind) or again.plan.checkpoint != name
    assert steps.paths.checkpoint(name).exists() == kept
    assert bool(steps.facts(Quarantined)) != kept


@pytest.mark.parametrize(("at_first", "account"), [(True, "no good checkpoint"), (False, "planned return to step 0")])
def test_what_comes_to_light_while_stopping_is_not_forgotten(steps: Steps, at_first: bool, account: str) -> None:
    """Told to stop with one step, and the next one, judged in the same moment, is not finite."""
    if not at_first:
        steps.snapshot()
    steps.end_with(1.0, stop=True)
    decision = steps.end_with(NAN)
    assert isinstance(decision, Halt)
    assert not decision.save, "the state is on the wrong side of an onset"
    assert decision.giving_up == ("no_checkpoint" if at_first else None)
    assert account in decision.account


def test_told_to_stop_after_a_healthy_step(steps: Steps) -> None:
    steps.end_with(1.0, stop=True)
    decision = steps.end_with(1.0)
    assert decision == Halt("told to stop", save=True)


def test_nothing_is_judged_ahead_while_a_step_in_a_screen_is_judged(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, tried = Sentinel.update, []

    def meanwhile(sentinel: Sentinel, *given: Any) -> Any:
        with pytest.raises(NotProved, match="being judged"):
            steps.judge.judge_ahead([b""])
        tried.append(given)
        return update(sentinel, *given)

    monkeypatch.setattr(Sentinel, "update", meanwhile)
    span = StepSpan(0, 0, 0, 1, Hint.NONE)
    steps.judge.end_step(span, torch.tensor(1.0), None, stop=False, scaler_skipped=False, screened=True)
    assert tried


def test_a_step_whose_loss_is_not_finite_is_not_kept_while_its_rank_waits_to_hear_whose_it_was(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for ever, where another rank has died."""
    asked = []

    def meanwhile(*_: object) -> None:
        with pytest.raises(NotProved, match="not healthy"):
            steps.judge.judge_ahead([steps.judge._pulse.sent()])  # type: ignore[list-item]
        asked.append(True)

    steps.end_with(NAN)
    monkeypatch.setattr(Ranks, "add_up", meanwhile)
    steps.judge.judge_pending()
    assert asked


def test_a_checkpoint_is_good_after_its_probation_and_not_before(steps: Steps) -> None:
    for _ in range(3):
        steps.end_with(1.0)
    steps.judge.judge_pending()
    steps.snapshot()
    for done in range(8):
        assert not any(point.good for point in steps.catalogue.as_held()), done
        steps.end_with(1.0)
        steps.judge.judge_pending()
    assert [point.good for point in steps.catalogue.as_held()] == [True]


def test_an_onset_is_told_in_batches_of_the_step_it_lies_in(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "run", batches_per_step=4)
    steps.snapshot()
    for _ in range(5):
        steps.end_with(1.0)
    steps.end_with(NAN)
    decision = steps.judge.judge_pending()
    assert isinstance(decision, Rewind)
    assert (decision.incident.onset_batch, decision.incident.detection_batch) == (20, 23)
    assert decision.plan.skip is not None
    assert len(decision.plan.skip) % 4 == 0
    steps.snapshots.close()


@pytest.mark.parametrize("remembered", [7, 0])
def test_a_window_leaves_whole_updates_as_its_own_epoch_has_them(tmp_path: Path, remembered: int) -> None:
    """Two epochs of 13 batches: updates of two batches, then of three. Also where a new process begins between them."""
    steps = Steps(tmp_path / "run", Settings(policy="surgical", probation=8))
    steps.snapshot()
    for number in range(7 - remembered, 7):
        last = min(2 * number + 1, 12)
        span = StepSpan(
            number, 2 * number, last, 2, Hint.NONE, batches=last + 1 - 2 * number, epoch_end=13, epoch_batches=13
        )
        steps.judge.end_step(span, torch.tensor(1.0), None, stop=False, scaler_skipped=False)
    span = StepSpan(7, 13, 15, 3, Hint.NONE, batches=3, epoch_end=26, epoch_batches=13)
    steps.judge.end_step(span, torch.tensor(NAN), None, stop=False, scaler_skipped=False)
    decision = steps.judge.judge_pending()
    assert isinstance(decision, Rewind)
    assert decision.plan.skip == Window(first=13, last=16), "three updates are left"
    steps.snapshots.close()


def test_observing_only_decides_nothing(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "run", Settings(observe_only=True, probation=8))
    steps.snapshot()
    for _ in range(4):
        assert steps.end_with(NAN) is None
    assert {plan.action for plan in steps.facts(Planned)} == {"observe"}
    steps.snapshots.close()


def test_advice_is_given_once(steps: Steps) -> None:
    for _ in range(3):
        steps.record.advise(AdviceText("code", "do it otherwise"))
    assert len(steps.facts(Advice)) == 1


def test_a_checkpoint_that_has_been_removed_never_becomes_good(steps: Steps) -> None:
    for step in range(30):
        steps.end_with(1.0)
        if step in (2, 4):
            steps.snapshot()
        if step == 6:
            shutil.rmtree(steps.paths.checkpoint("c000001-s00000005"))
    assert [fact.checkpoint for fact in steps.facts(BecameGood)] == ["c000000-s00000003"]
    assert [fact.checkpoint for fact in steps.facts(CheckpointLost)] == ["c000001-s00000005"]
    assert [point.name for point in steps.checkpoints.as_held()] == ["c000000-s00000003"]
