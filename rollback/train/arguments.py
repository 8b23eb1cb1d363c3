"""What the script hands to the guard, sorted and checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollback.config import Settings, settings_from
from rollback.errors import UsageError
from rollback.sentinel import Sentinel
from rollback.train.state import Stateful


def settings_and_objects(others: dict[str, Any]) -> tuple[Settings, dict[str, Stateful]]:
    """Settings and objects among the guard's further arguments. Raises UsageError for what is neither."""
    settings = {name: value for name, value in others.items() if name in Settings.model_fields}
    objects: dict[str, Stateful] = {}
    for name, value in others.items():
        if name in settings or value is None:
            continue
        if not isinstance(value, Stateful):
            raise UsageError(
                f"Guard({name}=...) is a {type(value).__name__}: neither a setting nor an object with state_dict and "
                "load_state_dict",
                hint=f"the settings are {', '.join(Settings.model_fields)}",
            )
        objects[name] = value
    return settings_from(settings), objects


def sentinel_for(settings: Settings) -> Sentinel:
    """The run's sentinel. Raises UsageError where a checkpoint could be good before the trouble in it is called."""
    sentinel = Sentinel(settings.sensitivity)
    if settings.probation <= sentinel.patience:
        raise UsageError(
            f"probation={settings.probation} is no longer than the sentinel's patience of {sentinel.patience} "
            "steps: a checkpoint could be called good before the trouble in it is called",
            hint=f"set probation to {sentinel.patience + 1} or more",
        )
    return sentinel


def scalar(value: Tensor | float, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(float(value))
    if value.numel() != 1:
        raise UsageError(
            f"guard.observe got a {what} of shape {list(value.shape)}; it takes one number",
            hint=f"reduce it first, for example {what}.mean()",
        )
    return value.detach().reshape(())
