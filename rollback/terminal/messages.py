"""Lines for the person at the terminal. They go to stderr; data goes to stdout and is not this module's."""

import contextlib
import io
import os
import sys

from rollback.errors import RollbackError

_BOLD, _RED, _OFF = "\x1b[1m", "\x1b[1;31m", "\x1b[0m"
_WITHOUT_COLOUR = ("dumb", "unknown")  # terminals: the names that rich knows, which prints the answers


def say(text: str) -> None:
    """One line (or an account of several) on stderr."""
    _write(line_for(text))


def line_for(text: str) -> str:
    return f"{_paint(_BOLD, 'rollback:')} {printable_lines(text)}\n"


def show_error(error: RollbackError) -> None:
    _write(f"{_paint(_RED, 'rollback: error:')} {printable_lines(str(error))}\n")


def printable(text: str) -> str:
    """`text` in one line, with everything that is not a visible character or a space spelt as an escape: a terminal
    would take it for a command, and names of files and tensors are not ours."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def printable_lines(text: str) -> str:
    """As `printable`, and its line breaks are kept."""
    return "\n".join(map(printable, text.split("\n")))


def occupy_standard_streams() -> None:
    """Open those of descriptors 0 to 2 that are closed, on nothing: a file of ours in their place would be written to
    by every process that takes it for its standard stream. Python has no stream for them until then."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def bear_any_character() -> None:
    """Have stdout write `?` for a character that its encoding lacks. Without a UTF-8 locale that is most of a plot, and
    the ellipsis of a table; an answer does not end there. stderr does so by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        with contextlib.suppress(OSError):  # it was a file when it was opened, and is a pipe now: there is no position
            sys.stdout.reconfigure(errors="replace")


def _paint(style: str, text: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in _WITHOUT_COLOUR
    coloured = not plain and sys.stderr is not None and sys.stderr.isatty()
    return f"{style}{text}{_OFF}" if coloured else text


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return  # the terminal is gone, or stderr is closed: a run does not end for want of an audience
