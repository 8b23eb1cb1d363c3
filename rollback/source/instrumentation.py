"""A script, or a module of its own, with a few expressions added to its loops, by which they are led."""

import ast
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from rollback.source.loop_variables import LoopVariable, loop_variables
from rollback.source.loops import ScriptLoops
from rollback.source.syntax import Loop, blocks_in

Node = TypeVar("Node", bound=ast.AST)
EPOCHS, EPOCH_MOVED = "__rollback_epochs__", "__rollback_epoch_moved__"
ENUMERATE, LIMIT = "__rollback_enumerate__", "__rollback_limit__"
BY_BATCH, BY_EPOCH, RAISED = "__rollback_by_batch__", "__rollback_by_epoch__", "__rollback_raised__"
STEPS, NEXT, STEP_MOVED = "__rollback_steps__", "__rollback_next__", "__rollback_step_moved__"
"""Names under which a script that `instrumented` has changed finds what leads it."""


@dataclass(frozen=True)
class InstrumentedFile:
    """A file whose loops are led. counts: the names of counts of iterations. variables: what loops carry, by a name
    each."""

    tree: ast.Module
    counts: list[str]
    variables: dict[str, LoopVariable]


def instrumented(loops: ScriptLoops, filename: str) -> InstrumentedFile:
    """The script, or a module of its own, with its loops instrumented, and what they carry from iteration to iteration.
    What is changed is another tree of the same source: `loops` stays as it is.

    EPOCHS is told the epochs' range and where the loop is, EPOCH_MOVED begins another one, ENUMERATE and LIMIT know
    where in the data a batch is, BY_BATCH and BY_EPOCH what a variable was there. NEXT takes a batch, and STEPS gives
    its number; where a batch has another number than its iteration, STEP_MOVED begins the one that has.

        for epoch in range(10):         for epoch in __rollback_epochs__(range(10), "script.py", 1):
            BODY                            try:
                                                BODY
                                            except __rollback_epoch_moved__:
                                                continue

        for i, batch in enumerate(loader):      for i, batch in __rollback_enumerate__(loader):
        for batch in islice(loader, 10):        for batch in __rollback_limit__(islice, loader, 10):

        for batch in loader:            for batch in loader:
            BODY                            for beta in __rollback_by_batch__(lambda: beta, NAME, FILE): pass
            beta *= 0.9                     BODY
                                            beta *= 0.9

    In front of a loop over batches, which may be another call of its function, and behind it, which may have had no
    batch, the same is asked. BY_EPOCH is asked at the top of an epoch, and told the line of its loop.

        for i in range(40):             for i in __rollback_steps__(range(40), "script.py", 1, False, ""):
            batch = next(batches)           try:
            BODY                                batch = __rollback_next__("script.py", 1, batches)
                                                BODY
                                            except __rollback_step_moved__:
                                                continue

    A loop that trains asks RAISED which errors it catches, which are none: so it is known that one has left the loop.

    Where an iteration takes several batches, its number is a count, too: that of the name that STEPS is told.
    """
    tree = ast.parse(loops.source)
    twins = dict(zip(map(id, ast.walk(loops.tree)), ast.walk(tree), strict=True))

    def twin(node: Node) -> Node:
        return cast(Node, twins[id(node)])

    for loop in loops.batch_loops:
        for limit in map(twin, loops.limits(loop)):
            limit.args.insert(0, limit.func)
            limit.func = ast.copy_location(ast.Name(LIMIT, ast.Load()), limit.func)
    for call in map(twin, loops.enumerations()):
        call.func = ast.copy_location(ast.Name(ENUMERATE, ast.Load()), call.func)
    variables = _named(loop_variables(loops))
    blocks = {id(part): block for block in blocks_in(tree) for part in block}
    for name, variable in reversed(variables.items()):
        if (function := loops.function_of(variable.loop)) is not None and "." not in variable.name:
            loops.scopes.declare(variable.name, twin(function))
        there = replace(variable, loop=twin(variable.loop), taking=tuple(map(twin, variable.taking)))
        _ask_for(name, there, filename, blocks)
    several = [each.loop for each in loops.step_loops if each.several]
    for step_loop in loops.step_loops:
        for call in map(twin, step_loop.takes):
            call.func = ast.copy_location(ast.Name(NEXT, ast.Load()), call.func)
            call.args[:0] = [ast.Constant(filename), ast.Constant(step_loop.loop.lineno)]
        if (numbers := loops.numbers(step_loop.loop)) is not None:
            counted = _step_count(several.index(step_loop.loop)) if step_loop.several else ""
            _number(twin(step_loop.loop), twin(numbers), STEPS, STEP_MOVED, filename, step_loop.in_epochs, counted)
    for loop, numbers in loops.epoch_loops.items():
        _number(twin(loop), twin(numbers), EPOCHS, EPOCH_MOVED, filename)
    for training in {*loops.training_loops, *loops.epoch_loops}:
        _catch(twin(training), ast.Call(ast.Name(RAISED, ast.Load()), [], []), ast.Pass())
    return InstrumentedFile(ast.fix_missing_locations(tree), [*map(_step_count, range(len(several)))], variables)


