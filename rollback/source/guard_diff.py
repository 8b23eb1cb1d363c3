"""The guard written into a script: what `rollback adopt` shows. From source to source; nothing is run.

    import rollback                                 behind the imports
    guard = rollback.Guard(model=..., ...)          before the loop over epochs, else before that over batches
    guard.epochs(10)                                in place of range(10); with a rehearsal where code behind the loop
                                                    over batches needs what that has set
    guard                                           in place of the loader where it is iterated, or passed
    guard.observe(loss)                             behind backward(); of a closure, behind the step that runs it

What Accelerate has prepared is handed to `rollback.protect` instead, which leaves the loop as it is.
"""

import ast
import difflib
import io
import re
from collections.abc import Callable
from typing import NamedTuple

from rollback.errors import UsageError
from rollback.source.loops import ScriptLoops
from rollback.source.observed_losses import observed_losses
from rollback.source.syntax import (
    Function,
    Scope,
    behind_imports,
    blocks_in,
    last_name,
    leaving,
    limits_or_counts,
    may_lack,
    own_names,
    parameters_of,
    range_of,
)
from rollback.source.trained_objects import averages, is_average, schedulers_in, schedules, whole, words


class GuardDiff(NamedTuple):
    """text: the unified diff. keeps: the names of what the guard is handed. leaves: lines of the script, as it was, at
    which it may leave its training in the midst of an epoch."""

    text: str
    keeps: set[str]
    leaves: list[int]


