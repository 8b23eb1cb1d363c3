"""What the functions and methods that a loop calls change of what outlives the call: objects' attributes, variables of
the file, and of the function around them. Only what this file shows: an object's class is known where it is made,
`stopper = Stopper()`."""

import ast
from collections.abc import Iterable, Iterator

from rollback.source.carried import Turn, dotted
from rollback.source.nodes import Loop, of_scope
from rollback.source.scopes import Function, Scopes


class ChangedByCalls:
    """found: what it carries that way, each with the line that changes it, as the loop's own function calls it:
    `stopper.count` for `self.count` in a method. rebound: those of them that are not changed in place alone."""

    def __init__(self, tree: ast.Module, scopes: Scopes, loop: Loop, function: Function | None) -> None:
        self.found: dict[str, int] = {}
        self.rebound: set[str] = set()
        self._scopes, self._function = scopes, function
        self._classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
        self._made = dict(_objects_made(ast.walk(tree), self._classes))
        self._of_file = {name for name, _ in _objects_made(of_scope(tree), self._classes)}
        self._entered: set[tuple[str | None, int]] = set()
        holding = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and loop in ast.walk(node)]
        self._kind = holding[-1] if holding else None
        self._nested = {id(node) for each in holding for node in ast.walk(each) if isinstance(node, Function)}
        self._enter(loop.body, "self" if holding else None, self._kind, here=True)

    def _enter(
        self, body: Iterable[ast.AST], owner: str | None, kind: ast.ClassDef | None, *, here: bool = False
    ) -> None:
        """owner: what `self` is there, as the loop's function calls it; None: there is no such thing. here: whether it
        has the variables of the loop's function."""
        for call in (node for part in body for node in ast.walk(part) if isinstance(node, ast.Call)):
            name = dotted(call.func) or ""
            receiver, _, method = name.rpartition(".")
            if receiver == "self" and owner is not None and kind is not None:
                self._enter_method(owner, kind, method)
            for its, asked in ((receiver, method), (name, "__call__")):
                known = owner is not None if its.startswith("self.") else here or its in self._of_file
                if known and its in self._made:
                    self._enter_method(_as_called(its, owner), self._made[its], asked)
            if name in self._functions and (None, id(self._functions[name])) not in self._entered:
                self._enter_function(self._functions[name])

    def _enter_method(self, owner: str, kind: ast.ClassDef, name: str) -> None:
        method = next(_methods(kind, name, self._classes), None)
        if method is None or (owner, id(method)) in self._entered:
            return
        self._entered.add((owner, id(method)))
        turn = _turn_of(method)
        for item, line in turn.carried.items():
            if item.startswith("self."):
                self._note(owner + item.removeprefix("self"), line, rebound=item in turn.rebound)
        self._enter(method.body, owner, kind)

    def _note(self, name: str, line: int, *, rebound: bool) -> None:
        self.found.setdefault(name, line)
        self.rebound |= {name} if rebound else set()

    def _enter_function(self, function: Function) -> None:
        self._entered.add((None, id(function)))
        turn = _turn_of(function)
        for name, line in turn.carried.items():
            root = name.partition(".")[0]
            home = self._scopes.home_of(root, function)
            if not self._scopes.is_own(root, function) and home is self._scopes.home_of(root, self._function):
                self._note(name, line, rebound=name in turn.rebound)
        nested = id(function) in self._nested  # a closure, which has the `self` of the method around it
        self._enter(function.body, "self" if nested else None, self._kind if nested else None, here=nested)


def _as_called(name: str, owner: str | None) -> str:
    return name if owner is None or not name.startswith("self.") else owner + name.removeprefix("self")


def _turn_of(function: Function) -> Turn:
    turn = Turn()
    turn.run(function.body, set())
    return turn


def _methods(kind: ast.ClassDef, name: str, classes: dict[str, ast.ClassDef]) -> Iterator[Function]:
    """Those of that name, of the class and of its bases in this file. Two classes of one name may seem to be bases of
    each other."""
    kinds = [kind]
    for each in kinds:
        yield from (item for item in each.body if isinstance(item, Function) and item.name == name)
        bases = (classes.get(base.id) for base in each.bases if isinstance(base, ast.Name))
        kinds += [base for base in bases if base is not None and base not in kinds]


def _objects_made(nodes: Iterable[ast.AST], classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=ast.Call(func=ast.Name(id=kind))) if kind in classes:
                yield from ((name, classes[kind]) for target in targets if (name := dotted(target)) is not None)
