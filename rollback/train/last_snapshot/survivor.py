"""The last snapshot: when a rank is gone, the others keep the state that they still hold, before they go themselves.

At every step's end a rank writes its end mark, and before its gradients are summed an early one (`early`). From a
step's end on it counts what begins to change the state: the optimizer's step, a restore. As long as nothing has begun,
the parameters in its memory are those of that step's end. A thread of each rank waits for the death of another one, or
for a bell. It needs neither the group nor the main thread, which may be in a collective for ever. docs/design.md, "The
last snapshot", has the proof that what it keeps is the state at the end of one step on all ranks. `write` writes it.
"""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rollback.checkpoints.fast_tier import end_marks, last_account, last_locks
from rollback.checkpoints.fast_tier.end_marks import ELSEWHERE, REASONS, EndMark, StepEnd
from rollback.checkpoints.fast_tier.last_account import LastAccount
from rollback.checkpoints.format.manifest import Manifest
from rollback.facts.training import NoLastSnapshot, Tier
from rollback.train.events import RollbackApplied
from rollback.train.last_snapshot.agreement import FIRST
from rollback.train.last_snapshot.begin import SWITCHED_OFF, meet, note_stopped
from rollback.train.last_snapshot.device import Device, NoAnswer, as_it_is
from rollback.train.last_snapshot.early import EarlyMarks
from rollback.train.last_snapshot.end_of_step import EndOfStep
from rollback.train.last_snapshot.exchange import Exchange, keep_together
from rollback.train.last_snapshot.held_ends import CommonEnd, HeldEnd
from rollback.train.last_snapshot.hosts import Hosts, StoreGone
from rollback.train.last_snapshot.lost_hosts import speaking_for_lost_hosts
from rollback.train.last_snapshot.peers import POLL, HostMarks, in_words
from rollback.train.last_snapshot.small_state import SmallStateReader
from rollback.train.last_snapshot.write import (
    Foreseen,
    LastWrite,
    NotProved,
    digest_of_large_state,
    digests_of_parameters,
    together,
    versions_of,
)
from rollback.train.run import AttachedRun
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.snapshots.unseen_writes import UnseenWrites
from rollback.train.state.state import TrainingState
from rollback.train.updates.closures import before_update
from rollback.train.updates.hooks import weak_hook
from rollback.wording import ranks_in_words

_SETTLE = 2.0  # seconds for ranks that still live to come to the end of the step that they are in
_PATIENCE = 30.0  # for all of it: as long as torchrun gives its ranks
_REST = 2.0  # of it, for the other ranks of a host when the hosts could not agree
_LEAST_WAIT = 0.5  # for the digests of the others


