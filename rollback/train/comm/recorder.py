"""The recorder of rank 0: journal, metrics and notices. A full disk never stops the training."""

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from rollback.errors import JournalDamaged
from rollback.facts.history import History, fold
from rollback.facts.training import Advice, Fact, JournalEntry, Trouble
from rollback.rundir.journal.folded_journal import FoldedJournal, fold_journal
from rollback.rundir.journal.journal import Journal
from rollback.rundir.metrics.column_file import ColumnWriter
from rollback.rundir.metrics.metric_lines import Metric, metric_line
from rollback.rundir.paths import RunPaths
from rollback.system.lines import LineWriter
from rollback.wording import AdviceText, Calls, first_few

_FLUSH_SECONDS = 1.0
_BLOCKS = 2  # of columns in one flush: some milliseconds each
_NAMED = 12
_JOURNALLING, _METRICS = "writing the journal", "writing the metrics"
_RECENT = 1024
_T = TypeVar("_T")


class _Unheard:
    """Counts the lines that could not be shown."""

    lines = 0


def say(text: str) -> None:
    """Show a line on stderr. A closed or full stderr must not end the training, nor a signal in the midst of a line of
    the script's own, behind which Python writes no other: lost lines are counted."""
    try:
        print(f"rollback: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, RuntimeError):
        _Unheard.lines += 1


def say_if_it_fails(doing: str, act: Callable[[], object]) -> None:
    """Do something that the run does not depend on. Report a failure."""
    try:
        act()
    except OSError as error:
        say(f"{doing} failed ({error}); training goes on")


class Recorder:
    """Writes the record on rank 0. On other ranks every method does nothing. Safe to use from several threads. Behind
    `close` there may still be something to note: the files are closed when nobody has the recorder any more.

    journal: the ranks' journal as rank 0 has just read it; None: it is read here.
    """

    def __init__(
        self,
        paths: RunPaths,
        attempt: int,
        *,
        is_rank_0: bool,
        advised: Iterable[str] = (),
        journal: FoldedJournal | None = None,
    ) -> None:
        self._attempt = attempt
        self._places = {_JOURNALLING: paths.train_journal, _METRICS: paths.metrics}
        self._journal: Journal | None = None
        self.history = History()
        """Rank 0: the ranks' facts of all attempts. Other ranks: nothing."""
        if is_rank_0:
            journal = journal or fold_journal(paths.train_journal, to_keep=True)
            self._journal, self.history = Journal(paths.train_journal, attempt, journal.reading), journal.history
            weakref.finalize(self, self._journal.close).atexit = False
            journal.keep()
        self._metrics: LineWriter | None = None
        self._unwritten: list[dict[str, Any]] = []
        """Rows of the metrics since the last flush, which makes lines of them: many in a row cost far less than one
        between two steps each."""
        self._flushed = time.monotonic()
        self._failing: dict[str, str] = {}
        """What fails at present, and why."""
        self._unheard_before = _Unheard.lines
        self._advised = set(advised)
        self.calls = Calls()
        self._lock = threading.RLock()
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        """The newest rows of the metrics, on every rank: rank 0 may be gone before it has written its last ones."""
        if is_rank_0:
            self._metrics = self._try(_METRICS, lambda: LineWriter(paths.metrics))
            self._columns = ColumnWriter(paths.metrics)
            weakref.finalize(self, self._columns.close).atexit = False

    def note(self, fact: Fact, notice: str | None = None) -> None:
        """Append a fact to the journal, and show `notice`. Durable on return, unless the disk refuses."""
        self.note_all([(fact, notice)])

    def note_all(self, noted: Sequence[tuple[Fact, str | None]]) -> None:
        """As `note`, of many facts in the time that the disk needs for one."""
        if self._journal is None or not noted:
            return
        journal = self._journal
        with self._lock:
            for fact, notice in noted:
                if notice:
                    say(notice)
                entry = JournalEntry(seq=0, at="", attempt=self._attempt, fact=fact)  # type: ignore[arg-type]
                with contextlib.suppress(JournalDamaged):  # a fact that does not fit ends no training
                    fold([entry], self.history)
            self._try(_JOURNALLING, lambda: journal.append(*(fact for fact, _ in noted)))

    @property
    def unwritten(self) -> str:
        """Why the journal could not take the last fact; empty: it has all."""
        return self._failing.get(_JOURNALLING, "")

    def advise(self, *advice: AdviceText) -> None:
        """Note likely mistakes of the script, each once in a run."""
        for each in advice:
            if each.code not in self._advised:
                self._advised.add(each.code)
                told = each.in_words(self.calls)
                self.note(Advice(code=each.code, text=told), told)

    def advise_of(self, advice: AdviceText, names: Sequence[str], **more: str) -> None:
        """Note a likely mistake about these names, of which the first few are listed. No names: no advice."""
        if names:
            self.advise(advice.of(names=first_few([*map(repr, names)], _NAMED), **more))

    def metric(
        self, step: int, batch: int, loss: float | None, grad_norm: float | None, verdict: str, timeline: int
    ) -> None:
        """Note a judged step."""
        row: dict[str, Any] = {
            "step": step, "batch": batch, "loss": loss, "grad_norm": grad_norm, "verdict": verdict,
            "attempt": self._attempt, "timeline": timeline,
        }  # fmt: skip
        self.recent.append(row)
        if self._metrics is None:
            return
        self._unwritten.append(row)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def complete_metrics(self, lines: Sequence[str]) -> None:
        """Add what rank 0 of an earlier attempt could not write any more. lines: of all its newest steps, in order.
        Nothing where the last line that is there is damaged: of which step it was is not known."""
        if self._metrics is None:
            return
        metrics, last = self._metrics, self._metrics.last
        try:
            there = _place(last) if last else (0, 0, -1)
        except ValueError:
            return
        for line in lines:
            if _place(line) > there:
                self._try(_METRICS, partial(metrics.write, line), proves=False)

    def flush(self) -> None:
        if self._metrics is not None:
            self._flushed = time.monotonic()
            rows, self._unwritten = self._unwritten, []
            for row in rows:
                self._try(_METRICS, partial(self._metrics.write, metric_line(**row)), proves=False)
            self._try(_METRICS, self._metrics.flush)
            self._columns.catch_up(_BLOCKS)

    def close(self) -> None:
        self.flush()
        unheard, self._unheard_before = _Unheard.lines - self._unheard_before, _Unheard.lines
        if unheard:
            self.note(Trouble(doing="telling people on stderr", error=f"{unheard} lines could not be shown"))

    def _try(self, doing: str, act: Callable[[], _T], *, proves: bool = True) -> _T | None:
        """Do something; report an error of the disk once, and go on. The journal keeps what it could not write.

        proves: a success shows that the disk works again.
        """
        try:
            result = act()
        except OSError as error:
            if doing not in self._failing:
                self._failing[doing] = error.strerror or str(error)
                say(
                    f"{doing} {self._places[doing]} fails ({error.strerror or error}); training goes on, and what the "
                    "journal could not take stays in memory"
                )
            return None
        if proves and doing in self._failing:
            del self._failing[doing]
            say(f"{doing} works again")
            if self._journal is not None:
                self.note(Trouble(doing=doing, error="failed for a while; what the journal held back is written now"))
        return result


def _place(line: str) -> tuple[int, int, int]:
    """Where a line of the metrics belongs: attempt, timeline, step. Raises ValueError."""
    row = Metric.model_validate_json(line)
    return row.attempt, row.timeline, row.step
