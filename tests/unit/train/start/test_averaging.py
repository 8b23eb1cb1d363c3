"""A communication hook of DDP that remembers anything is refused; one that only averages is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from rollback.errors import UsageError
from rollback.train.start.averaging import check_averaging


def averaged_by(hook: Callable[..., Any], state: object = None) -> nn.Module:
    model: Any = nn.Linear(1, 1)
    model._comm_hooks = [(hook, state)]
    return model  # type: ignore[no-any-return]


def with_dict() -> Any:
    left: dict[int, Any] = {}
    return lambda state, bucket: left.setdefault(bucket.index(), bucket.buffer())


def with_tensor() -> Any:
    left = torch.zeros(3)
    return lambda state, bucket: bucket.buffer() + left


def with_count() -> Any:
    steps = 0

    def hook(state: Any, bucket: Any) -> Any:
        nonlocal steps
        steps += 1

    return hook


def with_callback() -> Any:
    left: list[Any] = []

    def hook(state: Any, bucket: Any) -> Any:
        def then(future: Any) -> Any:
            left.append(future)

        return bucket.then(then)

    return hook


class Feedback:
    def __init__(self) -> None:
        self.left: dict[int, Any] = {}
        self.log: list[str] = []

    def hook(self, state: Any, bucket: Any) -> Any:
        return self.left.get(bucket.index())

    def average(self, state: Any, bucket: Any) -> Any:
        return bucket.buffer()


class Counting:
    def __init__(self) -> None:
        self.steps = 0

    def hook(self, state: Any, bucket: Any) -> Any:
        self.steps += 1
        return bucket.buffer()

    __call__ = hook


def counts_in_its_state(state: Any, bucket: Any) -> Any:
    state.steps += 1
    return bucket.buffer()


def by_powers() -> Any:
    kept = powerSGD_hook.PowerSGDState(None)
    return lambda state, bucket: powerSGD_hook.powerSGD_hook(kept, bucket)


def averages(state: Any, bucket: Any) -> Any:
    kept = bucket.buffer()

    def then(future: Any) -> Any:
        return kept.copy_(future.value())

    return bucket.then(then)


def scaled(factor: Any) -> Any:
    return lambda state, bucket: bucket.buffer() * factor


@pytest.mark.parametrize(
    "hook",
    [
        with_dict(),
        with_tensor(),
        with_count(),
        with_callback(),
        Feedback().hook,
        partial(averages, {}),
        Counting(),
        by_powers(),
    ],
    ids=[
        "a dict",
        "a tensor",
        "a count",
        "a list for a callback",
        "an object",
        "a partial function",
        "an object that is called",
        "a state of torch's in a closure",
    ],
)
def test_a_hook_that_remembers_is_refused(hook: Any) -> None:
    with pytest.raises(UsageError, match="which itself remembers"):
        check_averaging(averaged_by(hook), {})


@pytest.mark.parametrize(
    "hook",
    [averages, scaled(0.5), scaled(torch.tensor(0.5)), Feedback().average, default_hooks.fp16_compress_hook,
     default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)],
)  # fmt: skip
def test_a_hook_that_only_averages_is_not(hook: Any) -> None:
    check_averaging(averaged_by(hook), {})


def test_what_a_hook_counts_is_kept_in_an_object_that_is_handed_over() -> None:
    kept = Counting()
    for hook, state in ((kept.hook, None), (kept, None), (counts_in_its_state, kept)):
        check_averaging(averaged_by(hook, state), {"kept": kept})
        with pytest.raises(UsageError, match="hand that over by a name of its own"):
            check_averaging(averaged_by(hook, state), {})
