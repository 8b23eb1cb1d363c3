"""A training state that this rank holds in memory, to put it back a moment later: see `Rewinder.undo`.

It has all that a checkpoint has, and goes back the way that a checkpoint goes: through `TrainingState.load`. Weights
that nothing trains are not copied.
"""

import torch
from torch import Tensor

from rollback.train.sharded import is_sharded, local_of, sharded_like
from rollback.train.state import tree
from rollback.train.state.state import TrainingState


class HeldState:
    """The present state, copied to the host. Nothing here is collective.

    before: a held state that is not wanted any more; its memory is used again where it fits.
    """

    def __init__(self, state: TrainingState, before: "HeldState | None" = None) -> None:
        image = state.image()
        room = before._copies if before is not None else {}
        self.step, self.batch = state.counters.step, state.cursor.batch
        self._trees = image.shared, image.local
        self._copies: dict[str, Tensor] = {}
        tensors = {**image.shared_tensors, **image.local_tensors}
        with torch.no_grad():
            for name in tensors.keys() - image.frozen:
                item, free = tensors[name], room.get(name)
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
            if held is None:  # frozen: it is what it was
                frozen = find(name)
                assert frozen is not None
                return frozen
            if present is not None and (present.shape, present.dtype) == (held.shape, held.dtype):
                return present.copy_(held)
            return held.clone()

        def sharded(name: str) -> Tensor:
            like = find(name)
            assert like is not None
            part = plain(name)
            return sharded_like(part.to(local_of(like).device), like) if is_sharded(like) else part

        shared, local = self._trees
        state.load(tree.decode(shared, plain, sharded), tree.decode(local, plain))
