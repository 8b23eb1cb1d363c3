"""What a script's own counts are behind a load, and which turn a batch belongs to."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollback.trainers.adopt.counts import Count, Counts, Turned, TurningLoops
from rollback.trainers.adopt.enumeration import HandedOut


def trained(count: Count, start: int, batches: int, *, each_epoch: bool = False, offset: int = 0) -> int:
    """What the script has behind so many batches, each of which it adds 1 for."""
    present = start
    for number in range(offset, offset + batches):
        present = count.now(present, begins=each_epoch and number == 0) + 1
        count.set(present)
    return present


def test_a_count_is_the_scripts_until_something_is_loaded() -> None:
    count = Count()
    assert trained(count, 5, 3) == 8
    assert trained(count, 20, 1) == 21, "the script has set it by itself"
    kept = count.state_dict()
    assert trained(count, 21, 4) == 25
    count.load_state_dict(kept)
    assert trained(count, 25, 1) == 22


def test_a_new_process_goes_on_with_what_it_was() -> None:
    count = Count()
    trained(count, 0, 7)
    again = Count()
    again.load_state_dict(count.state_dict())
    assert trained(again, 0, 1, offset=3) == 8


@pytest.mark.parametrize("load", [Count.begin_anew, lambda count: count.load_state_dict(Count().state_dict())])
def test_a_return_to_before_the_first_batch_begins_with_what_the_process_had(load: Any) -> None:
    count = Count()
    trained(count, 5, 3)
    load(count)
    assert trained(count, 8, 1) == 6
    untouched = Count()
    load(untouched)
    assert trained(untouched, 5, 1) == 6


def test_a_count_of_each_epoch_begins_as_the_script_has_it_there() -> None:
    count = Count()
    trained(count, 0, 7, each_epoch=True)
    end_of_epoch = count.state_dict()
    assert trained(count, 0, 2, each_epoch=True) == 2
    in_epoch = count.state_dict()
    assert trained(count, 2, 3, each_epoch=True, offset=2) == 5
    count.load_state_dict(in_epoch)
    assert trained(count, 5, 1, each_epoch=True, offset=2) == 3
    count.load_state_dict(end_of_epoch)
    assert trained(count, 3, 1, each_epoch=True) == 1, "in the midst of a pass: the script has not begun it anew"
    count.load_state_dict(end_of_epoch)
    assert trained(count, 0, 1, each_epoch=True) == 1
    again = Count()
    again.load_state_dict(in_epoch)
    assert trained(again, 0, 1, each_epoch=True, offset=2) == 3
    again = Count()
    again.load_state_dict(end_of_epoch)
    assert trained(again, 0, 1, each_epoch=True) == 1


def test_what_is_no_whole_number_and_what_no_guard_keeps_is_added_as_the_script_says() -> None:
    counts = Counts()
    assert counts.added(4, 1, "n", "script.py", False) == 1
    kept: dict[str, Any] = {}
    guard: Any = SimpleNamespace(batch_in_epoch=0, keep=kept.update)
    counts.keep(guard, [("n", "/at/script.py")])
    assert [*kept] == ["count n of script.py"]
    kept["count n of script.py"].load_state_dict({"value": 7})
    assert counts.added(4.0, 1, "n", "/at/script.py", False) == 1
    assert counts.added(4, 1, "other", "/at/script.py", False) == 1
    assert counts.added(4, 0, "n", "/at/script.py", False) == 3
    assert counts.added(7, 1, "n", "/at/script.py", False) == 1


class Script:
    """A loop of nine turns over a guard that hands out batches, `moves` of which are at another place than the next."""

    def __init__(self, *, in_epochs: bool, stands: int = 0, moves: dict[int, int] | None = None, end: int = 99) -> None:
        self.guard: Any = SimpleNamespace(batch=stands, batch_in_epoch=stands)
        self.handed, self.moves, self.end = HandedOut(), dict(moves or {}), end
        self.loops = TurningLoops(self.handed, lambda: self.guard, lambda: True)
        self.in_epochs = in_epochs

    def batches(self) -> Iterator[int]:
        place = self.guard.batch
        while True:
            place = self.moves.pop(place, place)
            if place >= self.end:
                return
            self.guard.batch = self.guard.batch_in_epoch = place
            self.handed.guard, self.handed.batches = self.guard, self.handed.batches + 1
            yield place
            place += 1

    def train(self) -> list[tuple[int, int]]:
        done, batches = [], self.batches()
        for number in self.loops.turns(range(9), "script.py", 1, self.in_epochs):
            try:
                done.append((number, self.loops.take("script.py", 1, batches)))
            except Turned:
                continue
        return done


@pytest.mark.parametrize("in_epochs", [False, True])
def test_a_turn_has_the_number_of_its_batch(in_epochs: bool) -> None:
    def train(**given: Any) -> list[int]:
        done = Script(in_epochs=in_epochs, **given).train()
        assert [number for number, _ in done] == [place for _, place in done]
        return [place for _, place in done]

    assert train() == [*range(9)]
    assert train(stands=4) == [4, 5, 6, 7, 8]
    assert train(stands=9) == []
    assert train(moves={6: 2}) == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8]
    assert train(moves={3: 6}) == [0, 1, 2, 6, 7, 8]
    assert train(moves={3: 9}) == [0, 1, 2]


def test_an_epoch_that_has_no_batch_for_a_turn_is_over() -> None:
    script = Script(in_epochs=True, end=7)
    assert [place for _, place in script.train()] == [*range(7)]
    with pytest.raises(RuntimeError, match="StopIteration"):  # in a generator; the script's loop gets StopIteration
        next(iter(_raising(Script(in_epochs=False, end=7))))


def _raising(script: Script) -> Iterator[Any]:
    yield script.train()


def test_a_loop_that_is_begun_again_goes_on_behind_the_one_before() -> None:
    script = Script(in_epochs=False)
    first = script.train()
    script.guard.batch += 1
    assert [number for number, _ in script.train()] == [number for number, _ in first]
    assert script.handed.limited


def test_what_is_no_range_is_left_as_it_is() -> None:
    script = Script(in_epochs=False)
    numbers = [3, 4]
    assert script.loops.turns(numbers, "script.py", 1, False) is numbers
    assert script.loops.take("script.py", 1, iter([5])) == 5
