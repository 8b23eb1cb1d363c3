"""Writes to the weights within a step that torch does not count: where a script makes such, nothing is kept, and no
snapshot is copied beside the training.

The last snapshot knows by counters whether the weights are still those of the last step's end. A write through `.data`,
by NumPy or by another library's kernel is in no counter. Adversarial training, as it is often written, moves an
embedding in this way for a second backward, and then back. Whoever dies in between would leave the others with weights
that belong to no step. So in the first steps of an attempt the weights are looked at, and not only the counters. A
snapshot that is copied beside forward and backward goes by the same counters: one that is under way then is torn, and
the later ones are copied while the loop waits.
"""

from collections.abc import Callable

from torch import nn

from rollback.train.last_snapshot.write import digest_of_large_state
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.state import TrainingState
from rollback.train.updates.backward import BackwardWatch

FIRST_STEPS = 3
"""Steps of an attempt in which it is looked for."""
_LOOKS = 2  # in the backwards of each of them: of many micro-batches, each is trained on alike


class UnseenWrites:
    """Looks for such writes, for as long as this object lives. telltale: a parameter by which a backward is noticed.

    seems_unchanged: whether the counters say that the weights are those of the last end. found: called with a reason,
    in the backward. The script's own thread calls everything.
    """

    def __init__(
        self,
        state: TrainingState,
        snapshots: Snapshots,
        telltale: nn.Parameter | None,
        seems_unchanged: Callable[[], bool],
        found: Callable[[str], None],
    ) -> None:
        self._state, self._snapshots = state, snapshots
        self._seems_unchanged, self._found = seems_unchanged, found
        self._digest: int | None = None
        self._ends = self._looks = 0
        self._watch = BackwardWatch(None, telltale, self._in_backward)

    def at_end(self) -> int | None:
        """A step has ended. Returns the digest of weights and optimizer there; None: it is looked for no more."""
        if self._ends == FIRST_STEPS:
            self._watch.remove()
            self._digest = None
        else:
            self._digest = digest_of_large_state(self._state)
            self._ends, self._looks = self._ends + 1, 0
        return self._digest

    def _in_backward(self) -> None:
        if self._digest is None or self._looks == _LOOKS or not self._seems_unchanged():
            return
        self._looks += 1
        if digest_of_large_state(self._state) != self._digest:
            self._watch.remove()
            self._snapshots.mode = "held"
            self._found(
                "within a step the script writes to parameters through `.data` or the like, which torch counts not"
            )
