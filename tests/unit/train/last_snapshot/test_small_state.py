"""What the last snapshot takes of a state: nothing is copied that a file can be written from where it lies."""

import torch

from rollback.train.last_snapshot.small_state import piece_of


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
