"""What a training loop counts beside the guard, and which of these counts can be restored with the training.

A rollback and a resume leave the variables of a script as they are. A count that decides when the loop is left ends the
training too early behind a rollback, and too late behind a resume.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollback.source.loop_carried import has_part_in, names_in
from rollback.source.loop_variables import Dependence, carried_by_loops, innermost, loop_variables
from rollback.source.loops import ScriptLoops
from rollback.source.syntax import Loop, has_range, is_call_of, last_name, leaving, limits_or_counts


@dataclass(frozen=True)
class LoopCounter:
    """What counts the script's batches or updates beside the guard, a variable that it adds 1 to, a `range`; or what it
    carries from iteration to iteration, and trains by.

    ends: it decides when the loop is left. restored: it is what it was, where `instrumented` has changed this file.
    counts: whether it counts. trains: whether what is trained depends on it. loop: whose iterations.
    """

    name: str
    line: int
    ends: bool
    restored: bool = False
    counts: bool = True
    trains: bool = field(default=False, compare=False)
    loop: Loop | None = field(default=None, compare=False, repr=False)


def loop_counters(loops: ScriptLoops) -> list[LoopCounter]:
    """Of the training loops: what their iterations carry, and what limits them from outside."""
    found: dict[tuple[str, bool], LoopCounter] = {}
    for counter in (*_limiting(loops), *_numbered(loops), *_carried(loops), *_stopping(loops)):
        found.setdefault((counter.name, counter.restored), counter)
    return list(found.values())


def _carried(loops: ScriptLoops) -> Iterator[LoopCounter]:
    """What outlives an iteration of a loop, and affects the training or counts. In what it calls, counts that are
    attributes alone: a patience, which the variables of a method do not outlive."""
    carried_by = carried_by_loops(loops)
    variables = loop_variables(loops)
    for loop in (*innermost(loops), *loops.epoch_loops):
        deciding, carried = _deciding(loops, loop), carried_by[loop]
        own = {variable.name for variable in variables if variable.loop is loop}
        takes = [node for node in ast.walk(loop) if is_call_of(node, "next")]
        taken = {name for call in takes for of in call.args[:1] for name in names_in(of)}
        ordering = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and last_name(node) == "set_epoch"]
        orders, in_training = {name for call in ordering for name in names_in(call)}, loop in loops.training_loops
        for name, line in carried.lines.items():
            counts, ends = name in carried.counts, has_part_in(name, deciding)
            # Else what a count is told to besides, as `evaluate(model, epoch)`, would look as if it trained by that.
            trains = in_training and (has_part_in(name, orders) if counts else carried.affects_training(name))
            if name not in taken and (trains or ends or (counts and in_training)):
                yield LoopCounter(name, line, ends, name in own, counts, trains, loop)
        known, attributes = {id(node) for node in ast.walk(loop)}, {name.rpartition(".")[2] for name in carried.lines}
        for node in loops.reached(loop) if loop in loops.training_loops else ():
            match node:
                case ast.AugAssign(op=ast.Add(), value=ast.Constant(value=1), target=ast.Attribute() as target):
                    if id(node) not in known and target.attr not in attributes:
                        name = ast.unparse(target)
                        yield LoopCounter(name, node.lineno, name in deciding, loop=loop)


def _stopping(loops: ScriptLoops) -> Iterator[LoopCounter]:
    """Objects by which loops over epochs are left, `if stopper.stop: break`, that these loops do not make: if their
    class is another file's, and stops early by its name."""
    own = {node.name for node in ast.walk(loops.tree) if isinstance(node, ast.ClassDef)}
    for epochs in loops.epoch_loops:
        asked = {name for test in _ending(loops, epochs) for name in names_in(test)}
        anew = {id(node) for node in ast.walk(epochs)}
        for made in ast.walk(loops.tree):
            if not isinstance(made, ast.Assign) or not isinstance(made.value, ast.Call) or id(made) in anew:
                continue
            named, kind = {*map(ast.unparse, made.targets)} & asked, last_name(made.value)
            if named and kind not in own and "stop" in kind.lower():
                yield LoopCounter(named.pop(), made.lineno, ends=True, loop=epochs)


def _numbered(loops: ScriptLoops) -> Iterator[LoopCounter]:
    for loop in loops.batch_loops:
        if (counted := loops.enumerated(loop)) is not None:
            ends = counted[0] in _deciding(loops, loop)
            yield LoopCounter(counted[0], loop.lineno, ends, not loops.carries_on(loop), loop=loop)


def _deciding(loops: ScriptLoops, loop: Loop) -> set[str]:
    """What the loop, or a `while` around it, is ended by."""
    return Dependence(loops, ast.walk(loop)).names_for(_ending(loops, loop))


def _ending(loops: ScriptLoops, loop: Loop) -> list[ast.expr]:
    left_at = set(leaving(loop.body))
    ends = [node.test for node in ast.walk(loop) if isinstance(node, ast.If) and not left_at.isdisjoint(ast.walk(node))]
    while_loops = (node for node in ast.walk(loops.tree) if isinstance(node, ast.While))
    ends += [node.test for node in while_loops if node is loop or any(item is loop for item in loops.reached(node))]
    return ends


def _begins_iterator(loops: ScriptLoops, loop: Loop) -> bool:
    """Whether each iteration of a loop begins an iterator, from which a loop in it takes: it goes over epochs."""
    inner = [each for each in loops.training_loops if each is not loop and each in loops.reached(loop)]
    taken = {node for each in inner for node in loops.reached(each)}
    caught = (node for node in loops.reached(loop) if isinstance(node, ast.ExceptHandler))
    within = {item for handler in caught for item in ast.walk(handler)}
    return any(is_call_of(node, "iter") and node not in taken | within for node in loops.reached(loop))


def _limiting(loops: ScriptLoops) -> Iterator[LoopCounter]:
    """What else limits a loop over batches from outside, or counts; the `range` of one that goes by `next`."""
    for batches in loops.batch_loops:
        ours = loops.limits(batches)
        for call in ast.walk(batches.iter):
            if isinstance(call, ast.Call) and limits_or_counts(call):
                ends = not is_call_of(call, "zip") or has_range(call)
                yield LoopCounter(ast.unparse(call), call.lineno, ends, call in ours, loop=batches)
    led = [*loops.epoch_loops, *(each.loop for each in loops.step_loops)]
    epochs = [loop for loop in loops.drawing_loops if loop in loops.epoch_loops or _begins_iterator(loops, loop)]
    for loop in loops.drawing_loops:
        parts = any(each in loops.training_loops and each not in epochs for each in loops.around(loop))
        if not parts and (loop in led or loop not in epochs):  # parts of an update are begun anew for each
            yield LoopCounter(ast.unparse(loop.target), loop.lineno, True, loop in led, loop=loop)
