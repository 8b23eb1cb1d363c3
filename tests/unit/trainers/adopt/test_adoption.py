"""When a script that is adopted is at its end."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from rollback.errors import EARLY, UsageError
from rollback.train.guard import Guard
from rollback.train.process.stopping import ExitOrder
from rollback.trainers.adopt import hooks
from rollback.trainers.adopt.adoption import Adopted, Adoption
from rollback.trainers.adopt.adoption_state import ScriptEvent
from rollback.trainers.adopt.epoch_loop import EpochLoop
from rollback.trainers.adopt.notices import ScriptNotices
from rollback.trainers.adopt.sources import ScriptSources


@pytest.mark.parametrize(
    ("given", "others", "ends"),
    [
        ((), {}, True),
        ((None,), {}, True),
        ((), {"group": None}, True),
        (("a",), {}, False),
        ((), {"group": "a"}, False),
    ],
)
def test_the_script_is_at_its_end_when_it_leaves_all_groups_and_not_one_of_them(
    given: Any, others: Any, ends: bool
) -> None:
    done: list[str] = []
    adoption = Adoption(strict=False)
    guard = cast(Guard, SimpleNamespace(close=lambda *, given_up: done.append("closed")))
    adoption._adopted = Adopted(guard, nn.Linear(1, 1), cast(Optimizer, None), [], None, None)
    adoption._move(ScriptEvent.GUARD_MADE)

    def original(*given: Any, **others: Any) -> None:
        done.append("destroyed")

    adoption.leave_group(original, *given, **others)
    assert done == ["closed", "destroyed"] if ends else ["destroyed"]


@pytest.mark.parametrize("told", [True, False])
def test_a_script_that_leaves_its_loop_when_it_is_told_to_stop_has_not_come_to_its_end(told: bool) -> None:
    """It handles SIGTERM itself. Its run would count as complete, and the next launch would train nothing."""
    done: list[str] = []

    def finish(by: str) -> bool:
        done.append("finished")
        return True

    def close(*, given_up: bool) -> None:
        done.append("given up" if given_up else "closed")

    adoption = Adoption(strict=False)
    guard = cast(
        Guard, SimpleNamespace(close=close, finish=finish, step=5, exit_order=ExitOrder(), script_was_told=told)
    )
    adoption._adopted = Adopted(guard, nn.Linear(1, 1), cast(Optimizer, None), [], None, None)
    adoption._notices.guard = guard
    adoption._move(ScriptEvent.GUARD_MADE)
    adoption._move(ScriptEvent.PASS_BEGAN)
    adoption.end()
    assert done == (["given up"] if told else ["finished", "closed"])


@pytest.mark.parametrize(("code", "ends"), [(None, True), (0, True), (1, False), ("", False), ("no data", False)])
def test_a_script_that_exits_has_come_to_its_end_with_the_status_0(code: Any, ends: bool) -> None:
    """Of a text, also of an empty one, Python makes the status 1."""
    done: list[str] = []
    adoption = Adoption(strict=False)
    guard = cast(Guard, SimpleNamespace(close=lambda *, given_up: done.append("closed")))
    adoption._adopted = Adopted(guard, nn.Linear(1, 1), cast(Optimizer, None), [], None, None)
    adoption._move(ScriptEvent.GUARD_MADE)
    try:
        sys.exit(code)
    except SystemExit:
        adoption.end()
    assert done == ["closed"] * ends


def test_batches_of_another_loader_come_from_an_iterator_with_all_that_it_has() -> None:
    """A script may end the workers of its evaluation by itself."""
    adoption = Adoption(strict=False)
    model = nn.Linear(1, 1)
    ended: list[bool] = []

    class Batches:
        def __next__(self) -> int:
            return 5

        def _shutdown_workers(self) -> None:
            ended.append(True)

    guard = cast(Guard, SimpleNamespace(exit_order=ExitOrder()))
    adoption._adopted = Adopted(guard, model, cast(Optimizer, None), [], None, None)
    loader: DataLoader[int] = DataLoader([5])  # type: ignore[arg-type]
    batches = adoption.iterate_prepared(lambda _: Batches(), loader)
    assert next(batches) == 5
    assert adoption._other_loader is loader
    batches._shutdown_workers()
    assert ended == [True]


@pytest.mark.parametrize(("begun", "said"), [(2, "in epoch 2 of 3"), (3, ""), (4, "")])
def test_a_script_that_leaves_its_loop_over_epochs_early_is_told_what_that_means(
    begun: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As early stopping does: the epochs that a rollback repeats are counted as bad ones twice."""
    adoption = Adoption(strict=False)
    guard = cast(Guard, SimpleNamespace(close=lambda *, given_up: None))
    adoption._adopted = Adopted(guard, nn.Linear(1, 1), cast(Optimizer, None), [], None, None)
    adoption._led_loop = loop = EpochLoop(range(3), lambda loop: None)
    adoption._move(ScriptEvent.GUARD_MADE)
    for _ in range(begun):
        next(loop, None)
    adoption.end()
    out = "".join(capsys.readouterr())
    assert said in out
    assert ("left its loop over epochs by itself" in out) is bool(said)


