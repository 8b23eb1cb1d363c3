"""What a batch is known by: equal where its tensors are equal, another one where one of them is not."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollback.train.data.cursor.digest import Digest, digest_of_indices


@dataclass
class Pair:
    x: Any
    y: Any


class Bag:
    """A user's batch class, with something in it that is of this process alone."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.made = object()
        self.number = random.random()


def batch(value: float) -> list[Any]:
    x = torch.arange(12.0).reshape(3, 4)
    x[1, 2] = value
    return [
        x,
        (x, {"y": x}),
        {"x": x.numpy()},
        Pair(x, 3),
        Bag(x),
        Bag([{"x": x}]),
        x.t(),
        x.to(torch.bfloat16),
        x[:, 1:],
        x > value - 0.5,
        x.to(torch.complex64),
    ]


@pytest.mark.parametrize("number", range(len(batch(1.0))))
def test_one_element_makes_another_batch_and_equal_ones_make_the_same(number: int) -> None:
    assert Digest(batch(1.0)[number]).value == Digest(batch(1.0)[number]).value is not None
    assert Digest(batch(1.0)[number]).value != Digest(batch(70.0)[number]).value


X = torch.arange(6.0)
IN_DRAW_LOGS: dict[int, tuple[Any, bool]] = {
    0x7EB5813DDD5DEF09: ([X, X.to(torch.int64)], True),
    0x95521B2CBF701BD4: ({"x": X, 2: (X, {"y": [X, 1.5]})}, True),
    0xB4616C8526AAE2DE: (Pair(X, [X, 3]), True),
    0xB255113CE9043BF8: ([7, Bag([X, "text"]), Bag({"one": "text"}), 8], False),
    0x397A14EC6808EBF6: ([7, Bag({"one": "text"})], False),
    0xB2190DB534AB0FCF: (["a", 1, None], True),
    0xE911F627E664971E: ([Pair("p", 2), {"k": "v"}], True),
    0x4859FC8DA4B4378B: ([*range(5000)], False),
}
"""Batches by their digests, and whether these are of all that is in them."""


@pytest.mark.parametrize("known", IN_DRAW_LOGS)
def test_a_batch_keeps_the_digest_that_draw_logs_have(known: int) -> None:
    digest = Digest(IN_DRAW_LOGS[known][0])
    assert (digest.value, digest.whole) == (known, IN_DRAW_LOGS[known][1])


@given(st.integers(1, 40), st.integers(1, 5000), st.sampled_from(["whole", "columns", "channels last", "every other"]))
def test_a_large_tensor_is_known_by_pieces_all_over_it(rows: int, columns: int, kind: str) -> None:
    def view(tensor: torch.Tensor) -> torch.Tensor:
        match kind:
            case "columns":
                return tensor[:, : max(1, columns - 1)]
            case "channels last":
                return tensor.reshape(1, 1, rows, columns).contiguous(memory_format=torch.channels_last)
            case "every other":
                return tensor[::2]
        return tensor

    one = torch.arange(float(rows * columns)).reshape(rows, columns)
    assert Digest(view(one)).value == Digest(view(one.clone())).value
    assert Digest(view(one)).value != Digest(view(one + 1)).value


def test_shape_and_type_count() -> None:
    zeros = torch.zeros(4)
    digests = {Digest(item).value for item in (zeros, zeros.reshape(2, 2), zeros.int(), [zeros, zeros], zeros[:3])}
    assert len(digests) == 5


def test_a_path_beside_tensors_does_not_count_and_alone_it_does() -> None:
    x = torch.ones(2)
    assert Digest({"x": x, "path": "/tmp/1/cat.png"}).value == Digest({"x": x, "path": "/tmp/2/cat.png"}).value
    assert Digest({"path": "/tmp/1/cat.png"}).value != Digest({"path": "/tmp/2/cat.png"}).value


def test_what_nothing_is_known_of_is_said() -> None:
    assert Digest([torch.ones(1), 3, "text", None, np.float32(1)]).whole
    assert not Digest([torch.ones(1), object()]).whole
    assert Digest(object()).value is None
    assert Digest([]).value is None


@pytest.mark.parametrize("kind", [np.longdouble, np.clongdouble])
def test_an_array_of_a_type_that_torch_does_not_have_is_passed_over(kind: type) -> None:
    """Its numbers have bytes between them that mean nothing."""
    digest = Digest([np.ones(3, kind), torch.ones(3)])
    assert (digest.value, digest.whole) == (Digest([torch.ones(3)]).value, False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
def test_a_tensor_that_is_not_in_one_piece_is_passed_over() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    for odd in (nested, masked):
        assert Digest(odd).value is None
        assert Digest([torch.ones(1), odd]).value == Digest([torch.ones(1)]).value
        assert not Digest([torch.ones(1), odd]).whole


def test_a_batch_that_holds_itself_has_an_end() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    assert Digest(loop).value is not None
    assert not Digest(loop).whole


def test_indices_and_keys_of_any_kind_have_a_digest() -> None:
    assert digest_of_indices([1, 2]) == digest_of_indices((1, 2)) != digest_of_indices([2, 1])
    assert digest_of_indices(["a", ("b", 1)]) != digest_of_indices(["a", ("b", 2)])
    assert digest_of_indices(7) == digest_of_indices([7])
    assert digest_of_indices([torch.tensor(3)]) == digest_of_indices([torch.tensor(3)])
