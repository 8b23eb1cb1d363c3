"""What is looked at: one run's status and curves, read again and again."""

import time
from pathlib import Path

from rich.panel import Panel

from rollback.errors import RollbackError
from rollback.facts.training import JournalEntry
from rollback.inspect.status.report import RunStatus
from rollback.inspect.status.status import StatusReader
from rollback.live.panel import Curves, panel
from rollback.rundir.metrics.metric_lines import MetricTail
from rollback.rundir.paths import RunPaths
from rollback.terminal.quantities import seconds_since_epoch

EVERY = 0.5  # seconds between two glances
_MEMORY = 4 << 20  # bytes of metrics from before the first glance: some thirty thousand steps


class View:
    """A run directory, also one that is not there yet."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._reader, self._read = StatusReader(root), False
        self._newest: dict[str, int] = {}
        """The number of the newest entry that was read of each journal, by who writes it."""
        self._metrics = MetricTail(RunPaths(root).metrics, _MEMORY)
        self._curves = Curves()
        self.status: RunStatus | None = None
        self.fault: RollbackError | None = None
        self.news: list[JournalEntry] = []
        """What was journalled since the record could be read last; nothing at the first glance, where all is old."""

    def refresh(self) -> RunStatus | None:
        """Look again. What cannot be read now leaves the last status in place, and its reason in `fault`."""
        try:
            self.status, self.fault = self._reader.read(), None
            news, before = self._reader.news, {**self._newest}
            for record in news:
                self._newest[record.fact.writer] = record.seq
            if not self._read:  # a reader's first look brings all that there is
                news = [each for each in news if before and each.seq > before.get(each.fact.writer, -1)]
            self.news, self._read = news, True
        except RollbackError as error:
            self.fault, self.news = error, []
            self._reader, self._read = StatusReader(self._root), False
        for metric in self._metrics.new():
            self._curves.add(metric)
        return self.status

    def panel(self, width: int) -> Panel:
        """The picture of what was seen last."""
        status, seconds = self.status, None
        if status is not None and status.began is not None and (began := seconds_since_epoch(status.began)) is not None:
            end = seconds_since_epoch(status.ending.at) if status.ending and status.state == "ended" else None
            seconds = max(0.0, (time.time() if end is None else end) - began)
        return panel(status, self._curves, width, seconds)
