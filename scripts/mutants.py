"""Mutation testing of what decides: `scripts/mutants`.

A mutant is the source of a module with one small change: a comparison turned, a number one off, a statement dropped.
The unit tests of that module run against it, and at least one of them should fail. What survives is either a promise
that no test makes, or dead code, or a change that changes nothing. The last kind is argued in
`equivalent_mutants.txt`, by function and by the text of the line, so that lines may move.

Nothing is written: pytest collects the tests of a module once, and each mutant is a fork of that process in which the
code of the functions that stand has been replaced by the mutant's, whoever has imported them. So a mutant costs what
those tests cost that it takes to kill it. Fields of a class are not mutated, nor what a test's subprocesses import.
Of libraries that do the same, cosmic-ray changes the working tree and starts a Python for each mutant, which here costs
twenty times as much, and mutmut leaves out what is decorated, among it every property; neither drops statements.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where a sync costs nothing
ARGUED = Path(__file__).with_name("equivalent_mutants.txt")
BAR = 0.95  # share that has to be killed
COUNT = 300
TIMES, AT_LEAST = 5.0, 20.0  # a mutant may take so many times what its tests take without it, and so many seconds

MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "policy": (("policy.py",), ("policy",)),
    "cases": (("train/incidents/cases.py",), ("train/incidents/cases",)),
    "suspects": (("suspects.py",), ("suspects",)),
    "catalogue": (
        ("train/snapshots/catalogue.py", "checkpoints/resume.py"),
        ("train/snapshots/catalogue", "checkpoints/resume", "checkpoints/retention"),
    ),
    "retention": (("checkpoints/retention.py",), ("checkpoints/retention",)),
    "journal": (("rundir/journal.py", "facts/history.py"), ("rundir/journal", "facts/history")),
    "claim": (("supervisor/claim.py", "rundir/lock.py"), ("supervisor/claim", "rundir/lock")),
    "tiers": (
        ("checkpoints/tiers.py", "train/snapshots/tier_choice.py", "checkpoints/sizing.py"),
        ("checkpoints/tiers", "train/snapshots/tier_choice", "checkpoints/sizing"),
    ),
}
"""What decides: modules of the package, and the files of tests/unit that say what it promises."""

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


def all_mutants(only: Sequence[str] = ()) -> list[Mutant]:
    """Of the modules named, or of all."""
    return [
        mutant
        for module, (paths, _) in MODULES.items()
        if not only or module in only
        for path in paths
        for mutant in mutants_of(module, path, (ROOT / "rollback" / path).read_bytes())
    ]


def argued() -> dict[tuple[str, str, str], str]:
    """Why a mutant that no test can tell from the original changes nothing, by its key.

    A paragraph for each, as survivors are printed: where, what stands, what would; then the argument.
    """
    found = {}
    for paragraph in re.split(r"\n\s*\n", ARGUED.read_text()):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip() and not line.startswith("#")]
        if lines:
            where, before, after, *why = lines
            assert before.startswith("- "), f"{ARGUED.name}: no change below {where!r}"
            assert after.startswith("+ "), f"{ARGUED.name}: no change below {where!r}"
            assert why, f"{ARGUED.name}: no argument for {after!r}"
            found[re.sub(r":\d+", "", where), before[2:], after[2:]] = " ".join(why)
    return found


def put_in_place(mutant: Mutant) -> None:
    """In a fork: let the functions of the mutant's module do what the mutant's do, and have its constants."""
    file = ROOT / "rollback" / mutant.path
    name = ".".join(("rollback", *Path(mutant.path).with_suffix("").parts))
    standing = importlib.import_module(name)
    namespace: dict[str, Any] = {"__name__": name, "__file__": str(file)}
    exec(compile(mutant.applied(file.read_bytes()), str(file), "exec"), namespace)
    for key, value in namespace.items():
        if isinstance(value, int | float | str | tuple):
            setattr(standing, key, value)
        elif getattr(value, "__module__", None) == name:
            _replace_code(getattr(standing, key), value)


def _replace_code(standing: Any, mutated: Any) -> None:
    if isinstance(mutated, type):
        for key, value in vars(mutated).items():
            if key in vars(standing):
                _replace_code(vars(standing)[key], value)
    elif isinstance(mutated, property):
        _replace_code(standing.fget, mutated.fget)
    elif isinstance(mutated, staticmethod | classmethod) or hasattr(mutated, "__wrapped__"):
        _replace_code(standing.__wrapped__, mutated.__wrapped__)
    elif isinstance(mutated, types.FunctionType):
        standing.__code__ = mutated.__code__
        standing.__defaults__, standing.__kwdefaults__ = mutated.__defaults__, mutated.__kwdefaults__


class Trial:
    """A fork in which tests run against a mutant, or against what stands."""

    def __init__(self, session: Any, tests: Sequence[Any], mutant: Mutant | None, seconds: Path) -> None:
        self.mutant, self.began = mutant, time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os._exit(self._run(session, tests, seconds))
            except BaseException:  # noqa: BLE001 - a mutant that cannot even be imported
                os._exit(1)

    def _run(self, session: Any, tests: Sequence[Any], seconds: Path) -> int:
        if self.mutant is not None:
            session.config.pluginmanager.unregister(name="terminalreporter")  # nobody reads why it failed
            put_in_place(self.mutant)
        took = {}
        for test, following in zip(tests, [*tests[1:], None], strict=True):
            began = time.monotonic()
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            took[test.nodeid] = time.monotonic() - began
            if session.testsfailed:
                return 1
        if self.mutant is None:
            seconds.write_text(json.dumps(took))
        return 0

    def ended(self, limit: float) -> str | None:
        """`killed`, `survived`, or `too long` where it took more than `limit` seconds; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() - self.began < limit:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with what the tests have started
        if not pid:
            os.waitpid(self.pid, 0)
            return "too long"
        return "killed" if status else "survived"


