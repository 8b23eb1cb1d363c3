"""A sharded tensor that its object makes later than the guard is like the parameters of its shape, or refused."""

import pytest
import torch
from sharding import fully_sharded, one_rank
from torch import nn

from rollback.checkpoints.format.parts import Box, Part, whole
from rollback.errors import StateRefused
from rollback.sentinel import Sentinel
from rollback.train.data.cursor import cursor_for
from rollback.train.restore.made_later import like_parameters
from rollback.train.state.state import TrainingState

KEY = "shared/objects/average/weight"


def state_of(model: nn.Module) -> TrainingState:
    return TrainingState(model, torch.optim.SGD(model.parameters()), {}, cursor_for([1]), Sentinel("normal"))


def test_it_is_like_the_parameters_of_its_shape() -> None:
    with one_rank():
        state = state_of(fully_sharded(nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5))))
        assert like_parameters(KEY, (5, 3), state, [whole((5, 3))]) is state.parameters[0]


@pytest.mark.parametrize("case", ["of no parameter's shape", "sharded in two ways", "stored as another part"])
def test_it_is_refused_where_that_does_not_tell(case: str) -> None:
    with one_rank():
        model = nn.Sequential(fully_sharded(nn.Linear(3, 5)), nn.Linear(3, 5 if case == "sharded in two ways" else 4))
        shape = (2, 2) if case == "of no parameter's shape" else (5, 3)
        stored = [Part(shape, Box((0, 0), (1, 3)))] if case == "stored as another part" else None
        with pytest.raises(StateRefused, match="made later than the guard"):
            like_parameters(KEY, shape, state_of(model), stored)
