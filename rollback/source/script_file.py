"""A file of a script: in which function each of its nodes is, what its calls run, and whose its variables are."""

import ast
import symtable
from collections.abc import Iterator, Mapping, Sequence

from rollback.errors import UsageError
from rollback.source.syntax import Function, Loop, Scope, dotted, is_marked, of_scope, parameters_of

SymbolTable = symtable.SymbolTable

_AGAIN = (
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.For, ast.AsyncFor, ast.While,
)  # fmt: skip
"""What may do again and again what is in it."""
_OF_OPTIMIZERS = ("step", "update")
_OF_MODULES = ("train", "eval", "zero_grad", "to", *_OF_OPTIMIZERS)
"""Methods that models and optimizers have: `model.train()` does not mean the script's own of that name, unless the file
shows that `model` is an object of a class of its own."""
_DEPTH = 280
"""Levels of a file's tree. Who reads it calls itself for each, as `ast.unparse` does by three calls a level, and Python
lets a thousand be open."""


class ScriptFile:
    """Raises SyntaxError where `source` is not Python, UsageError where it is nested too deeply to be read. Calls of
    what other files have run nothing here."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self.tree, self.scopes = ast.parse(source), Scopes(source)
        except RecursionError as error:
            raise SyntaxError("it is nested too deeply") from error
        _require_flat(self.tree)
        self.functions: dict[str, list[Function]] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self._redefined: set[str] = set()
        """Names of several classes, of which nobody knows which one an object is of."""
        self._methods: set[str] = set()
        self._owners: dict[ast.AST, str] = {}
        """By method: what it calls the object that it is of."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
            if isinstance(node, ast.ClassDef):
                self._redefined |= {node.name} & self.classes.keys()
                self.classes[node.name] = node
                methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                self._methods |= {item.name for item in methods}
                of_objects = (item for item in methods if not is_marked(item, "staticmethod"))
                self._owners.update((item, name) for item in of_objects for name in parameters_of(item)[:1])
        self.guesses_owners = False
        """Whether an argument may be an object of this file's classes."""
        given = [pair for node in ast.walk(self.tree) for pair in _assigned(node)]
        arguments = {
            name for functions in self.functions.values() for each in functions for name in parameters_of(each)
        }
        self._only_arguments = arguments - {dotted(target) for target, _ in given}
        self.kinds_of: dict[str, list[ast.ClassDef]] = {}
        """The classes of objects that are made in this file, by the name that these get: `stopper = Stopper()`."""
        for name, kind in _objects_made(given, self.classes):
            self.kinds_of.setdefault(name, []).append(kind)
        self._class_around = {node: kind for kind in self.classes.values() for node in ast.walk(kind)}
        scopes = (node for node in ast.walk(self.tree) if isinstance(node, Scope))
        self.scope_of: dict[ast.AST, Scope] = {node: scope for scope in scopes for node in ast.walk(scope)}
        """What has a node: the innermost function, which comes last here, or the file."""

    def function_of(self, loop: Loop) -> Function | None:
        """The function that has it; None: it is in none."""
        scope = self.scope_of[loop]
        return scope if isinstance(scope, Function) else None

    def called(self, node: ast.AST) -> list[Function]:
        """The functions of this file that a call may run. Where it tells the class of an object, another class's method
        of that name is none: `meter.update(loss)` is not the `update` that trains."""
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self.functions.get(name, [])
            case ast.Call(func=ast.Attribute(attr=name, value=owner)) if name in self.functions:
                return self._called_of(owner, name)
        return []

    def _called_of(self, owner: ast.expr, name: str) -> list[Function]:
        known = dotted(owner) or ""
        kinds = self.kinds_of.get(known, [])
        if self._is_of_its_method(owner):
            if around := self._class_around.get(owner):
                kinds = [kind for kind in self.classes.values() if around in lineage(kind, self.classes)]
        elif name not in self._methods:
            return []
        elif name in _OF_MODULES and not any(any(methods_of(kind, name, self.classes)) for kind in kinds):
            guessed = self.guesses_owners and not kinds and name in _OF_OPTIMIZERS and known in self._only_arguments
            return self.functions[name] if guessed else []
        own = [method for kind in kinds for method in methods_of(kind, name, self.classes)]
        return own if own and self._redefined.isdisjoint(kind.name for kind in kinds) else self.functions[name]

    def _is_of_its_method(self, owner: ast.expr) -> bool:
        """Whether it is the object whose method it stands in."""
        return isinstance(owner, ast.Name) and owner.id in (
            "self",
            self._owners.get(self.scope_of.get(owner, self.tree)),
        )

    def reached_by(self, statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
        """These, and the bodies of what they call."""
        pending: list[ast.AST] = list(statements)
        entered: set[int] = set()
        while pending:
            for node in ast.walk(pending.pop()):
                yield node
                for function in self.called(node):
                    if id(function) not in entered:
                        entered.add(id(function))
                        pending += function.body

    def arguments(self, function: ast.AST) -> Iterator[tuple[ast.Call, ast.Assign]]:
        """The calls of a function, each with one of its arguments as an assignment to that name."""
        if not isinstance(function, ast.FunctionDef):
            return
        names = [name for name in parameters_of(function) if name not in ("self", self._owners.get(function))]
        for call in ast.walk(self.tree):
            if isinstance(call, ast.Call) and function in self.called(call):
                given = [*zip(names, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
                yield from ((call, ast.Assign([ast.Name(name, ast.Store())], value)) for name, value in given if name)

    def runs_once(self, node: ast.AST) -> bool:
        """Whether it does, but for the loops around it in its function, as far as the file tells: it is in no function,
        or in one that is named once, where it is called in no loop, by what runs once."""
        entered: list[ast.AST] = []
        while isinstance(function := self.scope_of[node], Function):
            named = [
                item for item in ast.walk(self.tree)
                if (isinstance(item, ast.Name) and item.id == function.name)
                or (isinstance(item, ast.Attribute) and item.attr == function.name)
            ]  # fmt: skip
            calls = [item for item in ast.walk(self.tree) if isinstance(item, ast.Call) and item.func in named]
            again = {id(item) for part in ast.walk(self.tree) if isinstance(part, _AGAIN) for item in ast.walk(part)}
            if len(named) != 1 or len(calls) != 1 or id(calls[0]) in again or function in entered:
                return False
            entered.append(function)
            node = calls[0]
        return True


def methods_of(kind: ast.ClassDef, name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[Function]:
    """Those of that name, of the class and of its bases in this file."""
    for each in lineage(kind, classes):
        yield from (item for item in each.body if isinstance(item, Function) and item.name == name)


def lineage(kind: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """A class and its bases in this file. Two classes of one name may seem to be bases of each other."""
    kinds = [kind]
    for each in kinds:
        bases = (classes.get(base.id) for base in each.bases if isinstance(base, ast.Name))
        kinds += [base for base in bases if base is not None and base not in kinds]
    return kinds


def _objects_made(
    given: Sequence[tuple[ast.expr, ast.expr]], classes: Mapping[str, ast.ClassDef]
) -> Iterator[tuple[str, ast.ClassDef]]:
    for target, whole in given:
        for value in (whole.body, whole.orelse) if isinstance(whole, ast.IfExp) else (whole,):
            match value:
                case ast.Call(func=ast.Name(id=kind)) if kind in classes and (name := dotted(target)) is not None:
                    yield name, classes[kind]


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and values: of `a, b = A(), B()` both."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            yield from zip(targets, values, strict=False)
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield target, value


def _require_flat(tree: ast.Module) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(_DEPTH):
        level = [part for node in level for part in ast.iter_child_nodes(node)]
    if level:
        lines = [node.lineno for node in level if isinstance(node, ast.expr | ast.stmt)]
        raise UsageError(
            f"line {min(lines, default=1)} of the source is nested {_DEPTH} levels deep or more, as a sum of so many "
            "terms is: that is not read",
            hint="compute it in several statements, or in a file that trains nothing",
        )


class Scopes:
    """Whose a variable is: of a function, of one around it, or of the file. Python's own symbol tables say so."""

    def __init__(self, source: str) -> None:
        self._file = symtable.symtable(source, "<source>", "exec")
        self._chains: dict[Function, list[SymbolTable]] = {}

    def home_of(self, name: str, function: Function | None) -> SymbolTable:
        """Of the variable that a name means in a function: one of a function, or the file's. None: outside of all."""
        for table in reversed(self._chain(function)):
            if name not in table.get_identifiers() or (symbol := table.lookup(name)).is_free():
                continue
            return self._file if symbol.is_global() else table
        return self._file

    def outer_names(self, function: Function) -> tuple[str, ...]:
        """The variables of functions around it that a function has."""
        own = next(reversed(self._chain(function)), None)
        return own.get_frees() if isinstance(own, symtable.Function) else ()

    def declare(self, name: str, function: Function) -> None:
        """Let a function set the variable that a name means there."""
        said = (node.names for node in of_scope(function) if isinstance(node, ast.Global | ast.Nonlocal))
        home = self.home_of(name, function)
        if home not in self._chain(function)[-1:] and not any(name in names for names in said):
            statement = ast.Global([name]) if home is self._file else ast.Nonlocal([name])
            behind_text = int(ast.get_docstring(function) is not None)
            function.body.insert(behind_text, ast.copy_location(statement, function.body[0]))

    def _chain(self, function: Function | None) -> list[SymbolTable]:
        """The tables of the functions around a function, from the outermost on, and its own."""
        if function is None:
            return []
        if function not in self._chains:  # asked again for each name in it
            self._chains[function] = next(_chains_to(function, self._file), [])
        return self._chains[function]


def _chains_to(function: Function, table: SymbolTable) -> Iterator[list[SymbolTable]]:
    own: list[SymbolTable] = [table] if isinstance(table, symtable.Function) else []
    if own and (table.get_name(), table.get_lineno()) == (function.name, function.lineno):
        yield own
    for child in table.get_children():
        yield from (own + chain for chain in _chains_to(function, child))
