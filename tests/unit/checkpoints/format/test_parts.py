"""Parts of sharded tensors: where they lie, and whether they are the whole together."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollback.checkpoints.format import contents
from rollback.checkpoints.format.contents import StoredParts, read_contents
from rollback.checkpoints.format.parts import METADATA, Box, Part, cover, read_parts, whole, write_parts
from rollback.checkpoints.format.shard import ShardPiece, ShardReader, write_shard
from rollback.errors import CheckpointDamaged

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that cut it along each dimension."""
    shape = draw(SHAPES)
    boxes = [Box((), ())]
    for length in shape:
        cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))})
        sides = list(zip(cuts, np.diff(cuts).tolist(), strict=False))
        boxes = [Box((*box.at, at), (*box.shape, size)) for box in boxes for at, size in sides]
    return shape, boxes


@given(grids(), st.randoms(use_true_random=False))
def test_boxes_that_cut_a_tensor_are_the_whole_of_it_and_replicas_count_once(grid, random) -> None:
    shape, boxes = grid
    parts = [Part(shape, box) for box in (*boxes, *boxes)]
    random.shuffle(parts)
    chosen = [parts[number].box for number in cover("w", parts)]
    assert sorted(chosen, key=lambda box: box.at) == sorted(boxes, key=lambda box: box.at)


@given(grids(), st.data())
def test_parts_that_leave_something_out_or_overlap_are_refused(grid, data: st.DataObject) -> None:
    shape, boxes = grid
    left_out = data.draw(st.sampled_from(boxes))
    others = [Part(shape, box) for box in boxes if box != left_out]
    with pytest.raises(ValueError, match="not the whole"):
        list(cover("w", others or [Part(shape, Box(left_out.at, (0,) * len(shape)))]))
    if len(boxes) > 1:
        with pytest.raises(ValueError, match="not the whole"):
            list(cover("w", [*(Part(shape, box) for box in boxes), whole(shape)]))


@given(grids(), grids())
def test_what_two_boxes_have_in_common_is_what_their_elements_are(one, other) -> None:
    shape, boxes = one
    for box in boxes:
        for second in other[1]:
            if len(second.at) != len(shape):
                continue
            elements = [
                set(np.ndindex(*map(int, np.add(item.at, item.shape)))) - {
                    index for index in np.ndindex(*map(int, np.add(item.at, item.shape)))
                    if any(place < start for place, start in zip(index, item.at, strict=True))
                }
                for item in (box, second)
            ]  # fmt: skip
            common = box.overlap(second)
            assert (common.size if common else 0) == len(elements[0] & elements[1])


@pytest.mark.parametrize(
    "text",
    [
        "[]", "7", '{"w": 1}', '{"w": {"shape": [4, 3]}}', '{"x": {"shape": [4, 3], "at": [0, 0]}}',
        '{"w": {"shape": [4], "at": [0, 0]}}', '{"w": {"shape": [4, 3], "at": [-1, 0]}}',
        '{"w": {"shape": [4, 3], "at": [3, 0]}}', '{"w": {"shape": [4, 3], "at": [0.0, 0]}}',
        '{"w": {"shape": "43", "at": "00"}}', '{"w": {"shape": [4, 3, 0], "at": [0]}}',
    ],
)  # fmt: skip
def test_parts_that_cannot_be_are_no_parts(text: str) -> None:
    with pytest.raises(ValueError, match="part"):
        read_parts({METADATA: text}, {"w": (2, 3)})


def shards_of(folder: Path, array: np.ndarray, boxes: list[Box]) -> list[ShardReader]:
    """A shard for each box, with trees that refer to the sharded tensor."""
    trees = {"model": {"w": {"$sharded": "w"}}, "optimizer": {}, "objects": {}, "sentinel": {}, "counters": {}}
    own = {"buffers": {}, "nonpersistent_buffers": {}, "random": {}, "cursor": {}}
    readers = []
    for rank, box in enumerate(boxes):
        part = np.ascontiguousarray(array[box.inside(whole(array.shape).box)])
        metadata = {"shared": json.dumps(trees), "local": json.dumps(own)}
        metadata[METADATA] = write_parts({"w": Part(array.shape, box)})
        path = folder / f"{rank}.safetensors"
        piece = ShardPiece(
            "w", "F32", part.shape, memoryview(part.reshape(-1)).cast("B") if part.size else memoryview(b"")
        )
        readers.append(ShardReader(path, write_shard(path, [piece], metadata)))
    return readers


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (3, 4)), Box((3, 0), (2, 4))],
        [Box((0, 0), (5, 1)), Box((0, 1), (5, 3)), Box((0, 1), (5, 3))],
        [Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (3, 2)), Box((2, 2), (3, 2)), Box((5, 0), (0, 4))],
    ],
    ids=["rows", "columns, one twice", "squares, one empty"],
)
@pytest.mark.parametrize("band", [1, 40, 1 << 20], ids=["a row at a time", "two rows", "all at once"])
def test_a_sharded_tensor_is_read_as_a_whole(
    tmp_path: Path, boxes: list[Box], band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_BAND", band)
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    value = read_contents(shards_of(tmp_path, array, boxes)).model(0)["w"]
    assert isinstance(value, StoredParts)
    assert (value.entry.dtype, value.entry.shape, value.entry.nbytes) == ("F32", (5, 4), 80)
    assert b"".join(value.blocks()) == array.tobytes()


def test_a_checkpoint_that_lacks_a_part_is_damaged(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, np.ones((5, 4), np.float32), [Box((0, 0), (3, 4)), Box((4, 0), (1, 4))])
    with pytest.raises(CheckpointDamaged, match="not the whole"):
        read_contents(shards)