class Trials:
    """A plugin of pytest that runs the tests which it has collected against each of some mutants."""

    def __init__(self, mutants: Sequence[Mutant], jobs: int, tell: Callable[[Mutant, str], None]) -> None:
        self._mutants, self._jobs, self._tell = mutants, jobs, tell
        self.sound = False

    def pytest_runtestloop(self, session: Any) -> bool:
        tests = list(session.items)
        with tempfile.TemporaryDirectory(prefix="rollback-mutants-") as folder:
            seconds = Path(folder, "seconds.json")
            clean = Trial(session, tests, None, seconds)
            while (ended := clean.ended(600.0)) is None:
                time.sleep(0.01)
            self.sound = ended == "survived"
            if not self.sound:
                return True
            limit = max(AT_LEAST, TIMES * (time.monotonic() - clean.began))
            took = json.loads(seconds.read_text())
            tests.sort(key=lambda test: float(took[test.nodeid]))  # most mutants are killed by a quick one
            waiting, running = list(self._mutants)[::-1], list[Trial]()
            while waiting or running:
                while waiting and len(running) < self._jobs:
                    running.append(Trial(session, tests, waiting.pop(), seconds))
                for trial in list(running):
                    if (ended := trial.ended(limit)) is not None:
                        running.remove(trial)
                        assert trial.mutant is not None
                        self._tell(trial.mutant, ended)
                time.sleep(0.005)
        return True


def try_module(mutants: Sequence[Mutant], jobs: int, tell: Callable[[Mutant, str], None]) -> None:
    """Try mutants of one module. Exits where its tests fail without one."""
    import pytest

    module = mutants[0].module
    trials = Trials(mutants, jobs, tell)
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not soak"]
    memory = tempfile.TemporaryDirectory(prefix="rollback-mutants-", dir=MEMORY)
    with memory as folder, contextlib.redirect_stdout(sys.stderr):
        pytest.main([*options, f"--basetemp={folder}/tests", *tests_of(module)], plugins=[trials])
    if not trials.sound:
        sys.exit(f"the tests of {module} fail without a mutant")


def tests_of(module: str) -> list[str]:
    named = [ROOT / "tests" / "unit" / name for name in MODULES[module][1]]
    return [str(path.with_name(f"test_{path.name}.py")) for path in named]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[*MODULES], default=[], help="this module (repeatable)")
    parser.add_argument("--count", type=int, default=COUNT, help=f"mutants, 0 for all (default: {COUNT})")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among them (default: 0)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time (default: cores)")
    parser.add_argument("--list", action="store_true", help="list modules, tests and numbers of mutants, and try none")
    arguments = parser.parse_args()
    mutants = all_mutants(arguments.only)
    if arguments.list:
        for module, (paths, _) in MODULES.items():
            count = sum(mutant.module == module for mutant in mutants)
            print(f"{module:10} {count:4} mutants of {', '.join(paths)}: {', '.join(tests_of(module))}")
        return 0
    reasons = argued()
    known = [mutant for mutant in mutants if mutant.key in reasons]
    if not arguments.only:
        for key in reasons.keys() - {mutant.key for mutant in known}:
            print(f"argued in {ARGUED.name}, and there is no such mutant: {' | '.join(key)}", flush=True)
    mutants = [mutant for mutant in mutants if mutant.key not in reasons]
    if 0 < arguments.count < len(mutants):
        chosen = random.Random(arguments.seed).sample(range(len(mutants)), arguments.count)
        mutants = [mutants[place] for place in sorted(chosen)]
    os.chdir(ROOT)
    began = time.monotonic()
    survived: list[Mutant] = []
    output = sys.stdout
    tally: Counter[tuple[str, str]] = Counter()

    def tell(mutant: Mutant, ended: str) -> None:
        tally[mutant.module, ended] += 1
        if ended == "survived":
            survived.append(mutant)
            print(f"survived: {mutant}", file=output, flush=True)
        if tally.total() % 50 == 0:
            print(f"{tally.total()} of {len(mutants)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    for _, own in itertools.groupby(mutants, lambda mutant: mutant.module):
        try_module(list(own), arguments.jobs, tell)
    for module in MODULES:
        counts = {kind: tally[module, kind] for kind in ("killed", "too long", "survived")}
        if any(counts.values()):
            print(f"{module:10} " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    share = 1 - len(survived) / max(1, len(mutants))
    print(
        f"{len(mutants)} mutants, {len(mutants) - len(survived)} killed ({share:.1%}), {len(survived)} survived; "
        f"{len(known)} more change nothing, as {ARGUED.name} argues; {time.monotonic() - began:.0f} s"
    )
    return int(share < BAR)


if __name__ == "__main__":
    sys.exit(main())
