"""Text for a terminal: what a journal quotes is shown, never obeyed.

A journal holds words from elsewhere (exceptions, names, the user's reasons). Those may contain what rich takes for
markup, or escape sequences that a terminal carries out. Everything from a journal passes through `printable` and is put
into `rich.text.Text`, which knows no markup.
"""

import errno
import os
from typing import TextIO

from rich.console import Console
from rich.text import Text

from rollback.terminal.messages import printable


def quoted(text: str, style: str = "") -> Text:
    """Words from a journal, safe to print; their line breaks are kept."""
    return Text("\n".join(printable(line) for line in text.splitlines()), style=style)


class _Console(Console):
    """Whose caller hears that the reader is gone: rich's own ends the process with 1, whatever the answer was."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console_for(stream: TextIO) -> Console:
    """A console that is plain where `stream` is not a terminal or NO_COLOR is set, and invents no highlights."""
    plain = bool(os.environ.get("NO_COLOR"))
    return _Console(file=stream, highlight=False, markup=False, emoji=False, color_system=None if plain else "auto")
