"""What a training loop counts beside the guard, and which of these counts can be led: put back with the training.

A rollback and a resume leave the variables of a script as they are. A count that decides when the loop is left ends the
training too early behind a rollback, and too late behind a resume.
"""

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from rollback.source.loops import ScriptLoops
from rollback.source.nodes import (
    Loop,
    begins_anew,
    has_range,
    is_call_of,
    last_name,
    limits_or_counts,
    names_update,
    of_scope,
)


@dataclass(frozen=True)
class OwnCounter:
    """What counts the script's batches or updates beside the guard: a variable that it adds 1 to, a `range`.

    ends: it decides when the loop is left. led: it is what it was, where `steered` has changed this file. loop: whose
    batches it counts.
    """

    name: str
    line: int
    ends: bool
    led: bool = False
    loop: Loop | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class LedCount:
    """A variable, or an attribute of one, that a training loop adds 1 to, and that nothing sets while the training goes
    on. loop: with the batch in hand at its top, or behind `taking`, the statements that take one by `next`."""

    name: str
    loop: Loop
    added: tuple[ast.AugAssign, ...]
    taking: tuple[ast.stmt, ...]


def own_counters(loops: ScriptLoops) -> list[OwnCounter]:
    """Of the training loops: what is added up in their bodies, and what limits them from outside."""
    found: dict[tuple[str, bool], OwnCounter] = {}
    led = {count.name for count in led_counts(loops)}
    added = (item for loop in loops.training for item in _added(loops, loop, led))
    for counter in (*_limiting(loops), *_numbered(loops), *added, *_of_epochs(loops, led)):
        found.setdefault((counter.name, counter.led), counter)
    return list(found.values())


def led_counts(loops: ScriptLoops) -> list[LedCount]:
    """Those of a file. Not where two of its training loops count by one name: they may not mean the same."""
    found = [count for loop in loops.training for count in _led(loops, loop)]
    names = [count.name for count in found]
    return [count for count in found if names.count(count.name) == 1]


def _led(loops: ScriptLoops, loop: Loop) -> Iterator[LedCount]:
    own = [node for part in loop.body for node in (part, *of_scope(part))]
    inner = {id(node) for node in own if node in loops.training for node in ast.walk(node)}
    added: dict[str, list[ast.AugAssign]] = {}
    for node in own:
        match node:
            case ast.AugAssign(
                op=ast.Add(), value=ast.Constant(value=int(1)), target=ast.Name() | ast.Attribute(ast.Name()) as target
            ):
                added.setdefault(ast.unparse(target), []).append(node)
    taking = tuple(part for part in loop.body if any(is_call_of(node, "next") for node in ast.walk(part)))
    if loop not in loops.batches and not taking:
        return  # what it calls takes the batch, and may look at the count there
    beside = {ast.unparse(node) for part in taking for node in ast.walk(part) if isinstance(node, ast.expr)}
    for name, nodes in added.items():  # beside the call that takes the batch a count is what it was before that
        if name not in beside and not any(id(node) in inner for node in nodes) and _is_runs(loops, loop, name, nodes):
            yield LedCount(name, loop, tuple(nodes), taking)


def _is_runs(loops: ScriptLoops, loop: Loop, name: str, added: list[ast.AugAssign]) -> bool:
    """Whether a count goes on through the whole run: nothing sets it in this loop or in one around it, nor in what
    these call; and a function that has it as its own variable runs once, as far as the file tells."""
    root, _, attribute = name.rpartition(".")
    led = {id(node.target) for node in added}
    around = loops.around(loop)
    for node in (node for each in (loop, *around) for node in (*ast.walk(each), *loops.reached(each))):
        if id(node) in led or not isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        if isinstance(node, ast.Name) and node.id in (name, root):
            return False
        if isinstance(node, ast.Attribute) and attribute and root and node.attr == attribute:
            return False
    function = loops.function_of(loop)
    if function is None or root:
        return True
    arguments = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    nested = any(each in of_scope(function) for each in around)
    return name not in arguments and (nested or loops.runs_once(loop))


def _added(loops: ScriptLoops, loop: Loop, led: Collection[str]) -> Iterator[OwnCounter]:
    """What outlives a turn of the loop. In what it calls, attributes alone: a patience, which its variables do not
    outlive."""
    deciding, own = _deciding(loops, loop), {id(node): node for node in ast.walk(loop)}
    for node in (*own.values(), *loops.reached(loop)):
        match node:
            case ast.AugAssign(op=ast.Add(), value=ast.Constant(value=1), target=target):
                name = ast.unparse(target)
                stays = id(node) in own and not begins_anew(name, node.lineno, loop)
                if stays or isinstance(target, ast.Attribute):
                    yield OwnCounter(name, node.lineno, name in deciding, name in led, loop)
            case ast.If(test=test, body=[*body]) if id(node) in own:  # `if i - last >= n: update(); last = i`
                inside = [item for part in body for item in ast.walk(part)]
                asked = {
                    ast.unparse(item.right)
                    for item in ast.walk(test)
                    if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Sub)
                }
                for item in inside if any(map(names_update, inside)) else ():
                    if isinstance(item, ast.Assign) and (name := ast.unparse(item.targets[0])) in asked:
                        yield OwnCounter(name, item.lineno, name in deciding, name in led, loop)


