"""A script that draws its next batch within an open update is told from those that only look like it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from sharding import fully_sharded
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rollback
from rollback.errors import UsageError
from rollback.train.data.prefetch import PrefetchWatch


def raise_it(error: UsageError) -> None:
    raise error


class Script:
    """The parts of a loop. `n` draws a batch, `f` is forward, `b` backward of the oldest forward, `s` the step, `c` one
    with a closure."""

    def __init__(self, sharded: bool = False) -> None:
        self.model = nn.Linear(2, 1)
        if sharded:
            fully_sharded(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.watch = PrefetchWatch(self.model, self.optimizer, self.model.bias, raise_it)
        self.losses: list[torch.Tensor] = []

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    def run(self, acts: str) -> None:
        for act in acts.replace(" ", ""):
            match act:
                case "n":
                    self.watch.handed_out()
                case "f":
                    self.losses.append(self.model(torch.ones(1, 2)).sum())
                case "b":
                    self.losses.pop(0).backward()
                case "s":
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                case "c":
                    self.optimizer.step(self.closure)
                case "e":
                    with torch.no_grad():
                        self.model(torch.ones(1, 2))
                case "x":
                    self.losses.clear()
                case "|":
                    self.watch.pass_ended()

    def run_generated(self, acts: str) -> None:
        """Batches are asked for in a generator."""

        def one() -> Iterator[None]:
            self.watch.handed_out()
            yield

        for act in acts.replace(" ", ""):
            next(one()) if act == "n" else self.run(act)

    def run_beside(self, acts: str) -> None:
        """Batches are asked for in a thread, and no further one until it has ended. At `a` one asks, and gets the batch
        at the `n` to come."""
        with ThreadPoolExecutor(1) as thread:
            for act in acts.replace(" ", ""):
                match act:
                    case "a":
                        thread.submit(self.watch.asking.__enter__).result()
                    case "n":
                        thread.submit(self.run, "n").result()
                        thread.submit(self.watch.asking.__exit__).result()
                    case _:
                        self.run(act)


@pytest.mark.parametrize(
    "acts",
    [
        "n f n b s" + "f n b s" * 3,
        "n" + "f n b s" * 4,
        "n" + "f b n s" * 5,
        "n" + "f b f x n s" * 5,
        "n f b n f n b s" * 3,
    ],
    ids=[
        "nanoGPT",
        "the same from the start",
        "between backward and step",
        "behind another forward",
        "in accumulation",
    ],
)
def test_a_batch_drawn_within_an_open_update_is_refused(acts: str, sharded: bool) -> None:
    with pytest.raises(UsageError, match=r"before optimizer.step\(\)") as refusal:
        Script(sharded).run(acts)
    assert "num_workers" in str(refusal.value)


@pytest.mark.parametrize(
    "acts",
    [
        "n f b s" * 20,
        "n f b n f b n f b s" * 20,
        "n n n f b f b f b s" * 20,
        "n n f f b b s" * 20,
        "n f x n f b s" * 20,
        "n n f b s" * 20,
        "n f f b b s" * 20,
        "n f b f b s" * 20,
        "n e f b e s e" * 20,
        "n f b s e n e f b s" * 20,
        "n f b n s n f b s n f b s",
        "n f b s f b s" * 20,
        "n c" * 20,
        "n f b n c" * 20,
    ],
    ids=[
        "usual", "accumulation", "all drawn first", "drawn and run first", "left out after forward", "left out",
        "two passes", "two backwards", "evaluation within", "evaluation between", "a last batch that is not used",
        "two updates for one batch", "closures", "accumulation and closures",
    ],
)  # fmt: skip
def test_other_loops_are_left_alone(acts: str, sharded: bool) -> None:
    Script(sharded).run(acts)


@pytest.mark.parametrize(
    ("acts", "sure"),
    [
        ("n n f b s" + "n f b s" * 14, "n f b s n"),
        ("n n n f b s" + "n f b s" * 15, "n"),
        ("n n f b n f b s" + "n f b n f b s" * 15, "n"),
        ("n n f b s n f b s | f b s", "n"),
    ],
    ids=["one", "two", "one, in accumulation", "a short pass"],
)
def test_a_generator_that_holds_batches_back_is_found_in_the_first_updates_or_behind_a_pass(
    acts: str, sure: str
) -> None:
    script = Script()
    script.run_generated(acts)
    with pytest.raises(
        UsageError, match=r"the generator one \(.*test_prefetch.py, line \d+\) takes a batch before"
    ) as why:
        script.run_generated(sure)
    assert "nothing that holds them in between" in str(why.value)


def test_a_loop_that_trains_on_the_batch_before_is_found_behind_its_last_one() -> None:
    script = Script()
    script.run("n" + "n f b s" * 30 + "| f b s e")
    with pytest.raises(UsageError, match="its loop takes a batch before"):
        script.run("n")


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize(
    "acts",
    [
        "n f b s" * 20 + "| f b s" + "n f b s" * 3,
        "n n n f b f b f b s" * 20 + "|" + "n n n f b f b f b s",
        "n n f b s" * 20,
        ("n f b s" * 5 + "|") * 4,
        ("n n n f b f b f b s n n | f b f b s" + "n n | f b f b s") * 2,
        "n n f b s" + "n f b s" * 14 + "n n f b s" * 20,
        "n s" * 20,
        "n n s" * 20,
    ],
    ids=[
        "something else trained between", "drawn in groups", "every other one left out", "passes",
        "groups, with what is left behind the pass",
        "left out now and then", "no forward is seen", "nor with accumulation",
    ],
)  # fmt: skip
def test_what_holds_nothing_back_is_left_alone(acts: str, generated: bool) -> None:
    script = Script()
    (script.run_generated if generated else script.run)(acts)


def test_a_loop_that_leaves_out_the_first_batch_of_each_pass_is_left_alone() -> None:
    Script().run(("n" + "n f b s" * 20 + "|") * 3)


def test_the_hooks_go_once_the_loop_is_known(sharded: bool) -> None:
    script = Script(sharded)
    hooks = len(script.model._forward_hooks) - sharded, len(script.model._forward_pre_hooks) - 1
    script.run("n f b s" * 30)
    assert (len(script.model._forward_hooks), len(script.model._forward_pre_hooks)) == hooks
    assert not script.optimizer._optimizer_step_pre_hooks


def test_a_script_whose_forward_cannot_be_seen_is_left_alone() -> None:
    script = Script()
    hidden: Callable[[], Iterator[Any]] = script.model.parameters
    for _ in range(5):
        loss = sum(parameter.sum() for parameter in hidden())
        script.run("n")
        loss.backward()
        script.run("s")


@pytest.mark.parametrize(
    "acts",
    [
        "n n f", "n f b s n n f", "n f b n n s f", "n f n b n s", "n f b n s" * 2, "n f n b n f", "a n a f",
        "a n f a b s",
    ],
    ids=[
        "at first", "behind a step", "within one", "within a backward", "within two", "in an accumulation",
        "waits while a forward runs", "or an update",
    ],
)  # fmt: skip
def test_a_thread_that_draws_ahead_is_told_where_the_script_trains(acts: str) -> None:
    script = Script()
    with pytest.raises(UsageError, match="a thread draws batches from the guard ahead of the one that trains"):
        script.run_beside(acts)


def test_a_thread_that_draws_each_batch_when_it_is_its_turn_is_none_that_draws_ahead() -> None:
    Script().run_beside("a n f b s" * 20)


class Slow(Dataset[torch.Tensor]):
    """Its second sample comes when it is told to come."""

    def __init__(self) -> None:
        self.asked, self.comes = Event(), Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            self.asked.set()
            assert self.comes.wait(60)
        return torch.ones(2)


def test_a_thread_that_waits_for_the_guard_while_another_one_trains_ends_the_training(tmp_path: Path) -> None:
    """Where reading takes longer than an update, it never has a batch to spare."""
    data, model = Slow(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=DataLoader(data), run=tmp_path / "run")
    with ThreadPoolExecutor(1) as thread:
        batches = iter(guard)
        batch = thread.submit(next, batches).result()
        thread.submit(next, batches)
        assert data.asked.wait(60)
        try:
            with pytest.raises(UsageError, match="a thread draws batches from the guard ahead"):
                model(batch)
        finally:
            data.comes.set()
    with pytest.raises(UsageError, match="a thread draws batches from the guard ahead"):
        next(batches)


def test_a_backward_that_computes_the_forward_again_in_a_thread_of_its_own_is_none_that_trains() -> None:
    """As on a GPU, of a model that is checkpointed as a whole."""
    script = Script()
    script.run("n n e")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(script.run, "f").result()
    script.run("b s")


def test_a_loop_that_is_known_is_not_watched() -> None:
    """In Lightning, batches that the script leaves out behind an update's first one look as if drawn ahead."""
    script = Script()
    script.watch.end()
    script.run("n f b n s" * 5)
