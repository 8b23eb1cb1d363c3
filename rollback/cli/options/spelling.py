"""Reading a command line as torchrun reads its own: abbreviated flags, both spellings, and flags newer than our table.

typer knows none of this, so the words before the script are rewritten in full before typer sees them.
"""

import argparse
import importlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from rollback.cli.answers import Command
from rollback.supervisor.torchrun.flags import FLAGS, Flag, in_full

# How a flag that only the installed torchrun knows is handed on: by a hidden option, as one word of torchrun's.
OTHER_FLAG = "--torchrun-flag"
STANDS_FOR = {"--adopt": "notice"}
"""Flags that may stand without a value, and the value that they have then."""


def spell_out(
    words: Sequence[str],
    takes_value: Mapping[str, bool],
    unknown: Callable[[str], bool | None],
    elsewhere: Container[str] = (),
) -> list[str]:
    """The words of a command line with every flag before the script in full and with dashes.

    takes_value: of every flag that is known, with its dashes. An abbreviation stands for a flag of torchrun; a name
    that is a flag in full is never one. unknown: the same for a name that is neither; None where it is no flag at all.
    elsewhere: flags of another command: no abbreviations here either (`--run`, of `--run-path`).
    """
    found: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if not word.startswith("--"):
            found.append(word)
            if takes_value.get(word) and rest:
                found.append(rest.pop(0))
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in takes_value and name not in elsewhere:
            name = f"--{in_full(name[2:])}"
        if name in STANDS_FOR and not equals:
            equals, value = "=", STANDS_FOR[name]
        takes = takes_value[name] if name in takes_value else unknown(name)
        if takes and not equals and rest:
            equals, value = "=", rest.pop(0)
        full = f"{name}{equals}{value}"
        found.append(full if name in takes_value or takes is None else f"{OTHER_FLAG}={full}")
    return [*found, *rest]


def flags_of(parser: argparse.ArgumentParser) -> tuple[Flag, ...]:
    """The flags of torchrun's own parser, without those that print something in place of a job."""
    found = []
    for action in parser._actions:
        names = [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
        if not names or isinstance(action, argparse._HelpAction) or names[0] == "print-completion":
            continue
        short = next((name[1:] for name in action.option_strings if not name.startswith("--")), None)
        metavar = None if action.nargs == 0 else action.dest.upper()
        reads_variable = type(action).__name__ in ("env", "check_env")
        found.append(Flag(names[0].replace("_", "-"), metavar, action.help or "", short, reads_variable))
    return tuple(found)


class LaunchCommand(Command):
    """A command that takes torchrun's flags as torchrun does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not option.is_flag
            for option in map(_as_any, self.get_params(ctx))
            if hasattr(option, "is_flag")
            for name in [*option.opts, *option.secondary_opts]
        }
        launch = ctx.parent.command.commands["launch"] if ctx.parent is not None else self
        elsewhere = {name for option in map(_as_any, launch.params) for name in option.opts}
        return super().parse_args(ctx, spell_out(args, takes_value, ask_torchrun, elsewhere))


def _as_any(option: object) -> Any:
    """typer brings its own copy of click in some versions and not in others, so that its classes have no one name."""
    return option


def ask_torchrun(option: str) -> bool | None:
    """Whether a flag that our table lacks takes a value, None where torchrun lacks it too.

    torchrun takes seconds to import: this is for a flag that is unknown otherwise.
    """
    try:
        launcher: Any = importlib.import_module("torch.distributed.run")
    except ImportError:
        return None
    known = {flag.name for flag in FLAGS}
    others = (flag for flag in flags_of(launcher.get_args_parser()) if flag.name not in known)
    return next((flag.metavar is not None for flag in others if flag.option == option), None)
