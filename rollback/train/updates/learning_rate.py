"""A lower learning rate for a stretch of steps, as a plan has it.

The optimizer's own rates are lowered as its step begins and put back as it ends. So schedulers, hints and checkpoints
see the script's rates alone, and the factor is a function of the step and of the plan in the journal: a resume needs
nothing else. A schedule that steps the optimizer's rates goes on underneath as if nothing had been done.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from rollback.facts.training import Planned
from rollback.train.events import RollbackApplied
from rollback.train.updates.hooks import weak_hook


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
