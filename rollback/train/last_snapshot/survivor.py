"""The last snapshot: when a rank is gone, the others keep the state that they still hold, before they go themselves.

At every step's end a rank writes its end mark, and before its gradients are summed an early one (`early`). From a
step's end on it counts what begins to change the state: the optimizer's step, a restore. As long as nothing has begun,
the parameters in its memory are those of that step's end. A thread of each rank waits for the death of another one, or
for a bell. It needs neither the group nor the main thread, which may be in a collective for ever. docs/design.md, "The
last snapshot", has the proof that what it keeps is the state at the end of one step on all ranks. `keeper` keeps it.
"""

import contextlib
import marshal
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import RANK_ENDS, REASONS, StepEnd
from rollback.errors import RollbackError
from rollback.facts.training import NoLastSnapshot
from rollback.system.threads import start_thread
from rollback.train.comm.pulse import Pulse
from rollback.train.data.batches import Batches
from rollback.train.events import RollbackApplied
from rollback.train.last_snapshot.agreement import FIRST
from rollback.train.last_snapshot.device import NO_DEVICE
from rollback.train.last_snapshot.early import EarlyMarks
from rollback.train.last_snapshot.keeper import Keeper, StandingEnds
from rollback.train.last_snapshot.membership import SWITCHED_OFF, join, note_stopped
from rollback.train.last_snapshot.proof import StoreGone
from rollback.train.last_snapshot.small_state import KEPT, SmallStateReader
from rollback.train.last_snapshot.writers import JudgedAhead, digest_of_large_state
from rollback.train.run import AttachedRun
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.snapshots.unseen_writes import UnseenWrites
from rollback.train.state.state import TrainingState
from rollback.train.updates.hooks import before_update, weak_hook
from rollback.wording import AdviceText

_FROM_NOW_ON = (
    "behind the backward of a step: from now on a rank that is killed between its backward and the step's end costs "
    "the steps since the newest checkpoint, and not this one alone, for nobody can tell any more what it knew"
)
VALUES_BEHIND = AdviceText(
    "values-behind-backward",
    f"the script changes {{names}}, which {{guard.keep}} keeps, {_FROM_NOW_ON}. Change such a value in front of "
    "loss.backward(), where that can be, as a count of tokens",
)
LOGS_BEHIND = AdviceText(
    "logs-behind-backward",
    f"the script or a callback logs or counts something with its Trainer {_FROM_NOW_ON}. Lightning's self.log in "
    "training_step is in front of it; in on_before_optimizer_step or on_train_batch_end it is not",
)


