"""Generators are found among whatever a data set is made of, and its samples are not looked through for every batch."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollback.train.data.cursor import generators
from rollback.train.data.cursor.generators import Generators, is_generator


def found_in(data_set: Any) -> int:
    return len(Generators(data_set))


SAMPLES: dict[str, Any] = {
    "token ids": [[1] * 200 for _ in range(200)],
    "paths with a class": [(f"{number}.png", number) for number in range(200)],
    "rows": [{"ids": [1, 2]} for _ in range(200)],
    "arrays": [np.zeros(3) for _ in range(200)],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_looked_through_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data_set = SimpleNamespace(samples=SAMPLES[name], transform=SimpleNamespace(rng=random.Random(1)))
    assert found_in(data_set) == 1
    looked: list[Any] = []
    monkeypatch.setattr(generators, "is_generator", lambda thing: looked.append(thing) or False)
    found_in(data_set)
    assert len(looked) < 10


def test_what_draws_from_the_system_has_no_state() -> None:
    assert not is_generator(random.SystemRandom())
    assert len(Generators([random.SystemRandom()])) == 0


BY_METHOD: dict[str, Callable[[Any], Any]] = {
    "a method": lambda one: one.collate,
    "a partial": lambda one: partial(print, one),
}


@pytest.mark.parametrize("wrapped", BY_METHOD.values(), ids=BY_METHOD)
def test_what_a_bound_method_and_a_partial_call_hold_is_found(wrapped: Callable[[Any], Any]) -> None:
    class Collator:
        def __init__(self) -> None:
            self.rng = random.Random(1)

        def collate(self, samples: Any) -> Any:
            return samples

    assert len(Generators(wrapped(Collator()))) == 1


def test_a_generator_is_found_wherever_it_is_made_and_as_soon_as_it_is_there() -> None:
    data_set = SimpleNamespace(samples=[(str(number), number) for number in range(100)], parts=[1, 2])
    assert found_in(data_set) == 0
    data_set.parts.append(SimpleNamespace(rng=np.random.default_rng(1)))
    assert found_in(data_set) == 1
    data_set.samples.append(SimpleNamespace(rng=torch.Generator()))
    data_set.samples[0], data_set.samples[-1] = data_set.samples[-1], data_set.samples[0]
    assert found_in(data_set) == 2
    data_set.rng = random.Random(2)
    assert found_in(data_set) == 3


def attribute(data: Any) -> None:
    data.rng = random.Random(1)


def exchanged(data: Any) -> None:
    data.transform = SimpleNamespace(rng=random.Random(1))


def in_a_list(data: Any) -> None:
    data.parts.append(random.Random(1))


def in_place_in_a_list(data: Any) -> None:
    data.parts[0] = random.Random(1)


def behind_samples(data: Any) -> None:
    data.samples.insert(0, random.Random(1))


def in_a_dict(data: Any) -> None:
    data.by_name["crop"] = random.Random(1)


def deep(data: Any) -> None:
    data.parts[1][0].rng = random.Random(1)


CHANGES = attribute, exchanged, in_a_list, in_place_in_a_list, behind_samples, in_a_dict, deep


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_looked_again_where_anything_has_changed_and_only_there(change: Callable[[Any], None]) -> None:
    data = SimpleNamespace(
        transform=SimpleNamespace(size=3), parts=[1, [SimpleNamespace()]], samples=[*range(100)], by_name={"crop": None}
    )
    found = Generators(data, print)
    assert len(found) == 0
    assert found.present(data, print) is found
    change(data)
    there = found.present(data, print)
    assert len(there) == 1
    assert there.present(data, print) is there


def from_part_to_part(data: Any) -> None:
    moved = {"two": vars(data.first).pop("two"), **vars(data.second)}
    vars(data.second).clear()
    vars(data.second).update(moved)


def from_list_to_list(data: Any) -> None:
    data.second.parts.insert(0, data.first.parts.pop())


@pytest.mark.parametrize("change", [from_part_to_part, from_list_to_list])
def test_what_moves_from_one_thing_to_the_next_is_a_change(change: Callable[[Any], None]) -> None:
    data = SimpleNamespace(first=SimpleNamespace(parts=[1, 2], two=2), second=SimpleNamespace(parts=[3]))
    found = Generators(data)
    assert found.present(data) is found
    change(data)
    assert found.present(data) is not found


def test_another_owner_is_looked_into() -> None:
    """As where the script gives its loader another collate_fn."""
    found = Generators(print)
    there = found.present(partial(print, random.Random(1)))
    assert (len(found), len(there)) == (0, 1)


class Handle:
    pass


@pytest.mark.parametrize("wrap", [lambda part: part, lambda part: [part], lambda part: {"part": part}])
def test_what_a_data_set_lets_go_of_is_not_kept_alive(wrap: Callable[[Any], Any]) -> None:
    part = torch.zeros(3)
    data = SimpleNamespace(part=wrap(part), handle=Handle())
    known = weakref.ref(part), weakref.ref(data.handle)
    found = Generators(data)
    del part
    data.part = data.handle = None
    assert [each() for each in known] == [None, None]
    assert found.present(data) is not found


def test_those_by_name_in_a_dict_are_found_and_a_dict_of_samples_is_data() -> None:
    generators_by_name = {"crop": random.Random(1), "more": {"flip": np.random.default_rng(2)}}
    assert found_in(SimpleNamespace(generators=generators_by_name)) == 2
    assert found_in(SimpleNamespace(samples={number: random.Random(number) for number in range(17)})) == 0


def test_what_is_deep_in_lists_of_objects_is_found_behind_any_number_of_samples() -> None:
    many = SimpleNamespace(a=[[number] for number in range(500)], b=[[SimpleNamespace(rng=random.Random(1))]])
    assert found_in(many) == 1


def test_where_further_ones_have_been_made_in_this_process_those_that_were_there_go_back() -> None:
    data_set = SimpleNamespace(second=random.Random(2))
    before = Generators(data_set).present(data_set)
    states = before.states()
    drawn = data_set.second.random()
    data_set.first = random.Random(1)  # in front of the other one, by its name
    now = before.present(data_set)
    assert len(now) == 2
    assert now.restore(states)
    assert data_set.second.random() == drawn
    assert not Generators(data_set).restore(states)  # as in a new process


@pytest.mark.parametrize("kind", [random.Random, np.random.RandomState, np.random.default_rng, torch.Generator])
def test_whether_one_has_drawn_is_told_by_its_state(kind: Callable[[], Any]) -> None:
    generator, still = kind(), kind()
    found = Generators(SimpleNamespace(first=generator, still=still))
    states = found.states()
    assert found.drawn_since(states) == [False, False]
    torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()
    assert found.drawn_since(states) == [True, False]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_data_set_that_is_a_list_is_looked_through_without_a_read(kind: type) -> None:
    class Augmenting(kind):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError(f"sample {index} was read")

    assert found_in(Augmenting([random.Random(1), 2])) == 1
    assert found_in(Augmenting(range(200))) == 0
