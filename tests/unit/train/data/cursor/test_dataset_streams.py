"""Streaming data sets of Hugging Face's `datasets`: gone back in exactly, whatever their own state leaves out."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from rollback.train.data.cursor import Cursor, cursor_for

SHARDS, BATCHES, EPOCHS = 2, 6, 3


@pytest.fixture
def stream() -> Any:
    datasets = pytest.importorskip("datasets")  # seconds, which only the worker that runs these tests should spend

    def samples(shards: list[int]) -> Iterator[dict[str, int]]:
        return ({"number": 6 * shard + i} for shard in shards for i in range(6))

    return datasets.IterableDataset.from_generator(samples, gen_kwargs={"shards": list(range(SHARDS))})


def read(cursor: Cursor, epochs: int) -> list[Any]:
    """The batches up to the end of so many epochs."""
    found = []
    while cursor.epoch < epochs:
        if not cursor.opened:
            cursor.open_epoch()
        try:
            while True:
                found.append(str(cursor.next()))
        except StopIteration:
            pass
    return found


LOADERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda stream: stream.batch(2),
    "in a loader": lambda stream: StatefulDataLoader(stream, batch_size=2),
    "in a loader with workers that persist": lambda stream: StatefulDataLoader(
        stream, batch_size=2, num_workers=1, persistent_workers=True
    ),
    "shuffled by a buffer": lambda stream: StatefulDataLoader(stream.shuffle(seed=1, buffer_size=4), batch_size=2),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_stream_that_was_gone_back_in_gives_each_later_epoch_whole(stream: "IterableDataset[Any]", name: str) -> None:
    expected = read(cursor_for(LOADERS[name](stream)), EPOCHS)
    assert len(expected) == BATCHES * EPOCHS
    cursor = cursor_for(LOADERS[name](stream))
    cursor.open_epoch()
    for _ in range(3):
        cursor.next()
    state = cursor.state_dict()
    cursor.close()
    resumed = cursor_for(LOADERS[name](stream))
    resumed.load_state_dict(state)
    assert read(resumed, EPOCHS) == expected[3:]
    resumed.close()
