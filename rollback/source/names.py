"""The names that a script gives to things of its own."""

import ast


def own_names(tree: ast.AST) -> dict[str, int]:
    """By name, a line that gives it: variables, arguments, functions, classes, and what is imported; this package is
    not the script's own."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found[name] = node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node.lineno
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                given = {alias.asname or alias.name.partition(".")[0] for alias in aliases}
                ours = {"rollback"} if isinstance(node, ast.Import) else set()
                found |= dict.fromkeys(given - ours, node.lineno)
    return found
