"""Whose a variable is: of a function, of one around it, or of the file. Python's own symbol tables say so."""

import ast
import symtable
from collections.abc import Iterator

from rollback.source.nodes import Function, of_scope

Table = symtable.SymbolTable


class Scopes:
    """Those of one file. Raises SyntaxError where it is not Python."""

    def __init__(self, source: str) -> None:
        self._file = symtable.symtable(source, "<source>", "exec")

    def home_of(self, name: str, function: Function | None) -> Table:
        """Of the variable that a name means in a function: one of a function, or the file's. None: outside of all."""
        for table in reversed(self._chain(function)):
            if name not in table.get_identifiers() or (symbol := table.lookup(name)).is_free():
                continue
            return self._file if symbol.is_global() else table
        return self._file

    def is_own(self, name: str, function: Function) -> bool:
        """Whether the variable is the function's own."""
        return self.home_of(name, function) in self._chain(function)[-1:]

    def declare(self, name: str, function: Function) -> None:
        """Let a function set the variable that a name means there."""
        said = (node.names for node in of_scope(function) if isinstance(node, ast.Global | ast.Nonlocal))
        if not self.is_own(name, function) and not any(name in names for names in said):
            of_file = self.home_of(name, function) is self._file
            statement = ast.Global([name]) if of_file else ast.Nonlocal([name])
            behind_text = int(ast.get_docstring(function) is not None)
            function.body.insert(behind_text, ast.copy_location(statement, function.body[0]))

    def _chain(self, function: Function | None) -> list[Table]:
        """The tables of the functions around a function, from the outermost on, and its own."""
        return [] if function is None else next(_chains(self._file, function), [])


def _chains(table: Table, function: Function) -> Iterator[list[Table]]:
    own: list[Table] = [table] if isinstance(table, symtable.Function) else []
    if own and (table.get_name(), table.get_lineno()) == (function.name, function.lineno):
        yield own
    for child in table.get_children():
        yield from (own + chain for chain in _chains(child, function))
