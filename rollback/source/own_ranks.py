"""Whether a script starts its ranks by itself, as one does that is begun by `python`: torch.multiprocessing.spawn.

Under torchrun, and so under `rollback launch`, such a script hangs: torchrun tells every process below it that there is
a store already, so the new ones wait for one at an address of the script's own, where nobody opens it.
"""

import ast
from collections.abc import Iterator

_SPAWN = ("spawn", "spawn.spawn", "start_processes", "spawn.start_processes")
_STARTS_RANKS = frozenset(f"torch.multiprocessing.{name}" for name in _SPAWN)


def line_of_spawn(source: bytes) -> int | None:
    """Where the script first does so; None: nowhere, as far as its own file tells, or that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = dict(_imported(tree))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return next((call.lineno for call in calls if _full_name(call.func, names) in _STARTS_RANKS), None)


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that imports give to something else, and what that is."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((alias.asname, alias.name) for alias in aliases if alias.asname)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in aliases)


def _full_name(called: ast.expr, names: dict[str, str]) -> str | None:
    match called:
        case ast.Name(id=name):
            return names.get(name, name)
        case ast.Attribute(value=owner, attr=name) if (of := _full_name(owner, names)) is not None:
            return f"{of}.{name}"
    return None
