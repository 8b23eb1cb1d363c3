"""The thread that fills the durable ring. It runs in the supervisor, or in rank 0 where there is no supervisor.

    phase      the thread                                              what moves it on
    FOLLOWING  reads the ranks' journal and copies what is due         `finish`, `close`
    FINISHING  copies what is left, the newest checkpoint included     nothing is left, or a copy fails (for long, where
                                                                       memory alone has what is left); `close`
    FINISHED   waits                                                   `close`
    CLOSING    brings the record up to date a last time                done, or failed
    CLOSED     has ended

Training never waits for this thread. If the durable ring cannot be reached, the thread writes one line into the journal
and one for people, and tries again.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from enum import IntEnum
from functools import partial

from rollback.checkpoints import pins, tiers
from rollback.checkpoints import ring as checkpoint_ring
from rollback.config import Settings
from rollback.errors import (
    CheckpointLeft,
    CheckpointUnreadable,
    CheckpointUnusable,
    RingUnavailable,
    RollbackError,
    RunDoesNotFit,
    message_of,
)
from rollback.facts.history import History, fold
from rollback.facts.training import Drained, DrainFailed, Fact, LeftDurableRing
from rollback.ring.copy_requests import CopyingHosts
from rollback.ring.in_run import RingInRun
from rollback.ring.schedule import DrainPace, LastCopy, Situation, in_memory_alone, next_to_drain, to_evict
from rollback.ring.url.ring import RingAtUrl, RunFromUrl
from rollback.ring.url.store import PATIENCE, Store
from rollback.rundir.host_records import Transport
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import JournalTail
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.system.threads import lower_priority, start_thread

_POLL = 0.2
_RECORD_EVERY = 30.0
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 300.0
_DOUBLED = 10  # times at most: a float takes a thousand, and a ring may be away for days


DurableRing = RingInRun | RingAtUrl
"""The target of the copies. The drainer's thread alone calls the methods, `open` first; any thread may call `give_up`.

