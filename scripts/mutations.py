"""The changes that make a mutant of a source, found in its syntax tree. What they are for: `mutants.py`."""

import ast
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}
_RECKONED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_FOR_PEOPLE = {"say"}  # dropping what is only printed is no decision


@dataclass(frozen=True)
class Mutant:
    """A change of one place. start, end: bytes of the file. key: what it is known by in the file of the argued ones."""

    module: str
    path: str
    line: int
    function: str
    start: int
    end: int
    text: str
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        return f"{self.path} {self.function}".strip(), self.before, self.after

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}\n    - {self.before}\n    + {self.after}"


class Places(ast.NodeVisitor):
    """All changes to a source: (line, function, start, end, text)."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self.found: list[tuple[int, str, int, int, str]] = []
        self.visit(ast.parse(source))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Neither decorators nor annotations, which decide nothing; of arguments their defaults."""
        self._names.append(node.name)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Its methods: a class that stands cannot be given other fields."""
        self._names.append(node.name)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self.visit(statement)
        self._names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """It tells a reader and the type checker what is so, and never fails."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            text, others = _COMPARED[type(operator)]
            self._swap(left, right, text, others)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        text, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap(left, right, text, (other,))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.LShift) and isinstance(node.right, ast.Constant):
            return  # a limit that is told by its order of magnitude: the next one is as good
        prose = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right))
        if not prose and type(node.op) in _RECKONED:
            text, other = _RECKONED[type(node.op)]
            self._swap(node.left, node.right, text, (other,))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        text, other = _RECKONED[type(node.op)]
        self._swap(node.target, node.value, text + "=", (other + "=",))
        self._drop(node)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._replace(node, self._text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool() as value:
                self._replace(node, str(not value))
            case int() | float() as value:
                self._replace(node, repr(value + 1))
                if value:
                    self._replace(node, repr(value - 1))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _CALLED:
            self._replace(node.func, _CALLED[node.func.id])
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and not node.value.value):
            self._replace(node.value, "None")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if called is not None and not (isinstance(called, ast.Name) and called.id in _FOR_PEOPLE):
            self._drop(node)
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._names and any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._drop(node)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._drop(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._drop(node)
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._drop(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._drop(node)

    def _negate(self, test: ast.expr) -> None:
        """A condition that is not itself turned by another operator."""
        if not isinstance(test, ast.Compare | ast.UnaryOp):
            self._replace(test, f"not ({self._text(test)})")

    def _drop(self, statement: ast.stmt) -> None:
        self._replace(statement, "pass")

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self._add(node.lineno, *self._span(node), text)

    def _swap(self, left: ast.expr, right: ast.expr, text: str, others: Sequence[str]) -> None:
        """Replace the operator between two operands, each of which may be in brackets of its own."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._source[start:end].decode()
        place = re.search(re.escape(text).replace(r"\ ", r"\s+"), between)
        assert place is not None, between
        line = left.end_lineno or left.lineno
        line += between[: place.start()].count("\n")
        for other in others:
            self._add(line, start + place.start(), start + place.end(), other)

    def _add(self, line: int, start: int, end: int, text: str) -> None:
        self.found.append((line, ".".join(self._names), start, end, text))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def mutants_of(module: str, path: str, source: bytes) -> list[Mutant]:
    """All mutants of a source that compile, in the order of its lines."""
    found: list[Mutant] = []
    for line, function, start, end, text in Places(source).found:
        mutated = source[:start] + text.encode() + source[end:]
        with contextlib.suppress(SyntaxError):
            compile(mutated, path, "exec")
            # The whole of a statement over several lines, so that two of its lines are never taken for one another.
            first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
            before, after = _one_line(source[first:last]), _one_line(mutated[first : last + len(mutated) - len(source)])
            found.append(Mutant(module, path, line, function, start, end, text, before, after))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.start))


def _one_line(text: bytes) -> str:
    return " ".join(text.decode().split())
