"""A file of a script: in which function each of its nodes is, what its calls run, and whose its variables are."""

import ast
import symtable
from collections.abc import Iterator, Sequence

from rollback.errors import UsageError
from rollback.source.syntax import Function, Loop, Scope, of_scope, parameters_of

SymbolTable = symtable.SymbolTable

_AGAIN = (
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.For, ast.AsyncFor, ast.While,
)  # fmt: skip
"""What may do again and again what is in it."""
_OF_MODULES = ("train", "eval", "step", "zero_grad", "update", "to")
"""Methods that models and optimizers have: `model.train()` does not mean the script's own of that name."""
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
        self._methods: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
            if isinstance(node, ast.ClassDef):
                self._methods |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        scopes = (node for node in ast.walk(self.tree) if isinstance(node, Scope))
        self.scope_of: dict[ast.AST, Scope] = {node: scope for scope in scopes for node in ast.walk(scope)}
        """What has a node: the innermost function, which comes last here, or the file."""

    def function_of(self, loop: Loop) -> Function | None:
        """The function that has it; None: it is in none."""
        scope = self.scope_of[loop]
        return scope if isinstance(scope, Function) else None

    def called(self, node: ast.AST) -> str | None:
        """The name of the function of this file that a call may mean."""
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return name
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id="self"))):
                return name
            case ast.Call(func=ast.Attribute(attr=name)) if name in self._methods and name not in _OF_MODULES:
                return name
        return None

    def reached_by(self, statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
        """These, and the bodies of what they call."""
        pending: list[ast.AST] = list(statements)
        entered: set[int] = set()
        while pending:
            for node in ast.walk(pending.pop()):
                yield node
                for function in self.functions.get(self.called(node) or "", []):
                    if id(function) not in entered:
                        entered.add(id(function))
                        pending += function.body

    def arguments(self, function: ast.AST) -> Iterator[tuple[ast.Call, ast.Assign]]:
        """The calls of a function, each with one of its arguments as an assignment to that name."""
        if not isinstance(function, ast.FunctionDef):
            return
        names = [name for name in parameters_of(function) if name != "self"]
        for call in ast.walk(self.tree):
            if isinstance(call, ast.Call) and self.called(call) == function.name:
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
