"""A script, or a module of its own, with a few expressions added to its loops, by which they are led."""

import ast

from rollback.source.loops import ScriptLoops

EPOCHS, MOVED = "__rollback_epochs__", "__rollback_moved__"
ENUMERATE, LIMIT = "__rollback_enumerate__", "__rollback_limit__"
"""Names under which a script that `steered` has changed finds what steers it."""


def steered(source: str, filename: str, *, is_script: bool = True) -> ast.Module:
    """The script, or a module of its own, with its loops over epochs and its counts of batches steered.

    EPOCHS is told the epochs' range and where the loop is, MOVED begins another one, ENUMERATE and LIMIT know where in
    the data a batch is.

        for epoch in range(10):         for epoch in __rollback_epochs__(range(10), "script.py", 1):
            BODY                            try:
                                                BODY
                                            except __rollback_moved__:
                                                continue

        for i, batch in enumerate(loader):      for i, batch in __rollback_enumerate__(loader):
        for batch in islice(loader, 10):        for batch in __rollback_limit__(islice, loader, 10):
    """
    loops = ScriptLoops(source, is_script=is_script)
    for loop in loops.batches:
        for limit in loops.limits(loop):
            limit.args.insert(0, limit.func)
            limit.func = ast.copy_location(ast.Name(LIMIT, ast.Load()), limit.func)
    for call in loops.enumerations():
        call.func = ast.copy_location(ast.Name(ENUMERATE, ast.Load()), call.func)
    for loop, numbers in loops.steerable.items():
        place: list[ast.expr] = [ast.Constant(filename), ast.Constant(loop.lineno)]
        if numbers is loop.iter:
            loop.iter = ast.copy_location(ast.Call(ast.Name(EPOCHS, ast.Load()), [numbers, *place], []), numbers)
        elif isinstance(numbers, ast.Call):  # in a call around it
            inner = ast.copy_location(ast.Call(numbers.func, numbers.args, numbers.keywords), numbers)
            numbers.func, numbers.args, numbers.keywords = ast.Name(EPOCHS, ast.Load()), [inner, *place], []
        handler = ast.ExceptHandler(ast.Name(MOVED, ast.Load()), None, [ast.Continue()])
        loop.body = [ast.copy_location(ast.Try(loop.body, [handler], [], []), loop.body[0])]
    return ast.fix_missing_locations(loops.tree)
