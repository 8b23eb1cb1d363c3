"""What a rank leaves at a step's end: what it has put on the pulse, and what only it knows.

Of a job on a GPU the host does not have all of it yet. That comes last in the mark, and the GPU puts it there.
"""

import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollback.checkpoints.fast_tier.end_marks import EndMark, StepEnd
from rollback.train.last_snapshot.device import Device
from rollback.train.last_snapshot.early import mark_body
from rollback.train.last_snapshot.small_state import KEPT, LocalState
from rollback.train.state.state import TrainingState


@dataclass(frozen=True)
class EndOfStep:
    """A mark's content, before it is written. late: what a GPU puts in place of the body's last bytes."""

    body: bytes
    stays: bytes
    late: Sequence[Tensor]

    @classmethod
    def of(
        cls, sent: bytes | Tensor, local: LocalState, at_end: Mapping[str, Any], on_gpu: Sequence[Tensor]
    ) -> "EndOfStep":
        """sent: `Pulse.sent`. at_end: see `told_at_end`. on_gpu: the last bytes of `local`."""
        if isinstance(sent, Tensor):
            return cls(mark_body(bytes(sent.nbytes), local.body(at_end)), local.stays, (*on_gpu, sent))
        return cls(mark_body(sent, local.body(at_end)), local.stays, on_gpu)

    @property
    def size(self) -> int:
        return len(self.body) + len(self.stays)

    def write(self, mark: EndMark, device: Device | None, end: StepEnd) -> int:
        """Leave it, in a part whose number is returned. With a device it is whole once that has come to this step's end
        itself."""
        if device is None:
            return mark.write(end, self.body, self.stays)
        part = mark.write(end, self.body, self.stays, added=sum(item.nbytes for item in self.late))
        device.add(part, end, self.late)
        return part


def told_at_end(state: TrainingState) -> dict[str, Any]:
    """What a rank knows at a step's end alone, as JSON: what the cursor says of the next batch, and sums and the like
    of the script (`ToldAtEnd`)."""
    of_next, kept = state.cursor.of_next(), state.kept.at_end()
    return {**of_next, KEPT: marshal.dumps(kept).hex()} if kept else of_next
