"""The audience of a launch on a terminal: the panel at the bottom, what is printed and said above it."""

import codecs
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from rollback.live.screen import Screen
from rollback.live.view import EVERY, View
from rollback.supervisor.torchrun.output import Stream
from rollback.terminal.canvas import Canvas, cursor_at_suspension
from rollback.terminal.messages import printable

# What a terminal takes for commands. Colours (m) are kept, everything else a script may send would tear the panel.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_]?)")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_LONGEST = 1 << 16  # characters of a line that has no end yet


class PanelScreen(Screen):
    """One panel, refreshed twice a second from the run directory. A fault of the panel ends the panel, not the run."""

    captures = True
    _every = EVERY

    def __init__(self, line_for: Callable[[str], str], root: Path, console: Console) -> None:
        super().__init__(line_for)
        self._console = console
        self._view = View(root)
        self._out_is_terminal = os.isatty(1)
        self._unfinished: dict[Stream, str] = {"out": "", "err": ""}
        decoder = codecs.getincrementaldecoder("utf-8")  # what a pipe gives may end within a character
        self._decoders = {stream: decoder("replace") for stream in self._unfinished}
        self._canvas = Canvas(console)
        self._suspension = cursor_at_suspension(console)
        self._broken = False

    def __enter__(self) -> Screen:
        self._suspension.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._suspension.__exit__(None, None, None)

    def _run(self) -> None:
        self._guarded(self._canvas.start)
        super()._run()

    def _write(self, stream: Stream, data: bytes) -> None:
        if self._broken or (stream == "out" and not self._out_is_terminal):
            super()._write(stream, data)
            return
        *lines, rest = (self._unfinished[stream] + self._decoders[stream].decode(data)).split("\n")
        self._unfinished[stream] = rest[-_LONGEST:]
        if lines:
            self._guarded(lambda: self._canvas.print(Text("\n").join(map(above, lines))))
        if self._broken:
            super()._write(stream, data)

    def _tick(self) -> None:
        if not self._broken:
            self._guarded(self._refresh)

    def _last(self) -> None:
        if self._broken:
            return
        for stream, rest in self._unfinished.items():
            if rest:
                self._unfinished[stream] = ""
                self._guarded(lambda rest=rest: self._canvas.print(above(rest)))  # type: ignore[misc]
        self._guarded(self._refresh)
        # Of a job that was refused nothing is left: its error says enough.
        self._guarded(lambda: self._canvas.stop(leave=self._view.status is not None))

    def _refresh(self) -> None:
        self._view.refresh()
        parts: list[RenderableType] = [above(rest) for rest in self._unfinished.values() if above(rest)]
        self._canvas.draw(Group(*parts, self._view.panel(self._console.width)))

    def _guarded(self, act: Callable[[], object]) -> None:
        """Draw; where that fails, do without a panel. Whatever is wrong with a picture, the run must not feel it: this
        thread writes what the run prints."""
        try:
            act()
        except Exception as error:  # noqa: BLE001
            self._broken = True
            reason = printable(f"{type(error).__name__}: {error}")
            super()._write("err", f"\x1b[?25h\n{self._line_for(f'going on without the panel ({reason})')}".encode())


def above(line: str) -> Text:
    """A line that a script printed, as it is shown above the panel: its colours kept, nothing else obeyed."""
    line = line.rstrip("\r").rpartition("\r")[2].expandtabs()
    kept = _SEQUENCE.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", line)
    parts = [
        printable(part) if not _COLOUR.fullmatch(part) else part for part in re.split(f"({_COLOUR.pattern})", kept)
    ]
    return Text.from_ansi("".join(parts))


def terminal(stream: TextIO | None) -> Console | None:
    """The console that a panel can be drawn on: the stream is a terminal that moves its cursor and shows dots."""
    if stream is None or not stream.isatty():
        return None
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    able = console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    return console if able else None
