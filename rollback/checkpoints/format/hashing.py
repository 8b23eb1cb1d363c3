"""The hash of a shard: xxh3_128 over the xxh3_128 of its pieces of 16 MiB, so that all cores can compute it.

One core hashes as fast as it reads, which is about as fast as a copy goes, and before a restore nothing else can be
done. docs/format.md, "manifest.json", has the rule.
"""

from collections.abc import Callable

import xxhash

from rollback.system.threads import Threads

PIECE = 16 << 20


class ShardHash:
    """Of bytes as they come, in order."""

    def __init__(self) -> None:
        self._pieces = xxhash.xxh3_128()
        self._piece = xxhash.xxh3_128()
        self._left = PIECE

    def update(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while view:
            part, view = view[: self._left], view[self._left :]
            self._piece.update(part)
            self._left -= len(part)
            if not self._left:
                self._pieces.update(self._piece.digest())
                self._piece.reset()
                self._left = PIECE

    def hexdigest(self) -> str:
        """Of all bytes so far."""
        pieces = self._pieces.copy()
        if self._left < PIECE:
            pieces.update(self._piece.digest())
        return str(pieces.hexdigest())


def hash_pieces(size: int, piece: Callable[[int, int], bytes], threads: int) -> str:
    """The hash of `size` bytes, the pieces hashed by `piece(start, end)`, in so many threads. Raises what that does."""
    starts = range(0, size, PIECE)

    def of_piece(start: int) -> bytes:
        return piece(start, min(start + PIECE, size))

    if threads == 1 or len(starts) < 2:
        return xxhash.xxh3_128_hexdigest(b"".join(map(of_piece, starts)))
    with Threads(min(threads, len(starts)), "rollback-hash") as pool:
        return xxhash.xxh3_128_hexdigest(b"".join(pool.map(of_piece, starts)))


def hash_of(data: memoryview, threads: int = 1) -> str:
    """The hash of bytes in memory."""
    return hash_pieces(len(data), lambda start, end: xxhash.xxh3_128(data[start:end]).digest(), threads)
