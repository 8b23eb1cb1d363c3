"""A script, or a module of its own, with a few expressions added to its loops, by which they are led."""

import ast

from rollback.source.loops import ScriptLoops
from rollback.source.nodes import Loop
from rollback.source.own_counters import LedCount, led_counts

EPOCHS, MOVED = "__rollback_epochs__", "__rollback_moved__"
ENUMERATE, LIMIT = "__rollback_enumerate__", "__rollback_limit__"
COUNT, RAISED = "__rollback_count__", "__rollback_raised__"
TURNS, TAKE, TURNED = "__rollback_turns__", "__rollback_take__", "__rollback_turned__"
"""Names under which a script that `steered` has changed finds what steers it."""


def steered(source: str, filename: str, *, is_script: bool = True) -> tuple[ast.Module, dict[str, int | None]]:
    """The script, or a module of its own, with its loops over epochs and its counts of batches steered; and the names
    of these counts, with what each begins with, where the source tells.

    EPOCHS is told the epochs' range and where the loop is, MOVED begins another one, ENUMERATE and LIMIT know where in
    the data a batch is, COUNT what a count was there. TAKE takes a batch, and TURNS gives its number; where a batch has
    another number than its turn, TURNED begins the one that has.

        for epoch in range(10):         for epoch in __rollback_epochs__(range(10), "script.py", 1):
            BODY                            try:
                                                BODY
                                            except __rollback_moved__:
                                                continue

        for i, batch in enumerate(loader):      for i, batch in __rollback_enumerate__(loader):
        for batch in islice(loader, 10):        for batch in __rollback_limit__(islice, loader, 10):

        for batch in loader:            for batch in loader:
            BODY                            try: steps += __rollback_count__(steps, 0, "steps", "script.py")
            steps += 1                      except (NameError, AttributeError): pass
                                            BODY
                                            steps += __rollback_count__(steps, 1, "steps", "script.py")

        for i in range(40):             for i in __rollback_turns__(range(40), "script.py", 1, False, ""):
            batch = next(batches)           try:
            BODY                                batch = __rollback_take__("script.py", 1, batches)
                                                BODY
                                            except __rollback_turned__:
                                                continue

    A loop that trains asks RAISED which errors it catches, which are none: so it is known that one has left the loop.

    Where a turn takes several batches, its number is a count, too: that of the name that TURNS is told.
    """
    loops = ScriptLoops(source, is_script=is_script)
    for loop in loops.batches:
        for limit in loops.limits(loop):
            limit.args.insert(0, limit.func)
            limit.func = ast.copy_location(ast.Name(LIMIT, ast.Load()), limit.func)
    for call in loops.enumerations():
        call.func = ast.copy_location(ast.Name(ENUMERATE, ast.Load()), call.func)
    counts = led_counts(loops)
    for count in counts:
        _lead(count, filename)
    several = [each.loop for each in loops.by_turns if each.several]
    for turning in loops.by_turns:
        for call in turning.takes:
            call.func = ast.copy_location(ast.Name(TAKE, ast.Load()), call.func)
            call.args[:0] = [ast.Constant(filename), ast.Constant(turning.loop.lineno)]
        if (numbers := loops.numbers(turning.loop)) is not None:
            counted = _turns_of(several.index(turning.loop)) if turning.several else ""
            _number(turning.loop, numbers, TURNS, TURNED, filename, turning.in_epochs, counted)
    for loop, numbers in loops.steerable.items():
        _number(loop, numbers, EPOCHS, MOVED, filename)
    for training in {*loops.training, *loops.steerable}:
        _catch(training, ast.Call(ast.Name(RAISED, ast.Load()), [], []), ast.Pass())
    begin: dict[str, int | None] = {count.name: None for count in counts}
    begin |= {_turns_of(place): 0 for place in range(len(several))}
    return ast.fix_missing_locations(loops.tree), begin


def _turns_of(place: int) -> str:
    """The name of the count of a loop's turns, by its place among those in the file: lines move with an edit."""
    return f"turns of loop {place + 1}"


def _lead(count: LedCount, filename: str) -> None:
    """What is added to a count, and nothing where its loop has a new batch, makes it what it is there in the data. It
    may not be there yet at the loop's top."""

    def by(added: int) -> str:
        return f"{count.name} += {COUNT}({count.name}, {added}, {count.name!r}, {filename!r})"

    def asked(at: ast.stmt) -> ast.stmt:
        (statement,) = ast.parse(f"try: {by(0)}\nexcept (NameError, AttributeError): pass").body
        for node in ast.walk(statement):
            if "lineno" in node._attributes:
                ast.copy_location(node, at)
        return statement

    for node in count.added:
        (statement,) = ast.parse(by(1)).body
        assert isinstance(statement, ast.AugAssign)
        node.value = ast.copy_location(statement.value, node.value)
        for part in ast.walk(node.value):
            if "lineno" in part._attributes:
                ast.copy_location(part, node)
    body = count.loop.body
    for part in count.taking:
        body.insert(body.index(part) + 1, asked(part))
    body.insert(0, asked(body[0]))


def _number(loop: ast.For, numbers: ast.expr, by: str, ended_by: str, filename: str, *others: bool | str) -> None:
    """Have `by` give a loop its numbers; `ended_by` ends a turn of it. numbers: what has its range, in its head."""
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
