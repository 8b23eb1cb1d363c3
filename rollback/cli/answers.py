"""What reading commands have in common: the argument RUN, an answer as text or JSON, and what could not be read."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from rollback.terminal.messages import say

if TYPE_CHECKING:
    from rich.console import Console

    from rollback.inspect.audit.report import Document

Answer = TypeVar("Answer", bound="Document")

RunArgument = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


def show(answer: Answer, print_text: "Callable[[Console, Answer], None]", *, json: bool) -> None:
    """On stdout: as JSON, or as text for people."""
    from rollback.terminal.escape import console_for

    if json:
        print(answer.to_json())
    else:
        print_text(console_for(sys.stdout), answer)


def say_notices(notices: Sequence[str]) -> None:
    """On stderr."""
    for notice in notices:
        say(f"notice: {notice}")
