"""Updates of other batches than they would have been of, since the run goes on in the middle of an epoch.

A script that counts batches by `enumerate` begins at 0 there. With `if i % 4 == 0: optimizer.step()` the first update
is of one batch then, and all further ones of the epoch begin at other batches than in an undisturbed run.
"""

from rollback.wording import AdviceText

UPDATES_MOVED = AdviceText(
    "updates-moved",
    "the run went on in the middle of an epoch, and there it made an update of {first} batches, between others of "
    "{usual}: the script seems to count its batches from 0 there, as `enumerate` does, so further updates come at "
    "other batches than without the resume. The guard's batch_in_epoch counts from the epoch's start. If that update "
    "was meant to be so, nothing is wrong",
)


class ResumedUpdates:
    """This process's first two updates. usual: how many batches the update before them had; None: the run begins."""

    def __init__(self, usual: int | None) -> None:
        self._usual = usual
        self._first: int | None = None
        self.found: list[AdviceText] = []
        """The advice, once there is one."""

    def note(self, batches: int, *, within_epoch: bool) -> None:
        """An update of so many batches is made. within_epoch: it is neither an epoch's first nor its last one."""
        usual, first, self._first = self._usual, self._first, batches
        if usual is None or first is not None or not within_epoch:
            self._usual = None
        if usual is not None and first is not None and within_epoch and batches == usual != first:
            self.found = [UPDATES_MOVED.of(first=first, usual=usual)]
