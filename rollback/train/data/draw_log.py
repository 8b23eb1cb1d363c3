"""The draw log: a record of what each batch was, to compare batches that are drawn again.

A rank keeps two hashes of each batch in a small file, and the first difference ends the run before that batch is
trained on: docs/design.md, "Data", says why.

`order` is a hash of the data set indices, if the loader has any. `content` is a hash of the batch. `opening` is a hash
of the epoch's number, its first batch and the random states at its opening: an epoch that is opened with other states,
or behind another batch, is another one, and nothing is compared. The content of a batch may depend on the random
numbers that were drawn before it (augmentation in the training process), and so on the batches that were skipped before
it. `past` is a hash of these, and content is compared only where `past` is the same.

Entry i of the file is for the last batch whose number is i modulo the number of entries. See docs/format.md.
"""

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from rollback.errors import RunDoesNotFit
from rollback.system import files
from rollback.train.comm.recorder import say
from rollback.train.data.cursor.digest import Digest

ENTRIES = 4096
_ENTRY = struct.Struct("<QQQQQQ")  # batch, opening, order, content, past, check
_BODY, _CHECK = struct.Struct("<QQQQQ"), struct.Struct("<Q")


class DrawEntry(NamedTuple):
    """The hashes of one batch. 0: not known."""

    batch: int
    opening: int
    order: int
    content: int
    past: int


class DrawLog:
    """The draw log of one rank. Nothing here is collective.

    path: its file. afresh: ignore the entries of earlier attempts, because the data were changed on purpose, or the
    ranks share them out in another way. contents: compare what batches hold; else their order alone.
    """

    def __init__(self, path: Path, *, afresh: bool, contents: bool = True) -> None:
        self._path = path
        self._contents = contents
        self._failing = False
        self._file: int | None = None
        self._open_one: tuple[DrawEntry, Digest] | None = None
        self._entries: dict[int, DrawEntry] = {}
        try:
            files.make_directory(path.parent)
            flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if afresh else 0)
            self._file = files.open_file(path, flags)
            self._entries = _read(os.pread(self._file, ENTRIES * _ENTRY.size, 0))
        except OSError as error:
            self._complain(error)

    def check(self, batch: int, order: int | None, data: Any, past: int, opening: int = 0) -> None:
        """Add batch number `batch`. Raises RunDoesNotFit where it was another one before.

        order: hash of its data set indices. past: from `SkipList.digest_before`. opening: see the module. Waits for the
        device only where there is something to compare.
        """
        if self._open_one is not None:
            self._settle(*self._open_one)
        digest, known = Digest(data), self._known(batch)
        if known is None and digest.coming:
            self._open_one = DrawEntry(batch, opening, order or 0, 0, past), digest
            return
        drawn = DrawEntry(batch, opening, order or 0, self._content_of(digest), past)
        if known is not None:
            _compare(known, drawn)
        self._add(drawn)

    def knows(self, batch: int, past: int) -> bool:
        """Whether the content of this batch with the same past is known."""
        known = self._known(batch)
        return known is not None and bool(known.content) and known.past == past

    def check_end(self, batch: int, opening: int) -> None:
        """The epoch has no batch number `batch`. Raises RunDoesNotFit where it had one before."""
        known = self._known(batch)
        if known is not None and opening and known.opening == opening:
            raise _other_data(batch, "its epoch ends before it")

    def compare(self, batch: int, data: Any, past: int) -> None:
        """As `check`, for a batch that is drawn again and dropped: adds nothing."""
        if (known := self._known(batch)) is not None:
            _compare(known, DrawEntry(batch, known.opening, 0, self._content_of(Digest(data)), past))

    def _content_of(self, digest: Digest) -> int:
        """0: not known, or not to be compared."""
        return (digest.value or 0) if self._contents else 0

    def _known(self, batch: int) -> DrawEntry | None:
        known = self._entries.get(batch % ENTRIES)
        return known if known is not None and known.batch == batch else None

    def close(self) -> None:
        """Write the last entry, and close the file."""
        if self._open_one is not None:
            self._settle(*self._open_one)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _settle(self, drawn: DrawEntry, digest: Digest) -> None:
        """Add the last batch, whose digest was still to come: it is on the host by now."""
        self._open_one = None
        self._add(drawn._replace(content=self._content_of(digest)))

    def _add(self, drawn: DrawEntry) -> None:
        """Write an entry."""
        slot = drawn.batch % ENTRIES
        self._entries[slot] = drawn
        if self._file is None:
            return
        try:
            os.pwrite(self._file, _packed(drawn), slot * _ENTRY.size)
            self._failing = False
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failing:
            say(
                f"writing the draw log {self._path} fails ({error}); training goes on, but after a restart it cannot "
                "be told whether the same batches come again"
            )
        self._failing = True


def _compare(before: DrawEntry, now: DrawEntry) -> None:
    if before.opening != now.opening:
        return
    if before.order and now.order and before.order != now.order:
        what = (
            "its samples are other ones (the sampler gives other indices; where the model or the loop draws from the "
            "very generator that the loader was given, give the loader one of its own)"
        )
    elif before.content and now.content and before.past == now.past and before.content != now.content:
        what = "it holds other data" + (" (the sampler gives the same indices)" if now.order else "")
    else:
        return
    raise _other_data(now.batch, what)


def _other_data(batch: int, what: str) -> RunDoesNotFit:
    return RunDoesNotFit(
        f"batch {batch} has been drawn before in this run, and now that it is drawn again {what}: going on would "
        "train on some samples twice and on others never. It was not trained on",
        hint="the loader, or what it reads, depends on something that does not come back after a restart: a data set "
        "that was changed, a split or a random generator without a seed, a counter of its own, a value that the loop "
        "sets on the data set at each step. Seed it, or give the loader a state_dict and load_state_dict. Samples that "
        "the script chooses anew for each epoch must follow from its number, in the body of `for epoch in "
        "guard.epochs(n):` (with --adopt of `for epoch in range(n):`), which is begun again there. To go on with the "
        "data as they are now: --accept-data-change",
    )


def _packed(drawn: DrawEntry) -> bytes:
    body = _BODY.pack(*drawn)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def _read(raw: bytes) -> dict[int, DrawEntry]:
    """The sound entries by place. A crash may leave a damaged one."""
    found = {}
    for slot in range(len(raw) // _ENTRY.size):
        entry = raw[slot * _ENTRY.size : (slot + 1) * _ENTRY.size]
        drawn = DrawEntry(*_ENTRY.unpack(entry)[:5])
        if drawn.batch % ENTRIES == slot and entry == _packed(drawn):
            found[slot] = drawn
    return found
