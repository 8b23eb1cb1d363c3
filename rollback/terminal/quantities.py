"""Numbers, times and sizes as people write them. Pure."""

import math
from datetime import datetime, timezone

from rollback.wording import counted


def number(value: float | None) -> str:
    """A measured value with the digits that matter."""
    return "unknown" if value is None else f"{value:.5g}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that people would use."""
    if seconds is None or not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def seconds_since_epoch(at: str) -> float | None:
    """The time of a journal line; None: it cannot be read."""
    try:
        moment = datetime.fromisoformat(at)
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        return None


def size(count: float | None, least: str = "B") -> str:
    """Bytes in the unit that people would use: `1.5 GiB`. least: what a single byte is called."""
    if count is None:
        return "?"
    for unit in (least, "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == least else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def at_least(number: str, least: bool) -> str:
    """A number of which there may be more than is on record."""
    return f"at least {number}" if least else number


def restores_in_words(restores: int, asked: int) -> str:
    """`3 restores (and 1 rewind that an operator asked for)`. asked: how many of the restores are such rewinds."""
    also = f" (and {counted(asked, 'rewind')} that an operator asked for)" if asked else ""
    return counted(restores - asked, "restore") + also


def steps_or_unknown(value: int | None) -> str:
    return "unknown steps" if value is None else counted(value, "step")


def or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)
