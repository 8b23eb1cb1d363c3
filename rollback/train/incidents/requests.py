"""Doing what operators ask of a running job: `rollback rewind`, `skip` and `stop`.

Rank 0 looks for requests and says on the pulse that there are some. When that beat has been read, all ranks have ended
the same step, take up the oldest request by one broadcast, and carry it out alike. A job that starts takes up what is
still open before its first batch. What would change the skip list alone waits while the journal cannot be written. A
request is over when the journal has its answer, and not before: one that a crash interrupted is taken up again, and
what an attempt has done of it is not done twice.
"""

from typing import Any

from rollback.facts.training import Answered, Requested, SampleQuarantine, SkipAdded, Window
from rollback.policy import PolicyCheckpoint
from rollback.rundir.lock import launch_of
from rollback.rundir.paths import CheckpointName
from rollback.rundir.requests import Inbox, Request, read_request, sound_requests
from rollback.suspects import beside_later_ones, left_out_at
from rollback.train.comm.recorder import say
from rollback.train.data.cursor import Cursor
from rollback.train.data.skips import SkipList, why_kept
from rollback.train.events import RollbackApplied
from rollback.train.incidents.decisions import Halt, Rewind
from rollback.train.incidents.judge import Judge
from rollback.train.process.stopping import StopRequest
from rollback.train.restore.restore import verify
from rollback.train.run import AttachedRun
from rollback.train.snapshots.manager import CheckpointManager

_NEED_THE_JOURNAL = ("skip", "quarantine", "release")
"""Orders that change what the run is trained on, and begin no timeline. Lost with rank 0's memory, one would leave
checkpoints that go on: nothing about them would show that they lack batches of which no record says that they were
skipped."""
_REFUSALS_AT_ONCE = 16  # each is a synced line, and a directory full of rubbish must not hold up training


