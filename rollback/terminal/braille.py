"""A small curve of braille dots: two columns and four rows in a character. Pure."""

import math
from collections.abc import Sequence

from rich.text import Text

from rollback.terminal.curve import Bucket

BLANK = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, then by row from above
_LOG_FROM = 8.0  # a curve whose highest value is this many times its lowest is drawn on a logarithmic axis


def draw(columns: Sequence[Bucket], bounds: tuple[float, float] | None, height: int) -> list[Text]:
    """Rows of a curve, `height` characters high. A column of values that are not finite is a red cross below.

    bounds: the values at the lower and the upper edge, where what lies beyond them is drawn.
    """
    rows = 4 * height
    places = [_place(column, bounds, rows) for column in columns]
    lines = []
    for line in range(height):
        text = Text()
        for first in range(0, len(columns), 2):
            pair = range(first, min(first + 2, len(columns)))
            if line == height - 1 and any(columns[each].nonfinite for each in pair):
                text.append("×", style="bold red")
                continue
            dots = sum(_dots(places, each, each - first, line) for each in pair)
            text.append(chr(BLANK + dots), style="cyan")
        lines.append(text)
    return lines


def _place(column: Bucket, bounds: tuple[float, float] | None, rows: int) -> tuple[int, int] | None:
    """The dot rows, from above, of the highest and the lowest value of a column."""
    if bounds is None or math.isnan(column.low):
        return None
    low, high = bounds
    logarithmic = low > 0 and high / low > _LOG_FROM
    scale = math.log if logarithmic else float
    span = scale(high) - scale(low)

    def row(value: float) -> int:
        value = min(high, max(low, value))
        share = (scale(value) - scale(low)) / span if span > 0 else 0.5
        return min(rows - 1, max(0, round((1 - share) * (rows - 1))))

    return row(column.high), row(column.low)


def _dots(places: Sequence[tuple[int, int] | None], column: int, side: int, line: int) -> int:
    """The dots of one column in one line of characters: its own range, drawn on towards the column before it."""
    place = places[column]
    if place is None:
        return 0
    top, bottom = place
    before = places[column - 1] if column else None
    if before is not None:
        top, bottom = (before[1] + 1, bottom) if before[1] < top - 1 else (top, bottom)
        top, bottom = (top, before[0] - 1) if before[0] > bottom + 1 else (top, bottom)
    return sum(DOTS[side][row - 4 * line] for row in range(4 * line, 4 * line + 4) if top <= row <= bottom)
