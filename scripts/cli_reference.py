"""Write docs/cli.md: what every command prints for --help.

python scripts/cli_reference.py            write it
python scripts/cli_reference.py --check    exit 1 if it is not what would be written
"""

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner

from rollback.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
_HEAD = """\
# Command line

What every command prints for `--help`; `python scripts/cli_reference.py` writes this page. Data goes to stdout,
progress and prose to stderr, and `NO_COLOR` is honoured.
"""


def reference() -> str:
    """The page."""
    # The width is read when typer is imported, from a variable that the person at the terminal may have set.
    with mock.patch("typer.rich_utils.MAX_WIDTH", 110):
        return "\n".join([_HEAD, *(_section(path) for path in _commands(typer.main.get_command(app), []))])


def _commands(command: Any, path: list[str]) -> list[list[str]]:
    """The words of every command that does something, groups of commands dissolved."""
    inner = getattr(command, "commands", None)
    return [path] if inner is None else [found for name in inner for found in _commands(inner[name], [*path, name])]


def _section(path: list[str]) -> str:
    runner = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "110", "TERM": "dumb"})
    result = runner.invoke(app, [*path, "--help"], prog_name="rollback")
    text = "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines())
    return f"## rollback {' '.join(path)}\n\n```text\n{text.strip()}\n```\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/cli.md: what every command prints for --help.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(reference())
    elif not PAGE.exists() or PAGE.read_text() != reference():
        sys.exit(f"{PAGE.name} is out of date: run python scripts/cli_reference.py")
