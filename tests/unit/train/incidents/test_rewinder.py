"""Whoever keeps something of a training hears of it when training is put back, for whatever cause."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy import SETTINGS, facts

import rollback
from rollback.facts.probes import NotProbed, Probed
from rollback.facts.training import Finished, PhaseAnnounced, Window
from rollback.sentinel.probe import OpenQuestion
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.probe.batches import MOST, ProbeBatch, ProbeUpdate

TRAIN = Path(rollback.__file__).parent / "train"
EPOCH = 12  # batches


class Script:
    """Epochs of a small job on one rank. The first time that batch `broken` comes by, it is NaN. With a slow copy of
    the weights in the model, which the script writes to by itself."""

    def __init__(self, run: Path, broken: int | None = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.model.slow = nn.Parameter(self.model.weight.detach().clone(), requires_grad=False)
        self.slow_at = {0: self.model.slow.detach().clone()}
        data = torch.randn(EPOCH, 4, 4, generator=torch.Generator().manual_seed(1))
        self.guard = rollback.Guard(
            model=self.model, optimizer=self.optimizer, loader=list(data), run=run,
            **SETTINGS | {"snapshot_every": 5} | settings,
        )  # fmt: skip
        self.broken = broken
        self.broken_again: int | None = None
        self.events: list[RollbackApplied] = []
        self.guard.on_rollback(self.events.append)

    def train(self, epochs: int, leave_at: int | None = None, between: Callable[[], object] = lambda: None) -> None:
        """leave_at: the batch at which the process is gone. between: what the script does behind each epoch."""
        guard = self.guard
        for _ in guard.epochs(epochs):
            for x in guard:
                self.update(x * torch.nan if guard.batch == self.broken else x)
                if guard.batch == leave_at:
                    return
            between()

    def update(self, x: torch.Tensor) -> None:
        if self.guard.batch == self.broken:
            self.broken, self.broken_again = self.broken_again, None
        self.guard._loop.checkpoints.snapshots.wait()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.slow.data = self.model.slow.data.lerp(self.model.weight.data, 0.1)
        self.slow_at[self.guard.step + 1] = self.model.slow.detach().clone()
        self.guard.observe(loss)


def subscribers(guard: rollback.Guard) -> list[Any]:
    """The objects behind the methods that are called."""
    return [getattr(subscriber, "__self__", None) for subscriber in guard._loop.rewinder.subscribers]


def listen_to_each(guard: rollback.Guard) -> list[tuple[str, RollbackCause]]:
    """Who is told, and of what, from now on."""
    heard: list[tuple[str, RollbackCause]] = []

    def noting(subscriber: Callable[[RollbackApplied], object]) -> Callable[[RollbackApplied], object]:
        def note(event: RollbackApplied) -> None:
            heard.append((subscriber.__qualname__, event.cause))
            subscriber(event)

        return note

    guard._loop.rewinder.subscribers = [noting(subscriber) for subscriber in guard._loop.rewinder.subscribers]
    return heard


def ask(guard: rollback.Guard) -> None:
    """As if there were a rise, and a batch from before."""
    kept = ProbeUpdate(0, [ProbeBatch(torch.zeros(4, 4), MOST, {})], loss=9.0)
    batches = guard._loop.prober.kept
    batches.held, batches.question = [kept], OpenQuestion(onset=1, level=0.0, now=1.0, noise=0.5)


def resumed(run: Path) -> Script:
    """A process that goes on in the second epoch."""
    script = Script(run)
    script.train(2, leave_at=EPOCH + 8)
    script.guard.close()
    return Script(run)


def test_who_can_be_told_of_a_rollback_is_told(tmp_path: Path) -> None:
    able = {
        defined.name
        for path in TRAIN.rglob("*.py")
        for defined in ast.walk(ast.parse(path.read_text()))
        if isinstance(defined, ast.ClassDef)
        and any(getattr(part, "name", "") == "rollback_applied" for part in defined.body)
    }
    script = Script(tmp_path / "run")
    assert able == {type(one).__name__ for one in subscribers(script.guard) if one is not script.events}
    script.guard.close()


@pytest.mark.parametrize("cause", RollbackCause)
def test_every_kind_of_restore_reaches_every_subscriber(tmp_path: Path, cause: RollbackCause) -> None:
    match cause:
        case RollbackCause.PLAN:
            script = Script(tmp_path / "run", broken=8)
        case RollbackCause.REHEARSAL:
            script = resumed(tmp_path / "run")
            script.guard._loop.rewinder.rehearsing = True  # as on more than two ranks
        case RollbackCause.EPOCH_START:
            script = Script(tmp_path / "run", broken=EPOCH + 1)
        case RollbackCause.SCREEN:  # a reach set by hand trusts no batch in hand
            script = Script(tmp_path / "run", broken=8, policy="screen")
            script.broken_again = 8
        case RollbackCause.PROBE:
            script = Script(tmp_path / "run")
            ask(script.guard)
    names = [subscriber.__qualname__ for subscriber in script.guard._loop.rewinder.subscribers]
    heard = listen_to_each(script.guard)
    script.train(2)
    assert [name for name, told_of in heard if told_of is cause] == names
    (event,) = [event for event in script.events if event.cause is cause]
    assert (event.case is not None) == (cause is RollbackCause.PLAN)
    if cause is RollbackCause.SCREEN:
        assert (event.checkpoint, event.step, event.batch, event.skip) == ("", 8, 8, Window(first=8, last=8))
    elif cause is RollbackCause.PROBE:
        assert (event.checkpoint, event.step, event.batch, event.skip) == ("", 1, 1, None)
        assert (script.guard.step, [fact.finding for fact in facts(tmp_path / "run", Probed)]) == (2 * EPOCH, ["data"])
    else:
        assert event.checkpoint.endswith(f"{event.step:08d}")


@pytest.mark.parametrize("cause", [RollbackCause.SCREEN, RollbackCause.PROBE])
def test_a_slow_copy_in_the_model_goes_back_with_an_update_that_does_not_count(
    tmp_path: Path, cause: RollbackCause
) -> None:
    script = Script(tmp_path / "run", broken=8, policy="screen")
    script.broken_again, went_back = 8, []
    if cause is RollbackCause.PROBE:
        script.broken = None
        ask(script.guard)

    def compare(event: RollbackApplied) -> None:
        if event.cause is cause:
            went_back.append(torch.equal(script.model.slow, script.slow_at[event.step]))

    script.guard.on_rollback(compare)
    script.train(2)
    assert went_back == [True]


def test_a_loop_that_counts_what_it_is_handed_gets_no_probe_and_the_journal_says_why(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    script.guard.without_probes("this loop counts")
    ask(script.guard)
    script.train(2, between=lambda: ask(script.guard))
    assert [fact.reason for fact in facts(tmp_path / "run", NotProbed, Probed)] == ["this loop counts"]  # once
    assert script.events == []


def test_a_loop_that_samples_from_the_model_meets_no_weights_that_are_nan(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", broken=8)
    script.guard.judge_first()
    for _ in script.guard.epochs(2):
        for x in script.guard:
            assert script.model.weight.isfinite().all()
            script.update(x * torch.nan if script.guard.batch == script.broken else x)
    assert [event.cause for event in script.events] == [RollbackCause.PLAN]


def test_a_script_is_told_of_a_rollback_when_the_guard_stands_where_it_leads(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", broken=8)
    stood: list[tuple[int, int]] = []
    script.guard.on_rollback(lambda event: stood.append((script.guard.step, script.guard.batch)))
    script.train(1)
    (event,) = script.events
    assert event.case is not None
    assert event.case.restored is not None
    assert stood == [(event.step, event.batch)] == [(event.case.restored.step, event.case.restored.batch)]


def test_an_update_between_two_epochs_that_is_undone_does_not_count(tmp_path: Path) -> None:
    """A script steps once more behind its loop, with what is left of an accumulation; then the epoch begins again."""
    script = Script(tmp_path / "run", broken=EPOCH + 1)
    updates: list[int] = []

    def step_behind_an_interrupted_epoch() -> None:
        if script.events and not updates:
            updates.append(script.guard.step)
            script.optimizer.step()

    script.train(2, between=step_behind_an_interrupted_epoch)
    assert updates
    passed_over = sum(len(event.skip) for event in script.events if event.skip is not None)
    assert script.guard.step == 2 * EPOCH - passed_over


def test_a_phase_announced_before_the_loop_begins_with_the_step_that_counts(tmp_path: Path) -> None:
    script = resumed(tmp_path / "run")
    script.guard._loop.rewinder.rehearsing = True
    script.guard.announce("fine")
    script.train(2)
    assert [fact.phase for fact in facts(tmp_path / "run", PhaseAnnounced)] == ["fine"]


def test_a_phase_announced_behind_an_update_between_two_epochs_that_is_undone_is_not_lost(tmp_path: Path) -> None:
    script, announced = Script(tmp_path / "run", broken=EPOCH + 1), []

    def step_and_announce() -> None:
        if script.events and not announced:
            announced.append(script.guard.step)
            script.optimizer.step()
            script.guard.announce("fine")

    script.train(2, between=step_and_announce)
    assert announced
    assert {fact.phase for fact in facts(tmp_path / "run", PhaseAnnounced)} == {"fine"}


def test_an_update_that_no_batch_was_drawn_for_is_no_step(tmp_path: Path) -> None:
    """A script steps before its loop, and behind each epoch though nothing is left over: also behind the last one."""
    script = Script(tmp_path / "run")
    script.optimizer.step()
    script.train(2, between=script.optimizer.step)
    script.guard.close()
    assert script.guard.step == 2 * EPOCH


def test_a_loop_that_stands_in_an_except_block_is_over_when_it_is(tmp_path: Path) -> None:
    try:
        raise ImportError("a library that is not there")
    except ImportError:
        script = Script(tmp_path / "run")
        for x in script.guard:
            script.update(x)
        script.guard.close()
    assert len(facts(tmp_path / "run", Finished)) == 1
