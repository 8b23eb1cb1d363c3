"""The batch that does not count, of a pass that has no batch left."""

import torch
from torch import nn

from rollback.train.process.rehearsal import PassRehearsal


def rehearsal(model: nn.Module) -> PassRehearsal:
    made = PassRehearsal(torch.optim.SGD(model.parameters(), 0.1))
    made.make = lambda: "a batch"
    return made


def test_a_pass_behind_a_restore_goes_back_to_that_and_takes_no_checkpoint() -> None:
    rehearsed = rehearsal(nn.Linear(1, 1))
    rehearsed.pass_begins(restored=True)
    rehearsed.prepare(lambda: "one that is not needed")
    assert (rehearsed.due, rehearsed.ready, rehearsed.source) == (True, True, None)


def test_another_one_needs_a_checkpoint_and_without_it_there_is_no_rehearsal() -> None:
    rehearsed = rehearsal(nn.Linear(1, 1))
    rehearsed.pass_begins(restored=False)
    rehearsed.prepare(lambda: None)
    assert not rehearsed.ready
    rehearsed.prepare(lambda: "c000001-s00000005")
    assert (rehearsed.ready, rehearsed.source) == (True, "c000001-s00000005")


def test_nobody_asked_for_one() -> None:
    rehearsed = rehearsal(nn.Linear(1, 1))
    rehearsed.make = None
    rehearsed.pass_begins(restored=True)
    assert not rehearsed.due


def test_a_pass_has_one_only_and_gradients_are_behind_it_what_they_were() -> None:
    model = nn.Linear(1, 1)
    model.weight.grad = torch.ones(1, 1)
    kept = model.weight.grad
    rehearsed = rehearsal(model)
    rehearsed.pass_begins(restored=True)
    assert rehearsed.begin() == "a batch"
    assert not rehearsed.due
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert rehearsed.end()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == kept.item() == 1
    assert model.bias.grad is None
    assert not rehearsed.end(), "it has come to its end"