class LastSnapshot:
    """One rank's part in it. Where there can be none, nothing is done at any step, and the journal has the reason.

    sent: what this rank has told the others of the last step. foresee: judges that step ahead by what the ranks that
    came to its end have told, from any thread; raises NotProved. telltale: a parameter by which a backward is noticed.
    at_last_batch: whether the batch in hand is probably its update's last one. may_resume: whether a run may resume
    where the data stand. Making one is collective; nothing else is.
    """

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        snapshots: Snapshots,
        timeline: Callable[[], int],
        sent: Callable[[], bytes | Tensor],
        foresee: Callable[[Sequence[bytes]], Foreseen],
        telltale: torch.nn.Parameter | None,
        unseen: UnseenWrites,
        at_last_batch: Callable[[], bool],
        may_resume: Callable[[], bool],
    ) -> None:
        self._run, self._state, self._snapshots = run, state, snapshots
        self._timeline, self._sent, self._foresee = timeline, sent, foresee
        self._unseen, self._at_last_batch, self._may_resume = unseen, at_last_batch, may_resume
        self._small_state = SmallStateReader(state)
        self._changes = self._returns = 0
        self._standings: tuple[HeldEnd, ...] = ()
        """Newest first: more than one behind an epoch's last step, before and behind the work between two epochs."""
        self._parameters = list(state.model.parameters())
        self._mark: EndMark | None = None
        self._device: Device | None = None
        self._early: EarlyMarks | None = None
        self._once, self._done, self._over = threading.Lock(), False, False
        self._gone: tuple[int, ...] = ()
        self._pid = os.getpid()
        self._thread: threading.Thread
        met = meet(run, state, snapshots, self._small_state)
        if isinstance(met, str):
            run.record.note(NoLastSnapshot(reason=met), None if met == SWITCHED_OFF else f"no last snapshots: {met}")
            return
        self._paths, self._mark, self._peers, self._hosts = met.paths, met.mark, met.peers, met.hosts
        self._device, self._read = met.device, met.device.read if met.device is not None else as_it_is
        self._tier = snapshots.memory.slots_of_host.paths
        before_update(state.optimizer, weak_hook(self._before_update))
        if met.device is not None:
            state.optimizer.register_step_post_hook(weak_hook(self._after_update))
        if run.ranks.world_size > 1:
            self._early = EarlyMarks(self._mark, self._device, telltale, self._small_state, self._coming)
        self._thread = threading.Thread(target=self._watch, name="rollback-last", daemon=True)
        self._thread.start()

    # At every step ---------------------------------------------------------------------------------------------------

    def mark_end(self) -> None:
        """A step has ended and the next batch is not read yet: note where this rank stands. Nothing where no run may
        resume."""
        if self._mark is None or self._over or not self._may_resume():
            return
        if self._unseen.found:
            self._stop("within a step the script writes to weights through `.data` or the like, which torch counts not")
            return
        local, end = self._small_state.local(), self._end_of(self._state.counters.step)
        by_digest = self._unseen.looking or self._state.cursor.at_end
        digest = digest_of_large_state(self._state) if by_digest else None
        shared, alike = self._small_state.shared(), self._small_state.alike()
        standing = HeldEnd(end, self._changes, self._versions(), shared, alike, digest)
        sent = self._sent() if self._device is None else self._device.holding(self._sent())
        left = EndOfStep.of(sent, local, self._state.cursor.of_next(), self._small_state.on_gpu)
        if left.size > end_marks.MOST:
            self._stop(f"{left.size >> 10} KiB of buffers and other small state would be copied at every step")
            return
        part = left.write(self._mark, self._device, end)
        before = self._standings[:1] if self._stands and self._standings[0].end != end else ()
        self._standings = standing, *before
        if self._early is not None:
            self._early.at_end(end, local, part)

    def _end_of(self, step: int) -> StepEnd:
        cursor = self._state.cursor
        return StepEnd(self._run.attempt, self._returns, step, cursor.batch, cursor.epoch, self._timeline())

    def _coming(self) -> StepEnd | None:
        """The end of the step in progress, if its last backward is under way and a run may resume there."""
        if self._over or not self._at_last_batch() or not self._may_resume():
            return None
        return self._end_of(self._state.counters.step + 1)

    def note_change(self) -> None:
        """The state is about to change, or what belongs to the last step's end is."""
        self._changes += 1

    def rollback_applied(self, event: RollbackApplied) -> None:
        """What follows are other steps, though they may have the same numbers."""
        self._changes += 1
        self._returns += 1
        self._small_state.forget()

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._device is not None and not self._over:
            self._device.await_gradients()
        self._changes += 1

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._device is not None and not self._over:
            self._device.note_update()

    @property
    def _stands(self) -> bool:
        """Whether nothing has begun to change since this rank's newest mark."""
        return bool(self._standings) and self._standings[0].changes == self._changes

    def _versions(self) -> int:
        return versions_of(self._parameters, self._state.optimizer)

    # The end ---------------------------------------------------------------------------------------------------------

    def raised(self, reason: str) -> None:
        """As `keep`, on a rank that an exception ends: it will not come to the end of the step that it is in."""
        if self._early is not None and not self._over:
            self._early.give_up()
        self.keep(reason)

    def keep(self, reason: str) -> None:
        """Keep the state of the last step's end if it can be proved to be that, or wait for whoever is at it. Any
        thread. Called where this attempt is about to end."""
        if self._mark is None or os.getpid() != self._pid:
            return
        with self._once:
            if self._done or self._over:
                return
            self._done = True
            speaking = speaking_for_lost_hosts(self._hosts, self._tier, _PATIENCE - _REST)
            with contextlib.suppress(OSError), last_locks.busy(self._paths), speaking:
                self._try_to_keep(reason)

    def _try_to_keep(self, reason: str) -> None:
        known = next((why for why, words in REASONS.items() if words == reason), b"!")
        self._peers.ring(known)
        began = time.monotonic()
        self._gone = tuple(self._peers.lost(known == b"!"))
        if self._gone:  # then what this rank has met follows from it
            reason = in_words(self._gone)
        account = LastAccount(attempt=self._run.attempt, rank=self._run.ranks.rank, reason=reason)
        try:
            if self._hosts is not None and known != ELSEWHERE:
                self._hosts.ring()
            account = self._keep(account, began)
        except (NotProved, NoAnswer) as error:
            account = account.model_copy(update={"why_not": str(error)})
            if self._hosts is not None:
                self._hosts.refuse(str(error))
        except Exception as error:  # noqa: BLE001 - the rank ends either way; the record says why nothing was kept
            account = account.model_copy(update={"why_not": f"{type(error).__name__}: {error}"})
        if account.checkpoint is None:  # else it is written already
            last_account.write_account(self._paths, account)

    def leave(self) -> None:
        """This rank ends as it should. If a last snapshot is being made, wait for it first."""
        if self._mark is None or os.getpid() != self._pid:
            return
        with self._once:
            if self._over:
                return
            self._over = True
            if not self._done:
                self._mark.leave()
            self._mark.wake()
        if self._hosts is not None:
            self._hosts.close()
        self._thread.join()
        self._peers.close()
        if self._device is not None:
            self._device.close()
        self._mark.close()

    def _keep(self, account: LastAccount, began: float) -> LastAccount:
        """Again, if this rank has come to another step's end meanwhile: it was behind the one that is gone."""
        while True:
            try:
                ends = self._await_common_ends(began, time.monotonic() + _SETTLE)
            except NotProved:
                if self._hosts is None or not self._peers.all_ends(began, over=True):
                    raise
                return self._keep_by_marks(self._hosts, account, began)
            try:
                return self._keep_one(ends, account, began)
            except NotProved:
                if ends[0].standing.changes == self._changes or time.monotonic() > began + _PATIENCE:
                    raise

    def _keep_one(self, ends: Sequence[CommonEnd], account: LastAccount, began: float) -> LastAccount:
        """Keep the state of the first of these ends; of several hosts, of that one which all have."""
        told = time.monotonic()
        ends = self._as_they_were(ends)
        first = ends[0].standing
        digests = digests_of_parameters(self._state, self._read)
        digest = together(digests)
        self._require_unchanged(first)
        assert self._mark is not None
        self._mark.tell_digest(first.end, digest)
        wait = max(_LEAST_WAIT, 3 * (time.monotonic() - told))
        with last_locks.alone(self._paths, began + _PATIENCE):
            if self._another_has_kept():
                return account
            self._peers.require_same(first.end, digest, time.monotonic() + wait)
            writes = {standing.end: self._write_at(standing, marks, digests) for standing, marks in ends}
            if self._hosts is None:
                foreseen = self._foresee(ends[0].marks.sent)
                write = writes[first.end]
                manifest, tier = write.write_alone(foreseen.sentinel)
                return self._tell(account, began, manifest, write.metrics(foreseen), tier=tier)
            exchange = Exchange(self._hosts, self._foresee, began + _PATIENCE - _REST - time.monotonic())
            here = {standing.end: marks for standing, marks in ends}
            plan, manifest = keep_together(
                exchange, self._tier, self._run.ranks.on_this_host, self._gone,
                lambda late: self._peers.all_ends(began, over=late) | here, writes=writes, digest=digest,
                next_seq=self._snapshots.next_seq, stands=lambda: first.changes == self._changes,
            )  # fmt: skip
            stood = writes.get(plan.at)
            metrics = stood.metrics(exchange.foreseen) if stood is not None else plan.metrics
            return self._tell(account, began, manifest, metrics, plan.gone)

    def _keep_by_marks(self, hosts: Hosts, account: LastAccount, began: float) -> LastAccount:
        """No rank of this host stands at these ends. Those of other hosts may, and lack nothing but these marks."""
        with last_locks.alone(self._paths, began + _PATIENCE):
            if self._another_has_kept():
                return account
            exchange = Exchange(hosts, self._foresee, began + _PATIENCE - _REST - time.monotonic())
            plan, manifest = keep_together(
                exchange, self._tier, self._run.ranks.on_this_host, self._gone,
                lambda late: self._peers.all_ends(began, over=True),
            )  # fmt: skip
            return self._tell(account, began, manifest, plan.metrics, plan.gone)

    def _another_has_kept(self) -> bool:
        return any(other.checkpoint for other in last_account.read_accounts(self._paths, self._run.attempt))

    def _tell(
        self, account: LastAccount, began: float, manifest: Manifest, metrics: Sequence[str],
        gone: Sequence[int] = (), tier: Tier = "fast",
    ) -> LastAccount:  # fmt: skip
        """Before another rank is let in. metrics: the newest lines. gone: as all hosts know of them."""
        told = {
            "checkpoint": manifest.name, "step": manifest.step, "tier": tier, "metrics": tuple(metrics),
            "seconds": round(time.monotonic() - began, 4), "reason": in_words(gone) if gone else account.reason,
        }  # fmt: skip
        account = account.model_copy(update=told)
        last_account.write_account(self._paths, account)
        return account

    def _write_at(self, standing: HeldEnd, marks: HostMarks, digests: Mapping[str, bytes]) -> LastWrite:
        return LastWrite(
            self._run, self._state, self._snapshots, standing.end, marks.bodies, standing.small,
            standing.alike, digests, self._read, lambda: self._require_unchanged(standing),
        )  # fmt: skip

    def _as_they_were(self, ends: Sequence[CommonEnd]) -> Sequence[CommonEnd]:
        """Those of these ends whose weights and optimizer this rank still has. Raises NotProved: it has none."""
        if all(standing.digest is None for standing, _ in ends):
            return ends
        digest = digest_of_large_state(self._state, self._read)
        if not (same := [each for each in ends if each.standing.digest in (None, digest)]):
            step = ends[0].standing.end.step
            raise NotProved(f"weights or optimizer are not those of step {step} any more")
        return same

    def _await_common_ends(self, began: float, deadline: float) -> list[CommonEnd]:
        """The steps' ends at which this rank stands and which all ranks of this host have told of, and what they told;
        newest first. Where another rank is further, this one will be there in a moment."""
        why = "this rank has not come to the end of a step"
        while True:
            over, standings = time.monotonic() > deadline, self._standings
            stands = bool(standings) and standings[0].changes == self._changes
            found: list[CommonEnd] = []
            for standing in standings if stands else ():
                end, first = standing.end, standing is standings[-1]  # early marks tell of the first of these ends
                marks, missing = self._peers.marks_of(end, began, early=first, over=over)
                if not missing and (over or not self._peers.any_is_beyond(end)):
                    found.append(CommonEnd(standing, marks))
                    if self._hosts is None:
                        break
                else:
                    why = f"{ranks_in_words(missing)} had not come to the end of step {end.step}"
            if found:
                return found
            if standings and not stands:
                why = f"this rank was in its update behind step {standings[0].end.step}, or had not ended that step"
            if over:
                raise NotProved(why)
            time.sleep(POLL)

    def _require_unchanged(self, standing: HeldEnd) -> None:
        if standing.changes != self._changes or standing.versions != self._versions():
            raise NotProved(f"the state of step {standing.end.step} was changed while it was read")

    # The thread ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._mark is not None
        poll = select.poll()
        ranks = {fd: rank for rank, fd in self._peers.pidfds.items()}
        for fd in (self._mark.bell, *ranks):
            poll.register(fd, select.POLLIN)
        while not (self._over or self._done):
            for fd, _ in poll.poll():
                if (rank := ranks.get(fd)) is None:
                    if asked := self._take_news(os.read(fd, 4096)):
                        self.keep(REASONS.get(asked[-1:], "another rank is about to end"))
                elif end_marks.has_left(self._paths, rank):
                    poll.unregister(fd)
                else:
                    self.keep("another rank is gone")
                if self._over or self._done:
                    return

    def _take_news(self, rung: bytes) -> bytes:
        """Journal that ranks leave no marks any more. Returns what else the bell was rung for."""
        if end_marks.STOPPED in rung:
            for rank in self._peers.pidfds:
                if (why := end_marks.read_stopped(self._paths, rank)) is not None:
                    note_stopped(self._run, f"rank {rank}: {why}")
        return rung.replace(end_marks.STOPPED, b"")

    def _stop(self, why: str) -> None:
        """Not collective: without the marks of one rank there is none."""
        assert self._mark is not None
        rank = self._run.ranks.rank
        if self._run.ranks.first:
            note_stopped(self._run, why)
        elif self._hosts is None or self._hosts.own == FIRST:
            self._mark.tell_stopped(why)
            end_marks.ring_bell(self._paths, 0, end_marks.STOPPED)
        else:
            with contextlib.suppress(StoreGone):
                self._hosts.tell_stopped(f"rank {rank}: {why}")
        self.leave()
