"""Rows of a label and a text, as the commands print them."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollback.terminal.messages import printable


def print_rows(console: Console, rows: Iterable[tuple[str, RenderableType]], indent: int = 2) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=9)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(Text(printable(label)), value)
    console.print(Padding(grid, (0, 0, 0, indent)))