The methods raise RollbackError or OSError where the ring cannot be reached or used. CheckpointUnusable concerns that
one checkpoint (CheckpointUnreadable: now); RunDoesNotFit means that this run may not write there any more."""
SecondTarget = RingInRun | RunFromUrl
"""Where the final state of a complete run is copied to as well: the run directory."""


class DrainPhase(IntEnum):
    FOLLOWING = 1
    FINISHING = 2
    FINISHED = 3
    CLOSING = 4
    CLOSED = 5


_NEXT = {DrainPhase.FINISHING: DrainPhase.FINISHED, DrainPhase.CLOSING: DrainPhase.CLOSED}
"""When the work of the phase is done, or failed."""


def drainer_for(
    paths: RunPaths,
    settings: Settings,
    note: Callable[[Fact], None],
    say: Callable[[str], None],
    transport: Transport | None = None,
) -> "Drainer | None":
    """The drainer that a run needs, not started yet; None where the run needs none. See `Drainer`.

    transport: reaches the other hosts where each has a run directory of its own.

    It copies to the URL in the settings. Without a URL it copies from the fast tier, if there is one, to RUN/ring.
    """
    if settings.ring is None and tiers.fast_tier_of(paths) is None:
        return None
    others = CopyingHosts(paths, settings.ring, say, transport)
    in_run: SecondTarget | None = None
    ring: DurableRing = RingInRun(paths, others)
    if settings.ring is not None:
        store = Store(settings.ring)
        in_run = RingInRun(paths, others) if transport is None else RunFromUrl(paths, store, say)
        ring = RingAtUrl(paths, store, say, others)
    keep = settings.keep if settings.keep_durable is None else settings.keep_durable
    patience = 0.0 if transport is None else PATIENCE  # hosts apart have no run directory for what the URL refuses
    return Drainer(paths, ring, DrainPace.parse(settings.checkpoint_every), keep, note, say, in_run, patience)


class Drainer:
    """Copies checkpoints of a run to its durable ring, from `start` to `close`.

    keep: capacity of the durable ring. note, say: take a fact for the journal, a line for people; called from the
    thread. in_run: a second target for the final state of a complete run, if `ring` is not the run directory's; None:
    no second target. patience: seconds from `finish` on for which what memory alone has is tried again where the ring
    refuses it, so long as nobody gives up.
    """

    def __init__(
        self,
        paths: RunPaths,
        ring: DurableRing,
        pace: DrainPace,
        keep: int,
        note: Callable[[Fact], None],
        say: Callable[[str], None],
        in_run: SecondTarget | None = None,
        patience: float = 0.0,
    ) -> None:
        self._in_run = in_run
        self._paths, self._ring, self._pace, self._keep = paths, ring, pace, keep
        self._note, self._say = note, say
        self._patience, self._given_up = patience, False
        self._until: float | None = None
        """When the patience is over, in monotonic seconds; None: it has not been needed."""
        self._tail: JournalTail | None = None
        self._history = History()
        self._lost: set[str] = set()
        self._unread = ""
        """The checkpoint that could not be read at the last try, and is tried once more."""
        self._last: LastCopy | None = None
        self._opened = False
        self._record_changed, self._record_at = True, 0.0
        self._failures = 0
        self._said: str | None = None
        """What people have been told of the ring since all was well there."""
        self.trouble: str | None = None
        """Why something could not be copied, in words; None: the ring has taken what was copied last."""
        self.unfit: RunDoesNotFit | None = None
        """Why this run may not write there any more; None: it may."""
        self.final_there: str | None = None
        """The final state of a complete run, where the ring was seen to hold it, whoever has put it there."""
        self._phase = DrainPhase.FOLLOWING
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rollback-drainer", daemon=True)

    def start(self) -> None:
        """Raises RollbackError where no thread can be made."""
        start_thread(self._thread)

    def finish(self) -> None:
        """The ranks write no more: copy what is left. Returns at once; `wait` for FINISHED."""
        self._move(DrainPhase.FOLLOWING, DrainPhase.FINISHING)

    def close(self) -> None:
        """No more facts come: bring the record up to date and end. Returns at once; `wait` for CLOSED."""
        for phase in (DrainPhase.FOLLOWING, DrainPhase.FINISHING, DrainPhase.FINISHED):
            self._move(phase, DrainPhase.CLOSING)

    def give_up(self) -> None:
        """Cancel the present operation, as far as a request in progress allows it."""
        self._ring.give_up()
        if isinstance(self._in_run, RingInRun):  # else it is reached by the same store
            self._in_run.give_up()
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def wait(self, phase: DrainPhase, seconds: float) -> bool:
        """Wait until the thread has reached or passed a phase. False: it has not within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._phase >= phase, seconds)

    def _move(self, before: DrainPhase, after: DrainPhase) -> None:
        with self._changed:
            if self._phase is before:
                self._phase = after
                self._changed.notify_all()

    # What the thread does ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        try:
            while self._phase is not DrainPhase.CLOSED:
                self._turn()
        finally:
            self._ring.close()
            with self._changed:
                self._phase = DrainPhase.CLOSED
                self._changed.notify_all()

    def _turn(self) -> None:
        phase = self._phase
        try:
            self._work(phase)
        except Exception as raised:  # noqa: BLE001 - a file system's own, say: of a thread that has died nobody hears
            error = raised if isinstance(raised, RollbackError | OSError) else RingUnavailable(repr(raised))
            self._opened = False  # whether what was under way was done there is found out
            if phase is DrainPhase.FINISHING and (left := self._left_to_wait(error)) > 0.0:
                self._pause(phase, min(_FIRST_WAIT, left))
                return
            self._complain(None, error)
            if phase is DrainPhase.FOLLOWING:
                self._pause(phase, min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(self._failures - 1, _DOUBLED)))
        else:
            if phase in (DrainPhase.FOLLOWING, DrainPhase.FINISHED):
                self._pause(phase, _POLL)
        if phase in _NEXT:
            self._move(phase, _NEXT[phase])

    def _pause(self, phase: DrainPhase, seconds: float) -> None:
        with self._changed:
            ending = phase is DrainPhase.FINISHING
            self._changed.wait_for(lambda: self._phase is not phase or (ending and self._given_up), seconds)

    def _left_to_wait(self, error: Exception) -> float:
        """Seconds for which what memory alone has is tried again though no rank runs any more: a new container would
        not find it, and what refuses (a key that was changed a moment ago) may pass. The first time, it is told."""
        name = None
        if self._patience and not self._given_up:
            with contextlib.suppress(RollbackError, OSError):  # else what memory has is not known
                in_slots = [place.name for place in tiers.in_slots(self._paths)]
                name = in_memory_alone(self._situation(ending=True), in_slots, checkpoint_ring.names(self._paths))
        if name is None:
            return 0.0
        clock = time.monotonic()
        if self._until is None:
            self._until = clock + self._patience
            self._tell_of_waiting(name, error)
        return self._until - clock

    def _work(self, phase: DrainPhase) -> None:
        if phase is DrainPhase.FINISHED:
            return
        try:
            if phase is DrainPhase.FINISHING:  # the ring may not answer until nobody waits any more
                with contextlib.suppress(RollbackError, OSError):  # it is tried again below, and told then
                    self._bring_home()
            if self.unfit is None:
                self._fill(phase)
        except RunDoesNotFit as error:  # what the run leaves in memory comes home all the same
            self.unfit, self._opened = error, False
            self._complain(None, error)
        finally:  # also where the ring is away
            if phase is DrainPhase.FINISHING:
                self._bring_home()
            if phase is DrainPhase.CLOSING:
                tiers.release(self._paths, self._ring.held() if self._opened else (), self._history.final)

    def _fill(self, phase: DrainPhase) -> None:
        if not self._opened:
            self._ring.open()
            self._opened = True
        while True:
            self._record_changed |= self._read()
            now = self._situation(phase is not DrainPhase.FOLLOWING)
            name = next_to_drain(now, self._pace, time.monotonic())
            if name is None or phase is DrainPhase.CLOSING:
                break
            self._drain(name)
        self.final_there = self._history.final if self._history.final in self._ring.held() else None
        # What cannot be deleted there keeps nothing else up, and is told behind it.
        refused = _refusal(self._evict_surplus)
        due = time.monotonic() - self._record_at >= _RECORD_EVERY
        if phase is DrainPhase.CLOSING or (self._record_changed and due):
            refused = _refusal(partial(self._keep_record, evicted=refused is None)) or refused
        if refused is not None:
            raise refused
        if name is None:  # else it came back when there was no time left for a checkpoint
            self._tell_that_it_works()

    def _read(self) -> bool:
        """Read what is new in the ranks' journal. Returns whether there is anything."""
        if self._tail is None:
            past = fold_journal(self._paths.train_journal)
            self._history, self._tail = past.history, JournalTail(self._paths.train_journal, past.reading)
            return past.reading.lines > 0
        new = self._tail.new()
        fold(new, self._history)
        return bool(new)

    def _bring_home(self) -> None:
        """Copy the final state of a complete run into the run directory, wherever else it is."""
        self._record_changed |= self._read()
        final = self._history.final
        if final is None or self._in_run is None or self._paths.checkpoint(final).exists():
            return
        if isinstance(self._in_run, RunFromUrl) and (self.unfit is not None or final not in self._ring.held()):
            return  # what is there by now may be another's
        place = next((found for found in tiers.in_slots(self._paths) if found.name == final), None)
        if place is not None:
            self._in_run.open()
            with tiers.hold_slot(place):
                self._in_run.put(place.manifest, place.directory)

    def _situation(self, ending: bool) -> Situation:
        held, pinned = self._ring.held(), frozenset(pins.pinned(self._paths))
        return Situation(self._history, held, pinned, frozenset(self._lost), self._last, ending)

    def _drain(self, name: str) -> None:
        place, began = None, time.monotonic()
        try:
            if (place := tiers.find(self._paths, name)) is None:
                self._lost.add(name)  # it has left the ring since
                return
            with tiers.hold_slot(place) as let_go, self._ring.if_stuck(let_go):
                self._ring.put(place.manifest, place.directory)
        except CheckpointUnusable as error:
            if place is not None and tiers.has_left(place):  # nothing is wrong: it may lie in another place
                self._drain(name)
                return
            following = self._phase is DrainPhase.FOLLOWING  # at the end there is no time; what is next may be sound
            if following and isinstance(error, CheckpointUnreadable) and self._unread != name:
                self._unread = name
                raise
            # The next one takes its place; where none gets there, that has to be told.
            is_ordinary = following and isinstance(error, CheckpointLeft) and not self._was_lost_before()
            self._lost.add(name)
            if is_ordinary:
                return
            self._complain(name, error)
            return
        seconds = time.monotonic() - began
        self._last = LastCopy(began, seconds)
        self._record_kept()
        self._recover()
        step, size = CheckpointName(name).step, place.manifest.bytes
        self._note(Drained(checkpoint=name, step=step, place=self._ring.place, bytes=size, seconds=round(seconds, 4)))

    def _was_lost_before(self) -> bool:
        """Whether a checkpoint could not be copied since the ring took one."""
        newest = max((*self._ring.held(), *self._lost), key=lambda name: CheckpointName(name).sort_key, default=None)
        return newest in self._lost

    def _evict_surplus(self) -> None:
        leaving = to_evict(self._situation(ending=False), self._keep)
        while leaving:
            name, reason = leaving.pop(0)
            if self._ring.evict(name):
                self._note(LeftDurableRing(checkpoint=name, place=self._ring.place, reason=reason))
            if self._read():  # that took its time: a plan may need by now what was about to leave
                self._record_changed = True
                leaving = to_evict(self._situation(ending=False), self._keep)

    def _keep_record(self, *, evicted: bool) -> None:
        """evicted: whether what was surplus could be removed."""
        if self._ring.keep_record() and evicted:
            self._recover()
        self._record_kept()

    def _record_kept(self) -> None:
        self._record_at, self._record_changed = time.monotonic(), False

    def _complain(self, checkpoint: str | None, error: Exception) -> None:
        """Report each trouble, to people once; the next `drained` in the journal ends the trouble. There is another try
        until the last attempt is over. Between two attempts nobody trains: it is not said that training goes on."""
        self.trouble = text = message_of(error)
        if checkpoint is None:
            self._failures += 1
        first = self._failures == 1 or isinstance(error, RunDoesNotFit)  # since something was written there
        if checkpoint is not None or first:
            follows = self._phase is DrainPhase.FOLLOWING
            again = "it is tried again" if follows else "this launch does not try it again"
            what = f"checkpoint {checkpoint} is not copied to it" if checkpoint else again
            if isinstance(error, RunDoesNotFit):
                what = f"nothing more is copied to it ({error.hint})"
            if checkpoint is not None or text != self._said:
                self._say(f"the durable ring: {text}; {what}{', and training does not wait for it' if follows else ''}")
            self._said = text if checkpoint is None else self._said
            self._note(DrainFailed(checkpoint=checkpoint, place=self._ring.place, error=text))

    def _tell_of_waiting(self, name: str, error: Exception) -> None:
        self.trouble = self._said = text = message_of(error)
        self._failures += 1
        at = datetime.fromtimestamp(time.time() + self._patience, timezone.utc)
        again = f"{name} is in memory alone: it is tried again until {at:%H:%M:%S} UTC"
        self._say(f"the durable ring: {text}; {again}, for {self._patience:.0f} s (interrupt twice to end now)")
        self._note(DrainFailed(checkpoint=name, place=self._ring.place, error=f"{text}; {again}"))

    def _recover(self) -> None:
        """Something was written there."""
        self._failures, self.trouble = 0, None

    def _tell_that_it_works(self) -> None:
        """At the end of a turn: what can be written may be all that can be done there."""
        if self._said is not None and not self._failures:
            self._say(f"the durable ring {self._ring.place} works again")
            self._said = None


def _refusal(act: Callable[[], None]) -> RingUnavailable | None:
    """Do something at the ring, and return why it was refused, if it was."""
    try:
        act()
    except RingUnavailable as error:
        return error
    return None