class LastSnapshot:
    """One rank's part in it. Where there can be none, nothing is done at any step, and the journal has the reason.

    judge_ahead: judges the last step ahead by what the ranks that came to its end have told, from any thread; raises
    NotProved. telltale: as `EarlyMarks` has it. at_last_batch: whether the batch in hand is probably its update's last
    one. Making one is collective; nothing else is.
    """

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        snapshots: Snapshots,
        pulse: Pulse,
        batches: Batches,
        timeline: Callable[[], int],
        judge_ahead: Callable[[Sequence[bytes]], JudgedAhead],
        telltale: Callable[[], torch.nn.Parameter | None],
        unseen: UnseenWrites,
        at_last_batch: Callable[[], bool],
    ) -> None:
        self._run, self._state, self._snapshots, self._pulse, self._batches = run, state, snapshots, pulse, batches
        self._timeline, self._judge_ahead = timeline, judge_ahead
        self._unseen, self._at_last_batch = unseen, at_last_batch
        self._small_state = SmallStateReader(state)
        self._standing = StandingEnds(state)
        self._returns = 0
        self._device = NO_DEVICE
        self._early: EarlyMarks | None = None
        self._stopped = set[int]()
        """Ranks of which the journal has it."""
        self._once, self._done, self._over = threading.Lock(), False, False
        self._pid = os.getpid()
        joined = join(run, state, snapshots, self._small_state)
        if isinstance(joined, str):
            self._over = True  # nothing of what follows is there
            said = None if joined == SWITCHED_OFF else f"no last snapshots: {joined}"
            run.record.note(NoLastSnapshot(reason=joined), said)
            return
        self._members, self._paths, self._mark, self._device = joined, joined.paths, joined.mark, joined.device
        before_update(state.optimizer, self._before_update)
        if self._device is not NO_DEVICE:
            state.optimizer.register_step_post_hook(weak_hook(self._after_update))
        if run.ranks.world_size > 1:
            self._early = EarlyMarks(self._mark, self._device, telltale, self._small_state, self._coming)
        self._thread = threading.Thread(target=self._watch, name="rollback-last", daemon=True)
        try:
            start_thread(self._thread)
        except RollbackError as error:
            self._stop(error.message)

    # At every step ---------------------------------------------------------------------------------------------------

    def mark_end(self) -> None:
        """A step has ended and the next batch is not read yet: note where this rank stands. Nothing where no run may
        resume."""
        if self._over or not self._batches.may_be_marked():
            return
        if self._unseen.found:
            self._stop("within a step the script writes to weights through `.data` or the like, which torch counts not")
            return
        if self._snapshots.drifted:
            self._stop("the ranks no longer have the same state")
            return
        local, end = self._small_state.local(), self._end_of(self._state.counters.step)
        by_digest = self._unseen.looking or self._state.cursor.at_end
        digest = digest_of_large_state(self._state) if by_digest else None
        shared = self._small_state.shared()
        sent, late = self._device.holding(self._pulse.sent()), self._small_state.on_gpu
        if isinstance(sent, Tensor):
            late = [*late, sent]
            sent = bytes(sent.nbytes)  # in their place the GPU puts what was sent
        body = local.body(told_at_end(self._state), sent)
        if (size := len(body) + len(local.unchanging)) > end_marks.MOST:
            self._stop(f"{size >> 10} KiB of buffers and other small state would be copied at every step")
            return
        added = sum(item.nbytes for item in late) if late else None
        part = self._mark.write(end, body, local.unchanging, added)
        self._device.add(part, end, late)  # the part is whole once a GPU has come to this step's end itself
        self._standing.add(end, shared, digest)
        if self._early is not None and (before := self._early.at_end(end, local, part)) is not None:
            then, now = before.kept(), local.kept()
            changed = [name for name in now if then.get(name) != now[name]]
            self._run.record.advise_of(VALUES_BEHIND, [*filter(self._state.kept.is_of_script, changed)])
            if any(map(self._state.kept.is_foretold, changed)):
                self._run.record.advise(LOGS_BEHIND)

    def _end_of(self, step: int) -> StepEnd:
        cursor = self._state.cursor
        return StepEnd(self._run.attempt, self._returns, step, cursor.batch, cursor.epoch, self._timeline())

    def _coming(self) -> StepEnd | None:
        """The end of the step in progress, if its last backward is under way and a run may resume there."""
        if self._over or not self._at_last_batch() or not self._batches.may_be_marked():
            return None
        return self._end_of(self._state.counters.step + 1)

    def note_change(self) -> None:
        """The state is about to change, or what belongs to the last step's end is."""
        self._standing.changes += 1

    def rollback_applied(self, event: RollbackApplied) -> None:
        """What follows are other steps, though they may have the same numbers. `note_change` came before."""
        self._returns += 1
        self._small_state.forget()

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._pulse.await_sum()
        if not self._over:
            self._device.await_gradients()
        self._standing.changes += 1

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._over:
            self._device.note_update()

    # The end ---------------------------------------------------------------------------------------------------------

    def raised(self, reason: str) -> None:
        """As `keep`, on a rank that an exception ends: it will not come to the end of the step that it is in."""
        if self._early is not None and not self._over:
            self._early.give_up()
        self.keep(reason)

    def keep(self, reason: str, bell: bytes = RANK_ENDS) -> None:
        """Keep the state of the last step's end if it can be proved to be that, or wait for whoever is at it. Any
        thread. Called where this attempt is about to end. bell: with what the other ranks of the host are rung."""
        if os.getpid() != self._pid:
            return
        with self._once:
            if self._done or self._over:
                return
            self._done = True
            members, snapshots = self._members, self._snapshots
            Keeper(self._run, self._state, snapshots, members, self._standing, self._judge_ahead, reason, bell).keep()

    def leave(self) -> None:
        """This rank ends as it should. If a last snapshot is being made, wait for it first."""
        if os.getpid() != self._pid:
            return
        with self._once:
            if self._over:
                return
            self._over = True
            if not self._done:
                self._mark.leave()
            self._mark.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._members.close()

    # The thread ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {fd: rank for rank, fd in self._members.peers.pidfds.items()}
        for fd in (self._mark.bell, *ranks):
            poll.register(fd, select.POLLIN)
        while not (self._over or self._done):
            for fd, _ in poll.poll():
                if (rank := ranks.get(fd)) is None:
                    if asked := self._take_news(os.read(fd, 4096)):
                        why = asked[-1:] if asked[-1:] in REASONS else RANK_ENDS
                        self.keep(REASONS[why], why)
                elif end_marks.has_left(self._paths, rank):
                    poll.unregister(fd)
                else:
                    self.keep("another rank is gone")
                if self._over or self._done:
                    return

    def _take_news(self, rung: bytes) -> bytes:
        """Journal that ranks leave no marks any more. Returns what else the bell was rung for."""
        if end_marks.STOPPED in rung:
            for rank in {*self._members.peers.pidfds} - self._stopped:
                if (why := end_marks.read_stopped(self._paths, rank)) is not None:
                    self._stopped.add(rank)
                    note_stopped(self._run, f"rank {rank}: {why}")
        return rung.replace(end_marks.STOPPED, b"")

    def _stop(self, why: str) -> None:
        """Not collective: without the marks of one rank there is none."""
        rank, hosts = self._run.ranks.rank, self._members.hosts
        if self._run.ranks.is_rank_0:
            note_stopped(self._run, why)
        elif hosts is None or hosts.own == FIRST:
            self._mark.tell_stopped(why)
            end_marks.ring_bell(self._paths, 0, end_marks.STOPPED)
        else:
            with contextlib.suppress(StoreGone):
                hosts.tell_stopped(f"rank {rank}: {why}")
        self.leave()


def told_at_end(state: TrainingState) -> dict[str, Any]:
    """What a rank knows at a step's end alone, as JSON: what the cursor says of the next batch, and sums and the like
    of the script (`ToldAtEnd`)."""
    of_next, kept = state.cursor.of_next(), state.kept.at_end()
    return {**of_next, KEPT: marshal.dumps(kept).hex()} if kept else of_next
