"""What makes a script one that resumes by itself: the state of an optimizer that it loads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD

from rollback.errors import UsageError
from rollback.trainers.adopt.own_resume import OwnResume
from rollback.trainers.adopt.script_pass import ScriptPass


def optimizer(*, lr: float = 0.1) -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=lr)


@pytest.mark.parametrize(("lr", "refused"), [(0.1, False), (0.2, True)], ids=["what it has", "a snapshot"])
def test_two_batches_before_the_first_backward_pass_over_one_only_behind_a_snapshot(lr: float, refused: bool) -> None:
    resume, told = OwnResume(), list[UsageError]()
    resume.load(SGD.load_state_dict, optimizer(), optimizer(lr=lr).state_dict())

    def iterate(original: Any, loader: Any) -> Iterator[Any]:
        return ScriptPass(tuple, lambda: None)

    batches = resume.watched(iterate, told.append)(None, None)
    next(batches)
    next(batches)
    assert bool(told) == refused
