"""Rehearsals: steps that do not count. All that they change is put back from a checkpoint.

The first step of a resumed process may be one:

DistributedDataParallel cuts its gradient buckets again after the first backward of every process, by the order of the
gradients (torch, `Reducer::rebuild_buckets`). With more than two ranks, the order of additions in an all-reduce depends
on this cut. So the first step of a resumed process would round its gradient in another way than the undisturbed run,
which had its final buckets long before. Doing the step, going back and doing it again gives the same buckets. With two
ranks a sum has only one order. Without the second cut no rehearsal is needed.

And a pass that has no batch left may be given one, since code behind the script's loop may need what the body sets. To
leave out the whole epoch instead was rejected: the run that skips it while it is in its body does the work behind the
loop, so the run that has the same skips from the start must do it too.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def needs_rehearsal(model: nn.Module, world_size: int, resumed_at: int) -> bool:
    """The same on all ranks. At step 0 the undisturbed run has the first cut too, so there is no rehearsal."""
    if resumed_at == 0 or world_size <= 2 or not isinstance(model, DistributedDataParallel):
        return False
    return bool(model.static_graph or not model.find_unused_parameters)


class PassRehearsal:
    """The batch that does not count, of a pass that has no batch left. Nothing here is collective.

    make: makes the batch; None: no pass gets one. due: whether the present pass gets one if nothing is left of it.
    ready: whether it gets one now. source: the checkpoint that is put back then; None: the one that was restored last.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._gradients: list[Tensor | None] | None = None
        self._restored = False
        self.make: Callable[[], Any] | None = None
        self.due = self.ready = False
        self.source: str | None = None

    def pass_begins(self, *, restored: bool) -> None:
        """restored: the state is that of the checkpoint that was restored last."""
        self.due, self.ready, self.source = self.make is not None, False, None
        self._restored = restored

    def prepare(self, take: Callable[[], str | None]) -> None:
        """take: returns a checkpoint of this very state, if one can be had."""
        self.source = None if self._restored else take()
        self.ready = self._restored or self.source is not None

    def begin(self) -> Any:
        """The batch."""
        assert self.make is not None
        self.due = self.ready = False
        self._gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters()]
        return self.make()

    def end(self) -> bool:
        """Whether that batch was the last one. Gradients, which no checkpoint has, are then what they were before."""
        if (gradients := self._gradients) is None:
            return False
        self._gradients = None
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.detach().copy_(gradient)
            else:
                parameter.grad = gradient
        return True

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
