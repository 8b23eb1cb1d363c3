"""The last snapshot: when a rank is gone, the others keep the state that they still hold, before they go themselves.

At every step's end a rank writes its end mark. From then on it counts what begins to change the state: the optimizer's
step, a restore. As long as nothing has begun, the parameters in its memory are those of that step's end. A
thread of each rank waits for the death of another one, or for a bell. It needs neither the group nor the main thread,
which may be in a collective for ever. docs/design.md, "The last snapshot", has the proof that what it keeps is the
state at the end of one step on all ranks. `last_write` writes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from rollback.checkpoints import end_marks
from rollback.checkpoints.end_marks import EndMark, LastAccount, StepEnd
from rollback.errors import RollbackError, UsageError
from rollback.facts.training import NoLastSnapshot
from rollback.rundir.records import metric_line
from rollback.train.events import RollbackApplied
from rollback.train.run import AttachedRun
from rollback.train.sharded import is_sharded
from rollback.train.snapshots.last_write import LastWrite, NotProved, digest_of_parameters
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.small_state import SmallStateReader
from rollback.train.state.state import TrainingState
from rollback.train.updates.closures import before_update
from rollback.train.updates.hooks import weak_hook

_SETTLE = 2.0  # seconds for ranks that still live to come to the end of the step that they are in
_PATIENCE = 30.0  # for all of it: as long as torchrun gives its ranks
_LEAST_WAIT = 0.5  # for the digests of the others
_POLL = 0.002
_MOMENT = 0.1
_version = attrgetter("_version")


@dataclass(frozen=True)
class Foreseen:
    """The sentinel once the last step is judged. metric: that step's line for the metrics, if it is not written yet."""

    sentinel: Mapping[str, Any]
    metric: str | None


@dataclass(frozen=True)
class _Standing:
    """A step's end, and how much had begun to change the state until then."""

    end: StepEnd
    changes: int
    versions: int


