"""Loops over a range that take one batch in each turn: `for i in range(n): batch = next(batches)`."""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rollback.source.nodes import is_call_of

_NESTED = (
    ast.For, ast.AsyncFor, ast.While, ast.If, ast.IfExp, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Match,
)  # fmt: skip
"""What may take a batch not at all, or again and again."""


@dataclass(frozen=True)
class TurningLoop:
    """takes: its calls of `next`, of which each turn comes to one. in_epochs: whether what they take from is made anew
    for each epoch, around the loop; else the loop goes over the whole training."""

    loop: ast.For
    takes: tuple[ast.Call, ...]
    in_epochs: bool


def turning_loops(
    drawing: Iterable[ast.For],
    reached: Callable[[ast.For], Iterator[ast.AST]],
    around: Callable[[ast.For], object],
    *,
    alone: bool,
) -> list[TurningLoop]:
    """drawing: loops over a range that train and call `next`, with no loop over batches inside. reached: the nodes of a
    body, and of what it calls. around: a loop by which one is begun anew. alone: whether no other loops train."""
    loops = list(drawing)
    found = []
    for loop in loops:
        takes = _takes(loop)
        if takes is None or any(node is not loop and node in loops for node in ast.walk(loop)):
            continue
        taken = ast.unparse(takes[0].args[0])
        outer = [other for other in loops if other is not loop and any(node is loop for node in reached(other))]
        inside = {id(node) for node in ast.walk(loop)}
        if outer:
            makes = {id(node) for other in outer for node in reached(other) if _makes(node, taken)}
            if makes and not makes & inside:
                found.append(TurningLoop(loop, takes, True))
        elif alone and around(loop) is None:
            found.append(TurningLoop(loop, takes, False))
    flat = [each for each in found if not each.in_epochs]
    return [each for each in found if each.in_epochs or flat == [each]]


def _takes(loop: ast.For) -> tuple[ast.Call, ...] | None:
    """The calls of `next` in a loop's body if each turn takes one batch by them: one, and others that catch its end."""
    calls = [node for node in ast.walk(loop) if is_call_of(node, "next")]
    direct, caught = _direct(loop.body)
    names = {ast.unparse(call.args[0]) for call in calls if isinstance(call, ast.Call) and call.args}
    if len(direct) != 1 or len(direct) + len(caught) != len(calls) or len(names) != 1:
        return None
    takes = (*direct, *caught)
    return takes if all(isinstance(call.args[0], ast.Name | ast.Attribute) for call in takes) else None


def _direct(body: Iterable[ast.AST], *, caught: bool = False) -> tuple[list[ast.Call], list[ast.Call]]:
    """The calls of `next` that each turn comes to, and those in handlers of errors."""
    found: tuple[list[ast.Call], list[ast.Call]] = [], []
    for node in body:
        if isinstance(node, _NESTED):
            continue
        if isinstance(node, ast.Call) and is_call_of(node, "next"):
            found[caught].append(node)
        within = _direct(ast.iter_child_nodes(node), caught=caught or isinstance(node, ast.ExceptHandler))
        found[0].extend(within[0])
        found[1].extend(within[1])
    return found


def _makes(node: ast.AST, name: str) -> bool:
    """Whether it is an assignment of an iterator to that name."""
    match node:
        case ast.Assign(targets=[target], value=value) if ast.unparse(target) == name:
            return any(is_call_of(each, "iter") for each in ast.walk(value))
    return False
