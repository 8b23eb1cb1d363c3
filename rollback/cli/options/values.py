"""Ranges of batches, samples, and sizes, as they are written on a command line."""

import re
from collections.abc import Sequence

from rollback.config import samples_from, window_from
from rollback.errors import UsageError
from rollback.facts.fact import SamplesFrom
from rollback.facts.training import Window

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_window(text: str, where: str) -> Window:
    """`A:B`, both included. Raises UsageError naming `where` it stood."""
    try:
        return window_from(text)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def parse_samples(text: str) -> SamplesFrom:
    """`I,J` or `BATCH:I,J`. Raises UsageError."""
    try:
        return samples_from(text)
    except ValueError as error:
        raise UsageError(f"--skip-samples: {error}") from error


def together(*lists: Sequence[SamplesFrom]) -> list[SamplesFrom]:
    """What several lists leave out together, by batch. Of each list, the last one that applies to a batch counts."""
    found: list[SamplesFrom] = []
    for batch in sorted({one.batch for each in lists for one in each}):
        apply = (next((one for one in reversed(each) if one.batch <= batch), None) for each in lists)
        samples = tuple(sorted({sample for one in apply if one is not None for sample in one.samples}))
        if samples != (found[-1].samples if found else ()):
            found.append(SamplesFrom(batch=batch, samples=samples))
    return found


def parse_size(text: str, where: str) -> int:
    """Bytes from `12GiB`, `12G`, `12e9`. Raises UsageError naming `where` it stood."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    try:
        if match is None or match[2] not in _UNITS:
            raise ValueError("no size")
        return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{where}: {text!r} is not a size", hint="such as 12GiB, 800MB or 1.5e9") from error
