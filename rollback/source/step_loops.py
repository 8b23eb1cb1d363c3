"""Loops over a range that take one batch in each iteration, `for i in range(n): batch = next(batches)`, or those of one
update: `for i in range(n): micro = [next(batches) for _ in range(k)]`.

Only those of which the file shows that nothing else takes from the iterator, and when it is made: for each epoch, in
front of the loop and in the same block, or once. And none whose iterations draw random numbers in front of their batch:
with that the random states are put back.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollback.source.script_file import ScriptFile
from rollback.source.syntax import Loop, is_call_of, is_step, last_name, range_of

_NESTED = (
    ast.For, ast.AsyncFor, ast.While, ast.If, ast.IfExp, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Match, ast.BoolOp,
)  # fmt: skip
"""What may take a batch not at all, or again and again."""
_DRAWS = (
    "bernoulli", "choice", "choices", "gauss", "integers", "multinomial", "normal", "normal_", "permutation", "sample",
    "shuffle", "uniform", "uniform_",
)  # fmt: skip
"""What draws random numbers by a name without "rand" in it."""


@dataclass(frozen=True)
class StepLoop:
    """takes: its calls of `next`. several: whether an iteration may take several batches by them; else each takes one.
    in_epochs: whether what they take from is made anew for each epoch, around the loop; else the loop goes over the
    whole training."""

    loop: ast.For
    takes: tuple[ast.Call, ...]
    several: bool
    in_epochs: bool


def step_loop(file: ScriptFile, loop: ast.For, around: list[Loop]) -> StepLoop | None:
    """What a loop over a range is that trains and calls `next`, if it is such a loop. around: all loops that come to
    it, also by way of functions."""
    takes, several = _takes(loop), False
    if takes is None and _updates_behind_takes(file, loop):
        takes, several = _takes(loop, several=True), True
    block = next((block for block in _blocks(file.tree) if loop in block), None)
    before_takes = [*_before_takes(loop.body)]
    if takes is None or block is None or len(around) > 1 or any(map(_draws, file.reached_by(before_takes))):
        return None
    if several and _carries_size(loop, before_takes):
        return None
    # of a loop that is begun again, by what the file does not show, the places go on where it had all of its iterations
    all_turns = not several and not any(isinstance(node, ast.Break | ast.Return) for node in ast.walk(loop))
    if not (all_turns or around or file.runs_once(loop)):
        return None
    taken = ast.unparse(takes[0].args[0])
    before = block[: block.index(loop)]
    made = [part for part in before if isinstance(part, ast.Assign) and taken in map(ast.unparse, part.targets)]
    inside = {id(node) for node in ast.walk(loop)}
    uses = [node for node in ast.walk(file.tree) if isinstance(node, ast.expr) and ast.unparse(node) == taken]
    elsewhere = [node for node in uses if id(node) not in inside and not _is_stored(node)]
    anew = [node for node in uses if id(node) in inside and _is_stored(node)]
    if len(made) != 1 or elsewhere or (around and anew) or not _begins_alike(loop):
        return None
    iterates = any(is_call_of(node, "iter") for node in ast.walk(made[0].value))
    return StepLoop(loop, takes, several, bool(around)) if iterates or not around else None


def _before_takes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """What runs in front of the first call of `next`."""
    for part in body:
        if not any(is_call_of(node, "next") for node in ast.walk(part)):
            yield part
            continue
        yield from (node.iter for node in ast.walk(part) if isinstance(node, ast.For | ast.comprehension))
        begins = min((node.lineno, node.col_offset) for node in ast.walk(part) if is_call_of(node, "next"))
        calls = (node for node in ast.walk(part) if isinstance(node, ast.Call))
        yield from (node for node in calls if (node.end_lineno or 0, node.end_col_offset or 0) <= begins)
        yield from _before_takes(getattr(part, "body", []))
        return


def _carries_size(loop: ast.For, before: list[ast.AST]) -> bool:
    """Whether how many batches an iteration takes goes by what iterations before it have set: that is put back with a
    batch."""
    sizes = {name for node in before if isinstance(node, ast.expr) for name in _named(node)}
    for part in reversed(before):
        if isinstance(part, ast.Assign) and any(_named(target) & sizes for target in part.targets):
            sizes |= _named(part.value)
    behind = [node for part in loop.body if part not in before for node in ast.walk(part)]
    added = [node.target for node in ast.walk(loop) if isinstance(node, ast.AugAssign)]
    return any(
        ast.unparse(node) in sizes for node in (*behind, *added) if isinstance(node, ast.expr) and _is_stored(node)
    )


def _named(value: ast.AST) -> set[str]:
    """The variables and attributes in it."""
    return {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute)}


def _draws(node: ast.AST) -> bool:
    """Whether it names what draws random numbers."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return "rand" in name or name in _DRAWS
    return False


