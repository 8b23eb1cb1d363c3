"""`rollback adopt`: the diff that writes a guard into a script."""

from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.answers import answering
from rollback.errors import UsageError


def adopt(
    script: Annotated[Path, typer.Argument(help="Training script.", metavar="SCRIPT", show_default=False)],
) -> None:
    """Print the diff that protects a script by lines of its own, in place of `rollback launch --adopt`.

    `rollback adopt train.py | patch train.py` applies it. Nothing of the script is run, and nothing is written.
    """
    from rollback.source.explicit import diff_of

    try:
        source = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the training script {script} cannot be read: {why}", hint="name a Python file: rollback adopt train.py"
        ) from error
    diff = diff_of(source, str(script))
    with answering():
        print(diff, end="")
