"""What a rank leaves at a step's end: what it has put on the pulse, and what only it knows.

Of a job on a GPU the host does not have all of it yet. That comes last in the mark, and the GPU puts it there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollback.checkpoints.fast_tier.end_marks import EndMark, StepEnd
from rollback.train.last_snapshot.device import Device
from rollback.train.last_snapshot.early import mark_body
from rollback.train.last_snapshot.small_state import LocalState


@dataclass(frozen=True)
class EndOfStep:
    """A mark's content, before it is written. late: what a GPU puts in place of the body's last bytes."""

    body: bytes
    stays: bytes
    late: Sequence[Tensor]

    @classmethod
    def of(
        cls, sent: bytes | Tensor, local: LocalState, of_next: Mapping[str, Any], on_gpu: Sequence[Tensor]
    ) -> "EndOfStep":
        """sent: `Pulse.sent`. of_next: what the cursor knows of the next batch. on_gpu: the last bytes of `local`."""
        if isinstance(sent, Tensor):
            return cls(mark_body(bytes(sent.nbytes), local.body(of_next)), local.stays, (*on_gpu, sent))
        return cls(mark_body(sent, local.body(of_next)), local.stays, on_gpu)

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
