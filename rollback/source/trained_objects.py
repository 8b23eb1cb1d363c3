"""Which calls make what a guard is handed beside its model: schedulers, averages of the model."""

import ast
import re

from rollback.source.syntax import last_name

_AVERAGE = re.compile(r"deepcopy|Averag|EMA|Ema(?![a-z])|^ema(?![a-z])")


def words(node: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def schedules(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return "lr_scheduler" in name or name.endswith("LR") or "schedule" in name.lower()


def schedulers_in(loop: ast.For, optimizer: str) -> set[str]:
    """What the loop sets to a scheduler of this optimizer."""
    return {
        ast.unparse(node.targets[0]) for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        and schedules(node.value) and optimizer in words(node.value)
    }  # fmt: skip


def is_average(call: ast.Call) -> bool:
    return _AVERAGE.search(last_name(call)) is not None


def averages(call: ast.Call, models: set[str]) -> bool:
    """Whether it makes an average of a model, or the copy that one begins with."""
    of = re.sub(r"(\.module)?(\.parameters\(\))?$", "", ast.unparse(call.args[0])) if call.args else ""
    return of in models and is_average(call)


def whole(part: ast.expr) -> str:
    """`model` of `model.head` and `model[0]`: what is frozen, or has buffers, is to be kept too."""
    found = part
    while isinstance(found, ast.Attribute | ast.Subscript):
        found = found.value
    return found.id if isinstance(found, ast.Name) and found.id != "self" else ast.unparse(part)
