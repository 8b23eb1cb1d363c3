"""`rollback adopt`: the diff that writes a guard into a script."""

import io
import sys
import tokenize
from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.answers import answering
from rollback.errors import UsageError
from rollback.terminal.messages import say

_LARGEST = 64 << 20  # bytes of a script


def adopt(
    script: Annotated[Path, typer.Argument(help="Training script.", metavar="SCRIPT", show_default=False)],
) -> None:
    """Print the diff that protects a script by lines of its own, in place of `rollback launch --adopt`.

    `rollback adopt train.py | patch train.py` applies it. Nothing of the script is run, and nothing is written.
    """
    from rollback.source.guard_diff import guard_diff
    from rollback.source.loop_variables import loop_variables
    from rollback.source.loops import ScriptLoops

    try:
        with script.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UsageError(f"{script} has more than {_LARGEST >> 20} MiB: it is no training script")
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0].removesuffix("-sig")  # the mark is kept
        source = content.decode(encoding)
    except (OSError, UnicodeDecodeError, LookupError, SyntaxError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the training script {script} cannot be read: {why}", hint="name a Python file: rollback adopt train.py"
        ) from error
    diff = guard_diff(source, str(script))
    with answering():
        # The script's own bytes; of its name, what can be.
        sys.stdout.buffer.write(diff.text.encode(encoding, "replace"))
    variables = loop_variables(ScriptLoops(source.removeprefix("\ufeff")))
    unkept = (variable for variable in variables if variable.name not in diff.keeps)
    if carried := dict.fromkeys((variable.shown, variable.line) for variable in unkept):
        names = ", ".join(f"`{name}` (line {line})" for name, line in carried)
        say(
            f"the script hands on from iteration to iteration what a guard does not know: {names}. A resume and a "
            "rollback leave that as it is, but for what you let guard.keep keep: docs/guard.md, values of your own"
        )
    if diff.leaves:
        at = ("line " if len(diff.leaves) == 1 else "lines ") + ", ".join(map(str, diff.leaves))
        say(
            f"the script leaves its training by itself ({at}): a run that ends so in the midst of an epoch does not "
            "count as complete, and its launch ends with 1. Have the guard end it: in place of `break`, "
            '`if guard.finish("enough"): break`'
        )
