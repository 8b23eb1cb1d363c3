"""The training loop of a script, read from its source: the `for` over batches whose body calls backward().

The body may call it in functions and methods of the same file, and in a loop over parts of the batch: over a range of
them, or over `x.chunk(2)`. What other files do is not known here.
"""

import ast
from collections.abc import Iterator, KeysView

from rollback.source.batch_lists import gathers_updates, lists_taken
from rollback.source.script_file import ScriptFile
from rollback.source.step_loops import step_loop
from rollback.source.syntax import (
    Loop,
    begins_at,
    calls_at,
    is_backward,
    is_call_of,
    is_train,
    last_name,
    limits_batches,
    names_epochs,
    names_update,
    of_scope,
    range_of,
)

_WRAPPERS = "enumerate", "tqdm"
_RANGES = "range", "trange"
_DIVIDE = "chunk", "split", "tensor_split", "unbind"
"""What makes micro-batches of a batch."""
_COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp
_GATHER = "list", "tuple", "set", "dict", "sorted", "sum", "min", "max"
"""What makes one thing of all batches."""
_PASSES_ON = (ast.Yield, ast.YieldFrom)


class ScriptLoops(ScriptFile):
    """The loops of one file. Raises as ScriptFile.

    batch_loops: the loops over batches, in their order. epochs_around: the loop over `range(...)` around each, None
    without one. gathering_loops: those that gather the batches of an update in a list. is_script: whether it is the
    file that is run, and no module.
    """

    def __init__(self, source: str, *, is_script: bool = True) -> None:
        super().__init__(source)
        self._reached: dict[Loop, KeysView[ast.AST]] = {}
        self._all = [node for node in ast.walk(self.tree) if isinstance(node, Loop)]
        self._loops = [loop for loop in self._all if isinstance(loop, ast.For)]
        mentioned = "backward" in source  # else nothing of what follows is found, and a large file takes seconds
        training = self._that_train() if mentioned else []
        if mentioned and not training and self._methods_train():
            self._reached, self.guesses_owners = {}, True
            training = self._that_train()
        whole = [loop for loop in training if range_of(loop) is None and not self._divides(loop)]
        pairs = [(loop, item) for loop in whole for item in self._inside(loop, training)]
        gathered = [pair for pair in pairs if self._is_of_update(*pair)]
        self.gathering_loops = [loop for loop, _ in gathered]
        parts = {pair[1] for pair in pairs if self._divides(pair[1]) or pair in gathered}
        training = [loop for loop in training if loop not in parts]
        inner = {loop: self._inside(loop, training) for loop in training}

        def nearest(loops: list[ast.For], to: ast.For) -> list[ast.For]:
            """Those of the loops that come to one without another of them in between."""
            outer = [loop for loop in loops if to in inner[loop]]
            return [loop for loop in outer if not any(other in inner[loop] for other in outer)]

        self.batch_loops = [
            loop
            for loop in training
            if not self._goes_over_numbers(loop)
            and all(map(self._goes_over_numbers, inner[loop]))
            and not self._has_taken(loop.iter, self.scope_of[loop], {})
        ]
        around = [loop for loop in training if range_of(loop) is not None]
        self.drawing_loops = [
            loop for loop in training
            if self._goes_over_numbers(loop)
            and not any(batches in inner[loop] for batches in self.batch_loops)
            and any(is_call_of(node, "next") for node in self.reached(loop))
        ]  # fmt: skip
        while_loops = [  # `while True: batch = next(batches)`
            node for node in self._all
            if isinstance(node, ast.While)
            and mentioned
            and any(is_call_of(item, "next") for item in self.reached(node))
            and any(map(is_backward, self.reached(node)))
            and not any(item in self.batch_loops for item in self.reached(node))
        ]  # fmt: skip
        self.training_loops: list[Loop] = [*self.batch_loops, *self.drawing_loops, *while_loops]
        """All that draw batches, and train on them."""
        self.epochs_around = {batches: near[0] for batches in self.batch_loops if (near := nearest(around, batches))}
        self.trains_elsewhere = not training
        """Whether no loop of this file calls backward(), as where a helper in another file does. Then each one that
        mentions an optimizer may train, or call what does; a loop over the layers of a model is none of them."""
        around = [loop for loop in training if self.numbers(loop) is not None]
        around_each = [(loop, self.around(loop)) for loop in self.drawing_loops]
        candidates = [
            found for loop, outer in around_each
            if all(each in self.drawing_loops for each in outer)
            and (found := step_loop(self, loop, outer))
        ]  # fmt: skip
        alone = len(candidates) == 1 and not (self.batch_loops or while_loops)
        self.step_loops = [each for each in candidates if each.in_epochs or alone]
        within = [*self.batch_loops, *(each.loop for each in self.step_loops if each.in_epochs)]
        may_train = [loop for batches in within for loop in nearest(around, batches)]
        if self.trains_elsewhere and is_script:
            may_train = [loop for loop in self._loops if names_epochs(loop) or self._has_optimizer(loop)]
        self.epoch_loops = {loop: numbers for loop in may_train if (numbers := self.numbers(loop)) is not None}
        """The loops that may go over epochs, each with its call of `range`, or with what has a range in it."""

    def _that_train(self) -> list[ast.For]:
        return [loop for loop in self._loops if any(map(is_backward, self.reached(loop)))]

    def _methods_train(self) -> bool:
        return any(map(is_backward, (node for kind in self.classes.values() for node in ast.walk(kind))))

    def epoch_loop_at(self, line: int) -> int | None:
        """The line of the innermost such loop in whose body `line` is."""
        lines = [loop.lineno for loop in self.epoch_loops if loop.body[0].lineno <= line <= (loop.end_lineno or 0)]
        return max(lines, default=None)

    def restarting_loop_at(self, line: int) -> Loop | None:
        """The innermost loop that begins anew what is at `line`; None for one that gives batches on, or takes them."""
        loops = [loop for loop in self._all if loop.body[0].lineno <= line <= (loop.end_lineno or 0)]
        found = max(loops, key=lambda loop: loop.lineno, default=None)
        gives = found is not None and any(isinstance(node, _PASSES_ON) for node in ast.walk(found))
        return None if gives or self.takes_at(line) else found

    def numbers(self, loop: ast.For) -> ast.expr | None:
        """What of a loop's head goes over a range: its call, or what will have one: `trange(3)`, a variable of that."""
        return range_of(loop) or (loop.iter if self._has_range(loop.iter, loop) else None)

    def _has_range(self, value: ast.AST, where: ast.AST) -> bool:
        match value:
            case ast.Call(args=[first, *_]):
                name = last_name(value)
                return name in _RANGES or (name == "tqdm" and self._has_range(first, where))
            case ast.NamedExpr(value=given):
                return self._has_range(given, where)
            case ast.Name(id=name):
                last = self._last_given(name, where)
                return last is not None and self._has_range(last, last)
        return False

    def enumerations(self) -> list[ast.Call]:
        """The calls of `enumerate` by which loops that may train number their batches."""
        if self.trains_elsewhere:  # not by way of variables: that would take long in a large file
            found = ((loop, node) for loop in self._loops for node in ast.walk(loop.iter))
            return [node for loop, node in found if is_call_of(node, "enumerate") and self._has_optimizer(loop)]
        return [call for loop in self.batch_loops if (call := self.enumeration(loop.iter, loop)) is not None]

    def around(self, loop: Loop) -> list[Loop]:
        """All loops by which this one is begun anew each time, also by way of functions."""
        return [other for other in self._all if other is not loop and loop in self.reached(other)]

    def iterated(self, loop: ast.For) -> ast.expr:
        """What a loop goes over, without `enumerate` and `tqdm`, also where they are in a variable: a progress bar."""
        found, where = loop.iter, loop.lineno
        while True:
            match found:
                case ast.Call(args=[first, *_]) if last_name(found) in _WRAPPERS:
                    found = first
                case ast.Name(id=name):
                    last = self._last_given(name, loop, where)
                    if not isinstance(last, ast.Call) or last_name(last) not in _WRAPPERS:
                        return found
                    found, where = last, last.lineno
                case _:
                    return found

    def trains_at(self, line: int) -> bool | None:
        """Whether a loader that is iterated at `line` is trained on; None where the source does not tell.

        None is also for a loop that yields what it is given: who takes from it decides.
        """
        loops = [loop for loop in self._loops if begins_at(loop, line)]
        if loops:
            loop = max(loops, key=lambda found: found.lineno)
            if loop in self.batch_loops:
                return True
            yields = any(isinstance(node, _PASSES_ON) for node in ast.walk(loop))
            return None if yields or not self.batch_loops else False
        here = calls_at(self.tree, line)
        taken = [call for call in here if is_call_of(call, "next")]
        looked = {id(node) for call in taken for node in ast.walk(call)}
        made = [call for call in here if is_call_of(call, "iter")]
        if taken and all(id(call) in looked for call in made):
            # next(iter(loader)): a look at a batch; next(batches) of a generator is one where nothing trains on it
            return None if not made and self._may_train_on(taken[0]) else False
        return None

    def sets_mode_at(self, line: int) -> bool:
        """Whether the training loop at `line` calls train() of its model for each batch, and so begins in any mode. Not
        where a function without backward() does, as an evaluation at its end."""
        loops = (loop for loop in self.batch_loops if begins_at(loop, line))
        found = (node for loop in loops for node in self.reached(loop) if is_train(node))
        return any(any(map(is_backward, ast.walk(self.scope_of[node]))) for node in found)

    def _may_train_on(self, taken: ast.Call) -> bool:
        """Whether a batch that is taken here, and not iterated, is in a loop that may train, or beside a backward()."""
        for loop in self._all:
            reached = list(self.reached(loop))
            if any(node is taken for node in reached) and (
                any(map(is_backward, reached)) or (self.trains_elsewhere and any(map(names_update, reached)))
            ):
                return True
        function = self.scope_of[taken]
        loops = [loop for loop in ast.walk(function) if isinstance(loop, Loop)]
        apart = {id(node) for loop in loops for node in ast.walk(loop)}
        beside = (node for node in ast.walk(function) if id(node) not in apart)
        return function is not self.tree and any(map(is_backward, beside))

    def gathers_at(self, line: int) -> bool:
        """Whether `line`, which begins no `for`, takes all batches at once: `list(loader)`, `[y for _, y in loader]`.

        A generator expression alone takes none: a loop over it may train."""
        made = [node for node in ast.walk(self.tree) if isinstance(node, _COMPREHENSIONS)]
        return any(node.lineno <= line <= (node.end_lineno or 0) for node in made) or any(
            is_call_of(call, name) for call in calls_at(self.tree, line) for name in _GATHER
        )

    def takes_at(self, line: int) -> bool:
        """Whether `line` takes batches by `iter` or `next`: a loop around it may go over batches, not over epochs."""
        return any(is_call_of(call, "iter") or is_call_of(call, "next") for call in calls_at(self.tree, line))

    def limits(self, loop: ast.For) -> list[ast.Call]:
        """The calls by which a loop has so many batches and no more: `islice(loader, 10)`, `zip(range(10), loader)`."""
        return [node for node in ast.walk(loop.iter) if limits_batches(node)]

    def enumerated(self, loop: ast.For) -> tuple[str, ast.expr] | None:
        """The name that a loop counts its batches in by `enumerate`, and from what on; None where it does not."""
        match loop.target, self.enumeration(loop.iter, loop):
            case ast.Tuple(elts=[ast.Name(id=name), *_]), ast.Call(args=[_, *starts], keywords=words):
                return name, next(iter([*starts, *(word.value for word in words)]), ast.Constant(0))
        return None

    def carries_on(self, loop: ast.For) -> bool:
        """Whether `enumerate` begins with what the loop itself sets: `for i, x in enumerate(loader, i + 1)`."""
        if (counted := self.enumerated(loop)) is None:
            return False
        names = [node for node in ast.walk(loop) if isinstance(node, ast.Name)]
        given = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        return any(isinstance(node, ast.Name) and node.id in given for node in ast.walk(counted[1]))

    def enumeration(self, value: ast.expr, where: ast.AST) -> ast.Call | None:
        """The call of `enumerate` in what is iterated over at `where`, also by way of variables (a progress bar)."""
        calls = (node for node in ast.walk(value) if is_call_of(node, "enumerate"))
        if (call := next(calls, None)) is not None:
            return call
        match value:
            case ast.Name(id=name):
                last = self._last_given(name, where)
                return self.enumeration(last, last) if last is not None else None
            case ast.Call(args=[first, *_]):
                return self.enumeration(first, where)
        return None

    def _last_given(self, name: str, where: ast.AST, line: int | None = None) -> ast.expr | None:
        """What a variable is set to last before that line; default: that of `where`."""
        before = where.lineno if line is None else line  # type: ignore[attr-defined]
        given = [item for item in self._given(name, where) if item.lineno < before]
        return max(given, key=lambda item: item.lineno, default=None)

    def _given(self, name: str, where: ast.AST) -> Iterator[ast.expr]:
        """What a variable is set to, by `=` and `with ... as`, in the function of `where`, or outside of all."""
        for node in of_scope(self.scope_of[where]):
            match node:
                case ast.Assign(targets=[ast.Name(id=given)], value=value) if given == name:
                    yield value
                case ast.withitem(context_expr=value, optional_vars=ast.Name(id=given)) if given == name:
                    yield value

    def _divides(self, loop: ast.For) -> bool:
        """Whether a loop goes over parts of a tensor: those of a batch, where it is inside of a loop over batches."""
        names = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Name)]
        values = [loop.iter, *(value for name in names for value in self._given(name.id, loop))]
        calls = (node for value in values for node in ast.walk(value) if isinstance(node, ast.Call))
        return any(last_name(call) in _DIVIDE for call in calls)

    def _goes_over_numbers(self, loop: ast.For) -> bool:
        counts = isinstance(loop.iter, ast.Call) and last_name(loop.iter) in ("arange", "count")
        return counts or self.numbers(loop) is not None

    def _is_of_update(self, loop: ast.For, inner: ast.For) -> bool:
        """Whether a loop goes over a list in which the other one has gathered the batches of an update."""
        over, scope, within = self.iterated(inner), self.scope_of[inner], set(self.reached(loop))
        given = {
            ast.unparse(value.value)
            for call, value in self.arguments(scope)
            if call in within and ast.unparse(value.targets[0]) == ast.unparse(over)
        }
        here = isinstance(over, ast.Attribute) or scope is self.scope_of[loop]
        lists = given | ({ast.unparse(over)} if here else set())
        return gathers_updates(self, loop, lists, inner)

    def _has_taken(self, value: ast.expr, scope: ast.AST, known: dict[tuple[ast.AST, str], bool | None]) -> bool | None:
        """Whether a list of batches that were taken by `next`, those of one update, is in `value`, also as all calls
        give it to this function. known: the answers for names. None: there is none yet, in a recursion."""
        names = {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute)}
        # the empty name: what a call gives, in which the caller's variables of the argument's name have no part
        if lists_taken({*names, ""}, [ast.Assign([ast.Name("")], value), *of_scope(scope)], self._gathers):
            return True
        for name in names - {name for where, name in known if where is scope}:
            known[scope, name] = None
            given = [(call, each.value) for call, each in self.arguments(scope) if ast.unparse(each.targets[0]) == name]
            told = {self._has_taken(item, self.scope_of[call], known) for call, item in given}
            known[scope, name] = False if not told or False in told else True if True in told else None
        answers = {known[scope, name] for name in names}
        return True in answers or (None if None in answers else False)

    def _gathers(self, value: ast.AST) -> bool:
        """Whether it calls a function of the file that makes a list of what `next` gives."""
        bodies = [node for function in self.called(value) for node in ast.walk(function)]
        gives = any(isinstance(node, _PASSES_ON) or is_backward(node) for node in bodies)
        return not gives and any(is_call_of(node, "next") for node in bodies)

    def _inside(self, loop: ast.For, loops: list[ast.For]) -> list[ast.For]:
        return [other for other in loops if other is not loop and other in self.reached(loop)]

    def reached(self, loop: Loop) -> KeysView[ast.AST]:
        """The body, what a `while` asks, and the bodies of what these call in this file, as they were when this was
        first asked."""
        if loop not in self._reached:
            again = [loop.test, *loop.body] if isinstance(loop, ast.While) else loop.body
            self._reached[loop] = dict.fromkeys(self.reached_by(again)).keys()
        return self._reached[loop]

    def _has_optimizer(self, loop: ast.For) -> bool:
        return any(names_update(node) for node in self.reached(loop))
