"""The part of a terminal that is drawn anew, below what was printed; also when the terminal is resized."""

import math

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text


class Canvas:
    """rich's Live, which knows what it drew but not that a terminal made narrower has wrapped it since."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._widths: list[int] = []  # of the lines that were drawn last

    def start(self) -> None:
        self._live.start()

    def stop(self, *, leave: bool = True) -> None:
        """Draw no more. leave: what was drawn last stays."""
        self._live.transient = not leave
        self._live.stop()

    def print(self, text: Text) -> None:
        """Print lines above what is drawn."""
        self._unwrap()
        self._live.console.print(text, soft_wrap=True)

    def draw(self, picture: RenderableType) -> None:
        self._unwrap()
        self._live.update(picture, refresh=True)
        lines = self.console.render_lines(picture, pad=False)
        self._widths = [sum(segment.cell_length for segment in line) for line in lines]

    def _unwrap(self) -> None:
        """Where the terminal has wrapped what was drawn, wipe it, and leave the cursor where rich expects it."""
        width = max(1, self.console.width)
        rows = sum(max(1, math.ceil(each / width)) for each in self._widths)
        if rows > len(self._widths):
            self.console.file.write(f"\r\x1b[{rows - 1}A\x1b[J" + "\n" * (len(self._widths) - 1))
            self._widths = [min(each, width) for each in self._widths]
