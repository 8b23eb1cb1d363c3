"""What a rank leaves at a step's end: what it has put on the pulse, and what only it knows.

Of a job on a GPU the host does not have all of it yet. That comes last in the mark, and the GPU puts it there.
"""

import marshal
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rollback.train.last_snapshot.small_state import KEPT, LocalState
from rollback.train.state.state import TrainingState


def content_of(
    sent: bytes | Tensor, local: LocalState, at_end: Mapping[str, Any], on_gpu: Sequence[Tensor]
) -> tuple[bytes, Sequence[Tensor]]:
    """A mark's content without what stays, and what a GPU puts in place of its last bytes.

    sent: `Pulse.sent`. at_end: see `told_at_end`. on_gpu: the last bytes of `local`.
    """
    if isinstance(sent, Tensor):
        return local.body(at_end, bytes(sent.nbytes)), (*on_gpu, sent)
    return local.body(at_end, sent), on_gpu


def told_at_end(state: TrainingState) -> dict[str, Any]:
    """What a rank knows at a step's end alone, as JSON: what the cursor says of the next batch, and sums and the like
    of the script (`ToldAtEnd`)."""
    of_next, kept = state.cursor.of_next(), state.kept.at_end()
    return {**of_next, KEPT: marshal.dumps(kept).hex()} if kept else of_next
