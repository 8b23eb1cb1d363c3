"""The durable ring of a supervised run: checked before the first attempt, filled beside it, completed at its end."""

import os
import time
from collections.abc import Callable

from rollback.checkpoints import tiers
from rollback.config import Settings
from rollback.errors import RingUnavailable, RollbackError
from rollback.facts.history import History, in_durable_ring
from rollback.ring.drainer import Drainer, DrainPhase, drainer_for
from rollback.ring.url.store import Store
from rollback.rundir.host_records import Transport
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor.journal import SupervisorJournal

_PATIENCE_AT_START = 30.0
_PATIENCE_AT_THE_END = 30.0
_POLL = 0.1
_LOOK_EVERY = 1.0
_WORTH_A_WORD = 2.0
_LAST_WORDS = 5.0  # seconds for the record, where the time for checkpoints is up already


def reach(
    url: str | None, *, writing: bool, expected: float = 0.0, say: Callable[[str], None] = lambda line: None
) -> Store | None:
    """The store at the ring's URL, once it has answered. writing: also write and read an object.

    expected: seconds for which other nodes wait for this one: so long it is asked again where that may help.
    Raises UsageError or RingUnavailable.
    """
    if url is None:
        return None
    store = Store(url, patience=_PATIENCE_AT_START)
    until = time.monotonic() + expected
    while True:
        try:
            with store.told_if_stuck(say):
                store.probe(writing=writing)
            return store
        except RingUnavailable as error:
            if store.refused or (left := until - time.monotonic()) <= 0:
                raise
            say(f"{error.message}; other nodes may wait for this one, so it is tried again for {left:.0f} s")
            time.sleep(min(1.0, left))  # what fails at once is not to be asked in a loop


class Draining:
    """Runs the drainer beside the attempts of a run. The ranks say by `attached` which ring they use.

    transport: reaches the other hosts where each has a run directory of its own.
    """

    def __init__(
        self,
        paths: RunPaths,
        own_journal: SupervisorJournal,
        say: Callable[[str], None],
        transport: Transport | None = None,
    ) -> None:
        self._paths, self._own_journal, self._say = paths, own_journal, say
        self._transport = transport
        self._drainer: Drainer | None = None
        self._not_started = ""
        """Why there is no drainer although the run needs one, in words."""
        self._url: str | None = None
        """Of the ring that the run fills; None: it is the run directory's."""
        self._looked_at = 0.0
        self._given_up = False

    def follow(self, history: History) -> None:
        """Start the drainer once the ranks have attached and name a ring. More calls have no effect, except where
        no thread could be made for it: the machine may have room for one by then."""
        if self._drainer is not None:
            return
        self._looked_at = time.monotonic()
        if not history.attached:
            return
        settings = Settings.model_construct(**history.settings)  # valid when recorded, if by another version's rules
        self._url = settings.ring
        drainer = drainer_for(self._paths, settings, self._own_journal.note, self._say, self._transport)
        if drainer is None:
            return
        try:
            drainer.start()
        except RollbackError as error:
            if not self._not_started:
                self._say(f"the durable ring: {error.message}; it is tried again\n{error.hint}")
            self._not_started = error.message
        else:
            self._drainer, self._not_started = drainer, ""

    def look(self, history: Callable[[], History]) -> None:
        """As `follow`, once a second: the ranks make the fast tier a moment after they have attached."""
        if self._drainer is None and time.monotonic() - self._looked_at > _LOOK_EVERY:
            self.follow(history())

    def finish(self, out_of_time: Callable[[], bool]) -> None:
        """The ranks are gone: wait until their checkpoints are copied or cannot be copied, or until `out_of_time`. Once
        there is no time, more calls have no effect."""
        drainer = self._drainer
        if drainer is None or self._given_up:
            return
        drainer.finish()
        if not drainer.wait(DrainPhase.FINISHED, _WORTH_A_WORD):
            self._say("the ranks have ended; copying what they left to the durable ring (interrupt twice to end now)")
        while not drainer.wait(DrainPhase.FINISHED, _POLL):
            if out_of_time():
                self._say("there is no time left to copy the newest checkpoint to the durable ring")
                self._given_up = True
                drainer.give_up()
                drainer.wait(DrainPhase.FINISHED, _LAST_WORDS)
                return

    def lacks(self, name: str | None) -> str | None:
        """Where a final state is, and why not in the run's durable ring, in words, after `finish`; None: it is there,
        or there is none."""
        paths, url = self._paths, self._url
        if name is None:
            return None
        in_run = os.path.exists(paths.checkpoint(name))
        if url is None and in_run:
            return None
        if self._drainer is not None and self._drainer.final_there == name:
            return None
        journals = (fold_journal(path).history for path in (paths.train_journal, paths.supervisor_journal))
        if name in in_durable_ring(*journals, place=None if url is None else url.rstrip("/")):
            return None
        if in_run:
            then = ", and the same command copies it" if self.hint is None else ""
            return f"not at {url} ({self.why_not()}): it is in {paths.checkpoint(name)}{then}"
        in_memory = any(found.name == name for found in tiers.in_slots(paths))
        where = "in memory alone, which a reboot or a new container takes, and " if in_memory else ""
        return f"{where}in no durable ring: {self.why_not()}"

    @property
    def hint(self) -> str | None:
        """How to go on where the same command does not: this run may not write at its URL any more. None: it does."""
        unfit = self._drainer.unfit if self._drainer is not None else None
        return unfit.hint if unfit is not None else None

    def why_not(self) -> str:
        """Why the last checkpoint is not in the durable ring, in words, after `finish`."""
        if self._given_up:
            return "there was no time left to copy it"
        if self._not_started:
            return self._not_started
        if self._drainer is not None and self._drainer.trouble is not None:
            return self._drainer.trouble
        if tiers.fast_tier_of(self._paths) is None:
            return (
                f"the fast tier cannot be found by {self._paths.identity} and {self._paths.fast_pointer}; somebody "
                "else has removed or changed one of these files, or the fast tier"
            )
        return "it is not in the fast tier any more"

    def close(self) -> None:
        """Copy the record with the last fact of this run, and end."""
        if self._drainer is not None:
            self._drainer.close()
            self._drainer.wait(DrainPhase.CLOSED, _LAST_WORDS if self._given_up else _PATIENCE_AT_THE_END)
