"""What single nodes of a script's source are, whatever is around them; and the names that a file imports."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from typing import TypeGuard

Loop = ast.For | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | Function


def range_of(loop: ast.For) -> ast.Call | None:
    """The call of `range` over which a loop goes, also inside of `tqdm(...)`."""
    match loop.iter:
        case ast.Call(func=ast.Name(id="range")) as numbers:
            return numbers
        case ast.Call(func=ast.Name(id="zip")):
            return None
        case ast.Call(args=[ast.Call(func=ast.Name(id="range")) as numbers, *_]):
            return numbers
    return None


def begins_at(loop: ast.For, line: int) -> bool:
    """Whether its head is there."""
    return loop.lineno <= line <= (loop.iter.end_lineno or loop.lineno)


def of_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function or a file that are not in a function inside of it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from of_scope(node)


def parameters_of(function: Function) -> list[str]:
    """Those that are given by their place."""
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args)]


def cell_of(function: str, name: str) -> str:
    """How a script reads and sets a variable that a function has of the one that has returned it."""
    return f"{function}.__closure__[{function}.__code__.co_freevars.index({name!r})].cell_contents"


def without_cells(name: str) -> str:
    """The same in words: `mean of running`."""
    return re.sub(r"^(.*?)(?:\.__wrapped__)*\.__closure__\[.*\.index\('(\w+)'\)\]\.cell_contents", r"\2 of \1", name)


def is_marked(method: Function, by: str) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == by for mark in method.decorator_list)


def blocks_in(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements: bodies, and what is behind `else`, `except`, `finally`."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def leaving(nodes: Iterable[ast.AST], *, inner: bool = False) -> Iterator[ast.Return | ast.Break]:
    """The `return`s in a loop's body, and each `break` that is of no loop in it. inner: in the body of such a loop."""
    for node in nodes:
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and not inner):
            yield node
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            yield from leaving(node.body, inner=True)
            yield from leaving(node.orelse, inner=inner)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from leaving(ast.iter_child_nodes(node), inner=inner)


def may_lack(scope: ast.AST, name: str, at: ast.stmt) -> ast.stmt | None:
    """The first statement by which a name of the scope gets a value on the way to `at`, if it may get none: where that
    is in an `if` without an `else`. None: it has one, as each argument of a function, or never gets any."""
    if isinstance(scope, Function) and any(isinstance(it, ast.arg) and it.arg == name for it in ast.walk(scope.args)):
        return None
    before = [part for block in blocks_in(scope) for part in _in_front_of(at, block)]
    giving = (part for part in before if _gives(part, name))
    return None if any(_gives(part, name, always=True) for part in before) else next(giving, None)


def _in_front_of(at: ast.stmt, block: list[ast.stmt]) -> list[ast.stmt]:
    """Of a block that has `at`, also in its statements, those in front of it; of others none."""
    place = next((place for place, part in enumerate(block) if at in [*ast.walk(part)]), 0)
    return block[:place]