def _updates_behind_takes(file: ScriptFile, loop: ast.For) -> bool:
    """Whether each iteration makes one update, for all that the file shows: behind the statements that take batches, or
    in what the last of them gives these batches to, `update([next(batches) for _ in range(4)])`."""
    takes = [at for at, part in enumerate(loop.body) if any(is_call_of(node, "next") for node in ast.walk(part))]
    updates = [at for at, part in enumerate(loop.body) if any(map(is_step, file.reached_by([part])))]
    if takes and updates and max(takes) == min(updates):
        match loop.body[max(takes)]:
            case ast.Expr(value=ast.Call() as call) | ast.Assign(value=ast.Call() as call):
                return not any(map(is_step, file.reached_by([*call.args, *call.keywords])))
    return bool(takes and updates) and max(takes) < min(updates)


def _begins_alike(loop: ast.For) -> bool:
    """Whether its numbers begin with the same one in each process, and not where the script's own snapshot says."""
    numbers = range_of(loop)
    if isinstance(loop.iter, ast.Call) and numbers is not loop.iter:
        name = last_name(loop.iter)
        numbers = loop.iter if name == "trange" else numbers if name == "tqdm" else None
    return numbers is not None and (len(numbers.args) == 1 or isinstance(numbers.args[0], ast.Constant))


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The bodies of the file, of its functions and of its loops."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.For):
            yield node.body


def _takes(loop: ast.For, *, several: bool = False) -> tuple[ast.Call, ...] | None:
    """The calls of `next` in a loop's body if each iteration takes one batch by them: one, and others that catch its
    end.

    several: if it takes so many as loops over a range in the body's statements say."""
    calls = [node for node in ast.walk(loop) if is_call_of(node, "next")]
    found = [*_direct(loop.body, several=several)]
    direct = [call for call, caught in found if not caught]
    names = {ast.unparse(call.args[0]) for call in calls if call.args}
    if (len(direct) != 1 and not several) or len(found) != len(calls) or len(names) != 1:
        return None
    places = [place for place, part in enumerate(loop.body) if any(node in calls for node in ast.walk(part))]
    for node in (node for part in loop.body[: places[-1] + 1] for node in ast.walk(part)):
        if isinstance(node, ast.Continue) or (several and isinstance(node, ast.Break)):
            return None  # an iteration may take none
        if isinstance(node, ast.ExceptHandler) and (node.type is None or "BaseException" in ast.unparse(node.type)):
            return None  # it may catch what ends an iteration
    takes = (*direct, *(call for call, caught in found if caught))
    return takes if all(len(call.args) == 1 and isinstance(call.args[0], ast.Name) for call in takes) else None


def _direct(body: Iterable[ast.AST], *, several: bool, caught: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """The calls of `next` that each iteration comes to, and those in handlers of errors, with whether it is one."""
    for node in body:
        if isinstance(node, _NESTED) and not (several and _is_repeated(node)):
            continue
        if is_call_of(node, "next"):
            yield node, caught
        catches = caught or isinstance(node, ast.ExceptHandler)
        yield from _direct(ast.iter_child_nodes(node), several=several, caught=catches)


def _is_repeated(node: ast.AST) -> bool:
    """Whether it does something as often as a range is long."""
    match node:
        case ast.For(iter=numbers, orelse=[]) | ast.ListComp(generators=[ast.comprehension(iter=numbers, ifs=[])]):
            return is_call_of(numbers, "range")
    return False


def _is_stored(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)
