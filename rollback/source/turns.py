"""Loops over a range that take one batch in each turn: `for i in range(n): batch = next(batches)`.

Only those of which the file shows that nothing else takes from the iterator, and when it is made: for each epoch, in
front of the loop and in the same block, or once.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollback.source.nodes import Loop, is_call_of, range_of

_NESTED = (
    ast.For, ast.AsyncFor, ast.While, ast.If, ast.IfExp, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Match, ast.BoolOp,
)  # fmt: skip
"""What may take a batch not at all, or again and again."""


@dataclass(frozen=True)
class TurningLoop:
    """takes: its calls of `next`, of which each turn comes to one. in_epochs: whether what they take from is made anew
    for each epoch, around the loop; else the loop goes over the whole training."""

    loop: ast.For
    takes: tuple[ast.Call, ...]
    in_epochs: bool


def turning_loop(tree: ast.Module, loop: ast.For, around: list[Loop]) -> TurningLoop | None:
    """What a loop over a range is that trains and calls `next`, if it is such a loop. around: all loops that come to
    it, also by way of functions."""
    takes = _takes(loop)
    block = next((block for block in _blocks(tree) if any(part is loop for part in block)), None)
    if takes is None or block is None or len(around) > 1:
        return None
    taken = ast.unparse(takes[0].args[0])
    before = block[: next(place for place, part in enumerate(block) if part is loop)]
    made = [part for part in before if isinstance(part, ast.Assign) and taken in map(ast.unparse, part.targets)]
    inside = {id(node) for node in ast.walk(loop)}
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.expr) and ast.unparse(node) == taken]
    elsewhere = [node for node in uses if id(node) not in inside and not _is_stored(node)]
    anew = [node for node in uses if id(node) in inside and _is_stored(node)]
    if len(made) != 1 or elsewhere or (around and anew) or not _begins_alike(loop):
        return None
    iterates = any(is_call_of(node, "iter") for node in ast.walk(made[0].value))
    return TurningLoop(loop, takes, bool(around)) if iterates or not around else None


def _begins_alike(loop: ast.For) -> bool:
    """Whether its numbers begin with the same one in each process, and not where the script's own snapshot says."""
    numbers = range_of(loop)
    return numbers is not None and (len(numbers.args) == 1 or isinstance(numbers.args[0], ast.Constant))


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The bodies of the file, of its functions and of its loops."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.For):
            yield node.body


def _takes(loop: ast.For) -> tuple[ast.Call, ...] | None:
    """The calls of `next` in a loop's body if each turn takes one batch by them: one, and others that catch its end."""
    calls = [node for node in ast.walk(loop) if is_call_of(node, "next")]
    direct, caught = _direct(loop.body)
    names = {ast.unparse(call.args[0]) for call in calls if call.args}
    if len(direct) != 1 or len(direct) + len(caught) != len(calls) or len(names) != 1:
        return None
    taking = next(place for place, part in enumerate(loop.body) if any(node is direct[0] for node in ast.walk(part)))
    for node in (node for part in loop.body[: taking + 1] for node in ast.walk(part)):
        if isinstance(node, ast.Continue):
            return None  # a turn may take none
        if isinstance(node, ast.ExceptHandler) and (node.type is None or "BaseException" in ast.unparse(node.type)):
            return None  # it may catch what ends a turn
    takes = (*direct, *caught)
    return takes if all(len(call.args) == 1 and isinstance(call.args[0], ast.Name) for call in takes) else None


def _direct(body: Iterable[ast.AST], *, caught: bool = False) -> tuple[list[ast.Call], list[ast.Call]]:
    """The calls of `next` that each turn comes to, and those in handlers of errors."""
    found: tuple[list[ast.Call], list[ast.Call]] = [], []
    for node in body:
        if isinstance(node, _NESTED):
            continue
        if is_call_of(node, "next"):
            found[caught].append(node)
        within = _direct(ast.iter_child_nodes(node), caught=caught or isinstance(node, ast.ExceptHandler))
        found[0].extend(within[0])
        found[1].extend(within[1])
    return found


def _is_stored(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)
