"""Which turn a batch belongs to."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollback.errors import RollbackError
from rollback.trainers.adopt.counts import StepCount, Turned, TurningLoops
from rollback.trainers.adopt.enumeration import HandedOut


class Script:
    """A loop of nine turns over a guard that hands out batches, `moves` of which are at another place than the next."""

    def __init__(self, *, in_epochs: bool, stands: int = 0, moves: dict[int, int] | None = None, end: int = 99) -> None:
        self.guard: Any = SimpleNamespace(batch=stands, batch_in_epoch=stands)
        self.handed, self.moves, self.end = HandedOut(self.guard), dict(moves or {}), end
        self.loops = TurningLoops(self.handed, lambda *place: None, lambda: True)
        self.in_epochs = in_epochs

    def batches(self) -> Iterator[int]:
        place = self.guard.batch
        while True:
            place = self.moves.pop(place, place)
            if place >= self.end:
                return
            self.guard.batch = self.guard.batch_in_epoch = place
            self.handed.batches += 1
            yield place
            place += 1

    def train(self) -> list[tuple[int, int]]:
        done, batches = [], self.batches()
        for number in self.loops.turns(range(9), "script.py", 1, self.in_epochs, ""):
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


@pytest.mark.parametrize(("in_epochs", "falls_short"), [(True, True), (True, False), (False, True)])
def test_an_epoch_that_falls_short_is_over_and_data_that_are_too_short_are_told(
    in_epochs: bool, falls_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HandedOut, "falls_short", lambda handed: falls_short)
    script = Script(in_epochs=in_epochs, end=7)
    if in_epochs and falls_short:
        assert [place for _, place in script.train()] == [*range(7)]
    else:
        with pytest.raises(StopIteration):
            script.train()


class Updates(Script):
    """Its turns take three batches each. loads: the number of the turn that is loaded as a batch is handed out."""

    def __init__(
        self, *, loads: dict[int, int] | None = None, owed: int | None = None, in_epochs: bool = False, end: int = 99
    ) -> None:
        super().__init__(in_epochs=in_epochs, end=end)
        self.loads, self.count = dict(loads or {}), StepCount()
        self.loops = TurningLoops(self.handed, lambda *place: self.count, lambda: True)
        if owed is not None:
            self.count.load_state_dict({"value": owed})

    def batches(self) -> Iterator[int]:
        for item in range(self.end):
            if item in self.loads:
                self.count.load_state_dict({"value": self.loads.pop(item)})
            self.handed.batches += 1
            yield item

    def train(self) -> list[tuple[int, int]]:
        done, batches = [], self.batches()
        for number in self.loops.turns(range(4), "script.py", 1, self.in_epochs, "turns"):
            try:
                taken = [self.loops.take("script.py", 1, batches) for _ in range(3)]
            except Turned:
                continue
            done.append((number, taken[0]))
        return done


@pytest.mark.parametrize("in_epochs", [False, True])
def test_a_turn_of_several_batches_has_the_number_that_checkpoints_have(in_epochs: bool) -> None:
    def train(**given: Any) -> list[tuple[int, int]]:
        script = Updates(in_epochs=in_epochs, **given)
        done = script.train()
        assert script.count.state_dict() == {"value": 0 if in_epochs else 4}, "of the turn that begins next"
        return done

    assert train() == [(0, 0), (1, 3), (2, 6), (3, 9)]
    assert train(owed=2) == [(2, 0), (3, 3)]
    assert train(loads={6: 1}) == [(0, 0), (1, 3), (1, 6), (2, 9), (3, 12)]
    assert train(loads={9: 3}) == [(0, 0), (1, 3), (2, 6), (3, 9)]
    assert train(loads={4: 0}) == [(0, 0), (0, 4), (1, 7), (2, 10), (3, 13)], "the update in its midst is another one"
    assert train(loads={4: 1}) == [(0, 0), (1, 4), (2, 7), (3, 10)]


def test_a_loop_that_is_begun_again_goes_on_behind_the_one_before() -> None:
    script = Script(in_epochs=False)
    first = script.train()
    script.guard.batch += 1
    assert [number for number, _ in script.train()] == [number for number, _ in first]
    assert script.handed.limited
    script.guard.batch += 1
    script.moves = {20: 11}
    with pytest.raises(RollbackError, match="a loop of the script that is over"):
        script.train()


def test_a_loop_that_is_begun_again_behind_one_that_was_broken_off_is_left_as_it_is() -> None:
    script = Script(in_epochs=False)
    batches = script.batches()
    for number in script.loops.turns(range(9), "script.py", 1, False, ""):
        script.loops.take("script.py", 1, batches)
        if number == 4:
            break
    for place in (5, 6):
        numbers = range(9)
        assert script.loops.turns(numbers, "script.py", 1, False, "") is numbers
        assert script.loops.take("script.py", 1, batches) == place


def test_items_of_several_batches_have_no_place() -> None:
    script = Script(in_epochs=False)
    pairs = zip(script.batches(), script.batches(), strict=False)
    turns = script.loops.turns(range(3), "script.py", 1, False, "")
    assert [(number, len(script.loops.take("script.py", 1, pairs))) for number in turns] == [(0, 2), (1, 2), (2, 2)]


def test_what_is_no_range_is_left_as_it_is() -> None:
    script = Script(in_epochs=False)
    numbers = [3, 4]
    assert script.loops.turns(numbers, "script.py", 1, False, "") is numbers
    assert script.loops.take("script.py", 1, iter([5])) == 5


def test_an_epoch_whose_batches_a_rollback_has_skipped_ends_with_its_last_whole_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HandedOut, "falls_short", lambda handed: False)  # it has had as many as an epoch has
    assert Updates(in_epochs=True, end=11, loads={5: 0}).train() == [(0, 0), (0, 5), (1, 8)]
    with pytest.raises(StopIteration):
        Updates(in_epochs=True, end=11).train()
