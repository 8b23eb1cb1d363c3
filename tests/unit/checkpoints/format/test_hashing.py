"""The hash of a shard: one rule, however the bytes come and however many threads compute it."""

import threading
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rollback.checkpoints.format import hashing
from rollback.checkpoints.format.hashing import ShardHash, hash_of, hash_pieces

_AS_IT_IS = hashing.PIECE
PIECE = 7


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "PIECE", PIECE)
        yield


def as_documented(data: bytes) -> str:
    """docs/format.md, "manifest.json"."""
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    return xxhash.xxh3_128(b"".join(xxhash.xxh3_128(piece).digest() for piece in pieces)).hexdigest()


@given(data=st.binary(max_size=50), cuts=st.lists(st.integers(0, 50)), threads=st.integers(1, 4))
def test_however_the_bytes_come_it_is_the_documented_hash(data: bytes, cuts: list[int], threads: int) -> None:
    running, begin = ShardHash(), 0
    for end in [*sorted(cuts), len(data)]:
        running.update(memoryview(data)[begin : max(begin, end)])
        begin = max(begin, end)
        assert running.hexdigest() == as_documented(data[:begin])
    assert hash_of(memoryview(data), threads) == as_documented(data)


def test_pieces_are_of_16_mib() -> None:
    assert _AS_IT_IS == 16 << 20


def test_several_threads_hash_at_once() -> None:
    """Each waits for the other: one alone would never end."""
    meeting = threading.Barrier(2, timeout=30)

    def piece(start: int, end: int) -> bytes:
        meeting.wait()
        return xxhash.xxh3_128(bytes(end - start)).digest()

    assert hash_pieces(2 * PIECE, piece, threads=2) == as_documented(bytes(2 * PIECE))


def test_what_goes_wrong_with_a_piece_goes_wrong_with_the_hash() -> None:
    def piece(start: int, end: int) -> bytes:
        raise OSError(5, "the disk refuses")

    with pytest.raises(OSError, match="the disk refuses"):
        hash_pieces(3 * PIECE, piece, threads=2)
