"""Random states are captured whole, restored exactly, and split without touching what they are split from."""

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from rollback.errors import UsageError
from rollback.train.data import rng
from rollback.train.data.rng import RawRandom


def draws() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
        torch.randn(()).item(),
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draws()  # leaves half-used pairs of Gaussian numbers behind


def test_what_is_restored_draws_the_same_again() -> None:
    state = rng.capture()
    first = draws()
    draws()
    rng.restore(state)
    assert draws() == first


def test_a_captured_state_is_a_tree_of_json_values_and_tensors() -> None:
    def check(tree: Any) -> None:
        if isinstance(tree, dict):
            assert all(type(key) is str for key in tree)
            for value in tree.values():
                check(value)
        elif isinstance(tree, list):
            for value in tree:
                check(value)
        else:
            assert tree is None or type(tree) in (int, float, str, bool, torch.Tensor)

    check(rng.capture())


def test_preserved_undoes_every_draw_and_seed_even_on_an_error() -> None:
    state = rng.capture()
    expected = draws()
    rng.restore(state)
    with contextlib.suppress(ZeroDivisionError), rng.preserved():
        draws()
        torch.manual_seed(9)
        _ = 1 // 0
    assert draws() == expected


def test_a_stream_that_takes_over_draws_what_the_process_would_have_drawn() -> None:
    state = rng.capture()
    expected = [draws(), draws()]
    rng.restore(state)
    stream = rng.RandomStream.take_over()
    outside = draws()
    with stream:
        first = draws()
    draws()
    with stream:
        second = draws()
    assert [first, second] == expected
    assert not set(map(str, outside)) & set(map(str, expected[0]))


def test_splitting_a_stream_off_leaves_the_process_as_it_was() -> None:
    state = rng.capture()
    expected = draws()
    rng.restore(state)
    stream = rng.RandomStream.split_off()
    assert draws() == expected
    with stream:
        assert not set(map(str, draws())) & set(map(str, expected))


def test_a_stream_comes_back_from_its_state_dict() -> None:
    stream = rng.RandomStream.split_off()
    state = stream.state_dict()
    with stream:
        expected = draws()
    with rng.RandomStream.from_state_dict(state):
        assert draws() == expected


def test_a_stream_that_has_just_come_back_can_be_kept_at_once() -> None:
    """Nobody has drawn from it: its states are still those that were read."""
    kept = rng.RandomStream.split_off().state_dict()
    again = rng.RandomStream.from_state_dict(kept).state_dict()
    for library in ("python", "numpy"):
        assert torch.equal(again[library]["words"], kept[library]["words"])
        assert {**again[library], "words": None} == {**kept[library], "words": None}
    assert torch.equal(again["torch"], kept["torch"])


def test_work_that_raises_leaves_the_stream_where_it_was() -> None:
    stream = rng.RandomStream.split_off()
    before = stream.state_dict()
    with contextlib.suppress(ZeroDivisionError), stream:
        draws()
        _ = 1 // 0
    with stream:
        again = draws()
    with rng.RandomStream.from_state_dict(before):
        assert draws() == again


def test_seeding_by_key_depends_on_the_key_alone() -> None:
    rng.seed_all("7/0/3")
    first = draws()
    rng.seed_all("7/0/4")
    assert draws() != first
    rng.seed_all("7/0/3")
    assert draws() == first


def test_another_kind_of_global_generator_of_numpy_is_refused_by_name() -> None:
    before, raw = np.random.get_bit_generator(), RawRandom()
    raw.read()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        for read in (rng.capture, raw.read):
            with pytest.raises(UsageError, match="NumPy's global generator is a PCG64"):
                read()
    finally:
        np.random.set_bit_generator(before)


class Machine:
    """Stands in for CUDA devices: how many a process sees, which it works on, and the state of each one's generator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int, own: int, first: int = 0) -> None:
        self.states = [torch.tensor([first + number], dtype=torch.uint8) for number in range(devices)]
        for name, value in (
            ("is_initialized", True), ("device_count", devices), ("current_device", own),
            ("get_rng_state_all", [*self.states]),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: self.states.__setitem__(device, state))


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ((4, 2), (4, 2), [0, 1, 2, 3]),
        ((8, 5), (4, 1), [0, 5, 2, 3]),
        ((4, 1), (8, 5), [0, 1, 2, 3, 104, 1, 106, 107]),
        ((8, 6), (1, 0), [6]),
    ],
    ids=["as before", "fewer", "more", "one"],
)
def test_the_device_that_a_process_works_on_gets_the_state_of_the_one_it_worked_on_before(
    monkeypatch: pytest.MonkeyPatch, then: tuple[int, int], now: tuple[int, int], expected: list[int]
) -> None:
    Machine(monkeypatch, *then)
    state = rng.capture()
    machine = Machine(monkeypatch, *now, first=100)
    rng.restore(state)
    assert [int(each) for each in machine.states] == expected


def test_states_of_which_nobody_told_whose_they_were_go_back_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 8, 5)
    state = rng.capture()
    del state["device"]
    machine = Machine(monkeypatch, 2, 1, first=100)
    rng.restore(state)
    assert [int(each) for each in machine.states] == [0, 1]
