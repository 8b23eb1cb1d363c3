"""Shards: the safetensors library reads what we write and we read what it writes; nothing damaged is believed."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_files import open_below
from safetensors.numpy import load_file, save_file

from rollback.checkpoints.format.hashing import hash_of
from rollback.checkpoints.format.layout import ITEM_SIZE, PADDING, NotReadBack, lay_out
from rollback.checkpoints.format.shard import ShardPiece, ShardReader, Written, write_shard
from rollback.errors import CheckpointDamaged, CheckpointUnusable
from rollback.system import durable
from rollback.system.small_json import parse_json

NUMPY = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "I32": np.int32, "U32": np.uint32, "F32": np.float32, "I64": np.int64, "U64": np.uint64, "F64": np.float64,
}  # fmt: skip

names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and _is_utf8(name))
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
anywhere = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)


def _is_utf8(text: str) -> bool:
    return text.encode("utf-8", "replace").decode() == text


@st.composite
def pieces(draw: st.DrawFn, dtypes: st.SearchStrategy[str]) -> list[ShardPiece]:
    drawn = draw(st.dictionaries(names, st.tuples(dtypes, shapes), max_size=5))
    made = []
    for name, (dtype, shape) in drawn.items():
        size = math.prod(shape) * ITEM_SIZE[dtype]
        data = draw(st.binary(min_size=size, max_size=size))
        if dtype == "BOOL":
            data = bytes(byte & 1 for byte in data)
        made.append(ShardPiece(name, dtype, shape, memoryview(data)))
    return made


def fresh(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def written_as(data: bytes) -> Written:
    """What a manifest would say of a file with this content: hostile files come with hashes that fit."""
    return Written(len(data), hash_of(memoryview(data)))


# --- round trips ------------------------------------------------------------------------------------------------------


@anywhere
@given(content=pieces(st.sampled_from(sorted(ITEM_SIZE))), metadata=st.dictionaries(names, names, max_size=3))
def test_we_read_what_we_wrote(tmp_path: Path, content: list[ShardPiece], metadata: dict[str, str]) -> None:
    path = fresh(tmp_path / "shard")
    written = write_shard(path, content, metadata)
    assert written == written_as(path.read_bytes())
    with ShardReader(path, written) as reader:
        assert reader.metadata == metadata
        assert reader.entries.keys() == {piece.name for piece in content}
        for piece in content:
            entry = reader.entries[piece.name]
            assert (entry.dtype, entry.shape) == (piece.dtype, piece.shape)
            assert reader.data(piece.name) == piece.data
            assert entry.start % ITEM_SIZE[piece.dtype] == 0, "a tensor that is not aligned cannot be used in place"


@anywhere
@given(content=pieces(st.sampled_from(sorted(NUMPY))))
def test_the_library_reads_what_we_wrote(tmp_path: Path, content: list[ShardPiece]) -> None:
    path = fresh(tmp_path / "shard")
    write_shard(path, content, {"made": "here"})
    loaded = load_file(path)
    assert loaded.keys() == {piece.name for piece in content}
    for piece in content:
        array = loaded[piece.name]
        assert (array.dtype, array.shape) == (NUMPY[piece.dtype], piece.shape)
        assert array.tobytes() == piece.data.tobytes()


@anywhere
@given(content=pieces(st.sampled_from(sorted(NUMPY))))
def test_we_read_what_the_library_wrote(tmp_path: Path, content: list[ShardPiece]) -> None:
    path = fresh(tmp_path / "shard")
    arrays = {p.name: np.frombuffer(p.data, dtype=NUMPY[p.dtype]).reshape(p.shape) for p in content}
    save_file(arrays, path, metadata={"made": "there"})
    with ShardReader(path, written_as(path.read_bytes())) as reader:
        assert reader.metadata == {"made": "there"}
        assert {name: bytes(reader.data(name)) for name in reader.entries} == {p.name: bytes(p.data) for p in content}


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=4),
        st.tuples(st.sampled_from(sorted(ITEM_SIZE)), st.sampled_from([(), (0,), (3,), (1024,), (8, 512), (4096,)])),
    ),
    st.integers(0, 9000),
)
def test_every_tensor_is_aligned_and_those_of_whole_pages_begin_at_one_place_in_a_page(
    kinds: dict[str, tuple[str, tuple[int, ...]]], spare: int
) -> None:
    room = 4096 + 64
    layout = lay_out(kinds, room, lay_out(kinds, room).size + spare)
    for name, entry in layout.entries.items():
        assert entry.start % ITEM_SIZE[entry.dtype] == 0
        if entry.nbytes % 4096 == 0 and name != PADDING:
            assert entry.start % 4096 == 64
    assert (
        max(layout.entries.values(), key=lambda entry: (entry.start, entry.nbytes)).end
        == layout.size
        == (layout.entries[PADDING].end)
    )


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"somebody else's")
    with pytest.raises(FileExistsError):
        write_shard(path, [], {})
    assert path.read_bytes() == b"somebody else's"


def test_a_piece_whose_bytes_do_not_fit_its_shape_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor w"):
        write_shard(tmp_path / "shard", [ShardPiece("w", "F32", (3,), memoryview(bytes(8)))], {})
    assert not list(tmp_path.iterdir())


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_write = os.write
    monkeypatch.setattr(durable.os, "write", lambda fd, data: really_write(fd, data[:5]))
    written = write_shard(tmp_path / "shard", [ShardPiece("w", "U8", (100,), memoryview(bytes(range(100))))], {})
    with ShardReader(tmp_path / "shard", written) as reader:
        assert bytes(reader.data("w")) == bytes(range(100))


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        write_shard(tmp_path / "shard", [ShardPiece("w", "U8", (3,), memoryview(b"abc"))], {})
    assert not list(tmp_path.iterdir())


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, Written, bytes]:
    path = tmp_path / "shard"
    content = [ShardPiece("a", "F32", (4, 4), memoryview(bytes(64))), ShardPiece("b", "U8", (5,), memoryview(b"12345"))]
    written = write_shard(path, content, {"tree": "{}"})
    return path, written, path.read_bytes()


def test_a_shard_cut_anywhere_is_refused(shard: tuple[Path, Written, bytes]) -> None:
    path, written, data = shard
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointDamaged, match="shard"):
            ShardReader(path, written)


def test_a_shard_cut_anywhere_is_refused_even_where_size_and_hash_were_made_to_fit(
    shard: tuple[Path, Written, bytes],
) -> None:
    path, _, data = shard
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointDamaged, match="shard"):
            ShardReader(path, written_as(data[:length]))


def test_every_flipped_bit_is_found(shard: tuple[Path, Written, bytes]) -> None:
    path, written, data = shard
    with open(path, "r+b", buffering=0) as file:
        for position in range(len(data)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[position] ^ 1 << bit]), position)
                with pytest.raises(CheckpointDamaged, match="hash"):
                    ShardReader(path, written)
            os.pwrite(file.fileno(), data[position : position + 1], position)
    ShardReader(path, written).close()


def test_a_longer_file_is_refused(shard: tuple[Path, Written, bytes]) -> None:
    path, written, data = shard
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointDamaged, match="bytes"):
        ShardReader(path, written)


# --- hostile files: size and hash are those of the manifest -----------------------------------------------------------


def file_with(header: Any, body: bytes = b"", *, stated: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if stated is None else stated) + text + body


def tensor(start: Any, end: Any, shape: Any = (4,), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x05\0\0\0\0\0\0", id="seven bytes"),
        pytest.param(file_with({}, stated=2**63), id="header larger than memory"),
        pytest.param(file_with({}, stated=2**64 - 1), id="header length -1"),
        pytest.param(file_with({}, stated=3), id="header longer than the file"),
        pytest.param(file_with(b"not json"), id="header not JSON"),
        pytest.param(file_with(b"\xff\xfe{}"), id="header not UTF-8"),
        pytest.param(file_with(b"[" * 200_000), id="header nested too deep"),
        pytest.param(file_with([]), id="header a list"),
        pytest.param(file_with(7), id="header a number"),
        pytest.param(file_with({"__metadata__": 3}), id="metadata a number"),
        pytest.param(file_with({"__metadata__": {"a": 1}}), id="metadata not text"),
        pytest.param(file_with({"a": tensor(0, 4), "b": tensor(2, 6)}, b"123456"), id="overlap"),
        pytest.param(file_with({"a": tensor(0, 4), "b": tensor(0, 4)}, b"1234"), id="the same bytes twice"),
        pytest.param(file_with({"a": tensor(0, 4), "b": tensor(5, 9)}, b"123456789"), id="gap"),
        pytest.param(file_with({"a": tensor(0, 4)}, b"12345"), id="bytes of no tensor"),
        pytest.param(file_with({"a": tensor(0, 8)}, b"12345678"), id="more bytes than the shape"),
        pytest.param(file_with({"a": tensor(0, 4)}, b"123"), id="beyond the end"),
        pytest.param(file_with({"a": tensor(-4, 0)}, b""), id="negative offset"),
        pytest.param(file_with({"a": tensor(0, 4, (-2, -2))}, b"1234"), id="negative shape"),
        pytest.param(file_with({"a": tensor(0, 4, (2.0, 2.0))}, b"1234"), id="fractional shape"),
        pytest.param(file_with({"a": tensor(0, True, (1,))}, b"1"), id="offset true"),
        pytest.param(file_with({"a": tensor("0", "4")}, b"1234"), id="offset text"),
        pytest.param(file_with({"a": tensor(0, 4, dtype="OBJECT")}, b"1234"), id="unknown dtype"),
        pytest.param(file_with({"a": tensor(0, 4, dtype=["U8"])}, b"1234"), id="dtype a list"),
        pytest.param(file_with({"a": tensor(0, 4, 4)}, b"1234"), id="shape a number"),
        pytest.param(file_with({"a": {"dtype": "U8", "shape": [4]}}, b"1234"), id="no offsets"),
        pytest.param(file_with({"a": "../../etc/passwd"}, b"1234"), id="an entry of text"),
        pytest.param(b"\x80\x04\x95" + b"c__builtin__\neval\n" * 3, id="a pickle"),
    ],
)
def test_a_hostile_file_is_refused_with_a_clear_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "shard"
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="shard"):
        ShardReader(path, written_as(data))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(os.mkfifo, id="pipe"),
        pytest.param(os.mkdir, id="directory"),
        pytest.param(lambda path: os.symlink("/dev/zero", path), id="link"),
        pytest.param(lambda path: None, id="nothing"),
    ],
)
def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "shard"
    make(path)
    with pytest.raises(CheckpointUnusable, match="shard"):
        ShardReader(path, Written(8, "0" * 32))


def test_a_link_to_a_sound_shard_is_refused_too(shard: tuple[Path, Written, bytes]) -> None:
    path, written, _ = shard
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(CheckpointDamaged):
        ShardReader(link, written)


def test_opening_and_refusing_leaks_no_file_descriptor(shard: tuple[Path, Written, bytes]) -> None:
    path, written, _ = shard
    for _ in range(20):
        reader = ShardReader(path, written)
        assert open_below(path.parent) == 1
        reader.close()
        with pytest.raises(CheckpointDamaged):
            ShardReader(path, Written(written.size, "0" * 32))
        assert open_below(path.parent) == 0


READS_MANY = """
import contextlib, resource, sys
from pathlib import Path
from rollback.checkpoints.format.shard import ShardPiece, ShardReader, write_shard