class Requests:
    """Open requests of a run. stop: what this rank has been asked by a signal."""

    def __init__(
        self, run: AttachedRun, stop: StopRequest, judge: Judge, checkpoints: CheckpointManager, skips: SkipList,
        cursor: Cursor,
    ) -> None:  # fmt: skip
        self._paths = run.paths
        self._ranks = run.ranks
        self._record = run.record
        self.stop = stop
        self._judge = judge
        self._checkpoints = checkpoints
        self._skips = skips
        self._cursor = cursor
        self._inbox = Inbox(run.paths, run.history.answers) if run.ranks.is_rank_0 else None
        self._launch = launch_of(run.paths) if run.ranks.is_rank_0 else None
        self._requested = set(run.history.requests)
        self._deferred = set[str]()
        """Rank 0: those that wait until the journal can be written."""
        self.starting = True
        """Whether this attempt has not looked yet."""

    @property
    def waiting(self) -> bool:
        """Whether there are open ones, as rank 0 sees it; False on the others, who hear of them by pulse."""
        if self._inbox is None or not (names := self._inbox.open()):
            return False
        held = self._deferred if self._record.unwritten else ()
        return any(name not in held for name in names)

    def carry_out(self, step: int, *, may_stop: bool) -> Rewind | Halt | None:
        """Collective: carry out open requests, oldest first, up to one for which the guard must act: that decision.

        step: the update in progress. may_stop: whether a checkpoint can be taken here; else a stop is left open.
        """
        starting, self.starting = self.starting, False
        while (oldest := self._oldest(step)) is not None:
            name, request, done = oldest
            if done is not None:
                self.answer(name, True, done)
            elif request.order == "stop":
                account = _by(f"asked to stop by {request.who}", request)
                return Halt(account, save=True) if may_stop else None
            elif request.order == "skip":
                self._skip(name, request)
            elif request.order in ("quarantine", "release"):
                self._leave_out(name, request)
            elif (decision := self._rewind(name, request, step, starting)) is not None:
                return decision
        return None

    def note_stop(self, step: int) -> None:
        """Note that the ranks have stopped, for a request or for a signal, and answer the request. Not collective."""
        names = list(self._inbox.open(now=True)) if self._inbox is not None else []
        for name, request in sound_requests(self._paths, names):
            if request.stops(self._launch):
                self._note_requested(name, request, step)
                self.answer(name, True, f"stopped at step {step}; the same command goes on from there")

    def answer(self, name: str, carried_out: bool, text: str) -> None:
        """Note what became of a request. Not collective."""
        if self._inbox is not None:
            self._inbox.note_answer(name)
            fact = Answered(request=name, carried_out=carried_out, text=text)
            self._record.note(fact, f"request {name}: {text}")

    def _oldest(self, step: int) -> tuple[str, Request, str | None] | None:
        """Collective: the oldest open request that is one, with its name and what an earlier attempt did of it, in
        words; or None."""
        name, body, done = self._ranks.from_first(self._read_oldest(step)) or (None, None, None)
        return (name, Request.model_validate(body), done) if name else None

    def _read_oldest(self, step: int) -> tuple[str, dict[str, Any], str | None] | None:
        if self._inbox is None:
            return None
        refused = 0
        for name in list(self._inbox.open(now=True)):
            try:
                request = read_request(self._paths, name)
                if request.order == "stop" and request.launch not in (None, self._launch):
                    raise ValueError("it was for a launch that is over")
            except (OSError, ValueError) as error:
                if refused == _REFUSALS_AT_ONCE:
                    return None
                refused += 1
                self.answer(name, False, f"refused: {error}")
                continue
            self._note_requested(name, request, step)
            if request.order in _NEED_THE_JOURNAL and self._record.unwritten:
                self._hold(name)
                continue
            return name, request.model_dump(mode="json"), self._done_of(name, request)
        return None

    def _hold(self, name: str) -> None:
        if name not in self._deferred:
            self._deferred.add(name)
            say(f"request {name} waits until the journal can be written ({self._record.unwritten})")

    def _note_requested(self, name: str, request: Request, step: int) -> None:
        if name in self._requested:
            return
        self._requested.add(name)
        fact = Requested(
            request=name, order=request.order, to=request.to, skip=request.skip, who=request.who, why=request.why,
            step=step, batch=self._cursor.batch, samples=request.samples,
        )  # fmt: skip
        self._record.note(fact, _by(f"{request.who} asks: {request.in_words()}", request))

    def _done_of(self, name: str, request: Request) -> str | None:
        """Rank 0: what the journal says of a request that was taken up before, and not answered."""
        history = self._record.history
        if request.order == "rewind" and (case := history.case_of(name)) and case.restored:
            return _back_at(case.restored.step, case.restored.batch, case.restored.checkpoint, request.skip)
        if request.skip is not None and any(added.request == name for added in history.added):
            return _to_be_skipped(request.skip)
        done = next((fact for fact in history.quarantine if fact.request == name), None)
        return _left_out(done) if done else None

    def _skip(self, name: str, request: Request) -> None:
        assert request.skip is not None
        window, position = request.skip, self._cursor.batch
        if window.last < position:
            self.answer(
                name, False, f"refused: {window.in_words()} cannot be skipped any more: the run is at batch "
                f"{position}; rewind to a step at or before batch {window.first}, and skip from there: "
                f"rollback rewind RUN --to STEP --skip {window}",
            )  # fmt: skip
            return
        window = Window(first=max(window.first, position), last=window.last)
        added = SkipAdded(window=window, who=request.who, why=request.why, request=name)
        self._record.note(added)
        self._skips.add(window)
        self._skips.announce(self._cursor)
        self.answer(name, True, _to_be_skipped(window))

    def _leave_out(self, name: str, request: Request) -> None:
        if (why := why_kept(request.samples, self._cursor)) is not None:
            self.answer(name, False, f"refused: {why}")
            return
        samples = {*request.samples}
        before = {*left_out_at(self._skips.quarantine, self._cursor.batch)}
        adds = request.order == "quarantine"
        fact = SampleQuarantine(
            batch=self._cursor.batch, samples=tuple(sorted(before | samples if adds else before - samples)),
            added=tuple(sorted(samples)) if adds else (), released=() if adds else tuple(sorted(samples)),
            who=request.who, why=request.why, request=name,
        )  # fmt: skip
        for one in beside_later_ones(self._skips.quarantine, fact):
            self._skips.leave_out(one)
        self._skips.announce(self._cursor)
        self.answer(name, True, _left_out(fact))

    def _rewind(self, name: str, request: Request, step: int, starting: bool) -> Rewind | None:
        """Plan a rollback and journal the plan; None if the request was refused.

        A running job may evict what the operator was told of, and does not go back further than that. One that starts
        does: nobody trains meanwhile, and what is missing then is lost.
        """
        assert request.to is not None
        if request.to > step:
            self.answer(name, False, f"refused: the run has not come to step {request.to} yet, it is at step {step}")
            return None
        self._checkpoints.await_landing()  # so that all checkpoints there are can be chosen
        target, oldest = self._target(request.to)
        if target is None:
            known = f"the oldest one that can be used is of step {oldest}" if oldest is not None else "there is none"
            self.answer(name, False, f"refused: there is no checkpoint at or before step {request.to}; {known}")
            return None
        told = CheckpointName(request.checkpoint or target.name)
        if target.step < told.step and not starting:
            self.answer(
                name, False, f"refused: {told}, of step {told.step}, was there when this was asked, and cannot be used "
                f"any more; the newest checkpoint at or before step {request.to} is {target.name} now, of step "
                f"{target.step}; ask again to go back to that",
            )  # fmt: skip
            return None
        if request.skip is not None and request.skip.last < target.batch:
            self.answer(
                name, False, f"refused: {request.skip.in_words()} cannot be skipped from there: {target.name} begins "
                f"with batch {target.batch}; rewind further",
            )  # fmt: skip
            return None
        return self._judge.plan_request(name, request, target, step=step, batch=self._cursor.batch)

    def _target(self, step: int) -> tuple[PolicyCheckpoint | None, int | None]:
        """Collective: the newest checkpoint at or before `step` that every rank can read; and the oldest step held."""
        self._checkpoints.look_into_ring()
        for point in reversed(self._checkpoints.as_held()):
            if point.step > step:
                continue
            fault = verify(point.name, self._checkpoints.places(point.name), self._ranks)
            if fault is None:
                return point, None
            self._checkpoints.put_aside(point.name, fault)
        return None, min((point.step for point in self._checkpoints.as_held()), default=None)

    def rollback_applied(self, event: RollbackApplied) -> None:
        """Answer the request, which has been carried out. Not collective."""
        case = event.case
        if case is not None and case.plan is not None and case.incident.request is not None:
            checkpoint = f"{event.checkpoint}, {case.plan.reason}"
            self.answer(case.incident.request, True, _back_at(event.step, event.batch, checkpoint, case.plan.skip))


def _by(text: str, request: Request) -> str:
    return f"{text} ({request.why})" if request.why else text


def _back_at(step: int, batch: int, checkpoint: str, skip: Window | None) -> str:
    return f"back at step {step}, batch {batch} ({checkpoint})" + (f"; {_to_be_skipped(skip)}" if skip else "")


def _to_be_skipped(window: Window) -> str:
    return f"{window.in_words()} will be passed over"


def _left_out(fact: SampleQuarantine) -> str:
    return f"from batch {fact.batch} on left out: {', '.join(map(str, fact.samples)) or 'none'}"
