"""What the ranks' journal says of one attempt. Pure.

A fold, and not the entries: an attempt of weeks has hundreds of thousands of them.
"""

from dataclasses import dataclass, field

from rollback.facts.history import furthest_of
from rollback.facts.training import (
    Attached,
    Committed,
    FinalStateLost,
    Finished,
    JournalEntry,
    LastSaveFailed,
    Restored,
    Stopped,
)


@dataclass
class AttemptRecord:
    """Each entry of the attempt has to be handed to `take`, in order. How it ended counts from when its ranks attached
    last: one process may train several times."""

    finished: Finished | None = None
    final_state_lost: FinalStateLost | None = None
    stopped: Stopped | None = None
    save_failed: LastSaveFailed | None = None
    furthest: int | None = None
    """The furthest step on record."""
    restored: Restored | None = None
    """The last rollback in process."""
    since_restored: int | None = None
    """The furthest step since then."""
    left_behind: dict[int, bool] = field(default_factory=dict)
    """By the step at which its ranks attached: whether they have left a checkpoint behind it."""
    _began: int | None = None

    @property
    def attached(self) -> bool:
        return bool(self.left_behind)

    def take(self, entry: JournalEntry) -> None:
        if (reached := furthest_of([entry])) is not None:
            self.furthest = max(reached, self.furthest or 0)
            self.since_restored = max(reached, self.since_restored or 0)
        match entry.fact:
            case Attached(step=step):
                self._began = step
                self.left_behind.setdefault(step, False)
                self.finished = self.final_state_lost = self.stopped = self.save_failed = None
            case Committed(step=step) if self._began is not None and step > self._began:
                self.left_behind[self._began] = True
            case Restored(route="in_process") as fact:
                self.restored, self.since_restored = fact, fact.step
            case Finished() as fact:
                self.finished = fact
            case FinalStateLost() as fact:
                self.final_state_lost = fact
            case Stopped() as fact:
                self.stopped = fact
            case LastSaveFailed() as fact:
                self.save_failed = fact


def got_further(record: AttemptRecord, step: int | None, best: int | None, before: AttemptRecord) -> bool:
    """Whether an attempt made progress.

    It did if it went further than all attempts before, or if it left a checkpoint after the one it began with: after a
    rollback a run repeats steps and still makes progress. Not so where it began where the attempt before it did: what
    that one left was of no use, as a checkpoint of an epoch's end is none to a script whose evaluation fails there
    each time. step: the furthest step of the attempt. best: that of all attempts before; None: this is the first
    attempt. before: the record of the attempt before it.
    """
    if any(left for began, left in record.left_behind.items() if began not in before.left_behind):
        return True
    return step is not None and step > (best or 0)
