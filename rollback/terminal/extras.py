"""Packages that only some commands need, and that are installed on request."""

import importlib

from rollback.errors import UsageError


def require_extra(module: str, need: str, extra: str, otherwise: str = "") -> None:
    """Raise UsageError where a module cannot be imported, with the command that installs it.

    need: what needs which package. extra: of ours that has it. otherwise: what else the user can do.
    """
    try:
        importlib.import_module(module)
    except Exception as error:  # what it needs in turn may be of another version, and raise anything
        raise UsageError(
            f"{need}, which cannot be imported ({error})", hint=f"pip install 'torch-rollback[{extra}]'{otherwise}"
        ) from error
