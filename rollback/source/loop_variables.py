"""Which variables that a script's loops carry from iteration to iteration are restored where training goes on
elsewhere."""

import ast
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from rollback.source.changed_by_calls import ChangedByCalls
from rollback.source.loop_carried import has_part_in, iteration_of, names_in, place_of, set_by_head, targets_in
from rollback.source.loops import ScriptLoops
from rollback.source.syntax import (
    Function,
    Loop,
    dotted,
    is_backward,
    is_call_of,
    is_step,
    last_name,
    of_scope,
    put_in_list,
    takes_or_names,
    without_cells,
)

_LEAVES = ast.Break, ast.Continue, ast.Return
_TOLD = frozenset({"print", "format", "info", "debug", "warning", "log", "write", "set_postfix", "set_description",
                   "set_postfix_str", "add_scalar", "add_scalars", "len", "range", "isinstance",
                   "observe"})  # fmt: skip
"""Calls by which nothing of what they are given comes into the training; the last one is the guard's."""
_CLOCKS = frozenset((
    "time", "perf_counter", "monotonic", "process_time", "thread_time", "now", "utcnow", "default_timer",
))  # fmt: skip
"""Calls that read one, also in nanoseconds (`time_ns`)."""


@dataclass(frozen=True)
class LoopVariable:
    """A variable, or an attribute of one, that a loop carries.

    line: where the loop sets it. affects_training: whether what is trained, or for how long, depends on it, for all
    that the file shows. by_batch: in a training loop, whose iteration has a batch; else in one over epochs, where it is
    what it was at the top of the epoch. in_place: whether it is the same object all the time, as a list that grows.
    taking: statements of that loop that take a batch by `next`, also in a loop over the batches of an update.
    """

    name: str
    line: int
    affects_training: bool
    by_batch: bool
    in_place: bool
    loop: Loop = field(compare=False, repr=False)
    taking: tuple[ast.stmt, ...] = field(default=(), compare=False, repr=False)

    @property
    def shown(self) -> str:
        """Its name, for a reader."""
        return without_cells(self.name)


def loop_variables(loops: ScriptLoops) -> list[LoopVariable]:
    """Those of a file, loop by loop."""
    found: list[LoopVariable] = []
    carried_by = carried_by_loops(loops)
    for loop, carried in carried_by.items():
        by_batch = loop not in loops.epoch_loops
        taking = (*_taking(loop.body),) if by_batch else ()
        if by_batch and loop not in loops.batch_loops and not taking:
            continue  # what it calls takes the batch, and may look at the variable there
        if by_batch:
            apart = {name for part in taking for name in names_in(part)}  # it is what it was before the batch there
        else:  # what its batches change beside the training is not what it was at the epoch's top
            inner = [each for each in carried_by if each not in loops.epoch_loops and each in loops.reached(loop)]
            apart = {name for each in inner for name in carried_by[each].lines if not carried.affects_training(name)}
        found += [
            LoopVariable(
                name, line, carried.affects_training(name), by_batch, name not in carried.rebound, loop, taking
            )
            for name, line in carried.lines.items()
            if name not in apart
        ]
    return found


def carried_by_loops(loops: ScriptLoops) -> "dict[Loop, CarriedByLoop]":
    """Of those over epochs that are led, and of those that train."""
    if loops not in _carried_by:
        _carried_by[loops] = {loop: CarriedByLoop(loops, loop) for loop in (*loops.epoch_loops, *innermost(loops))}
    return _carried_by[loops]