def _gives(part: ast.stmt, name: str, *, always: bool = False) -> bool:
    """Whether behind this statement a name may have a value of it; or always has, where anything comes behind it."""
    match part:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return False
        case ast.Raise() | ast.Return() | ast.Continue() | ast.Break() if always:
            return True
        case ast.If(body=body, orelse=orelse) if always:
            return all(any(_gives(each, name, always=True) for each in block) for block in (body, orelse))
        case ast.With(body=body) if always:
            return any(_gives(each, name, always=True) for each in body)
        case ast.For() | ast.While() | ast.Try() | ast.Match() if always:
            return False
    stored = (node for node in of_scope(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return any(node.id == name for node in stored)


def is_call_of(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def put_in_list(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """A list that is made or filled here, and of what, or with what; None: none is."""
    match node:
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
            if isinstance(target, ast.Subscript):
                return target.value, value
            makes = (
                isinstance(value, ast.ListComp | ast.List) or is_call_of(value, "list") or is_call_of(value, "tuple")
            )
            return (target, value) if makes else None
        case ast.AugAssign(target=target, value=value):
            return target, value
        case ast.Call(func=ast.Attribute(attr="append" | "extend", value=target), args=[value]):
            return target, value
    return None


def dotted(node: ast.AST) -> str | None:
    """`self.cfg.beta`; None: it is no chain of names."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=attribute, value=value):
            owner = dotted(value)
            return None if owner is None else f"{owner}.{attribute}"
    return None


def last_name(call: ast.Call) -> str:
    """`step` of `self.optimizer.step()`. The chain of calls that it may be of can be long: it is not gone through."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ast.unparse(call.func).rpartition(".")[2]


def calls_at(tree: ast.AST, line: int) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if call.lineno <= line <= (call.end_lineno or 0)]


def takes_or_names(value: ast.expr, names: Collection[str] = ()) -> bool:
    """Whether it calls `next`, or has one of these variables in it."""
    return any(
        is_call_of(node, "next") or (isinstance(node, ast.Name) and node.id in names) for node in ast.walk(value)
    )


def cycles_at(tree: ast.AST, line: int) -> bool:
    """Whether `itertools.cycle` goes over something at `line`. In a `zip` it may be what goes beside a loader."""
    names, calls = names_of_imports(tree), calls_at(tree, line)
    zipped = {id(node) for call in calls if is_call_of(call, "zip") for node in ast.walk(call)}
    return any(full_name(call.func, names) == "itertools.cycle" and id(call) not in zipped for call in calls)


def names_of_imports(tree: ast.AST) -> dict[str, str]:
    """Names that imports give to something else, and what that is."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                found |= {alias.asname: alias.name for alias in aliases if alias.asname}
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                found |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in aliases}
    return found


def own_names(tree: ast.AST) -> dict[str, int]:
    """By name, a line that gives it: variables, arguments, functions, classes, and what is imported; this package is
    not the script's own."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found[name] = node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node.lineno
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                given = {alias.asname or alias.name.partition(".")[0] for alias in aliases}
                ours = {"rollback"} if isinstance(node, ast.Import) else set()
                found |= dict.fromkeys(given - ours, node.lineno)
    return found


def behind_imports(tree: ast.Module, lines: list[str]) -> int:
    """The number of the line behind which another import belongs."""
    last = next((place for place, line in enumerate(lines) if not line.startswith("#")), 0)  # "#!", "# coding"
    for place, node in enumerate(tree.body):
        is_docstring = place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not isinstance(node, ast.Import | ast.ImportFrom) and not is_docstring:
            break
        last = node.end_lineno or 0
    return last


def full_name(called: ast.expr, names: dict[str, str]) -> str:
    """`itertools.cycle` of `it.cycle`, by the names of imports; empty: it is no chain of names."""
    root, dot, rest = (dotted(called) or "").partition(".")
    return names.get(root, root) + dot + rest


def comes_to(tree: ast.AST, loop: Loop | None, line: int) -> bool:
    """Whether who is at this line is in the loop, or beside it in the block that has it."""
    blocks = (block for block in blocks_in(tree) if loop in block)
    return any(part.lineno <= line <= (part.end_lineno or 0) for block in blocks for part in block)


def limits_or_counts(call: ast.Call) -> bool:
    name = last_name(call)
    counts = any(isinstance(item, ast.Call) and ast.unparse(item.func).endswith("count") for item in call.args)
    return name == "islice" or (name == "zip" and (counts or has_range(call)))


def limits_batches(node: ast.AST) -> TypeGuard[ast.Call]:
    match node:
        case ast.Call(func=ast.Name(id="zip"), args=[_, _], keywords=words):
            return has_range(node) and all(ast.unparse(word) == "strict=False" for word in words)
        case ast.Call(func=ast.Name(id="islice") | ast.Attribute(attr="islice"), args=[_, _]):
            return True
    return False


def has_range(call: ast.Call) -> bool:
    return any(is_call_of(item, "range") for item in call.args)


def names_epochs(loop: ast.For) -> bool:
    match loop.target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return "epoch" in name.lower()
    return False


def names_update(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return "optim" in name.lower() or name == "zero_grad"
    return False


def is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def is_step(node: ast.AST) -> bool:
    """`optimizer.step()`, whatever it is called; a scheduler's, too."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"


def is_train(node: ast.AST) -> bool:
    """`model.train()`; by an argument it may be the other mode."""
    match node:
        case ast.Call(func=ast.Attribute(attr="train"), args=[], keywords=[]):
            return True
    return False


def demands_item(tree: ast.AST, line: int) -> bool:
    """Whether `line` asks an iterator for one item by `next`, and is not prepared for there being none. What catches
    all errors of the taking is; around a whole loop it is for what goes wrong."""
    here = [call for call in calls_at(tree, line) if is_call_of(call, "next")]
    return any(len(call.args) == 1 for call in here) and not any(
        handler.type is None or _names(handler.type) & {"Exception", "BaseException"}
        for tried in _tries(tree, line)
        for handler in tried.handlers
        if not any(isinstance(node, Loop) and _has_line(node.body, line) for node in ast.walk(tried))
    )


def catches_end(tree: ast.AST, line: int) -> bool:
    """Whether an iterator's end that comes at `line` is caught, by its name."""
    suppressed = any(
        isinstance(node, ast.With) and _has_line(node.body, line) and "StopIteration" in _names(*node.items)
        for node in ast.walk(tree)
    )
    return suppressed or any(
        "StopIteration" in _names(handler.type) for tried in _tries(tree, line) for handler in tried.handlers
    )


def _tries(tree: ast.AST, line: int) -> list[ast.Try]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Try) and _has_line(node.body, line)]


def _names(*trees: ast.AST | None) -> set[str]:
    return {node.id for tree in trees if tree is not None for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _has_line(body: list[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)
