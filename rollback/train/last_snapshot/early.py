"""Early marks: what a rank knows of a step's end before it lets the others go on into their updates.

Between the last sum of a step's gradients and the step's end a rank may die, while the others finish their updates.
Then nobody has the step before any more. So each rank leaves an early mark in its backward, before its gradients are
all given to the sum: whoever has got the sums can rely on it. It stands for the mark of the step's end if nothing
changes in between what only that rank knows. That is looked at in every step, by every rank.
"""

import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor, nn

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import FOREVER, EndMark, EndMarkPaths, Hold, StepEnd
from rollback.train.last_snapshot.device import NoDevice
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.last_snapshot.small_state import LocalState, SmallStateReader, same_but_for_next, split
from rollback.train.updates.backward import BackwardWatch

TRIED = 3
"""Steps in which nothing may have changed before an early mark is left. What a GPU has is compared a step later."""
_LATITUDE = 500_000_000  # nanoseconds
_version = attrgetter("_version")


class _Present(NamedTuple):
    """What a rank knew in its backward, and when. buffers: of its buffers on a GPU, where they lie, and the versions
    that torch counts."""

    end: StepEnd
    local: LocalState
    at: int
    computed: int
    buffers: list[tuple[int, int]]


class _Added(NamedTuple):
    """Which parts of a mark a GPU adds the same bytes to, where nothing changes buffers behind a backward."""

    end: StepEnd
    early: int
    at_end: int
    at: int
    length: int


class EarlyMarks:
    """One rank's early marks, for as long as this object lives. telltale: gives the parameter by which a backward is
    noticed now. coming: the end of the step in progress; None: there will be none, or it is not known yet."""

    def __init__(
        self,
        mark: EndMark,
        device: NoDevice,
        telltale: Callable[[], nn.Parameter | None],
        small_state: SmallStateReader,
        coming: Callable[[], StepEnd | None],
    ) -> None:
        self._mark, self._device, self._small_state, self._coming = mark, device, small_state, coming
        self._present: _Present | None = None
        self._part = 0
        self._added: _Added | None = None
        self._tried = self._longest = self._most = 0
        self._stopped = False
        self._telltale, self._watched = telltale, telltale()
        self._watch = BackwardWatch(None, self._watched, self._in_backward)

    def _in_backward(self, *_: object) -> None:
        """Called by the telltale's own hook, before DDP learns that its gradient is there."""
        self._present = None
        if self._device.is_capturing():
            return
        if (end := self._coming()) is None or (local := self._small_state.coming()) is None:
            return
        now = time.monotonic_ns(), time.process_time_ns()
        self._present = present = _Present(end, local, *now, self._versions())
        patience, effort = 2 * self._longest + _LATITUDE, 2 * self._most + _LATITUDE
        if self._leave(present, Hold(present.at, patience, present.computed, effort)):
            self._device.add(self._part, end, self._small_state.on_gpu, present.at)  # they are as the forward left them

    def _leave(self, present: _Present, hold: Hold) -> bool:
        local, on_gpu = present.local, self._small_state.on_gpu
        body, proved = local.body({}), self._tried >= TRIED + bool(on_gpu)
        if not (proved or on_gpu) or len(body) + len(local.unchanging) > end_marks.MOST:
            return False
        added = sum(item.nbytes for item in on_gpu) if on_gpu else None
        self._part = self._mark.write_early(present.end, body, hold, local.unchanging, added)
        if not proved:
            self._mark.withdraw()  # what the GPU adds is to be compared, and nobody may rely on it yet
        return added is not None

    def _versions(self) -> list[tuple[int, int]]:
        """Of what a script puts in a buffer's place torch begins to count anew; it lies elsewhere."""
        on_gpu = self._small_state.on_gpu
        return [*zip(map(Tensor.data_ptr, on_gpu), map(_version, on_gpu), strict=True)]

    def at_end(self, end: StepEnd, local: LocalState, part: int) -> LocalState | None:
        """The step has ended, and that part of the mark tells of it. Where something has changed in it, there are no
        early marks any more: what this rank knew in its backward."""
        present, self._present = self._present, None
        if not self._stopped and (telltale := self._telltale()) is not self._watched:
            self._watch.remove()
            self._watched = telltale
            self._watch = BackwardWatch(None, telltale, self._in_backward)
        if present is None or present.end != end:
            return None
        changed = present.local != local or present.buffers != self._versions()
        if changed or (self._added is not None and self._was_changed_unseen(self._added)):
            self.stop()
            return present.local
        if on_gpu := self._small_state.on_gpu:
            self._added = _Added(end, self._part, part, present.at, sum(item.nbytes for item in on_gpu))
        self._tried += 1
        self._longest = max(self._longest, time.monotonic_ns() - present.at)
        self._most = max(self._most, time.process_time_ns() - present.computed)
        return None

    def _was_changed_unseen(self, added: _Added) -> bool:
        """Whether something has changed buffers behind the backward of the step before, which its host cannot see."""
        early = self._device.added(added.early, added.end, added.length, added.at)
        at_end = self._device.added(added.at_end, added.end, added.length)
        return None not in (early, at_end) and early != at_end

    def give_up(self) -> None:
        """This rank will not come to the end of the step that it is in. Say whether it has changed anything so far."""
        if (present := self._present) is None:
            return
        try:
            same = self._small_state.coming() == present.local and self._versions() == present.buffers
        except Exception:  # noqa: BLE001 - another exception ends this rank, and that one is to be shown
            same = False
        if same:
            self._leave(present, Hold(present.at, FOREVER, present.computed, FOREVER))
        else:
            self.stop()

    def stop(self) -> None:
        self._stopped = True
        self._watch.remove()
        self._mark.withdraw()


def early_of_dead(paths: EndMarkPaths, rank: int, end: StepEnd, now: int) -> bytes:
    """The early mark of a rank that is gone, as its mark of that step's end. now: when it was, at the latest.

    Raises NotProved.
    """
    early = end_marks.read_early(paths, rank).get(end)
    if early is None or end_marks.has_left(paths, rank):
        raise NotProved(
            f"rank {rank} had not come to the end of step {end.step}, and the others had; it had told nothing of that "
            "end before, as in a step that logs, evaluates or saves, an epoch's last one and an attempt's first ones, "
            "or once the script logs, counts or draws behind a backward"
        )
    if now > early.hold.at + early.hold.patience:
        seconds = (now - early.hold.at) / 1e9
        raise NotProved(f"rank {rank} was behind the backward of step {end.step} for {seconds:.1f} s, as never before")
    return early.body


def early_of_living(paths: EndMarkPaths, rank: int, end: StepEnd, computed: int | None) -> bytes | None:
    """The same of a rank that lives; None: it may still come to that end, with something else.

    computed: what its process has used of the processor's time, where it has had all the time to come there.
    """
    early = end_marks.read_early(paths, rank).get(end)
    if early is None or end_marks.has_left(paths, rank):
        return None
    hold = early.hold
    stands = hold.patience == FOREVER or (computed is not None and computed <= hold.computed + hold.effort)
    return early.body if stands else None


def why_refuted(paths: EndMarkPaths, ended: Mapping[int, bytes], end: StepEnd) -> str | None:
    """Which rank has not told that step's end early as it was, in words. ended: by rank, what each knows there."""
    for rank, own in ended.items():
        early = end_marks.read_early(paths, rank).get(end)
        if early is None or not same_but_for_next(split(early.body)[1], own):
            return f"behind the backward of step {end.step} rank {rank} changed what only it knows"
    return None
