"""What an iteration of a loop hands on to the next one in variables of the script: loop-carried variables, as compilers
say.

A variable is carried if the loop's body sets it, and may read it in an iteration before it sets it there: a temperature
that goes down, a mean of losses, a patience. A rollback and a resume leave it as it is.
"""

import ast
from collections.abc import Collection, Iterator, Sequence

from rollback.source.syntax import Loop, dotted, last_name, of_scope

_CHANGES = frozenset((
    "append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear", "add", "discard",
    "update", "setdefault", "sort", "reverse", "rotate", "subtract",
))  # fmt: skip
"""Methods by which lists, sets, dicts and deques are changed in place."""
_CHANGES_FIRST = frozenset((
    "heappush", "heappop", "heappushpop", "heapreplace", "heapify", "insort", "insort_left", "insort_right", "shuffle",
))  # fmt: skip
"""Functions that change what they are given first."""
_CHANGES_TENSOR = frozenset((
    "mul_", "add_", "sub_", "div_", "copy_", "fill_", "zero_", "lerp_", "clamp_", "clamp_min_", "clamp_max_",
    "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_", "masked_fill_", "addcmul_", "addcdiv_",
))  # fmt: skip
_OF_PARAMETERS = frozenset(("grad", "data", "param_groups"))
"""Attributes of what the guard has, `w.data`; the script's own may have such a name, too, as `self.data`."""


def iteration_of(loop: Loop) -> "LoopIteration":
    """What happens to variables, and to attributes of variables (`self.beta`), in an iteration of a loop's body."""
    iteration, known = LoopIteration(), set_by_head(loop)
    if isinstance(loop, ast.While):
        iteration.read(loop.test, known)
    iteration.run(loop.body, known)
    return iteration


def set_by_head(loop: Loop) -> set[str]:
    """The variables that a `for` sets in each iteration."""
    return {*_stored(loop.target)} if isinstance(loop, ast.For) else set()


def names_in(node: ast.AST) -> set[str]:
    """The variables and attributes of variables that are read in it: of `self.a.b`, `self.a` and `self.a.b`."""
    found, bound = set(), {"self"}
    for part in ast.walk(node):
        match part:
            case ast.comprehension(target=target):
                bound |= {*_stored(target)}
            case ast.arg(arg=argument):  # of a lambda
                bound.add(argument)
            case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()) if (name := dotted(part)) is not None:
                found.add(name)
    return {name for name in found if name.startswith("self.") or name.partition(".")[0] not in bound}


def place_of(target: ast.AST) -> str | None:
    """The name of what is set or changed in place where `target` is: `self.beta`; `history` of `history[3]`."""
    while isinstance(target, ast.Subscript | ast.Starred):
        target = target.value
    return dotted(target)


def targets_in(target: ast.expr) -> Iterator[ast.expr]:
    """The single ones: `a` and `b[0]` of `a, b[0] = ...`."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from targets_in(part)
        case ast.Starred(value=value):
            yield from targets_in(value)
        case _:
            yield target


def _changes(method: str, of: ast.expr) -> bool:
    """Whether a method changes what it is of. A tensor, `w.mul_(0.9)`, not where it may be a model's buffer."""
    own = (dotted(of) or "").removeprefix("self.").isidentifier()
    return method in _CHANGES or (method in _CHANGES_TENSOR and own)