def _of_epochs(loops: ScriptLoops, led: Collection[str]) -> Iterator[OwnCounter]:
    """By which a loop over epochs is left, behind their batches: a patience. What is led is none."""
    for epochs in loops.steerable:
        deciding = _deciding(loops, epochs)
        inner = [loop for loop in ast.walk(epochs) if loop in loops.training and loop is not epochs]
        inside = {id(node) for loop in inner for node in ast.walk(loop)}
        for node in ast.walk(epochs):
            match node:
                case ast.AugAssign(op=ast.Add(), value=ast.Constant(value=1), target=target) if id(node) not in inside:
                    name = ast.unparse(target)
                    if name in deciding and name not in led and not begins_anew(name, node.lineno, epochs):
                        yield OwnCounter(name, node.lineno, True, False, epochs)
        yield from _of_stoppers(loops, epochs, deciding)


def _of_stoppers(loops: ScriptLoops, epochs: ast.For, deciding: Collection[str]) -> Iterator[OwnCounter]:
    """What an object counts by which a loop over epochs is left, `if stopper.stop: break`, where the loop does not make
    it and the file has its class."""
    anew = {id(node) for node in ast.walk(epochs)}
    trains = {id(node) for loop in loops.training for node in loops.reached(loop)}
    made = {
        last_name(node.value) for node in ast.walk(loops.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and id(node) not in anew
        and any(ast.unparse(target) in deciding for target in node.targets)
    }  # fmt: skip
    classes = (node for node in ast.walk(loops.tree) if isinstance(node, ast.ClassDef) and node.name in made)
    for node in (item for each in classes for item in ast.walk(each) if id(item) not in trains):
        match node:
            case ast.AugAssign(op=ast.Add(), value=ast.Constant(value=1), target=ast.Attribute() as target):
                yield OwnCounter(ast.unparse(target), node.lineno, True, False, epochs)


def _numbered(loops: ScriptLoops) -> Iterator[OwnCounter]:
    for loop in loops.batches:
        if (counted := loops.enumerated(loop)) is not None:
            ends = counted[0] in _deciding(loops, loop)
            yield OwnCounter(counted[0], loop.lineno, ends, not loops.carries_on(loop), loop)


def _deciding(loops: ScriptLoops, loop: Loop) -> set[str]:
    """What the loop, or a `while` around it, is ended by."""
    leaving = set(_leaving(loop.body))
    ends = [node.test for node in ast.walk(loop) if isinstance(node, ast.If) and not leaving.isdisjoint(ast.walk(node))]
    turning = (node for node in ast.walk(loops.tree) if isinstance(node, ast.While))
    ends += [node.test for node in turning if node is loop or any(item is loop for item in loops.reached(node))]
    return {
        ast.unparse(item)
        for test in ends
        for item in ast.walk(test)
        if isinstance(item, ast.Name | ast.Attribute | ast.Subscript)
    }


def _leaving(nodes: Iterable[ast.AST], *, inner: bool = False) -> Iterator[ast.AST]:
    """The `return`s in a loop's body, and each `break` that is of no loop in it. inner: in the body of such a loop."""
    for node in nodes:
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and not inner):
            yield node
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            yield from _leaving(node.body, inner=True)
            yield from _leaving(node.orelse, inner=inner)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _leaving(ast.iter_child_nodes(node), inner=inner)


def _begins_iterator(loops: ScriptLoops, loop: Loop) -> bool:
    """Whether each turn of a loop begins an iterator, from which a loop in it takes: it goes over epochs."""
    inner = [each for each in loops.training if each is not loop and each in loops.reached(loop)]
    taken = {node for each in inner for node in loops.reached(each)}
    caught = (node for node in loops.reached(loop) if isinstance(node, ast.ExceptHandler))
    within = {item for handler in caught for item in ast.walk(handler)}
    return any(is_call_of(node, "iter") and node not in taken | within for node in loops.reached(loop))


def _limiting(loops: ScriptLoops) -> Iterator[OwnCounter]:
    """What else limits a loop over batches from outside, or counts; the `range` of one that goes by `next`."""
    for batches in loops.batches:
        ours = loops.limits(batches)
        for call in ast.walk(batches.iter):
            if isinstance(call, ast.Call) and limits_or_counts(call):
                ends = not is_call_of(call, "zip") or has_range(call)
                yield OwnCounter(ast.unparse(call), call.lineno, ends, call in ours, batches)
    led = [*loops.steerable, *(each.loop for each in loops.by_turns)]
    epochs = [loop for loop in loops.drawing if loop in loops.steerable or _begins_iterator(loops, loop)]
    for loop in loops.drawing:
        parts = any(each in loops.training and each not in epochs for each in loops.around(loop))
        if not parts and (loop in led or loop not in epochs):  # parts of an update are begun anew for each
            yield OwnCounter(ast.unparse(loop.target), loop.lineno, True, loop in led, loop)
