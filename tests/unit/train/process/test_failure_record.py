"""What a rank's failure record says of where an exception came from."""

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from toy import SETTINGS

import rollback
from rollback.facts.training import ScriptLeft
from rollback.rundir.failures import FailureRecord, raised_in, read_failures
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths

PACKAGE = Path(rollback.__file__).parent


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)


def train(run: Path, script: Callable[[rollback.Guard, Callable[[torch.Tensor], None]], object], **more: Any) -> None:
    """Run a script as Python would, and close its guard as its end does. more: arguments of the guard."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = {"loader": [*torch.randn(6, 2, 4)], "run": run, **SETTINGS, **more}
    guard = rollback.Guard(model=model, optimizer=optimizer, **given)

    def update(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)

    try:
        script(guard, update)
    except Exception as error:  # noqa: BLE001 - as Python itself would
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        pass
    guard.close()


def record_of(
    run: Path, script: Callable[[rollback.Guard, Callable[[torch.Tensor], None]], object], **more: Any
) -> FailureRecord:
    """What the script leaves that nobody catches the exception of."""
    train(run, script, **more)
    (record,) = read_failures(RunPaths(run).failures(1)).values()
    return record


def in_a_step(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    for x in guard:
        update(x)
        if guard.batch == 3:
            raise ValueError("here")


def in_an_evaluation(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    for x in guard:
        update(x)
        if guard.batch == 3:
            guard._loop.state.model.eval()
            with torch.no_grad():
                raise ValueError("here")


def in_a_loss_of_another_mode(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    for _ in guard:
        guard._loop.state.model.eval()
        raise ValueError("here")


def in_a_metric_of_a_model_that_is_never_in_training_mode(
    guard: rollback.Guard, update: Callable[[torch.Tensor], None]
) -> None:
    guard._loop.state.model.eval()
    for x in guard:
        update(x)
        raise ValueError("here")


def behind_a_pass(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    for x in guard:
        update(x)
    raise ValueError("here")


def behind_epochs(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    for _ in guard.epochs(1):
        for x in guard:
            update(x)
    raise ValueError("here")


def behind_finish(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    for x in guard:
        update(x)
        if guard.batch == 3:
            break
    guard.finish("the script")
    raise ValueError("here")


def behind_close(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    for x in guard:
        update(x)
        if guard.batch == 3:
            break
    guard.close()
    raise ValueError("here")


def before_the_loop(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    raise ValueError("here")


@pytest.mark.parametrize(
    ("script", "in_hand"),
    [
        (in_a_step, True), (in_an_evaluation, False), (in_a_loss_of_another_mode, True),
        (in_a_metric_of_a_model_that_is_never_in_training_mode, True),
        (behind_a_pass, False), (behind_epochs, False), (behind_finish, False),
        (behind_close, False), (before_the_loop, False),
    ],
)  # fmt: skip
def test_a_batch_is_in_hand_in_the_loop_s_body_alone(
    tmp_path: Path, script: Callable[[rollback.Guard, Callable[[torch.Tensor], None]], object], in_hand: bool
) -> None:
    record = record_of(tmp_path / "run", script)
    assert (record.in_hand, record.ours, bool(record.samples)) == (in_hand, False, False)


def test_an_error_behind_a_second_guard_is_no_failure_of_the_first_one_s_run(tmp_path: Path) -> None:
    """Nor does the first one's loader live any longer, as it would where a hook or an exit handler had it."""
    loader = DataLoader(torch.randn(6, 2, 4), batch_size=None)  # type: ignore[arg-type]
    train(tmp_path / "first", lambda guard, _: guard.close(), loader=loader)
    gone, loader = weakref.ref(loader), None  # type: ignore[assignment]
    record_of(tmp_path / "second", in_a_step)
    assert read_failures(RunPaths(tmp_path / "first").failures(1)) == {}
    gc.collect()
    assert gone() is None


def in_a_thread() -> None:
    def end() -> None:
        with contextlib.suppress(SystemExit):
            sys.exit(1)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()


