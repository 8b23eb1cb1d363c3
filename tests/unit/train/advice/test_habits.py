"""What is watched for advice only is left alone once enough of it has been seen."""

import pytest
import torch
from torch import nn

from rollback.train.advice.habits import Habits
from rollback.train.updates.optimizer import Updates


class Watched:
    """An optimizer whose updates are watched."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.updates = Updates(self.optimizer, None, self.model)
        self.habits = Habits(self.updates, self.optimizer, None, self.model)

    def update(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.habits.end_step(1)
        self.updates.forget()


def test_a_look_behind_the_update_is_gone_once_it_has_been_done_often_enough() -> None:
    watched, hooked = Watched(), []
    for _ in range(20):
        watched.update()
        hooked.append(len(watched.optimizer._optimizer_step_post_hooks))
    assert hooked == [1] * 15 + [0] * 5


def test_where_nothing_is_averaged_no_backward_is_looked_into_once_enough_have_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordinary, looked = Habits._accumulated, []

    def counted(habits: Habits, *given: object) -> None:
        looked.append(1)
        ordinary(habits, *given)

    monkeypatch.setattr(Habits, "_accumulated", counted)
    watched = Watched()
    for _ in range(20):
        watched.update()
    assert len(looked) == 16


def test_what_was_noticed_of_an_update_is_forgotten_with_it() -> None:
    watched = Watched()
    watched.model(torch.ones(1, 2)).sum().backward()
    watched.optimizer.step()
    watched.updates.forget()
    assert watched.habits.end_step(1).written is None
    watched.model(torch.ones(1, 2)).sum().backward()
    watched.optimizer.step()
    assert watched.habits.end_step(1).written is False