path, most = Path(sys.argv[1]), 400
written = write_shard(path, [ShardPiece("w", "U8", (2,), memoryview(b"ab"))], {})
resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with contextlib.ExitStack() as opened:
    shards = [opened.enter_context(ShardReader(path, written)) for _ in range(2 * most)]
    others = [opened.enter_context(open(path, "rb")) for _ in range(100)]
    assert {bytes(shard.data("w")) for shard in shards} == {b"ab"}
"""


def test_more_shards_than_the_soft_limit_of_open_files_are_read_and_others_can_open_files(tmp_path: Path) -> None:
    """In a process of its own, whose limit and open files are no other test's."""
    subprocess.run([sys.executable, "-c", READS_MANY, str(tmp_path / "shard")], check=True)


@pytest.mark.parametrize("beside", ["", "[[{", "}]"])
@pytest.mark.parametrize("inner", [[], {}])
def test_a_tree_nested_deeper_than_a_reader_believes_is_not_written(beside: str, inner: object) -> None:
    def head(levels: int) -> bytes:
        tree = inner
        for _ in range(levels - 2):
            tree = [beside, tree]
        text = json.dumps({"kept": tree})
        made = lay_out({}, 1 << 16).head({"local": text})
        assert parse_json(text), "it would be read"
        return made

    head(64)  # the innermost one is empty
    with pytest.raises(NotReadBack, match="nested deeper than 64 levels"):
        head(65)
