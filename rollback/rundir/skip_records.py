"""skips/rank-NNNNN.jsonl: what a rank skipped. The run does not depend on them."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from rollback.facts.fact import Count
from rollback.system.durable import open_regular
from rollback.system.small_json import fault_of, parse_model

WRITING = "writing the skip record"
"""What the journal calls it where the disk refuses: without a reason, what a record lacks looks like damage."""
_LINE_LIMIT = 8 << 20  # a skipped batch of a million samples on one rank; a hostile line is not read into memory
_DAMAGED_LIMIT = 1000  # lines: more than that is no record with some damage


class SkippedBatch(BaseModel, frozen=True):
    """A line of skips/rank-NNNNN.jsonl."""

    batch: Count
    epoch: int
    offset: int
    indices: list[int] | None
    timeline: int


def read_skipped(path: Path, damaged: list[str]) -> Iterator[SkippedBatch]:
    """Batches that a rank skipped, in order; an absent file has none, and a torn tail is dropped. Damaged lines are
    described in `damaged` and left out.

    Raises OSError, or ValueError where `path` is not a regular file, or is damaged beyond belief.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        number = 0
        while (line := file.readline(_LINE_LIMIT)).endswith(b"\n"):
            number += 1
            try:
                yield parse_model(line, SkippedBatch)
            except ValueError as error:
                damaged.append(f"{path}: line {number} is damaged: {fault_of(error)}")
                if len(damaged) > _DAMAGED_LIMIT:
                    raise ValueError(f"{path}: more than {_DAMAGED_LIMIT} lines are damaged") from None
        if len(line) == _LINE_LIMIT:
            raise ValueError(f"{path}: line {number + 1} has more than {_LINE_LIMIT} bytes")
