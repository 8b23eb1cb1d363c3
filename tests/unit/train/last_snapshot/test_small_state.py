"""What the last snapshot takes of a state: nothing is copied that a file can be written from where it lies."""

from types import SimpleNamespace
from typing import cast

import torch

from rollback.train.last_snapshot.small_state import SmallStateReader, piece_of
from rollback.train.state.state import TrainingState


def test_a_tensor_s_bytes_are_written_from_where_they_lie() -> None:
    tensor = torch.zeros(8)
    data = piece_of("weight", tensor).data
    assert callable(data)
    (block,) = data()
    tensor[0] = 1.0
    assert bytes(block) == tensor.numpy().tobytes()


def test_a_tensor_that_lies_in_another_order_is_written_in_its_own() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    data = piece_of("weight", tensor).data
    assert callable(data)
    assert b"".join(map(bytes, data())) == torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]).numpy().tobytes()


def test_what_is_small_and_shared_is_copied_when_the_step_ends() -> None:
    """An average of the weights, say, moves before the next update begins."""

    class Average:
        values = torch.ones(3)

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"values": self.values}

    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    state = SimpleNamespace(objects={"average": Average()}, counters=SimpleNamespace(step=3), optimizer=optimizer)
    shared = SmallStateReader(cast(TrainingState, state)).shared()
    Average.values.mul_(2)
    (piece,) = shared.pieces()
    assert callable(piece.data)
    (stored,) = piece.data()
    assert bytes(stored) == torch.ones(3).numpy().tobytes()
