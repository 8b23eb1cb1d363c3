"""When a backward has reached the model's parameters: for those who measure gradients, or watch the script.

The hook of a small parameter, the *telltale*, says so. No hook of a sharded parameter is called: FSDP2 computes with
other tensors, and sets the gradients itself. There a backward shows in what the model's forward gave out, and counts
as having reached the parameters at its end, when FSDP2 has set them.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rollback.train.sharded import is_sharded, local_of
from rollback.train.updates.hooks import weak_hook

_TELLTALE_SIZE = 1 << 16  # elements; a norm of so few costs microseconds


def choose_telltale(parameters: list[nn.Parameter]) -> nn.Parameter | None:
    """A small parameter near the model's input: a fault anywhere in backward reaches it. Of sharded ones, one of which
    this rank has a part; None: it has a part of none."""
    trained = [p for p in parameters if p.requires_grad and (local_of(p).numel() or not is_sharded(p))]
    small = (p for p in trained if local_of(p).numel() <= _TELLTALE_SIZE)
    return next(small, min(trained, key=lambda p: local_of(p).numel(), default=None))


def nearer_the_input(parameters: list[nn.Parameter], telltale: nn.Parameter | None) -> list[nn.Parameter]:
    """Those before the telltale, of parameters in the order of the model: most are embeddings.

    A backward reaches them last. A checkpoint with `use_reentrant` makes a backward of its own, and where the telltale
    lies in one, that ends before these are reached.
    """
    if telltale is None or is_sharded(telltale):
        return []  # of these no hook tells, and a watch is of the whole model
    before = takewhile(lambda p: p is not telltale, parameters)
    return [p for p in before if p.requires_grad and not is_sharded(p)]


at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""In a backward: call this when it ends, behind all that is to be called then so far."""


class BackwardWatch:
    """Calls the method `act` in each backward, for as long as its object and this one live.

    act: gets nothing, or the tensor that was reached. model: as the script calls it; None: not known, and no backward
    is seen where the telltale is sharded. begin: where it is, called when a backward begins.
    """

    def __init__(
        self,
        model: nn.Module | None,
        telltale: nn.Parameter | None,
        act: Callable[..., None],
        begin: Callable[[], None] | None = None,
    ) -> None:
        self._act, self._begin = act, begin
        self._seen = False
        self._hooks: list[Any] = []
        if telltale is None:
            return
        if not is_sharded(telltale):
            self._hooks.append(telltale.register_post_accumulate_grad_hook(weak_hook(act)))  # type: ignore[no-untyped-call]
        elif model is not None and not is_compiled(model):
            self._hooks.append(model.register_forward_hook(weak_hook(self._after_forward)))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._seen = False
        for item in tree_leaves(output):
            if isinstance(item, Tensor) and item.requires_grad:
                item.register_hook(weak_hook(self._backward_begins))  # type: ignore[no-untyped-call]

    def _backward_begins(self, _: Tensor) -> None:
        if not self._seen:  # of several outputs the first one
            self._seen = True
            if self._begin is not None:
                self._begin()
            at_end_of_backward(lambda: at_end_of_backward(self._end))  # FSDP2 sets gradients at its end too

    def _end(self) -> None:
        self._seen = False
        self._act()


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has compiled the module in place: a hook inside of it would be compiled too."""
    return getattr(model, "_compiled_call_impl", None) is not None
