"""A script that has loaded a snapshot of its own, and what it takes of the guard then."""

import pytest
import torch
from torch.optim import SGD

from rollback.errors import UsageError
from rollback.trainers.adopt.enumeration import HandedOut
from rollback.trainers.adopt.own_resume import OwnResume
from rollback.trainers.adopt.signs import ScriptSigns


def optimizer(*, lr: float = 0.1) -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=lr)


@pytest.mark.parametrize(
    ("loads", "trains", "refused"),
    [(0.2, False, True), (0.2, True, False), (0.1, False, False), (None, False, False)],
    ids=["a snapshot", "a snapshot, and trains", "what it has, as Accelerate prepares it", "nothing"],
)
def test_the_first_batch_of_a_pass_is_passed_over_where_the_next_one_is_asked_for(
    loads: float | None, trains: bool, refused: bool
) -> None:
    handed = HandedOut(batches=5)
    resume = OwnResume(handed, ScriptSigns(strict=False))
    if loads is not None:
        resume.note_load(optimizer(), optimizer(lr=loads).state_dict())
    resume.pass_begins()
    resume.require_trained()
    resume.require_trained()  # reading has raised, and the script asks again
    handed.batches += 1
    if trains:
        resume.trained()
    if refused:
        with pytest.raises(UsageError, match="does not train on the first batch"):
            resume.require_trained()
    else:
        resume.require_trained()
