"""What the functions and methods that a loop calls change of what outlives the call: objects' attributes, what they are
given, variables of the file, and of the function around them, also where that has returned them. Only what this file
shows: an object's class is known where it is made, `stopper = Stopper()`, and so is a function, `mean = running()`."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollback.source.loop_carried import LoopIteration
from rollback.source.script_file import ScriptFile, methods_of
from rollback.source.syntax import Function, Loop, cell_of, dotted, is_marked, of_scope, parameters_of


@dataclass(frozen=True)
class _Body:
    """Statements that run in an iteration. function: whose they are. given: its parameters, as the loop's function
    calls what they are given; those that are given nothing with a name are left out."""

    statements: Sequence[ast.stmt]
    function: Function | None
    given: Mapping[str, str] = field(default_factory=dict)


class ChangedByCalls:
    """found: what it carries that way, each with the line that changes it, as the loop's own function calls it:
    `stopper.count` for `self.count` in a method. rebound: those of them that are not changed in place alone."""

    def __init__(self, file: ScriptFile, loop: Loop) -> None:
        self.found: dict[str, int] = {}
        self.rebound: set[str] = set()
        self._scopes, self._function, tree = file.scopes, file.function_of(loop), file.tree
        self._classes = file.classes
        methods = [item for kind in self._classes.values() for item in kind.body]
        functions = (node for node in ast.walk(tree) if isinstance(node, Function) and node not in methods)
        self._functions = {node.name: node for node in functions}
        self._returned = dict(_returned_functions(tree, self._functions))
        self._kinds = {name: kinds[-1] for name, kinds in file.kinds_of.items()}
        self._kinds.update(("self", kind) for kind in self._classes.values() if loop in ast.walk(kind))
        self._entered: set[tuple[int, frozenset[tuple[str, str]]]] = set()
        self._look_into(_Body(loop.body, self._function), ())

    def _look_into(self, body: _Body, around: tuple[Function, ...]) -> None:
        """around: the functions that are being looked into."""
        for call in (node for part in body.statements for node in ast.walk(part) if isinstance(node, ast.Call)):
            for function, owner in self._called(call, body):
                given = self._given(call, body, function, owner)
                called = id(function), frozenset(given.items())
                if function in around or called in self._entered:
                    continue
                self._entered.add(called)
                inner = _Body(function.body, function, given)
                self._note(inner)
                self._look_into(inner, (*around, function))

    def _given(self, call: ast.Call, body: _Body, function: Function, owner: str | None) -> dict[str, str]:
        """What the names in a function mean that differ from those of the loop's function."""
        given = {name: called for name, called in body.given.items() if self._same(name, body.function, function)}
        is_method = owner is not None and function not in self._returned.values()
        for name, value in _arguments(call, function, is_method=is_method):
            if (called := self._as_called(value, body)) is not None:
                given[name] = called
        if owner is None:
            return given
        if is_method:
            given.update((own, owner) for own in parameters_of(function)[:1])
        else:
            given.update((name, cell_of(owner, name)) for name in self._scopes.outer_names(function))
        return given

    def _note(self, body: _Body) -> None:
        iteration = LoopIteration()
        iteration.run(body.statements, set())
        outer = () if body.function is None else self._scopes.outer_names(body.function)
        for name, line in iteration.carried.items():
            # Else another object has its name, and is the function's own.
            is_given = name not in body.given or name not in iteration.rebound or name in outer
            if is_given and (called := self._as_called(name, body)) is not None:
                self.found.setdefault(called, line)
                self.rebound |= {called} if name in iteration.rebound else set()

    def _called(self, call: ast.Call, body: _Body) -> Iterator[tuple[Function, str | None]]:
        """What of this file a call may run; of a method, what it is of, as the loop's function calls that, and of a
        function that another one has returned, what it is called itself."""
        name = dotted(call.func) or ""
        own = self._as_called(name, body)
        if own is not None and (returned := self._returned.get(own) or self._returned.get(name)) is not None:
            yield returned, own + ".__wrapped__" * len(returned.decorator_list)
        if name in self._functions:
            yield self._functions[name], None
        receiver, _, method = name.rpartition(".")
        for its, asked in ((receiver, method), (name, "__call__")):
            if (owner := self._as_called(its, body)) is not None:
                kind = self._kinds.get(owner) or self._kinds.get(its)
                found = None if kind is None else next(methods_of(kind, asked, self._classes), None)
                if kind is None or found is None or is_marked(found, "classmethod"):
                    continue
                self._kinds.setdefault(owner, kind)
                yield found, None if is_marked(found, "staticmethod") else owner

    def _as_called(self, name: str, body: _Body) -> str | None:
        """What the loop's function calls a variable; None: it does not outlive the body's function, or is another."""
        root, dot, rest = name.partition(".")
        if root in body.given:
            return body.given[root] + dot + rest
        return name if root and self._same(root, body.function, self._function) else None

    def _same(self, name: str, one: Function | None, other: Function | None) -> bool:
        """Whether it is one variable in both."""
        return self._scopes.home_of(name, one) is self._scopes.home_of(name, other)


def _arguments(call: ast.Call, function: Function, *, is_method: bool) -> Iterator[tuple[str, str]]:
    """The parameters that are given what has a name, and that name. is_method: the first one is what it is of."""
    names = [value if isinstance(value, ast.Starred) else dotted(value) for value in call.args]
    for parameter, name in zip(parameters_of(function)[is_method:], names, strict=False):
        if isinstance(name, ast.Starred):
            break
        if name is not None:
            yield parameter, name
    for word in call.keywords:
        if word.arg is not None and (name := dotted(word.value)) is not None:
            yield word.arg, name


def _returned_functions(tree: ast.AST, functions: Mapping[str, Function]) -> Iterator[tuple[str, Function]]:
    """Functions that others have inside and return, by the name that one gets: `mean = running(0.9)`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=maker))) if maker in functions:
                given = (item.value for item in of_scope(functions[maker]) if isinstance(item, ast.Return))
                names = {item.id for item in given if isinstance(item, ast.Name)}
                inner = (item for item in functions[maker].body if isinstance(item, Function) and item.name in names)
                if (name := dotted(target)) is not None and (function := next(inner, None)) is not None:
                    yield name, function