def guard_diff(source: str, name: str) -> GuardDiff:
    """What makes the protection of a script explicit.

    source: with its byte order mark and the ends of its lines as they are in the file, or the diff would not fit there.
    name: of its file, for the diff and for errors.

    Raises UsageError for a script that this cannot be done to, with the line and what to do by hand.
    """
    mark = _BYTE_ORDER_MARK if source.startswith(_BYTE_ORDER_MARK) else ""  # no part of the Python
    try:
        script = _Script(source.removeprefix(mark), name)
        changed = script.protected()
    except SyntaxError as error:
        at = f"line {error.lineno}: " if error.lineno else ""
        raise UsageError(f"{name} is not Python that this interpreter reads: {at}{error.msg}") from error
    try:
        compile(changed, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UsageError(
            f"{name}: a guard would have to go where no line of its own can be: line {error.lineno} of the result",
            hint="give each statement of the training loop a line of its own",
        ) from error
    lines = difflib.unified_diff(_lines_of(source), _lines_of(mark + changed), name, name)
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return GuardDiff(text, script.keeps, script.leaves)


class _Script:
    def __init__(self, source: str, name: str) -> None:
        self._name = name
        self._lines = _lines_of(source)
        self._line_end = "\r\n" if source.partition("\n")[0].endswith("\r") else "\n"
        self._loops = ScriptLoops(source)
        self._scopes = self._loops.scope_of
        self._own = own_names(self._loops.tree)
        self._guard = next(name for name in ("guard", "run_guard", "rollback_guard") if name not in self._own)
        self.keeps: set[str] = set()
        self.leaves: list[int] = []
        self._put: list[tuple[int, str]] = []  # lines, to be put behind that one
        self._instead: list[tuple[ast.expr, str]] = []

    def protected(self) -> str:
        attributes = (node for node in ast.walk(self._loops.tree) if isinstance(node, ast.Attribute))
        if any(ast.unparse(node) in _PROTECTED for node in attributes):
            raise UsageError(f"{self._name} has a guard already", hint="start it with rollback launch, without --adopt")
        if (line := self._own.get("rollback")) is not None:
            raise UsageError(f"{self._name} calls something of its own `rollback` (line {line})", hint="rename that")
        batches = self._batches()
        epochs = self._loops.epochs_around.get(batches)
        outer = epochs or batches
        scope = self._scopes[outer]
        if any(leaving(batches.body)):  # else it leaves at most between two epochs, which may be the end
            self.leaves = [node.lineno for node in leaving(outer.body)]
        if around := self._loops.around(outer):
            word = "while" if isinstance(around[0], ast.While) else "for"
            raise self._by_hand(
                outer, f"is begun anew by the `{word}` in line {around[0].lineno}, and a job has one guard",
                "a loop over epochs is `for epoch in guard.epochs(n):`; one over trainings belongs around the launch",
            )  # fmt: skip
        loader = self._loader(batches)
        here = self._scopes[batches] is scope
        argument = loader if here else self._argument(batches, loader, epochs)
        made = {"loader": argument.id}
        if prepared := self._prepared(scope):
            self._protect(prepared, argument.id, batches)
            guard, inside = f"{argument.id}.guard", f"{loader.id}.guard"
        else:
            guard = self._guard
            inside = guard if here else loader.id
            made |= self._made(scope, outer)
            self._require_there(batches, loader, outer)
            if not here:
                self._require_of_guard(self._scopes[batches], loader.id, batches)
            self._require_kept(made, outer)
            for name in sorted(made.keys() - {"model", "optimizer", "loader"}):
                self._give_none(scope, made[name], outer)
            self._instead.append((argument, guard))
            order = sorted(made, key=["model", "optimizer", "loader", *sorted(made)].index)
            given = ", ".join(f"{word}={made[word]}" for word in order)
            self.keeps.update(made.values())
            self._put.append((outer.lineno - 1, f"{self._indent(outer)}{guard} = rollback.Guard({given})\n"))
            for observed in observed_losses(self._loops.tree, batches, self._by_hand):
                self._instead += observed.instead
                observe = f"{self._indent(observed.behind)}{inside}.observe({observed.loss})\n"
                self._put.append((observed.behind.end_lineno or 0, observe))
        self._count_batches(batches, inside)
        if epochs is not None:
            given = f"{argument.id}.base_dataloader" if prepared else argument.id
            rehearse = f", rehearse=lambda: next(iter({given}))" if self._leaves_names(batches) else ""
            self._count_epochs(epochs, guard, rehearse)
        self._put.append((behind_imports(self._loops.tree, self._lines), "import rollback\n"))
        return self._edited()

    # What is there ---------------------------------------------------------------------------------------------------

    def _batches(self) -> ast.For:
        found = self._loops.batch_loops
        if len(found) != 1:
            at = ", ".join(str(loop.lineno) for loop in found)
            raise UsageError(
                f"{self._name} has {len(found)} loops over batches whose body calls backward()"
                + (f" (lines {at})" if at else ""),
                hint="it takes one `for batch in loader:`. docs/guard.md shows how to write a guard into other loops",
            )
        return found[0]

    def _loader(self, batches: ast.For) -> ast.Name:
        found = self._loops.iterated(batches)
        if isinstance(found, ast.Name):
            return found
        do = "guard in place of the loader"
        calls = [node for node in ast.walk(batches.iter) if isinstance(node, ast.Call)]
        if any(last_name(call) == "zip" and not limits_or_counts(call) for call in calls):
            do = f"guard in place of it, and as its loader an object whose __iter__ returns {ast.unparse(found)}"
        elif any(last_name(call) in ("zip", "islice") for call in calls):
            do += "; what counts or goes beside it begins anew after a resume: guard.batch_in_epoch says where it was"
        raise self._by_hand(batches, f"goes over {ast.unparse(batches.iter)}", do)

    def _require_there(self, batches: ast.For, loader: ast.Name, outer: ast.For) -> None:
        """A progress bar around the loader that is made before the guard cannot be given the guard."""
        if loader.lineno < outer.lineno and self._scopes[batches] is self._scopes[outer]:
            what = f"goes over {ast.unparse(batches.iter)}, which line {loader.lineno} makes of {loader.id}"
            raise self._by_hand(batches, what, f"make the guard in front of line {loader.lineno}, and use it there")

    def _require_kept(self, made: dict[str, str], outer: ast.For) -> None:
        """The guard is made of these in front of the loop: none of them may be another one, or only be made, inside."""
        names = {*made.values(), *schedulers_in(outer, made["optimizer"])}
        for node in ast.walk(outer):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
                raise self._by_hand(
                    outer, f"sets {node.id} inside of it (line {node.lineno})",
                    "make it in front of the loop, and the guard behind that",
                )  # fmt: skip

    def _argument(self, batches: ast.For, loader: ast.Name, epochs: ast.For | None) -> ast.Name:
        """By which the function with the loop over batches is given its loader in the loop over epochs."""
        function = self._scopes[batches]
        assert isinstance(function, Function)
        calls = [
            node for node in ast.walk(self._loops.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function.name
        ]  # fmt: skip
        if len(calls) == 1 and epochs is not None and calls[0] in [*ast.walk(epochs)]:
            by_place = zip(parameters_of(function), calls[0].args, strict=False)
            given = [*by_place, *((word.arg, word.value) for word in calls[0].keywords)]
            argument = next((value for name, value in given if name == loader.id), None)
            if isinstance(argument, ast.Name):
                return argument
        raise self._by_hand(batches, f"is in {function.name}(), and not called once with its loader as an argument",
                            "pass the guard to it in place of the loader")  # fmt: skip

    def _require_of_guard(self, function: Scope, name: str, batches: ast.For) -> None:
        """The guard comes in place of the loader there: it has a length and the data set, and nothing else of it."""
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name and node.attr != "dataset":
                raise self._by_hand(
                    batches, f"is in a function that asks {ast.unparse(node)} in line {node.lineno}",
                    "pass the guard to it beside the loader, and go over the guard",
                )  # fmt: skip

    def _made(self, scope: Scope, before: ast.For) -> dict[str, str]:
        """Names of model, optimizer, schedulers, scaler and averages of the model."""
        optimizers = self._names(
            scope, before,
            lambda call: last_name(call)[0].isupper() and not is_average(call)
            and ".parameters()" in "".join(map(ast.unparse, call.args)),
        )  # fmt: skip
        if len(optimizers) != 1:
            found = ", ".join(f"`{name}`" for name in optimizers) or "none"
            raise self._by_hand(before, f"has before it {len(optimizers)} optimizers made of .parameters() ({found})",
                                "pass the one whose steps count as optimizer=, others by other names")  # fmt: skip
        ((optimizer, made),) = optimizers.items()
        wrapped = list(self._names(scope, before, lambda call: last_name(call) in ("DistributedDataParallel", "DDP")))
        receivers = [
            node.func.value for node in ast.walk(made)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parameters"
        ]  # fmt: skip
        wholes = list(dict.fromkeys(map(whole, receivers)))
        if len(wholes) > 1:
            raise self._by_hand(
                before, f"has an optimizer of {' and '.join(wholes)}",
                "pass one as model=, the others by names of their own; or one torch.nn.ModuleDict of them",
            )  # fmt: skip
        model = wrapped[-1] if wrapped else wholes[0]
        schedulers = list(self._names(scope, before, lambda call: schedules(call) and optimizer in words(call)))
        scalers = list(self._names(scope, before, lambda call: last_name(call) == "GradScaler"))
        copies = [
            name for name in self._names(scope, before, lambda call: averages(call, {*wholes, *wrapped}))
            if name not in (*wholes, *wrapped)
        ]  # fmt: skip
        named = {"model": model, "optimizer": optimizer}
        for word, names in (("scheduler", schedulers), ("scaler", scalers), ("ema", copies)):
            named |= {word if place == 1 else f"{word}{place}": name for place, name in enumerate(names, 1)}
        return named

    def _names(self, scope: Scope, before: ast.For, is_it: Callable[[ast.Call], bool]) -> dict[str, ast.Call]:
        """Names that are given such a call in this scope, and their last one."""
        found: dict[str, ast.Call] = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno < before.lineno and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                calls = [item for item in ast.walk(node.value) if isinstance(item, ast.Call) and is_it(item)]
                if self._scopes[node] is scope and calls and isinstance(targets[0], ast.Name):
                    found[targets[0].id] = calls[0]
        return found

    def _prepared(self, scope: Scope) -> list[ast.Assign]:
        """The lines that have Accelerate prepare objects, in their order."""
        backward = {ast.unparse(node.value) for node in ast.walk(self._loops.tree)
                    if isinstance(node, ast.Attribute) and node.attr == "backward"}  # fmt: skip
        return [
            node for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and isinstance(call := node.value, ast.Call)
            and isinstance(call.func, ast.Attribute) and call.func.attr == "prepare"
            and ast.unparse(call.func.value) in backward and self._scopes[node] is scope
        ]  # fmt: skip

    def _by_hand(self, found: ast.stmt, what: str, do: str) -> UsageError:
        word = "loop" if isinstance(found, ast.For) else "line"
        return UsageError(
            f"{self._name}, line {found.lineno}: this {word} {what}", hint=f"by hand: {do} (docs/guard.md)"
        )

    def _indent(self, node: ast.stmt) -> str:
        """What the line of a statement begins with: of several on a line all have it, but for a block's on its own."""
        line = self._lines[node.lineno - 1]
        if line.encode()[: node.col_offset].strip() and _BLOCK.match(line):
            raise self._by_hand(node, "is on the line that its block begins with", "give it a line of its own")
        return line[: len(line) - len(line.lstrip())]

    # What becomes of it ----------------------------------------------------------------------------------------------

    def _protect(self, prepared: list[ast.Assign], loader: str, batches: ast.For) -> None:
        """Hand over what is prepared, but for loaders that are not trained on."""
        last = prepared[-1]
        assert isinstance(last.value, ast.Call)
        assert isinstance(last.value.func, ast.Attribute)
        targets = [node for line in prepared for node in ast.walk(line.targets[0])]
        names = dict.fromkeys(node.id for node in targets if isinstance(node, ast.Name))
        if loader not in names:
            raise self._by_hand(batches, f"goes over {loader}, which is none of what is prepared here",
                                "loop over the loader that rollback.protect has returned")  # fmt: skip
        others = {name for name in names if _LOADER.search(name)} - {loader}
        line = ", ".join(name for name in names if name not in others)
        accelerator = ast.unparse(last.value.func.value)
        line = f"{self._indent(last)}{line} = rollback.protect({accelerator}, {line})\n"
        self._put.append((self._behind_registering(last, f"{accelerator}.register_for_checkpointing", batches), line))

    def _behind_registering(self, prepared: ast.Assign, register: str, batches: ast.For) -> int:
        """The number of the line behind which all is prepared, and registered for Accelerate's checkpoints."""
        block = next(block for block in blocks_in(self._loops.tree) if prepared in block)
        found: ast.stmt = prepared
        for statement in block[block.index(prepared) + 1 :]:
            inside = [*ast.walk(statement)]
            if batches in inside:
                break
            if any(isinstance(node, ast.Call) and ast.unparse(node.func) == register for node in inside):
                found = statement
        return found.end_lineno or 0

    def _leaves_names(self, batches: ast.For) -> bool:
        """Whether code behind a loop over batches, in its function, uses a name that only the loop has set."""
        scope = [node for node in ast.walk(self._scopes[batches]) if isinstance(node, ast.Name)]
        inside = {id(node) for node in ast.walk(batches)}
        set_inside = {node.id for node in scope if id(node) in inside and isinstance(node.ctx, ast.Store)}
        end = batches.end_lineno or 0
        before = {node.id for node in scope if isinstance(node.ctx, ast.Store) and node.lineno < batches.lineno}
        return any(
            node.id in set_inside - before and node.lineno > end for node in scope if isinstance(node.ctx, ast.Load)
        )

    def _give_none(self, scope: Scope, name: str, before: ast.For) -> None:
        """What the script makes only where a condition holds is None elsewhere, which a guard takes for no object."""
        if (giving := may_lack(scope, name, before)) is not None:
            self._put.append((giving.lineno - 1, f"{self._indent(giving)}{name} = None\n"))

    def _count_batches(self, batches: ast.For, guard: str) -> None:
        if (counted := self._loops.enumerated(batches)) is not None:
            name, start = counted
            if self._loops.carries_on(batches):
                raise self._by_hand(
                    batches, f"counts by enumerate from {ast.unparse(start)} on, which it sets itself",
                    "let guard.keep keep that count, and add to it in the loop",
                )  # fmt: skip
            place: ast.expr = ast.Attribute(ast.Name(guard), "batch_in_epoch")
            count = place if ast.unparse(start) == "0" else ast.BinOp(place, ast.Add(), start)
            first = batches.body[0]
            self._put.append((first.lineno - 1, f"{self._indent(first)}{name} = {ast.unparse(count)}\n"))

    def _count_epochs(self, epochs: ast.For, guard: str, rehearse: str) -> None:
        numbers = range_of(epochs)
        assert numbers is not None
        match [*numbers.args]:
            case [count] | [ast.Constant(value=0), count]:
                self._instead.append((numbers, f"{guard}.epochs({ast.unparse(count)}{rehearse})"))
            case [ast.Constant(value=int(first)), last]:
                many = ast.unparse(ast.BinOp(last, ast.Sub(), ast.Constant(first)))  # `(n or 3) - 1`
                if isinstance(last, ast.BinOp) and ast.unparse(last) == f"{ast.unparse(last.left)} + {first}":
                    many = ast.unparse(last.left)
                self._instead.append((numbers, f"({first} + done for done in {guard}.epochs({many}{rehearse}))"))
            case _:
                do = "loop over range(n); what loads a snapshot and sets the first epoch goes out, the guard does that"
                raise self._by_hand(epochs, f"goes over {ast.unparse(numbers)}", do)

    def _edited(self) -> str:
        lines = list(self._lines)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += self._line_end
        for node, text in sorted(self._instead, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
            if node.end_lineno != node.lineno:
                raise UsageError(
                    f"{self._name}, line {node.lineno}: what goes over several lines is not changed here",
                    hint=f"write it on one line: {ast.unparse(node)}",
                )
            line = lines[node.lineno - 1].encode()  # columns are counted in bytes
            lines[node.lineno - 1] = (line[: node.col_offset] + text.encode() + line[node.end_col_offset :]).decode()
        for behind, text in sorted(self._put, key=lambda edit: edit[0], reverse=True):
            lines.insert(behind, text.rstrip("\n") + self._line_end)
        return "".join(lines)


_BLOCK = re.compile(r"\s*(if|elif|else|for|while|with|try|except|finally|async|def|class|case)\b")
_LOADER = re.compile(r"load|batches|_dl\b|\bdl_|_dl_", re.IGNORECASE)
_BYTE_ORDER_MARK = "\ufeff"
_PROTECTED = ("rollback.Guard", "rollback.protect")


def _lines_of(source: str) -> list[str]:
    """The lines as Python counts them, and as they end. `str.splitlines` would also end one at a form feed."""
    return io.StringIO(source, newline="").readlines()
