"""Whether a script starts its ranks by itself, as one does that is begun by `python`: torch.multiprocessing.spawn.

Under torchrun, and so under `rollback launch`, such a script hangs: torchrun tells every process below it that there is
a store already, so the new ones wait for one at an address of the script's own, where nobody opens it.
"""

import ast

from rollback.source.syntax import full_name, names_of_imports

_SPAWN = ("spawn", "spawn.spawn", "start_processes", "spawn.start_processes")
_STARTS_RANKS = frozenset(f"torch.multiprocessing.{name}" for name in _SPAWN)


def line_of_spawn(source: bytes) -> int | None:
    """Where the script first does so; None: nowhere, as far as its own file tells, or that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = names_of_imports(tree)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return next((call.lineno for call in calls if full_name(call.func, names) in _STARTS_RANKS), None)