def _step_count(place: int) -> str:
    """The name of the count of a loop's iterations, by its place among those in the file: lines move with an edit. It
    is in checkpoints, so it stays as it is."""
    return f"turns of loop {place + 1}"


def _named(variables: list[LoopVariable]) -> dict[str, LoopVariable]:
    """Each by its name and its loop's place among those in the file."""
    loops = list({id(variable.loop): None for variable in variables})
    return {f"{variable.shown} of loop {loops.index(id(variable.loop)) + 1}": variable for variable in variables}


def _ask_for(name: str, variable: LoopVariable, filename: str, blocks: dict[int, list[ast.stmt]]) -> None:
    """Ask for what a variable was wherever its loop may have come to another place in the data: where an iteration
    begins, and, of a training loop, where it begins, has a batch, has ended. Nothing else is set. blocks: that has each
    statement, by its `id`."""
    place = [ast.Constant(filename), *([] if variable.by_batch else [ast.Constant(variable.loop.lineno)])]
    by = BY_BATCH if variable.by_batch else BY_EPOCH

    def asked(at: ast.stmt, *, behind: bool = False) -> ast.stmt:
        read = f"for {variable.name} in {by}(lambda: {variable.name}, {name!r}): pass"
        (statement,) = ast.parse(read).body
        assert isinstance(statement, ast.For)
        assert isinstance(statement.iter, ast.Call)
        statement.iter.args += [*place, *([ast.Constant(True)] if behind else [])]
        for node in ast.walk(statement):
            if "lineno" in node._attributes:
                ast.copy_location(node, at)
        return statement

    body, block = variable.loop.body, blocks[id(variable.loop)]
    for part in variable.taking:
        within = blocks[id(part)]
        within.insert(within.index(part) + 1, asked(part))
    body.insert(0, asked(body[0]))
    if variable.by_batch:
        block.insert(block.index(variable.loop) + 1, asked(variable.loop, behind=True))
        block.insert(block.index(variable.loop), asked(variable.loop))


def _number(loop: ast.For, numbers: ast.expr, by: str, ended_by: str, filename: str, *others: bool | str) -> None:
    """Have `by` give a loop its numbers; `ended_by` ends an iteration of it. numbers: what has its range, in its
    head."""
    place: list[ast.expr] = [ast.Constant(filename), ast.Constant(loop.lineno), *map(ast.Constant, others)]
    if numbers is loop.iter:
        loop.iter = ast.copy_location(ast.Call(ast.Name(by, ast.Load()), [numbers, *place], []), numbers)
    elif isinstance(numbers, ast.Call):  # in a call around it
        inner = ast.copy_location(ast.Call(numbers.func, numbers.args, numbers.keywords), numbers)
        numbers.func, numbers.args, numbers.keywords = ast.Name(by, ast.Load()), [inner, *place], []
    _catch(loop, ast.Name(ended_by, ast.Load()), ast.Continue())


def _catch(loop: Loop, kinds: ast.expr, does: ast.stmt) -> None:
    handler = ast.ExceptHandler(kinds, None, [does])
    loop.body = [ast.copy_location(ast.Try(loop.body, [handler], [], []), loop.body[0])]
