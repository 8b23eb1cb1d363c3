"""A training state that this rank holds in memory, to put it back a moment later: see `Rewinder.undo`.

It has all that a checkpoint has, and goes back the way that a checkpoint goes: through `TrainingState.load`. What
snapshots leave out is not copied either. For a step after which training goes on as if it had not been (`Prober`),
gradients are held too, and the position in the data is left out, since that does not move.
"""

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn

from rollback.train.sharded import FsdpModules, is_sharded, like_of, local_of, sharded_like
from rollback.train.state import tree
from rollback.train.state.image import STILL
from rollback.train.state.state import TrainingState


class StateCopy:
    """The present state, copied to the host. Nothing here is collective.

    left_out: frozen weights that stay as they are, as far as is known (`FrozenWeights`): a script may write to others
    all the same. before: a held state that is not wanted any more; its memory is used again where it fits. data: with
    the position in the data.
    """

    def __init__(
        self,
        state: TrainingState,
        left_out: Collection[str] = (),
        before: "StateCopy | None" = None,
        *,
        data: bool = True,
    ) -> None:
        image = state.image(data=data)
        reusable = before._copies if before is not None else {}
        self.step, self.batch = state.counters.step, state.cursor.batch
        self._trees = image.shared, image.local
        self._shapes = {name: part.shape for name, part in image.parts.items()}
        self._copies: dict[str, Tensor] = {}
        tensors = {**image.shared_tensors, **image.local_tensors}
        with torch.no_grad():
            for name in tensors.keys() - image.frozen.intersection(left_out):
                item, free = tensors[name], reusable.get(name)
                if free is not None and (free.shape, free.dtype) == (item.shape, item.dtype):
                    self._copies[name] = free.copy_(item)
                else:
                    self._copies[name] = item.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    @torch.no_grad()
    def put_back(self, state: TrainingState) -> None:
        """Make it the present state again, bit for bit. Nothing may be copying the live objects now."""
        live, find = state.live_tensors(), state.places()

        def plain(name: str) -> Tensor:
            present, held = live.get(name), self._copies.get(name)
            if held is None:  # left out: it is what it was
                frozen = find(name)
                assert frozen is not None
                return frozen
            if present is not None and (present.shape, present.dtype) == (held.shape, held.dtype):
                return present.copy_(held)
            own = None if name.startswith(STILL) else find(name)  # as `restore.reader.targets`
            if own is None or isinstance(own, nn.Parameter):
                return held.clone()
            return held.to(local_of(own).device, copy=True)

        def sharded(name: str) -> Tensor:
            found = find(name)
            assert found is not None
            like, part = like_of(found, self._shapes[name]), plain(name)
            return sharded_like(part.to(local_of(like).device), like) if is_sharded(like) else part

        shared, local = self._trees
        state.load(tree.decode(shared, plain, sharded), tree.decode(local, plain))


class GradientCopy:
    """The present gradients of these parameters, and those that FSDP2 has not summed yet, copied to the host."""

    def __init__(self, parameters: Iterable[nn.Parameter], fsdp: FsdpModules) -> None:
        self._held = [(p, _on_host(p.grad)) for p in parameters]
        found = ((owner, name, getattr(owner, name)) for owner, name in fsdp.gradients())
        self._not_summed = [(*place, item.device, _on_host(item)) for *place, item in found if item is not None]
        self._layouts = [(owner, name, dict(getattr(owner, name))) for owner, name in fsdp.layouts()]

    @torch.no_grad()
    def put_back(self, put_back_state: Callable[[], object]) -> None:
        """Behind a state, which has none. They go into the tensors that are there now, which others may know too."""
        present = [parameter.grad for parameter, _ in self._held]
        put_back_state()
        for (parameter, held), gradient in zip(self._held, present, strict=True):
            if held is not None and gradient is not None:
                gradient.detach().copy_(held)
                parameter.grad = gradient
            else:
                parameter.grad = None if held is None else held.to(parameter.device)
        for owner, name, device, held in self._not_summed:
            setattr(owner, name, held.to(device))
        for owner, name, layout in self._layouts:
            setattr(owner, name, layout)


def _on_host(item: Tensor | None) -> Tensor | None:
    return None if item is None else item.detach().to("cpu", copy=True)
