"""Whether a script starts its ranks by itself, as one does that is begun by `python`: by torch.multiprocessing.spawn,
or by processes whose function makes a process group.

Under torchrun, and so under `rollback launch`, such a script hangs: torchrun tells every process below it that there is
a store already, so the new ones wait for one at an address of the script's own, where nobody opens it.
"""

import ast

from rollback.source.syntax import Function, full_name, last_name, names_of_imports

_SPAWN = ("spawn", "spawn.spawn", "start_processes", "spawn.start_processes")
_STARTS_RANKS = frozenset(f"torch.multiprocessing.{name}" for name in _SPAWN)


def line_of_spawn(source: bytes) -> int | None:
    """Where the script first does so; None: nowhere, as far as its own file tells, or that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = names_of_imports(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    meeting = _meeting(tree)
    return next(
        (call.lineno for call in calls if full_name(call.func, names) in _STARTS_RANKS or _runs(call, meeting)), None
    )


def _runs(call: ast.Call, functions: set[str]) -> bool:
    """Whether it is `Process(target=f)` of one of these, of whatever module or context."""
    given = (word.value for word in call.keywords if word.arg == "target")
    return last_name(call) == "Process" and any(isinstance(f, ast.Name) and f.id in functions for f in given)


def _meeting(tree: ast.Module) -> set[str]:
    """Functions of the file that make a process group, also by way of others."""
    called = {
        node.name: {last_name(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
        for node in ast.walk(tree) if isinstance(node, Function)
    }  # fmt: skip
    found: set[str] = set()
    while more := {name for name, calls in called.items() if calls & (found | {"init_process_group"})} - found:
        found |= more
    return found
