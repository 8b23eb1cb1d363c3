"""Whether the batch before a position is what it was, where the random states that it was read under are not known."""

from collections.abc import Callable
from typing import Any

from rollback.errors import RunDoesNotFit
from rollback.train.data.cursor.base import Witness
from rollback.train.data.cursor.digest import Digest


def require_same_last(batch: int, last_under: Callable[[str], Any], witness: Witness) -> None:
    """last_under: reads the batch before number `batch`, under random states that are made of a key.

    It is read twice under one made-up state and once under another. If the first two differ, the data depend on
    something that cannot be restored: RunDoesNotFit. If only the third differs, random states matter and nothing can be
    compared.
    """
    read = [last_under(key) for key in ("one", "one", "other")]
    first, again, other = (Digest(data).value for data in read)
    if first != again:
        raise RunDoesNotFit(
            f"cannot go on at batch {batch} of the data: read twice under the same random states, the batch before it "
            "is not the same, so the data set depends on something that does not come back",
            hint="let data set and collate_fn draw from the global random states, or from a generator that is one of "
            "their attributes; or go on with the data as they are now by --accept-data-change",
        )
    if first == other:
        witness.check(batch - 1, read[0])