class LastSnapshot:
    """One rank's part in it. Where there can be none, nothing is done at any step, and the journal has the reason.

    sent: what this rank has told the others of the last step. foresee: judges that step ahead by what all ranks have
    told, from any thread; raises NotProved. Making one is collective; nothing else is.
    """

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        snapshots: Snapshots,
        timeline: Callable[[], int],
        sent: Callable[[], bytes],
        foresee: Callable[[Sequence[bytes]], Foreseen],
    ) -> None:
        self._run, self._state, self._snapshots = run, state, snapshots
        self._timeline, self._sent, self._foresee = timeline, sent, foresee
        self._small_state = SmallStateReader(state)
        self._changes = self._returns = 0
        self._standing: _Standing | None = None
        self._parameters = list(state.model.parameters())
        self._mark: EndMark | None = None
        self._pidfds: dict[int, int] = {}
        self._once, self._done, self._over = threading.Lock(), False, False
        self._pid = os.getpid()
        if (why := self._begin()) is not None:
            self._mark = None
            run.record.note(NoLastSnapshot(reason=why), None if why == _SWITCHED_OFF else f"no last snapshots: {why}")
            return
        before_update(state.optimizer, weak_hook(self._before_update))
        self._thread = threading.Thread(target=self._watch, name="rollback-last", daemon=True)
        self._thread.start()

    # At every step ---------------------------------------------------------------------------------------------------

    def mark_end(self) -> None:
        """A step has ended and the next batch is not read yet: note where this rank stands."""
        if self._mark is None or self._over:
            return
        state = self._state
        sent = self._sent()
        body = len(sent).to_bytes(8, "little") + sent + self._small_state.read()
        if len(body) > end_marks.MOST:
            self._stop(f"{len(body) >> 10} KiB of buffers and other small state would be copied at every step")
            return
        counters, cursor = state.counters, state.cursor
        end = StepEnd(self._run.attempt, self._returns, counters.step, cursor.batch, self._timeline())
        versions = self._versions()
        self._mark.write(end, body)
        self._standing = _Standing(end, self._changes, versions)

    def note_change(self) -> None:
        """The state is about to change, or what belongs to the last step's end is."""
        self._changes += 1

    def rollback_applied(self, event: RollbackApplied) -> None:
        """What follows are other steps, though they may have the same numbers."""
        self._changes += 1
        self._returns += 1

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._changes += 1

    def _versions(self) -> int:
        """Changes with every write to a parameter in place, as torch counts."""
        return sum(map(_version, self._parameters))

    # The end ---------------------------------------------------------------------------------------------------------

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
        for rank in self._pidfds:
            end_marks.ring_bell(self._paths, rank)
        began = time.monotonic()
        if self._pidfds:  # a dying rank's connections end a moment before it does
            _any_ended(self._pidfds.values(), _MOMENT)
        gone = [rank for rank in self._pidfds if self._is_gone(rank) and not end_marks.has_left(self._paths, rank)]
        if gone:  # then what this rank has met follows from it
            reason = f"{_ranks(gone)} {'are' if len(gone) > 1 else 'is'} gone"
        account = LastAccount(attempt=self._run.attempt, rank=self._run.ranks.rank, reason=reason)
        try:
            account = self._keep(account, began)
        except NotProved as error:
            account = account.model_copy(update={"why_not": str(error)})
        except (OSError, RollbackError, ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
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
        for fd in self._pidfds.values():
            os.close(fd)
        self._mark.close()

    def _keep(self, account: LastAccount, began: float) -> LastAccount:
        standing, bodies = self._await_common_end(began + _SETTLE)

        def require() -> None:
            self._require_unchanged(standing)

        told = time.monotonic()
        digest = digest_of_parameters(self._state)
        require()
        assert self._mark is not None
        self._mark.tell_digest(standing.end, digest)
        wait = max(_LEAST_WAIT, 3 * (time.monotonic() - told))
        with end_marks.alone(self._paths, began + _PATIENCE):
            if any(other.checkpoint for other in end_marks.read_accounts(self._paths, self._run.attempt)):
                return account  # another rank has done it
            self._compare(standing.end, digest, time.monotonic() + wait)
            sent, bodies = map(list, zip(*map(_split, bodies), strict=True))
            foreseen = self._foresee(sent)
            write = LastWrite(self._run, self._state, self._snapshots, self._small_state.buffer_trees)
            manifest, tier = write.write(standing.end, bodies, foreseen.sentinel, digest, require)
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

    def _await_common_end(self, deadline: float) -> tuple[_Standing, list[bytes]]:
        """A step's end at which this rank stands and of which all ranks have left their marks, and these marks."""
        why = "this rank has not come to the end of a step"
        while True:
            standing = self._standing
            if standing is not None and standing.changes == self._changes:
                bodies, missing = self._marks_of(standing.end)
                if not missing:
                    return standing, bodies
                why = f"{_ranks(missing)} had not come to the end of step {standing.end.step}"
                if any(self._is_gone(rank) for rank in missing) and self._is_behind(missing, standing.end):
                    raise NotProved(f"{why}, and the others had")
            elif standing is not None:
                why = f"this rank was in its update behind step {standing.end.step}, or had not ended that step"
            if time.monotonic() > deadline:
                raise NotProved(why)
            time.sleep(_POLL)

    def _marks_of(self, end: StepEnd) -> tuple[list[bytes], list[int]]:
        """The marks of all ranks at a step's end, and the ranks that have none."""
        found = [end_marks.read_ends(self._paths, rank).get(end) for rank in range(self._run.ranks.world_size)]
        return [body for body in found if body is not None], [rank for rank, body in enumerate(found) if body is None]

    def _is_behind(self, ranks: list[int], end: StepEnd) -> bool:
        """Whether ranks that are gone have left no later mark either: then this rank waits in vain."""
        ends = [other for rank in ranks if self._is_gone(rank) for other in end_marks.read_ends(self._paths, rank)]
        return all((other.returns, other.step) < (end.returns, end.step) for other in ends)

    def _compare(self, end: StepEnd, digest: int, deadline: float) -> None:
        """Compare the parameters with those of the others that still live and stand at this very step's end."""
        waiting = {rank for rank in self._pidfds if not self._is_gone(rank)}
        while waiting:
            for rank in list(waiting):
                other = end_marks.read_digest(self._paths, rank, end)
                if other is not None and other != digest:
                    raise NotProved(f"the parameters of rank {rank} are others, though they are replicas")
                ends = end_marks.read_ends(self._paths, rank)
                if other is not None or self._is_gone(rank) or any(later.step > end.step for later in ends):
                    waiting.discard(rank)
            if time.monotonic() > deadline:
                return  # stopped, or in a call that does not end: as if it were gone
            time.sleep(_POLL)

    def _require_unchanged(self, standing: _Standing) -> None:
        if standing.changes != self._changes or standing.versions != self._versions():
            raise NotProved(f"the state of step {standing.end.step} was changed while it was read")

    # The thread ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._mark is not None
        poll = select.poll()
        poll.register(self._mark.bell, select.POLLIN)
        ranks = {fd: rank for rank, fd in self._pidfds.items()}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        while not (self._over or self._done):
            for fd, _ in poll.poll():
                if (rank := ranks.get(fd)) is None:
                    self.keep(_words_of(os.read(fd, 4096)))
                elif end_marks.has_left(self._paths, rank):
                    poll.unregister(fd)
                else:
                    self.keep("another rank is gone")
                if self._over or self._done:
                    return

    def _is_gone(self, rank: int) -> bool:
        fd = self._pidfds.get(rank)
        return fd is not None and _any_ended([fd])

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
        why = ranks.first_fault(self._try(lambda: end_marks.prepare(self._paths)) if ranks.first_of_host else None)
        return why or ranks.first_fault(self._try(self._open)) or self._meet()

    def _open(self) -> None:
        self._mark = EndMark(self._paths, self._run.ranks.rank)

    def _meet(self) -> str | None:
        pids = self._run.ranks.from_each(os.getpid())

        def look() -> None:
            for rank, pid in enumerate(pids):
                if rank != self._run.ranks.rank:
                    self._pidfds[rank] = os.pidfd_open(pid)

        return self._run.ranks.first_fault(self._try(look))

    @staticmethod
    def _try(act: Callable[[], None]) -> str | None:
        try:
            act()
        except (OSError, RollbackError, UsageError) as error:
            return f"the memory for it cannot be had: {error}"
        return None

    def _stop(self, why: str) -> None:
        """Not collective: without the marks of one rank there is none."""
        self.leave()
        self._run.record.note(NoLastSnapshot(reason=why), f"no last snapshots from now on: {why}")


_SWITCHED_OFF = "it is switched off"


def _any_ended(pidfds: Iterable[int], seconds: float = 0.0) -> bool:
    """Whether one of these processes has ended, or does within that time."""
    poll = select.poll()  # select() knows no descriptor above 1,023
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _split(mark: bytes) -> tuple[bytes, bytes]:
    """What the rank has told the others, and its small state."""
    start = 8 + int.from_bytes(mark[:8], "little")
    return mark[8:start], mark[start:]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _words_of(asked: bytes) -> str:
    """Why a bell was rung, in words."""
    return end_marks.REASONS.get(asked[-1:], "another rank is about to end")