def has_part_in(name: str, names: Collection[str]) -> bool:
    """Whether it is among them, or what it is an attribute of."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))


class LoopIteration:
    """What happens to variables in one iteration of a loop. Where it may go several ways, a variable is set if all set
    it.

    stored: the line that sets each first. rebound: those that are set to another object, not changed in place alone.
    An inner loop has an iteration at least: else all that such a loop sets would seem to be carried.
    """

    def __init__(self) -> None:
        self.stored: dict[str, int] = {}
        self.rebound: set[str] = set()
        self._exposed: set[str] = set()
        """What is read in front of being set."""

    @property
    def carried(self) -> dict[str, int]:
        """What an iteration hands on to the next one, each with the line that sets it first."""
        found = {name: line for name, line in self.stored.items() if name in self._exposed}
        parts = {name: name.removeprefix("self.").split(".")[1:] for name in found}
        return {name: line for name, line in found.items() if _OF_PARAMETERS.isdisjoint(parts[name])}

    def read(self, node: ast.AST | None, known: set[str]) -> None:
        """An expression, or the parts of a simple statement."""
        if node is None:
            return
        self._exposed |= {name for name in names_in(node) if not has_part_in(name, known)}
        for part in ast.walk(node):
            match part:
                case ast.Call(func=ast.Attribute(attr=method, value=of)) if _changes(method, of):
                    self._change(of, part.lineno, known)
                case ast.Call(func=ast.Name(id="setattr"), args=[of, ast.Constant(value=str(name)), _]):
                    self._store(ast.copy_location(ast.Attribute(of, name, ast.Store()), part), known)
                case ast.Call(args=[of, *_]) if last_name(part) in _CHANGES_FIRST:
                    self._change(of, part.lineno, known)
                case ast.NamedExpr(target=target):
                    self._store(target, known)

    def _change(self, target: ast.expr, line: int, known: set[str]) -> None:
        """In place: it is read, too."""
        if (name := place_of(target)) is not None and not has_part_in(name, known):
            self._exposed.add(name)
            self.stored.setdefault(name, line)

    def _store(self, target: ast.expr, known: set[str]) -> None:
        for part in targets_in(target):
            if isinstance(part, ast.Subscript):
                self._change(part, part.lineno, known)
            elif (name := dotted(part)) is not None:
                self.rebound.add(name)
                if name not in known:
                    self.stored.setdefault(name, part.lineno)
                    known.add(name)

    def run(self, statements: Sequence[ast.stmt], known: set[str]) -> set[str] | None:
        """What is set behind these; None: they are left in between. known: what is set in front, and is changed."""
        for statement in statements:
            found = self._run(statement, known)
            if found is None:
                return None
            known = found
        return known

    def _run(self, statement: ast.stmt, known: set[str]) -> set[str] | None:
        match statement:
            case ast.If(test=test, body=body, orelse=other):
                self.read(test, known)
                return _both(self.run(body, {*known}), self.run(other, {*known}))
            case ast.For(target=target, iter=values) | ast.AsyncFor(target=target, iter=values):
                self.read(values, known)
                self._store(target, known)
                return self._run_inner(statement, known)
            case ast.While(test=test):
                self.read(test, known)
                return self._run_inner(statement, known)
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for item in items:
                    self.read(item.context_expr, known)
                    if item.optional_vars is not None:
                        self._store(item.optional_vars, known)
                return self.run(statement.body, known)
            case ast.stmt(body=body, handlers=handlers, orelse=other, finalbody=last):  # type: ignore[misc]
                # ast.Try, and ast.TryStar of Python 3.11 on
                before = {*known}
                behind = self.run([*body, *other], known)
                for handler in handlers:
                    behind = _both(behind, self.run(handler.body, {*before, *([handler.name] if handler.name else [])}))
                final = self.run(last, before if behind is None else behind)
                return None if behind is None else final
            case ast.Match(subject=subject, cases=cases):
                self.read(subject, known)
                for case in cases:
                    self.read(case.guard, known)
                    self.run(case.body, {*known})
                return known
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._run_definition(statement, known)
                return known
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                self.read(statement, known)
                return None
        return self._run_simple(statement, known)

    def _run_simple(self, statement: ast.stmt, known: set[str]) -> set[str]:
        match statement:
            case ast.Assign(targets=targets, value=value):
                self.read(value, known)
                for target in targets:
                    self._store(target, known)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.read(value, known)
                self._store(target, known)
            case ast.AugAssign(target=target, value=value):
                self.read(value, known)
                self._change(target, statement.lineno, known)
            case _:
                self.read(statement, known)
        return known

    def _run_inner(self, loop: ast.stmt, known: set[str]) -> set[str]:
        assert isinstance(loop, ast.For | ast.AsyncFor | ast.While)
        behind = self.run(loop.body, {*known})
        self.run(loop.orelse, {*known})
        return known if behind is None else behind

    def _run_definition(self, function: ast.stmt, known: set[str]) -> None:
        """A closure: it may be called in the iteration, and set what it has as `nonlocal`."""
        if not isinstance(function, ast.ClassDef):
            own = {name for node in of_scope(function) for name in _stored(node)} | {
                item.arg for item in ast.walk(function) if isinstance(item, ast.arg)
            }
            outer = {name for node in of_scope(function) if isinstance(node, ast.Nonlocal | ast.Global)
                     for name in node.names}  # fmt: skip
            read = {name for part in function.body for name in names_in(part)}  # type: ignore[attr-defined]
            self._exposed |= {name for name in read - (own - outer) if not has_part_in(name, known)}
            for name in outer & own:
                self._exposed.add(name)
                self.stored.setdefault(name, function.lineno)
        known.add(function.name)  # type: ignore[attr-defined]


def _both(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _stored(node: ast.AST) -> Iterator[str]:
    """The variables, without attributes, that are set in it."""
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
