"""The learning rate: how it is read, and how a plan lowers it for a stretch of steps.

The optimizer's own rates are lowered as its step begins and put back as it ends. So schedulers, hints and checkpoints
see the script's rates alone, and the factor is a function of the step and of the plan in the journal: a resume needs
nothing else. A schedule that steps the optimizer's rates goes on underneath as if nothing had been done.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rollback.facts.training import Planned
from rollback.train.events import RollbackApplied
from rollback.train.updates.hooks import weak_hook


class RateReader:
    """Reads an optimizer's rate. One that lies on a device, as of `Adam(capturable=True)`, is read where it has been
    written to since the last time: to read it is to wait for all that the device has been told to do."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, float] | None = None

    def read(self, given: Tensor | float) -> float:
        if not isinstance(given, Tensor) or given.is_cpu:
            return float(given)
        if self._last is None or self._last[0] is not given or self._last[1] != given._version:
            self._last = given, given._version, float(given)
        return self._last[2]


class LoweredRate:
    """Not collective. step: the update in progress. plan: the last one that lowers the rate; None: there is none.

    The optimizer gets hooks with the first plan only: a run without one pays nothing.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], int], plan: Planned | None) -> None:
        self._optimizer = optimizer
        self._step = step
        self._plan: Planned | None = None
        self._own: list[tuple[dict[str, Any], Any]] = []
        self._follow(plan)

    def rollback_applied(self, event: RollbackApplied) -> None:
        """The plan that was carried out may lower the rate."""
        self._follow(event.case.plan if event.case is not None else None)

    def end(self) -> None:
        """The guard is over, or does not come about: another one may lower the rates of this optimizer."""
        self._plan = None

    def _follow(self, plan: Planned | None) -> None:
        if plan is None or plan.lower_rate is None:
            return
        if self._plan is None:
            self._optimizer.register_step_pre_hook(weak_hook(self._before_step))
            self._optimizer.register_step_post_hook(weak_hook(self._after_step))
        self._plan = plan

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        # The step before may have raised, as where memory runs out, and the script caught that.
        self._after_step(optimizer)
        factor = self._plan.rate_at(self._step()) if self._plan is not None else 1.0
        if factor == 1.0:
            return
        self._own = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
        for group, rate in self._own:
            group["lr"] = rate * factor

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group, rate in self._own:
            group["lr"] = rate
        self._own = []
