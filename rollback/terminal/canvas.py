"""The part of a terminal that is drawn anew, below what was printed; also when the terminal is resized."""

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from types import FrameType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

_SHOW_CURSOR = b"\x1b[?25h"


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


@contextlib.contextmanager
def cursor_at_suspension(console: Console) -> Iterator[None]:
    """To be entered by the main thread while a canvas is drawn, which hides the cursor: Ctrl-Z shows it, since the
    shell's prompt would have none. Whoever handles or ignores SIGTSTP already is left to it."""

    def suspend(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(console.file.fileno(), _SHOW_CURSOR)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, suspend)

    ours = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
