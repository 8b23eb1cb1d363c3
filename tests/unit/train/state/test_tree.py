"""States as trees: what goes in comes out equal, through JSON, and what cannot is refused with its path."""

import json
import math
import warnings
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import lr_scheduler as lr

from rollback.checkpoints.format import contents
from rollback.errors import CheckpointDamaged, UsageError
from rollback.train.snapshots.capture import bytes_of
from rollback.train.state import tree


def through_json(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(tree.encode(value, "state", tensors), allow_nan=False)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    return tree.decode(json.loads(text), kept.__getitem__)


class LooksLikeATensor(torch.Tensor):
    """As those of quantized optimizers: what it shows has no memory, and its values are in another tensor."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> "LooksLikeATensor":
        made: LooksLikeATensor = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def alike(one: Any, other: Any) -> bool:
    """Equal, of the same type, bit for bit; NaN is alike to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            type(key) is type(same) and alike(one[key], other[same]) for key, same in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    return bool(one == other)


shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(
    lambda shape, dtype, seed: torch.testing.make_tensor(shape, dtype=dtype, device="cpu", noncontiguous=False)
    if dtype not in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.float8_e4m3fn)
    else torch.full(shape, seed % 100, dtype=torch.float32).to(dtype),
    shapes, st.sampled_from(list(tree.DTYPE_CODE)), st.integers(),
)  # fmt: skip
arrays = st.builds(
    lambda shape, dtype: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    shapes, st.sampled_from(["bool", "uint8", "int16", "int64", "float32", "float64"]),
)  # fmt: skip
names = st.text(max_size=3) | st.sampled_from(["$tensor", "$map", "a/b", "a%2Fb", "0", "1", ""])
keys = names | st.integers(-1, 2) | st.booleans() | st.none() | st.tuples(st.integers(0, 1), names)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | tensors | arrays
states = st.recursive(
    leaves | st.dictionaries(names, st.integers()).map(Counter),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(names, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(states)
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    assert alike(through_json(state), state)


def test_keys_that_read_alike_keep_tensors_of_their_own() -> None:
    state = {1: torch.zeros(1), "1": torch.ones(1), "a": {2: {"w": torch.ones(2)}, "2": {"w": torch.zeros(2)}}}
    assert alike(through_json(state), state)


@pytest.mark.parametrize("kind", sorted(contents.NUMBERS))
def test_numbers_of_numpy_come_back_in_their_types(kind: str) -> None:
    """An average that is kept in float32 is rounded otherwise where it goes on in Python's floats."""
    numbers = np.array([0, 1, 0.1, np.inf] if "float" in kind else [0, 1, 1]).astype(kind)
    back = through_json([*numbers])
    assert [type(item) for item in back] == [type(item) for item in numbers]
    assert back == [*numbers]


@pytest.mark.parametrize(("body", "why"), [(["object_", 1], "type 'object_'"), (["int8", 300], "int8 300")])
def test_a_number_that_its_type_cannot_be_is_damage(body: list[Any], why: str) -> None:
    with pytest.raises(CheckpointDamaged, match=why):
        tree.decode({"$number": body}, lambda name: torch.zeros(1))


def test_an_ordered_dict_comes_back_in_order() -> None:
    assert list(through_json(OrderedDict(b=1, a=2))) == ["b", "a"]


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        print,
        object(),
        1j,
        torch.device("cpu"),
        torch.zeros(2).to_sparse(),
        torch.zeros(1, dtype=torch.complex128),
        np.array(["a"]),
        np.array([object()]),
        np.zeros(2, dtype=">f4"),
        np.datetime64("2020-01-01"),
        np.zeros(1, dtype=np.longdouble)[0],
        LooksLikeATensor(torch.zeros(2, dtype=torch.int8)),
        {torch.zeros(1): "moments"},  # as an optimizer may have them by its parameters, in its groups
        {(0, torch.zeros(1)): "moments"},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_faithful_form_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(UsageError, match=r"state/outer/1") as refused:
        tree.encode({"outer": [0, value]}, "state", {})
    assert refused.value.hint


@pytest.mark.parametrize("body", [{"$new": 1}, {"$": 1}, {"deep": [{"$pickle": "gASV"}]}])
def test_a_tag_that_nobody_knows_is_damage(body: Any) -> None:
    with pytest.raises(CheckpointDamaged, match="unknown tag"):
        tree.decode(body, {}.__getitem__)


SCHEDULERS = {
    "StepLR": lambda o: lr.StepLR(o, 3),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lr.ConstantLR,
    "LinearLR": lr.LinearLR,
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lr.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=20),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.MultiStepLR(o, [2])], [4]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_from_what_was_kept_of_it(name: str) -> None:
    def steps(scheduler: Any, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        rates = []
        for step in range(count):
            optimizer.step()
            scheduler.step(*([1.0 + step % 3] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (optimizer, scheduler), (other_optimizer, other) = make(), make()
        steps(scheduler, optimizer, 5)
        other.load_state_dict(through_json(scheduler.state_dict()))
        other_optimizer.load_state_dict(through_json(optimizer.state_dict()))
        assert alike(through_json(other.state_dict()), through_json(scheduler.state_dict()))
        assert steps(other, other_optimizer, 8) == steps(scheduler, optimizer, 8)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor", "LBFGS"])
def test_an_optimizer_s_state_comes_back_as_it_was(kind: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in parameters)
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    assert alike(through_json(state), state)
