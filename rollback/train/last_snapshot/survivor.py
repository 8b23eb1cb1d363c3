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
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import EndMark, LastAccount, StepEnd
from rollback.errors import RollbackError, UsageError
from rollback.facts.training import NoLastSnapshot
from rollback.rundir.records import metric_line
from rollback.train.events import RollbackApplied
from rollback.train.last_snapshot.early import EarlyMarks, mark_body, of_gone, of_living, require_quiet, split
from rollback.train.last_snapshot.peers import POLL, Peers
from rollback.train.last_snapshot.small_state import SharedState, SmallStateReader
from rollback.train.last_snapshot.write import LastWrite, NotProved, digest_of_large_state, digest_of_parameters
from rollback.train.run import AttachedRun
from rollback.train.sharded import is_sharded
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.state import TrainingState
from rollback.train.updates.closures import before_update
from rollback.train.updates.hooks import weak_hook

_SETTLE = 2.0  # seconds for ranks that still live to come to the end of the step that they are in
_PATIENCE = 30.0  # for all of it: as long as torchrun gives its ranks
_LEAST_WAIT = 0.5  # for the digests of the others
_version = attrgetter("_version")


@dataclass(frozen=True)
class Foreseen:
    """The sentinel once the last step is judged. metric: that step's line for the metrics, if it is not written yet."""

    sentinel: Mapping[str, Any]
    metric: str | None


class _Standing(NamedTuple):
    """A step's end, and how much had begun to change the state until then."""

    end: StepEnd
    changes: int
    versions: int
    small: SharedState
    buffer_trees: Mapping[str, Any]
    digest: int | None
    """Of the parameters and the optimizer's tensors, behind an epoch's last step: in the work between two epochs a
    script may exchange weights, by writes that torch does not count. None: not needed."""


