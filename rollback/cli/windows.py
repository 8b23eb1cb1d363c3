"""Ranges of batches, and samples, as they are written on a command line."""

from __future__ import annotations

from collections.abc import Sequence

from rollback.errors import UsageError
from rollback.facts.fact import SamplesFrom
from rollback.facts.training import Window


def parse_window(text: str, where: str) -> Window:
    """`A:B`, both included. Raises UsageError naming `where` it stood."""
    first, separator, last = text.partition(":")
    try:
        if not separator:
            raise ValueError("no colon")
        return Window(first=int(first), last=int(last))
    except ValueError as error:
        raise UsageError(
            f"{where}: {text!r} is not a range of batches", hint="write FIRST:LAST, both included, as in 120:139"
        ) from error


def parse_samples(text: str, where: str) -> SamplesFrom:
    """`I,J` or `BATCH:I,J`. Raises UsageError naming `where` it stood."""
    batch, _, listed = text.rpartition(":")
    try:
        return SamplesFrom(batch=int(batch or 0), samples=tuple(int(sample) for sample in listed.split(",")))
    except ValueError as error:
        raise UsageError(
            f"{where}: {text!r} is not a list of samples",
            hint="write data set indices as in 17,402; or BATCH:17,402 to leave them out from that batch on",
        ) from error


def cumulative(given: Sequence[SamplesFrom]) -> list[SamplesFrom]:
    """What several of these say together, by batch: each of the result has all samples that are left out from there."""
    batches = sorted({one.batch for one in given})
    together = [{sample for one in given if one.batch <= batch for sample in one.samples} for batch in batches]
    return [SamplesFrom(batch=b, samples=tuple(sorted(samples))) for b, samples in zip(batches, together, strict=True)]