def _taking(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for part in body:
        inner = [*_taking(part.body)] if isinstance(part, Loop) else []  # over the batches of an update
        takes = any(is_call_of(node, "next") for node in ast.walk(part))
        yield from inner or ([part] if takes else [])


def innermost(loops: ScriptLoops) -> list[Loop]:
    """The training loops that have none inside, nor in what they call, but one over the batches of an update."""
    training = [
        loop for loop in loops.training_loops if loop not in loops.epoch_loops and not _is_of_update(loops, loop)
    ]
    begin_others = {loop for other in training for loop in loops.around(other)}
    return [loop for loop in training if loop not in begin_others]


def _is_of_update(loops: ScriptLoops, loop: Loop) -> bool:
    """Whether it makes none, and a training loop around it does: `for micro in range(4): batch = next(batches)`."""
    outer = (each for each in loops.around(loop) if each in loops.training_loops and each not in loops.epoch_loops)
    return not any(map(is_step, loops.reached(loop))) and any(
        is_step(node) for each in outer for node in loops.reached(each)
    )


class CarriedByLoop:
    """What a loop carries, also by what it calls. Not the list in which it gathers the batches of an update: that is
    empty where a checkpoint is taken. Nor the time, which no other process goes on with.

    lines: where each is set. rebound: those that are not changed in place alone. counts: those that it adds 1 to.
    """

    def __init__(self, loops: ScriptLoops, loop: Loop) -> None:
        called, iteration = ChangedByCalls(loops, loop), iteration_of(loop)
        anew = iteration.rebound | set_by_head(loop)
        beside = {name: line for name, line in called.found.items() if not has_part_in(name, anew)}
        clocks = {dotted(it) for targets, value in map(_assigned, ast.walk(loop)) if _is_clock(value) for it in targets}
        whole = {name.rpartition(".")[0] for name in called.found}  # of which each part is known: `meter.update(loss)`
        self.lines = {name: line for name, line in (beside | iteration.carried).items() if name not in clocks | whole}
        self.rebound = iteration.rebound | called.rebound
        if loop in loops.gathering_loops or loop in [each.loop for each in loops.step_loops]:
            filled = (item for node in ast.walk(loop) if (item := put_in_list(node)) is not None)
            for name in {place_of(target) for target, value in filled if takes_or_names(value, set_by_head(loop))}:
                self.lines.pop(name or "", None)
        self.counts = {
            ast.unparse(node.target) for node in ast.walk(loop)
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
            and isinstance(node.value, ast.Constant) and node.value.value == 1
        }  # fmt: skip
        self._decisive = _decisive_names(loops, loop)

    def affects_training(self, name: str) -> bool:
        """Whether the training depends on it, or on an object that it is an attribute of."""
        return has_part_in(name, self._decisive)


_carried_by: WeakKeyDictionary[ScriptLoops, dict[Loop, CarriedByLoop]] = WeakKeyDictionary()
"""What was found of each file: of a large one that takes seconds."""


def _decisive_names(loops: ScriptLoops, loop: Loop) -> set[str]:
    """The names on which it depends what a loop trains, and when it ends: those that a loss is made of, or that decide
    of an update or of the loop's end, and those that these are made of in turn. Rather too many than too few."""
    nodes = [node for each in (loop, *loops.around(loop)) for node in (*ast.walk(each), *loops.reached(each))]
    dependence = Dependence(loops, nodes)
    return dependence.names_for((*_seeds(loops, dependence.nodes, loop), *_read_elsewhere(loops, dependence.nodes)))


def _read_elsewhere(loops: ScriptLoops, region: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What lambdas read, and functions which this file does not show to be called there, as a model's forward; and what
    attributes of objects are made of, `dropout.p = rate`."""
    here = {id(node) for node in region}
    for node in ast.walk(loops.tree):
        match node:
            case ast.Lambda():
                yield node.body
            case ast.FunctionDef() if not _has(node, here):
                names = [item for item in ast.walk(node) if isinstance(item, ast.Name)]
                own = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
                own |= {item.id for item in names if isinstance(item.ctx, ast.Store)}
                yield from (item for item in names if item.id not in own)
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner))], value=value):
                if owner != "self" and id(node) in here:
                    yield value


def _has(function: ast.FunctionDef, region: Container[int]) -> bool:
    """Whether it is called there, or the loop is in it."""
    return any(id(node) in region for node in ast.walk(function) if isinstance(node, ast.stmt))


class Dependence:
    """A part of a script: what is made of what in it."""

    def __init__(self, loops: ScriptLoops, nodes: Iterable[ast.AST]) -> None:
        self._loops = loops
        self.nodes = [*{id(node): node for node in nodes}.values()]
        self._returned: dict[Function, set[str]] = {}
        """The names in what a function of the file gives back."""
        self._made: list[tuple[str, set[str]]] = []
        """What is set, and what it is made of; with the tests of all `if`s around that."""
        self._parts: list[tuple[str, str]] = []
        """What is set to a part of an object, `for group in optimizer.param_groups`, and that object's name."""
        self._given: list[tuple[set[str], set[str]]] = []
        """The objects in a call, and all names in it: one may take in the others, `model.set(beta)`. With the tests of
        all `if`s around a call whose value nobody takes: `if late: trigger.set()`."""
        self._find()

    def _find(self) -> None:
        tests: dict[int, set[str]] = {}
        for asked in (node for node in self.nodes if isinstance(node, ast.If)):
            names = {*self._names_behind(asked.test)}
            for item in (item for part in (*asked.body, *asked.orelse) for item in ast.walk(part)):
                tests.setdefault(id(item), set()).update(names)
        acting = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}  # for what they do alone
        imports = (item for node in ast.walk(self._loops.tree) if isinstance(node, ast.Import) for item in node.names)
        modules = {item.asname or item.name.partition(".")[0] for item in imports}
        for node in self.nodes:
            if isinstance(node, ast.Call) and last_name(node) not in _TOLD:
                values = [*node.args, *(word.value for word in node.keywords)]
                decided_by = tests.get(id(node), set()) if id(node) in acting else set()
                takes = {place_of(item) or "" for item in values}
                if isinstance(node.func, ast.Attribute):
                    takes.add(place_of(node.func.value) or "")
                self._given.append((takes - modules, decided_by.union(*map(names_in, values))))
            targets, value = _assigned(node)
            if value is not None:
                made_of = {*self._names_behind(value)} | tests.get(id(node), set())
                for name in filter(None, map(place_of, targets)):
                    self._made.append((name, made_of))
                    self._parts.append((name, place_of(value) or ""))

    def names_for(self, nodes: Iterable[ast.AST]) -> set[str]:
        """The names in these nodes, and those that they are made of."""
        found = {name for node in nodes for name in self._names_behind(node)}
        set_here = {name for name, _ in self._made}
        while True:
            objects, before = found - set_here, len(found)
            for name, made_of in self._made:
                found |= made_of if has_part_in(name, found) else set()
            found |= {name for name, whole in self._parts if has_part_in(whole, objects)}
            for takes, given in self._given:
                found |= given if takes & objects else set()
            if len(found) == before:
                return found

    def _names_behind(self, value: ast.AST) -> Iterator[str]:
        """Those in an expression, and in what functions give back that it calls."""
        yield from names_in(value)
        for node in ast.walk(value):
            functions = self._loops.called(node)
            if isinstance(node, ast.Attribute):  # a property
                functions = [each for each in self._loops.functions.get(node.attr, []) if each.decorator_list]
            yield from (name for function in functions for name in self._names_returned(function))

    def _names_returned(self, function: Function) -> set[str]:
        if function not in self._returned:
            given = (node.value for node in of_scope(function) if isinstance(node, ast.Return) and node.value)
            self._returned[function] = set().union(*map(names_in, given))
        return self._returned[function]


def _seeds(loops: ScriptLoops, region: list[ast.AST], loop: Loop) -> Iterator[ast.AST]:
    if isinstance(loop, ast.For):
        yield _handed_on(loop.iter)
    for node in region:
        match node:
            case ast.Call(func=ast.Attribute(attr="backward" | "step" | "zero_grad" | "set_epoch")):
                yield node
            case ast.Call() if last_name(node) in _TOLD:
                continue
            case ast.Call() if loops.called(node) and any(map(_trains, loops.reached_by([node]))):
                yield from (node.func, *node.args, *node.keywords)  # what it gives back may only be told
            case ast.While(test=test):
                yield test
            case ast.If(test=test, body=body, orelse=other):
                inside = [item for part in (*body, *other) for item in ast.walk(part)]
                if any(isinstance(item, _LEAVES) or _trains(item) for item in inside):
                    yield test


def _is_clock(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and last_name(value).removesuffix("_ns") in _CLOCKS


def _trains(node: ast.AST) -> bool:
    return is_backward(node) or is_step(node)


def _assigned(node: ast.AST) -> tuple[list[ast.expr], ast.expr | None]:
    """What a node sets, and of what it is made there."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return [item for target in targets for item in targets_in(target)], value
        case (
            ast.AugAssign(target=target, value=value)
            | ast.AnnAssign(target=target, value=value)
            | ast.NamedExpr(target=target, value=value)
        ):
            return [target], value
        case ast.For(target=target, iter=value):
            return [*targets_in(target)], _handed_on(value)
        case (
            ast.comprehension(target=target, iter=value)
            | ast.withitem(optional_vars=ast.expr() as target, context_expr=value)
        ):
            return [*targets_in(target)], value
    return [], None


def _handed_on(value: ast.expr) -> ast.expr:
    """What a loop goes over, but for a logger that hands it on: `enumerate(logger.log_every(loader, 10))`."""
    calls = (node for node in ast.walk(value) if isinstance(node, ast.Call) and last_name(node) == "log_every")
    return next((call.args[0] for call in calls if call.args), value)