class LastSnapshot:
    """One rank's part in it. Where there can be none, nothing is done at any step, and the journal has the reason.

    sent: what this rank has told the others of the last step. foresee: judges that step ahead by what the ranks that
    came to its end have told, from any thread; raises NotProved. telltale: a parameter by which a backward is noticed.
    markable: whether the batch in hand is probably its update's last one, and a run may resume behind it. Making one is
    collective; nothing else is.
    """

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        snapshots: Snapshots,
        timeline: Callable[[], int],
        sent: Callable[[], bytes],
        foresee: Callable[[Sequence[bytes]], Foreseen],
        telltale: torch.nn.Parameter | None,
        markable: Callable[[], bool],
    ) -> None:
        self._run, self._state, self._snapshots = run, state, snapshots
        self._timeline, self._sent, self._foresee, self._markable = timeline, sent, foresee, markable
        self._small_state = SmallStateReader(state)
        self._changes = self._returns = 0
        self._standings: tuple[_Standing, ...] = ()
        """Newest first: more than one behind an epoch's last step, before and behind the work between two epochs."""
        self._parameters = list(state.model.parameters())
        self._mark: EndMark | None = None
        self._early: EarlyMarks | None = None
        self._peers: Peers
        self._once, self._done, self._over = threading.Lock(), False, False
        self._pid = os.getpid()
        self._thread: threading.Thread
        if (why := self._begin()) is not None:
            self._mark = None
            run.record.note(NoLastSnapshot(reason=why), None if why == _SWITCHED_OFF else f"no last snapshots: {why}")
            return
        before_update(state.optimizer, weak_hook(self._before_update))
        assert self._mark is not None
        if self._peers.pidfds:
            self._early = EarlyMarks(self._mark, telltale, self._small_state, self._coming)
        self._thread = threading.Thread(target=self._watch, name="rollback-last", daemon=True)
        self._thread.start()

    # At every step ---------------------------------------------------------------------------------------------------

    def mark_end(self) -> None:
        """A step has ended and the next batch is not read yet: note where this rank stands."""
        if self._mark is None or self._over:
            return
        local = self._small_state.local()
        body = mark_body(self._sent(), local.body(self._state.cursor.of_next()))
        if (size := len(body) + len(local.stays)) > end_marks.MOST:
            self._stop(f"{size >> 10} KiB of buffers and other small state would be copied at every step")
            return
        end = self._end_of(self._state.counters.step)
        digest = digest_of_large_state(self._state) if self._state.cursor.at_end else None
        shared, trees = self._small_state.shared(), self._small_state.buffer_trees
        standing = _Standing(end, self._changes, self._versions(), shared, trees, digest)
        self._mark.write(end, body, local.stays)
        before = self._standings[:1] if self._stands and self._standings[0].end != end else ()
        self._standings = standing, *before
        if self._early is not None:
            self._early.at_end(end, local)

    def _end_of(self, step: int) -> StepEnd:
        cursor = self._state.cursor
        return StepEnd(self._run.attempt, self._returns, step, cursor.batch, cursor.epoch, self._timeline())

    def _coming(self) -> StepEnd | None:
        """The end of the step in progress, if its last backward is under way and a run may resume there."""
        if self._over or not self._markable():
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
        self._changes += 1

    @property
    def _stands(self) -> bool:
        """Whether nothing has begun to change since this rank's newest mark."""
        return bool(self._standings) and self._standings[0].changes == self._changes

    def _versions(self) -> int:
        """Changes with every write to a parameter in place, as torch counts."""
        return sum(map(_version, self._parameters))

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
            with contextlib.suppress(OSError), end_marks.busy(self._paths):
                self._try_to_keep(reason)

    def _try_to_keep(self, reason: str) -> None:
        known = next((why for why, words in end_marks.REASONS.items() if words == reason), b"!")
        self._peers.ring(known)
        began = time.monotonic()
        if gone := self._peers.lost():  # then what this rank has met follows from it
            reason = f"{_ranks(gone)} {'are' if len(gone) > 1 else 'is'} gone"
        account = LastAccount(attempt=self._run.attempt, rank=self._run.ranks.rank, reason=reason)
        try:
            account = self._keep(account, began)
        except NotProved as error:
            account = account.model_copy(update={"why_not": str(error)})
        except Exception as error:  # noqa: BLE001 - the rank ends either way; the record says why nothing was kept
            account = account.model_copy(update={"why_not": f"{type(error).__name__}: {error}"})
        if account.checkpoint is None:  # else it is written already
            end_marks.write_account(self._paths, account)

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
        self._thread.join()
        self._peers.close()
        self._mark.close()

    def _keep(self, account: LastAccount, began: float) -> LastAccount:
        """Again, if this rank has come to another step's end meanwhile: it was behind the one that is gone."""
        while True:
            standing, sent, bodies = self._await_common_end(began, time.monotonic() + _SETTLE)
            try:
                return self._keep_at(standing, sent, bodies, account, began)
            except NotProved:
                if standing.changes == self._changes or time.monotonic() > began + _PATIENCE:
                    raise

    def _keep_at(
        self, standing: _Standing, sent: list[bytes], bodies: list[bytes], account: LastAccount, began: float
    ) -> LastAccount:
        def require() -> None:
            self._require_unchanged(standing)

        told = time.monotonic()
        if standing.digest not in (None, digest_of_large_state(self._state)):
            raise NotProved(f"weights or optimizer are not those of step {standing.end.step} any more")
        digest = digest_of_parameters(self._state)
        require()
        assert self._mark is not None
        self._mark.tell_digest(standing.end, digest)
        wait = max(_LEAST_WAIT, 3 * (time.monotonic() - told))
        with end_marks.alone(self._paths, began + _PATIENCE):
            if any(other.checkpoint for other in end_marks.read_accounts(self._paths, self._run.attempt)):
                return account  # another rank has done it
            self._peers.require_same(standing.end, digest, time.monotonic() + wait)
            foreseen = self._foresee(sent)
            write = LastWrite(self._run, self._state, self._snapshots, standing.buffer_trees)
            manifest, tier = write.write(standing.end, bodies, standing.small, foreseen.sentinel, digest, require)
            metrics = [metric_line(**row) for row in self._run.record.recent]
            if foreseen.metric is not None:
                metrics.append(foreseen.metric)
            account = account.model_copy(
                update={
                    "checkpoint": manifest.name, "step": manifest.step, "tier": tier, "metrics": tuple(metrics),
                    "seconds": round(time.monotonic() - began, 4),
                }
            )  # fmt: skip
            end_marks.write_account(self._paths, account)  # before another rank is let in
            return account

    def _await_common_end(self, began: float, deadline: float) -> tuple[_Standing, list[bytes], list[bytes]]:
        """A step's end at which this rank stands and which all ranks have told of; what those that came there have sent
        the others; and what each alone knew. Where another rank is further, this one will be there in a moment."""
        why = "this rank has not come to the end of a step"
        while True:
            over, standings = time.monotonic() > deadline, self._standings
            stands = bool(standings) and standings[0].changes == self._changes
            for standing in standings if stands else ():
                end = standing.end
                ended, missing = self._peers.marks_of(end)
                told = missing if standing is standings[-1] else ()  # an early mark tells of the first of these ends
                early = {
                    rank: split(body) for rank in told if (body := self._stand_in(rank, end, began, over)) is not None
                }
                if early:  # their gradients are in the sums, or this rank would not have come here
                    require_quiet(self._paths, ended, end)
                missing = [rank for rank in missing if rank not in early]
                if not missing and (over or not self._peers.any_is_beyond(end)):
                    return standing, [sent for sent, _ in ended.values()], [
                        own for _, (_, own) in sorted({**ended, **early}.items())
                    ]  # fmt: skip
                why = f"{_ranks(missing)} had not come to the end of step {end.step}"
            if standings and not stands:
                why = f"this rank was in its update behind step {standings[0].end.step}, or had not ended that step"
            if over:
                raise NotProved(why)
            time.sleep(POLL)

    def _stand_in(self, rank: int, end: StepEnd, began: float, over: bool) -> bytes | None:
        """The early mark of a rank in place of its mark of that end, if that can be proved."""
        if not self._peers.is_behind(rank, end):
            return None
        if self._peers.is_gone(rank):
            return of_gone(self._paths, rank, end, int(began * 1e9))
        return of_living(self._paths, rank, end, self._peers.computed(rank) if over else None)

    def _require_unchanged(self, standing: _Standing) -> None:
        if standing.changes != self._changes or standing.versions != self._versions():
            raise NotProved(f"the state of step {standing.end.step} was changed while it was read")

    # The thread ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._mark is not None
        poll = select.poll()
        poll.register(self._mark.bell, select.POLLIN)
        ranks = {fd: rank for rank, fd in self._peers.pidfds.items()}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        while not (self._over or self._done):
            for fd, _ in poll.poll():
                if (rank := ranks.get(fd)) is None:
                    if asked := self._take_news(os.read(fd, 4096)):
                        self.keep(_words_of(asked))
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
                    self._note_stopped(f"rank {rank}: {why}")
        return rung.replace(end_marks.STOPPED, b"")

    # The beginning ---------------------------------------------------------------------------------------------------

    def _begin(self) -> str | None:
        """Collective: make the marks. Returns why there can be no last snapshot; the same on all ranks."""
        run, ranks = self._run, self._run.ranks
        if run.settings.last_snapshot == "off" or not run.settings.snapshot_every:
            return _SWITCHED_OFF
        if ranks.host_count > 1:
            return "the ranks are on several hosts, and what a lost one knew is nowhere else"
        if not self._snapshots.drained:
            return "there is no fast tier"
        why = "the model is sharded" if any(map(is_sharded, self._parameters)) else self._small_state.why_too_large()
        if (why := ranks.first_fault(why)) is not None:
            return why
        self._paths = end_marks.marks_of(self._snapshots.slots_of_host.paths)
        self._peers = Peers(self._paths, ranks)
        why = ranks.first_fault(self._try(lambda: end_marks.prepare(self._paths)) if ranks.first_of_host else None)
        return why or ranks.first_fault(self._try(self._open)) or self._meet()

    def _open(self) -> None:
        self._mark = EndMark(self._paths, self._run.ranks.rank)

    def _meet(self) -> str | None:
        pids = self._run.ranks.from_each(os.getpid())
        return self._run.ranks.first_fault(self._try(lambda: self._peers.watch(pids)))

    @staticmethod
    def _try(act: Callable[[], None]) -> str | None:
        try:
            act()
        except (OSError, RollbackError, UsageError) as error:
            return f"the memory for it cannot be had: {error}"
        return None

    def _stop(self, why: str) -> None:
        """Not collective: without the marks of one rank there is none."""
        assert self._mark is not None
        if self._run.ranks.first:
            self._note_stopped(why)
        else:
            self._mark.tell_stopped(why)
            end_marks.ring_bell(self._paths, 0, end_marks.STOPPED)
        self.leave()

    def _note_stopped(self, why: str) -> None:
        self._run.record.note(NoLastSnapshot(reason=why), f"no last snapshots from now on: {why}")


_SWITCHED_OFF = "it is switched off"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _words_of(asked: bytes) -> str:
    """Why a bell was rung, in words."""
    return end_marks.REASONS.get(asked[-1:], "another rank is about to end")