def leaves(
    tmp_path: Path, leave: Callable[[], object], *, behind: bool = False, goes_on: bool = False
) -> list[FailureRecord]:
    """What a script leaves that calls `leave` at its fourth batch; behind: behind a `break` there."""

    def script(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
        for x in guard:
            if guard.batch == 3 and behind:
                break
            with contextlib.suppress(*[SystemExit] * goes_on):
                if guard.batch == 3:
                    leave()
            update(x)
        if behind:
            leave()

    train(tmp_path / "run", script)
    return [*read_failures(RunPaths(tmp_path / "run").failures(1)).values()]


@pytest.mark.parametrize("leave", [lambda: sys.exit(1), lambda: sys.exit("the loss is nan"), lambda: exit(code=3)])
def test_an_exit_with_an_error_in_the_loop_s_body_is_recorded_as_an_exception_is(
    tmp_path: Path, leave: Callable[[], object]
) -> None:
    (record,) = leaves(tmp_path, leave)
    assert (record.error, record.batch, record.in_hand, record.ours) == ("SystemExit", 3, True, False)
    assert record.frames[-1].function == "<lambda>", "as the traceback of an exception, innermost last"
    assert "in script" in record.traceback
    assert not any(
        isinstance(line.fact, ScriptLeft) for line in read_journal(RunPaths(tmp_path / "run").train_journal).records
    )


@pytest.mark.parametrize(
    ("leave", "where"),
    [
        (lambda: sys.exit(0), {}), (lambda: sys.exit(None), {}), (lambda: sys.exit(1), {"behind": True}),
        (lambda: sys.exit(1), {"goes_on": True}), (in_a_thread, {}),
    ],
)  # fmt: skip
def test_any_other_exit_is_no_failure_of_a_batch(
    tmp_path: Path, leave: Callable[[], object], where: dict[str, bool]
) -> None:
    assert leaves(tmp_path, leave, **where) == []


def test_what_rollback_itself_raises_is_told_to_be_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("rollback.train.step.StepInProgress.hand_out")  # an AttributeError in the guard
    record = record_of(tmp_path / "run", in_a_step)
    assert (record.error, record.ours) == ("AttributeError", True)


def test_of_a_loader_s_worker_its_own_innermost_frame_counts() -> None:
    def told(*files: str) -> ValueError:
        frames = "\n".join(f'  File "{file}", line 7, in read\n    x' for file in files)
        return ValueError(f"Caught ValueError in worker 0.\nOriginal Traceback (most recent call last):\n{frames}\nbad")

    ours = str(PACKAGE / "train/data/workers.py")
    assert raised_in(told("/script.py", ours), PACKAGE)
    assert not raised_in(told(ours, "/script.py"), PACKAGE)
    assert not raised_in(ValueError("bad"), PACKAGE)


class LacksItsSeventh(Dataset[torch.Tensor]):
    """Where its samples are read one after the other, the first of the second epoch is not there."""

    read = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        if self.read == 7:
            raise KeyError(index)
        return torch.full((4,), 0.1 * index)


def uses_its_last_batch(guard: rollback.Guard, update: Callable[[torch.Tensor], None]) -> None:
    for _ in guard.epochs(2):
        found = {}
        for found["x"] in guard:
            update(found["x"])
        found["x"].sum()


def test_an_epoch_without_a_batch_is_told_from_one_whose_first_batch_cannot_be_read(tmp_path: Path) -> None:
    behind = record_of(tmp_path / "empty", uses_its_last_batch, skip=[{"first": 6, "last": 11}])
    assert (behind.error, behind.empty_epoch, behind.in_hand) == ("KeyError", 1, False)
    assert "had no batch in epoch 1" in behind.message
    reading = record_of(tmp_path / "read", uses_its_last_batch, loader=DataLoader(LacksItsSeventh()))
    assert (reading.error, reading.empty_epoch, reading.in_hand) == ("KeyError", None, True)
    assert "had no batch" not in reading.message
