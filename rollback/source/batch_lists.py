"""Lists of the batches of one update: what `next` has taken, and what a loop over batches gathers until it has enough:

    for batch in loader:
        micro.append(batch)
        if len(micro) == 4:
            update(micro)
            micro = []

The latter only where the file shows that the list is empty between updates, and when the loop begins: a checkpoint is
taken there, and has no batch that the script holds.
"""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator

from rollback.source.script_file import ScriptFile
from rollback.source.syntax import blocks_in, is_step, put_in_list, takes_or_names

_LEAVES = ast.Continue, ast.Break, ast.Return


def lists_taken(names: Collection[str], nodes: list[ast.AST], gathers: Callable[[ast.AST], bool]) -> bool:
    """Whether one of these names is given a list of what `next` takes, in these nodes. gathers: whether a call makes
    such a list."""
    given = [node for node in nodes if isinstance(node, ast.Assign)]
    parts = (
        item for node in given if takes_or_names(node.value) for target in node.targets for item in ast.walk(target)
    )
    taken = {item.id for item in parts if isinstance(item, ast.Name)}
    lists = [put_in_list(node) for node in nodes]
    lists += [(node.targets[0], node.value) for node in given if gathers(node.value)]
    return any(
        ast.unparse(target) in names and (takes_or_names(value, taken) or gathers(value))
        for target, value in filter(None, lists)
    )


def gathers_updates(file: ScriptFile, loop: ast.For, lists: Collection[str], inner: ast.For) -> bool:
    """Whether a loop gathers its batches for another loop that it comes to. lists: what that one goes over, as this one
    may call it."""
    return bool(lists) and any(
        any(node is inner for node in file.reached_by([part]))
        and all(_is_emptied(file, loop, block, place, name) for name in lists)
        for block in blocks_in(ast.Module(loop.body, []))
        for place, part in enumerate(block)
    )


def _is_emptied(file: ScriptFile, loop: ast.For, block: list[ast.stmt], place: int, name: str) -> bool:
    """Whether the list of that name is given each batch by one statement, in front of the update at this place of a
    block; is made empty behind it, and by what has it last in front of the loop; and nothing but this block makes
    updates. What the update does to the list is gone with it."""
    around = next((each for each in blocks_in(file.tree) if loop in each), [])
    before = around[: around.index(loop)] if around else []
    last = next((part for part in reversed(before) if _has(part, name)), None)
    behind = next((at for at in range(place + 1, len(block)) if _empties(block[at], name)), None)
    fills = [at for at, part in enumerate(loop.body) if _fills(part, name)]
    if behind is None or last is None or not _empties(last, name) or len(fills) != 1:
        return False
    filled, update = loop.body[fills[0]], block[place]
    if any(isinstance(node, ast.Continue) for part in loop.body[: fills[0]] for node in ast.walk(part)):
        return False  # it may pass over batches that it had trained on before it was started again
    leaves = any(isinstance(node, _LEAVES) for part in block[place:behind] for node in ast.walk(part))
    inside = {id(node) for part in block for node in ast.walk(part)}
    calls = [node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Call)]
    elsewhere = file.reached_by([call for call in calls if id(call) not in inside])
    updates_here = any(map(is_step, file.reached_by(block))) and not any(map(is_step, elsewhere))
    empties = (node for node in ast.walk(loop) if _empties(node, name))
    ours = {id(node) for part in (filled, *empties) for node in ast.walk(part)} | {
        id(node) for node in file.reached_by([update])
    }
    others = any(id(node) not in ours for node in _changes(file.reached_by(loop.body), name))
    return not leaves and not others and updates_here and filled.lineno < update.lineno


def _changes(nodes: Iterable[ast.AST], name: str) -> Iterator[ast.expr]:
    """What may change the list: it sets the name or a part of it, deletes from it, or calls a method of it."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=changed)) if ast.unparse(changed) == name:
                yield node
            case ast.Subscript(ctx=ast.Store() | ast.Del(), value=changed) if ast.unparse(changed) == name:
                yield node
            case ast.Name(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                if ast.unparse(node) == name:
                    yield node


def _has(part: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.expr) and ast.unparse(node) == name for node in ast.walk(part))


def _fills(part: ast.stmt, name: str) -> bool:
    """Whether this statement is what adds to the list, and no part of it may be left out."""
    match part:
        case ast.Expr(value=does) | (ast.AugAssign() as does):
            put = put_in_list(does)
        case _:
            return False
    return put is not None and ast.unparse(put[0]) == name


def _empties(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Expr(value=value):
            return _empties(value, name)
        case ast.Call(func=ast.Attribute(attr="clear", value=target), args=[]):
            return ast.unparse(target) == name
        case ast.Delete(targets=[ast.Subscript(value=target, slice=ast.Slice(None, None, None))]):
            return ast.unparse(target) == name
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
            return ast.unparse(target) == name and ast.unparse(value) in ("[]", "list()")
    return False
