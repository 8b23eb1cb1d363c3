"""Whose a variable is: of a function, of one around it, or of the file. Python's own symbol tables say so."""

import ast
import symtable
from collections.abc import Iterator
from enum import Enum, auto

from rollback.source.nodes import of_scope

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Owner(Enum):
    """Of a variable, as seen from a function."""

    FUNCTION = auto()
    FUNCTION_AROUND = auto()
    FILE = auto()


class Scopes:
    """Those of one file. Raises SyntaxError where it is not Python."""

    def __init__(self, source: str) -> None:
        self._table = symtable.symtable(source, "<source>", "exec")

    def owner_of(self, name: str, function: Function | None) -> Owner:
        """Of the variable that a name means in a function; None: outside of all."""
        chain = next(_chains(self._table, function), []) if function is not None else []
        if not chain:
            return Owner.FILE
        for table in reversed(chain):
            if name not in table.get_identifiers() or (symbol := table.lookup(name)).is_free():
                continue
            if symbol.is_global():
                return Owner.FILE
            return Owner.FUNCTION if table is chain[-1] else Owner.FUNCTION_AROUND
        return Owner.FILE

    def declare(self, name: str, function: Function) -> None:
        """Let a function set the variable that a name means there."""
        owner = self.owner_of(name, function)
        said = (node.names for node in of_scope(function) if isinstance(node, ast.Global | ast.Nonlocal))
        if owner is not Owner.FUNCTION and not any(name in names for names in said):
            statement = ast.Global([name]) if owner is Owner.FILE else ast.Nonlocal([name])
            behind_text = int(ast.get_docstring(function) is not None)
            function.body.insert(behind_text, ast.copy_location(statement, function.body[0]))


def _chains(table: symtable.SymbolTable, function: Function) -> Iterator[list[symtable.SymbolTable]]:
    """The tables of the functions around a function, from the outermost on, and its own."""
    own: list[symtable.SymbolTable] = [table] if isinstance(table, symtable.Function) else []
    if own and (table.get_name(), table.get_lineno()) == (function.name, function.lineno):
        yield own
    for child in table.get_children():
        yield from (own + chain for chain in _chains(child, function))
