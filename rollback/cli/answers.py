"""What commands have in common: RUN and --json, an answer as text or JSON, and what could not be read or written."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from rollback.errors import OutputNotWritten
from rollback.terminal.messages import say

if TYPE_CHECKING:
    from rich.console import Console

    from rollback.inspect.document import Document

Answer = TypeVar("Answer", bound="Document")

# readable: one that may not be read is told of by who reads it, with 74; to typer it is wrong use.
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False, readable=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print as JSON (top-level `schema`: 1).")]


def show(answer: Answer, print_text: "Callable[[Console, Answer], None]", *, json: bool) -> None:
    """On stdout: as JSON, or as text for people."""
    from rollback.terminal.escape import console_for

    with answering():
        if json:
            print(answer.to_json())
        else:
            print_text(console_for(sys.stdout), answer)


@contextmanager
def answering(hint: str = "check the free space there, and give the command again") -> Iterator[None]:
    """Within, a command prints its answer on stdout. All of it is written on return, also a short one.

    Raises OutputNotWritten where that is refused (a full disk); hint: what is to be known or done then. A reader that
    has gone away (`| head`) has had enough: that is no error, and the exit code is that of the answer.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_stdout()
    except OSError as error:
        _give_up_stdout()
        raise OutputNotWritten(f"writing the answer to stdout: {error.strerror or error}", hint=hint) from error


def _give_up_stdout() -> None:
    """What is still to be written goes nowhere: Python would try once more at its end, and exit with a code of its
    own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class _HelpAnswer:
    def get_help(self, ctx: Any) -> str:
        """typer prints the help here, but without rich, and returns what it has not printed."""
        text = ""
        with answering():
            try:
                text = str(super().get_help(ctx))  # type: ignore[misc]
            except SystemExit as end:  # rich's, where the reader has gone away
                raise BrokenPipeError from end
        return text


class Command(_HelpAnswer, TyperCommand):
    """A command whose help goes by the rule of the other answers."""


class CommandGroup(_HelpAnswer, TyperGroup):
    """The same of several commands under one name."""


def say_notices(notices: Sequence[str]) -> None:
    """On stderr."""
    for notice in notices:
        say(f"notice: {notice}")
