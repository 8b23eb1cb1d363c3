"""What is found in tensors that is not finite, and what of it is left alone."""

import math

import pytest
import torch
from torch import Tensor

from rollback.train.state.nonfinite import FiniteCheck, kind_in, union
from rollback.train.state.tree import DTYPE

FLOATS = [dtype for dtype in DTYPE.values() if dtype.is_floating_point or dtype.is_complex]
LARGE = 70_000  # elements: looked at in three pieces


def check() -> FiniteCheck:
    return FiniteCheck(("shared/", "local/buffers/"), repr)


def buffers(*values: float, **others: Tensor) -> dict[str, Tensor]:
    return {"local/buffers/b": torch.tensor(values), **{f"local/buffers/{name}": item for name, item in others.items()}}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - 1])
def test_a_single_value_is_found_wherever_it_is(dtype: torch.dtype, place: int) -> None:
    item = torch.ones(LARGE).to(dtype)
    assert kind_in(item) is None
    for value, kind in ((math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "Inf")):
        if kind == "Inf" and dtype is torch.float8_e4m3fn:
            continue  # it has none
        item = torch.ones(LARGE)
        item[place] = value
        assert kind_in(item.to(dtype)) == kind


def test_the_largest_numbers_are_finite_and_both_kinds_are_told() -> None:
    largest = torch.finfo(torch.float32).max
    assert kind_in(torch.tensor([largest, -largest])) is None
    assert kind_in(torch.tensor([math.nan, math.inf])) == "NaN and Inf"
    assert kind_in(torch.tensor([[math.inf, 1.0], [1.0, 1.0]]).T) == "Inf"
    assert kind_in(torch.tensor([], dtype=torch.float32)) is kind_in(torch.tensor([1, 2])) is None


def test_what_was_so_at_the_beginning_is_left_alone_for_good_and_another_kind_is_not() -> None:
    one = check()
    one.accept(one.begin(buffers(-math.inf)))
    assert one.left_alone == {"local/buffers/b": "Inf"}
    assert one.newly_nonfinite(buffers(1.0)) == one.newly_nonfinite(buffers(math.inf)) == {}
    assert one.newly_nonfinite(buffers(math.inf, math.nan)) == {"local/buffers/b": "NaN and Inf"}
    assert one.newly_nonfinite(buffers(math.nan)) == {"local/buffers/b": "NaN"}


def test_a_buffer_that_comes_later_may_be_infinite_and_an_optimizer_s_state_may_not() -> None:
    one = check()
    one.accept(one.begin(buffers(1.0)))
    mask = buffers(1.0, mask=torch.tensor([0.0, -math.inf]))
    assert one.newly_nonfinite(mask) == one.newly_nonfinite(mask) == {}
    assert one.newly_nonfinite(buffers(1.0, other=torch.tensor([math.nan]))) == {"local/buffers/other": "NaN"}
    state = {"shared/optimizer/state/0/exp_avg_sq": torch.tensor([math.inf])}
    assert one.newly_nonfinite(state) == {"shared/optimizer/state/0/exp_avg_sq": "Inf"}
    assert one.newly_nonfinite({"local/random/torch": torch.tensor([math.nan])}) == {}, "that is nobody's number"


def test_ranks_agree_on_all_that_any_of_them_has_found() -> None:
    assert union([{"a": "NaN", "b": "Inf"}, {"b": "NaN"}, {}]) == {"a": "NaN", "b": "NaN and Inf"}