@pytest.mark.parametrize(("step", "error"), [(150, True), (150, False), (50, True)])
def test_a_training_behind_an_error_gives_up_the_first_one_whose_run_is_not_complete(
    step: int, error: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script that begins anew with smaller batches when memory runs out. In its first updates it is refused."""
    adoption, closed = Adoption(strict=False), list[bool]()
    guard = cast(Guard, SimpleNamespace(step=step, close=lambda *, given_up: closed.append(given_up)))
    adoption._adopted = Adopted(guard, nn.Linear(1, 1), cast(Optimizer, None), [], None, None)
    adoption._move(ScriptEvent.GUARD_MADE)
    adoption._move(ScriptEvent.PASS_BEGAN)

    def refuse(error: UsageError) -> None:
        raise error

    monkeypatch.setattr(adoption._notices, "refuse", refuse)
    try:
        raise MemoryError if error else StopIteration
    except (MemoryError, StopIteration):
        assert adoption._note_raised() == ()
    if step < EARLY:
        with pytest.raises(UsageError, match=r"an error \(MemoryError\), and begins another"):
            adoption._note_inexact("trains on two loaders", step)
        return
    adoption._note_inexact("trains on two loaders", step)
    out = capsys.readouterr().err
    assert not closed, "the other ranks may wait in the guard"
    if error:
        adoption.end()
        assert closed == [True]
    assert ("not protected from here on" in out and "the run is not complete" in out) is error
    assert ("goes on under guard" in out) is not error


@pytest.mark.parametrize("led", [True, False])
def test_an_error_of_a_training_behind_the_guarded_one_gives_up_nothing(
    led: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    adoption, closed = Adoption(strict=False), list[bool]()
    guard = cast(Guard, SimpleNamespace(step=50, close=lambda *, given_up: closed.append(given_up)))
    adoption._adopted = Adopted(guard, nn.Linear(1, 1), cast(Optimizer, None), [], None, None)
    for event in (ScriptEvent.GUARD_MADE, ScriptEvent.PASS_BEGAN, ScriptEvent.PASS_ENDED):
        adoption._move(event)
    if led:
        adoption._led_loop = EpochLoop(range(1), lambda loop: None)
        list(adoption._led_loop)
    try:
        raise MemoryError
    except MemoryError:
        adoption._note_raised()
    adoption._note_inexact("trains on two loaders", 50)
    adoption.end()
    out = capsys.readouterr().err
    assert "trains on two loaders" in out
    assert "given up" not in out
    assert closed == [False]


def test_an_error_that_one_rank_catches_in_its_loop_over_epochs_does_not_take_it_out_of_the_guard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others go on in the guard's collectives, and wait for it."""
    adoption = Adoption(strict=False)
    guard = cast(Guard, SimpleNamespace(step=150))  # that cannot be closed
    adoption._adopted = Adopted(guard, nn.Linear(1, 1), cast(Optimizer, None), [], None, None)
    adoption._led_loop = loop = EpochLoop(range(3), lambda loop: None)
    monkeypatch.setattr(Adoption, "_current_loop", loop)
    adoption._move(ScriptEvent.GUARD_MADE)
    adoption._move(ScriptEvent.PASS_BEGAN)
    try:
        raise MemoryError
    except MemoryError:
        adoption._note_raised()
    adoption._note_inexact("trains on two loaders", 150)
    assert "It goes on under guard" in capsys.readouterr().err
    assert adoption._state.guarded


def watched_trainer(adoption: Adoption) -> Any:
    """A class of a library, as `hooks` leaves it."""

    class Trainer:
        def train(self) -> str:
            return "trained"

    hooks._replace(Trainer, "train", adoption.library_trains)
    return Trainer


def test_another_trainer_behind_the_first_one_is_said_to_be_unprotected(capsys: pytest.CaptureFixture[str]) -> None:
    adoption = Adoption(strict=False)
    adoption._move(ScriptEvent.LEAVES)
    assert watched_trainer(adoption)().train() == "trained"
    assert "not protected from here on: the script trains a second time, by Trainer.train()" in capsys.readouterr().err


def test_a_trainer_with_an_entry_of_its_own_is_refused_before_that_would_run_twice() -> None:
    class Own(watched_trainer(Adoption(strict=False))):  # type: ignore[misc]
        def train(self) -> Any:
            return super().train()

    with pytest.raises(UsageError, match=r"an? Own with a train\(\) of its own"):
        Own().train()


def test_the_epoch_that_fabric_tells_a_sampler_is_the_one_that_the_guard_has_led_to() -> None:
    """Fabric counts the passes over its loader: there were none in a process that resumes, and too many in one that was
    sent back. That order would be another epoch's, without a word."""
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    whole = wrappers._FabricDataLoader
    kind = type("_FabricDataLoader", (whole,), {"__iter__": whole.__iter__})
    adoption = Adoption(strict=False)
    hooks.watch_library(adoption, "lightning.fabric.wrappers", SimpleNamespace(_FabricDataLoader=kind))
    sampler: DistributedSampler[int] = DistributedSampler([0, 1], num_replicas=1, rank=0)
    loader: DataLoader[int] = DataLoader([0, 1], sampler=sampler)  # type: ignore[arg-type]
    prepared, other = kind(loader), kind(DataLoader([0]))  # type: ignore[arg-type]

    def told() -> int:
        list(prepared)
        return sampler.epoch

    assert [told(), told()] == [0, 1]  # the first is a look at the data; in the second the guard is made
    adoption._adopted = Adopted(cast(Guard, None), nn.Linear(1, 1), cast(Optimizer, None), [], loader, None)
    adoption._led_loop = loop = EpochLoop(range(9), lambda loop: None)
    told_in = {}
    for loop.place in (3, 4, 1, 2):
        told_in[loop.place] = told()
        list(other)
    assert told_in == {place: 1 + place for place in (3, 4, 1, 2)}
    assert other._num_iter_calls == 4, "only what is trained on follows the guard"


def test_an_iteration_that_a_librarys_loader_inherits_is_watched_once() -> None:
    """Where it stands: watched again, an epoch of it would be two."""

    class Shard(DataLoader):
        def __iter__(self) -> Any:
            return iter(())

    class Dispatcher(DataLoader):
        pass

    inherited = Dispatcher.__iter__
    library = SimpleNamespace(DataLoaderShard=Shard, DataLoaderDispatcher=Dispatcher, skip_first_batches=None)
    hooks.watch_library(Adoption(strict=False), "accelerate.data_loader", library)
    assert "__wrapped__" in vars(Shard.__iter__)
    assert Dispatcher.__iter__ is inherited
    assert "__iter__" not in vars(Dispatcher)


def test_a_script_that_is_nested_too_deeply_to_be_read_is_refused() -> None:
    source = f"total = {'1 + ' * 600}1\n".encode()
    with pytest.raises(UsageError, match=r"train.py: line 1 of the source is nested 280 levels deep"):
        ScriptSources(lambda *_: None, ScriptNotices(strict=False).refuse).read_script(source, "train.py")
