"""What a guard is to be told as the loss, and where: behind backward(), or behind the step that runs a closure."""

import ast
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rollback.errors import UsageError

ByHand = Callable[[ast.stmt, str, str], UsageError]
"""The error for a statement, what is wrong with it, and what to do by hand."""
_NAMED = "give the loss a name, loss = ..., then loss.backward() and guard.observe(loss)"


@dataclass(frozen=True)
class ObservedLoss:
    """`loss`, behind that statement. instead: what is put in place of its expressions, so that the loss has a name."""

    behind: ast.stmt
    loss: str
    instead: list[tuple[ast.expr, str]] = field(default_factory=list)


def observed_losses(tree: ast.Module, batches: ast.For, by_hand: ByHand) -> Iterator[ObservedLoss]:
    """Of the body of a loop over batches.

    What calls something is given a name: to call it again would draw other random numbers, and count a batch twice.
    Raises UsageError, made by `by_hand`, where no line of its own would do.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names = itertools.chain(("loss", "observed"), map("observed_{}".format, itertools.count(2)))
    named = next(name for name in names if name not in used)
    functions = (node for node in ast.walk(batches) if isinstance(node, ast.FunctionDef))
    closures = {id(node): closure for closure in functions for node in ast.walk(closure)}  # the innermost comes last
    found, told = False, set()
    for statement in _statements_in(batches):
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="backward", value=receiver), args=[])):
                found, closure = True, closures.get(id(statement))
                if closure is not None and (step := _step_that_runs(closure, batches)) is not None:
                    if id(step) not in told:
                        yield _behind_step(step, closure, named, by_hand)
                    told.add(id(step))
                    continue
                loss = _unscaled(receiver)
                if not any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(loss)):
                    yield ObservedLoss(statement, ast.unparse(loss))
                    continue
                if isinstance(receiver, ast.IfExp):
                    raise by_hand(statement, f"calls backward() on {ast.unparse(receiver)}", _NAMED)
                yield ObservedLoss(statement, named, [(loss, f"({named} := {ast.unparse(loss)})")])
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="backward", value=receiver))):
                what = f"calls backward() of {ast.unparse(receiver)} with an argument"
                raise by_hand(statement, what, "guard.observe(loss) behind it, with the loss of the batch")
    if not found:
        raise by_hand(batches, "calls a function that calls backward()", "guard.observe(loss) behind it")


def _step_that_runs(closure: ast.FunctionDef, batches: ast.For) -> ast.stmt | None:
    """The statement with `optimizer.step(closure)`; the innermost one."""
    found = [statement for statement in _statements_in(batches) if _step_call(closure, statement) is not None]
    return found[-1] if found else None


def _step_call(closure: ast.FunctionDef, statement: ast.stmt) -> ast.Call | None:
    for node in ast.walk(statement):
        match node:
            case ast.Call(func=ast.Attribute(attr="step"), args=given, keywords=words):
                values = [*given, *(word.value for word in words)]
                if any(isinstance(value, ast.Name) and value.id == closure.name for value in values):
                    return node
    return None


def _behind_step(step: ast.stmt, closure: ast.FunctionDef, named: str, by_hand: ByHand) -> ObservedLoss:
    """The step returns what its closure has returned first: an optimizer may run it many times, along the way."""
    call = _step_call(closure, step)
    assert call is not None
    if not any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(closure)):
        raise by_hand(
            closure, "is a closure that returns no loss", "return the loss, and guard.observe(loss) behind the step"
        )
    match step:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if value is call:
            return ObservedLoss(step, name)
        case ast.Expr(value=value) if value is call:
            return ObservedLoss(step, named, [(call, f"{named} = {ast.unparse(call)}")])
        case ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            return ObservedLoss(step, named, [(call, f"({named} := {ast.unparse(call)})")])
    raise by_hand(step, f"decides by {ast.unparse(call)}", f"loss = {ast.unparse(call)}, then guard.observe(loss)")


def _statements_in(batches: ast.For) -> Iterator[ast.stmt]:
    """Of the loop's body; outer ones before those inside them."""
    return (node for part in batches.body for node in ast.walk(part) if isinstance(node, ast.stmt))


def _unscaled(receiver: ast.expr) -> ast.expr:
    """`loss` of `scaler.scale(loss)`."""
    match receiver:
        case ast.Call(func=ast.Attribute(attr="scale"), args=[loss]):
            return loss
        case ast.IfExp(orelse=loss):
            return _unscaled(loss)
    return receiver
