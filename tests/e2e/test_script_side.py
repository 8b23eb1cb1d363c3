"""What a script may do with a guard besides looping over it: ask for positions and lengths, call next(), have values
kept."""

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import soak
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toy import SETTINGS, facts, skip_list

import rollback
from rollback.errors import ExitCode, UsageError
from rollback.facts.training import Evicted, Finished, PhaseAnnounced, Restored, Stopped

SAMPLES = torch.randn(60, 8, generator=torch.Generator().manual_seed(3))


class Script:
    """A small training over 30 batches an epoch; nan: positions of bad batches."""

    def __init__(self, run: Path, *, loader: Any = None, nan: tuple[int, ...] = (), **settings: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = loader or DataLoader(TensorDataset(SAMPLES), batch_size=2, shuffle=True)
        self.nan = nan
        self.guard = rollback.Guard(
            model=self.model, optimizer=self.optimizer, loader=self.loader, run=run, **{**SETTINGS, **settings}
        )
        torch.manual_seed(2)

    def train_on(self, batch: Any) -> float:
        x = batch[0] if isinstance(batch, list) else batch
        loss = self.model(x).square().mean() * (float("nan") if self.guard.batch in self.nan else 1.0)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.guard.observe(loss)
        self.guard._loop.checkpoints.snapshots.wait()
        return loss.item()


def test_positions_are_those_of_the_batch_in_hand(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    guard, seen = script.guard, []
    assert (guard.step, guard.batch, guard.batch_in_epoch, guard.epoch) == (0, 0, 0, 0)
    for epoch in guard.epochs(2):
        for batch in guard:
            script.train_on(batch)
            seen.append((guard.batch, guard.batch_in_epoch, guard.epoch))
            if len(seen) == 47:
                break
        assert guard.epoch == epoch
        if len(seen) == 47:
            break
    assert seen == [(batch, batch % 30, batch // 30) for batch in range(47)]
    guard.close()
    again = Script(tmp_path / "run").guard
    assert (again.step, again.batch, again.batch_in_epoch) == (40, 40, 10), "resumed: of the batch that comes next"
    for _, _ in zip(again.epochs(2), again, strict=False):
        assert (again.batch, again.batch_in_epoch, again.epoch) == (40, 10, 1)
        break
    again.close()


def test_a_rollback_takes_the_position_in_the_epoch_along(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", nan=(37,), policy="surgical")
    seen = []
    for _ in script.guard.epochs(2):
        for batch in script.guard:
            seen.append((script.guard.batch, script.guard.batch_in_epoch))
            script.train_on(batch)
    (restored,) = facts(tmp_path / "run", Restored)
    assert restored.batch < 37 < len(seen)
    assert all(in_epoch == batch % 30 for batch, in_epoch in seen)


def test_a_guard_is_as_long_as_its_loader(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    assert len(script.guard) == 30
    assert script.guard
    assert len(script.guard.dataset) == 60
    script.guard.close()
    drawn = Script(tmp_path / "drawn", loader=lambda: torch.randn(2, 8)).guard
    with pytest.raises(TypeError):
        len(drawn)
    assert drawn, "a guard is there, whatever its length"
    with pytest.raises(AttributeError, match=r"'dataset'.*loader \(function\)"):
        drawn.dataset  # noqa: B018
    with pytest.raises(AttributeError, match="ask of the loader"):
        drawn.batch_size  # noqa: B018
    assert not hasattr(drawn, "state_dict")
    drawn.close()


def drawing() -> torch.Tensor:
    return torch.randn(2, 8)


@pytest.mark.parametrize("with_iter", [True, False])
def test_next_hands_out_what_a_loop_does_also_after_a_resume(tmp_path: Path, with_iter: bool) -> None:
    """Dropout draws from the random states, which a resumed run must put back before its first batch."""

    def losses(run: str, batches: int) -> list[float]:
        script = Script(tmp_path / run, loader=drawing)
        source: Iterator[Any] = iter(script.guard) if with_iter else script.guard
        lost = [script.train_on(next(source)) for _ in range(batches - script.guard.step)]
        script.guard.close()
        return lost

    undisturbed = losses("undisturbed", 40)
    losses("run", 25)
    assert losses("run", 40) == undisturbed[20:]


def test_next_ends_with_the_epoch_and_iter_begins_another(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    source = iter(script.guard)
    for _ in range(30):
        script.train_on(next(source))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(source)
    script.train_on(next(iter(script.guard)))
    assert (script.guard.epoch, script.guard.batch_in_epoch) == (1, 0)
    script.guard.close()


def test_one_iterator_can_be_taken_from_in_many_places(tmp_path: Path) -> None:
    """As any iterator: `for` and `islice` over it go on where it stands, and begin no other epoch."""
    script = Script(tmp_path / "run")
    batches, groups = iter(script.guard), []
    while group := list(itertools.islice(batches, 4)):
        groups.append(len(group))
        for batch in group:
            script.train_on(batch)
    assert groups == [4] * 7 + [2]
    assert (script.guard.epoch, script.guard.batch) == (0, 29)
    script.guard.close()


def test_a_script_that_counts_steps_takes_its_batches_from_one_stream(tmp_path: Path) -> None:
    """Over epochs that it does not count, also where it resumes in a later one and goes back over the start of one."""

    def losses(run: str, until: int, **more: Any) -> dict[int, float]:
        script = Script(tmp_path / run, max_steps=95, **more)
        stream = (batch for _ in script.guard.epochs(10**9) for batch in script.guard)
        lost: dict[int, float] = {}
        for batch in stream:
            if script.guard.batch == until:
                break
            lost[script.guard.batch] = script.train_on(batch)
        script.guard.close()
        return lost

    undisturbed = losses("undisturbed", 95)
    assert list(undisturbed) == list(range(95))
    losses("run", 77)
    resumed = losses("run", 95)
    assert resumed == {batch: loss for batch, loss in undisturbed.items() if batch >= 70}
    back = losses("back", 200, nan=(62,), policy="surgical")
    (restored,) = facts(tmp_path / "back", Restored)
    assert restored.batch < 60
    assert len([loss for loss in back.values() if loss == loss]) == 95


# --- values that are kept ---------------------------------------------------------------------------------------


def trained(run: Path, *, until: int = 90, **more: Any) -> tuple[dict[str, Any], list[Any]]:
    """Train three epochs, or up to a batch; what is kept at the end, and what it was when training began."""
    script = Script(run, **more)
    guard = script.guard
    kept = guard.keep(best=float("inf"), batches=0, history=[])
    first = [kept.best, kept.batches, list(kept.history), guard.step]
    for epoch in guard.epochs(3):
        for batch in guard:
            loss = script.train_on(batch)
            kept.batches += 1
            if guard.batch == until:
                guard.close()
                return {}, first
            if loss < kept.best:
                kept.best = loss
        kept.history.append([epoch, kept.best])
    guard.close()
    return {"best": kept.best, "batches": kept.batches, "history": kept.history}, first


@pytest.mark.parametrize("until", [66, *soak(25, 30, 47)])
def test_values_that_are_kept_come_back_with_a_resumed_run(tmp_path: Path, until: int) -> None:
    undisturbed, first = trained(tmp_path / "undisturbed")
    assert first == [float("inf"), 0, [], 0]
    trained(tmp_path / "run", until=until)
    resumed, found = trained(tmp_path / "run")
    assert found[1] == found[3] > 0
    assert resumed == undisturbed
    assert resumed["batches"] == 90
    assert [epoch for epoch, _ in resumed["history"]] == [0, 1, 2]


@pytest.mark.parametrize("bad", [32, *soak(25, 61)])
def test_values_that_are_kept_go_back_with_a_rollback(tmp_path: Path, bad: int) -> None:
    """As if the bad batches had never been there: also over an epoch's start, and back to the very first checkpoint."""
    ended, _ = trained(tmp_path / "run", nan=(bad,))
    assert facts(tmp_path / "run", Restored)
    fresh, _ = trained(tmp_path / "fresh", skip=skip_list(tmp_path / "run"))
    assert ended == fresh
    assert ended["batches"] < 90


def test_a_run_that_began_without_them_finds_the_first_values(tmp_path: Path) -> None:
    script = Script(tmp_path / "run")
    for batch in itertools.islice(script.guard, 25):
        script.train_on(batch)
    script.guard.close()
    assert trained(tmp_path / "run")[1] == [float("inf"), 0, [], 20]


def test_a_checkpoint_without_the_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As checkpoints were before there were kept values."""
    from rollback.train.state import state, tree

    original = tree.encode

    def as_before(value: Any, path: str, tensors: Any) -> Any:
        if path == "local":
            value = {key: item for key, item in value.items() if key != "kept"}
        return original(value, path, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(state.tree, "encode", as_before)
        trained(tmp_path / "run", until=25)
    assert trained(tmp_path / "run")[1] == [float("inf"), 0, [], 20]


def test_what_cannot_be_kept_is_refused_at_once(tmp_path: Path) -> None:
    guard = Script(tmp_path / "run").guard
    with pytest.raises(UsageError, match="'model' holds a Linear"):
        guard.keep(model=nn.Linear(1, 1))
    kept = guard.keep(best=1)
    with pytest.raises(UsageError, match="kept already"):
        guard.keep(best=2)
    assert guard.keep(tokens=0) is kept
    guard.close()


def test_a_list_that_grows_without_end_costs_no_checkpoint(tmp_path: Path) -> None:
    """It outgrows what was set apart for it, and is given more."""
    script = Script(tmp_path / "run")
    kept = script.guard.keep(seen=[])
    for _ in script.guard.epochs(3):
        for batch in script.guard:
            script.train_on(batch)
            kept.seen.extend(range(1000))
    script.guard.close()
    again = Script(tmp_path / "run").guard
    assert len(again.keep(seen=[]).seen) == 1000 * again.step > 50_000
    again.close()


def test_a_script_that_ends_its_training_early_has_ended_it_well(tmp_path: Path) -> None:
    """Where the last update turns out to be bad, it has not: there is more to come."""
    script = Script(tmp_path / "run", nan=(40,))
    guard, ended, trained = script.guard, [], 0
    assert guard.run == tmp_path / "run"
    for _ in guard.epochs(2):
        for batch in guard:
            script.train_on(batch)
            trained += 1
            assert guard.last_in_epoch == (guard.batch_in_epoch == 29)
            if trained in (41, 45):  # the first of them is the bad one
                ended.append(guard.finish("patience"))
                if ended[-1]:
                    break
        if ended[-1:] == [True]:
            break
    guard.close()
    assert ended == [False, True]
    (finished,) = facts(tmp_path / "run", Finished)
    assert finished.by == "patience"
    assert len(facts(tmp_path / "run", Restored)) == 1


@pytest.mark.parametrize("by_epochs", [True, False])
def test_behind_the_end_the_final_state_stays_whatever_the_script_loops_over_and_signals_are_its_own(
    tmp_path: Path, by_epochs: bool
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    script = Script(tmp_path / "run")
    guard = script.guard
    for _ in guard.epochs(1 if by_epochs else 9):
        for batch in guard:
            script.train_on(batch)
        if not by_epochs and guard.finish("enough"):
            break
    assert guard.finished
    assert signal.getsignal(signal.SIGTERM) == before, "nobody asks for a stop any more"
    if by_epochs:
        with pytest.raises(UsageError, match=r"complete, by guard.epochs\(1\)"):
            next(iter(guard))
    else:
        assert [*guard] == [], "as behind max_steps"
    guard.close()
    (finished,) = facts(tmp_path / "run", Finished)
    assert not [fact for fact in facts(tmp_path / "run", Evicted) if fact.checkpoint == finished.checkpoint]
    again = Script(tmp_path / "run").guard
    assert again.step == finished.step == 30
    again.close()


def test_a_stop_in_the_step_behind_which_the_script_leaves_its_last_epoch_does_not_open_that_again(
    tmp_path: Path,
) -> None:
    def trained(run: Path, stop: bool = False) -> list[int]:
        script = Script(run)
        seen = []
        for epoch in script.guard.epochs(2):
            for batch in script.guard:
                script.train_on(batch)
                seen.append(script.guard.batch)
                if script.guard.batch_in_epoch + 1 == 20:
                    if stop and epoch == 1:
                        signal.raise_signal(signal.SIGTERM)
                    break
        script.guard.close()
        return seen

    assert trained(tmp_path / "run", stop=True) == trained(tmp_path / "undisturbed") == [*range(40)]
    assert [fact.step for fact in facts(tmp_path / "run", Finished)] == [40]
    assert trained(tmp_path / "run") == [], "nothing is left to train"


def test_a_rollback_may_shift_where_the_script_leaves_an_epoch(tmp_path: Path) -> None:
    """The batches of the next one have other numbers then: they are not taken for other data."""

    def trained(run: Path, nan: tuple[int, ...] = (), **settings: Any) -> tuple[int, list[float]]:
        script = Script(run, nan=nan, policy="surgical", skip_after=0, max_skipped="100%", **settings)
        script.model[1].p = 0.0  # nothing draws but the loader: each epoch is opened with the same random states
        kept = script.guard.keep(batches=0)
        for _ in script.guard.epochs(2):
            for (x,) in script.guard:
                loss = script.model(x).square().mean() * (float("nan") if script.guard.batch in nan else 1.0)
                loss.backward()
                script.guard.observe(loss)
                kept.batches += 1
                if kept.batches % 2 == 0:
                    script.optimizer.step()
                    script.optimizer.zero_grad()
                if script.guard.batch_in_epoch + 1 >= 21:
                    break
        script.guard.close()
        return script.guard.step, script.model[0].weight.tolist()

    ended = trained(tmp_path / "run", nan=(20,))
    assert facts(tmp_path / "run", Restored)
    assert ended == trained(tmp_path / "given", skip=skip_list(tmp_path / "run"))


def test_a_script_that_catches_the_end_of_its_rank_is_ended_again(tmp_path: Path) -> None:
    """By the bare `except:` around `next(batches)` that is meant for the end of an epoch."""
    script = Script(tmp_path / "run")
    caught = []

    def train() -> None:
        batches = iter(script.guard)
        for step in range(70):
            try:
                batch = next(batches)
            except:  # noqa: E722
                caught.append(step)
                batches = iter(script.guard)
                batch = next(batches)
            script.train_on(batch)
            if step == 40:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        train()
    (stopped,) = facts(tmp_path / "run", Stopped)
    assert caught == [30, stopped.step], "the end of an epoch, and the stop"
    assert left.value.code == ExitCode.RESUMABLE
    assert script.guard.step == stopped.step, "nothing is trained behind the stop"


def test_a_phase_that_is_announced_for_the_step_behind_a_stop_is_not_lost(tmp_path: Path) -> None:
    """Behind the last update before it: the next start begins with that phase."""

    def sentinel_at_the_end(name: str, stop_at: int | None = None) -> dict[str, Any]:
        script = Script(tmp_path / name)
        for batch in script.guard:
            step = script.guard.step
            script.train_on(batch)
            if step == 19:
                script.guard.announce("other data")
            if step == stop_at:
                signal.raise_signal(signal.SIGTERM)
        script.guard.close()
        return script.guard._loop.state.sentinel.state_dict()

    with pytest.raises(SystemExit):
        sentinel_at_the_end("run", stop_at=19)
    assert facts(tmp_path / "run", Stopped)[0].step == 20
    assert sentinel_at_the_end("run") == sentinel_at_the_end("undisturbed")
    assert [fact.step for fact in facts(tmp_path / "run", PhaseAnnounced)] == [20]
