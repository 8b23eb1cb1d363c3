"""The rows that Lightning's CSVLogger has written: those of undone steps are taken back.

A job that is started again writes to a new file (Lightning counts versions), or has its old one removed: then the rows
up to where it goes on are the first ones of the new file.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
from pathlib import Path
from typing import Any

from rollback.train.comm.recorder import say


class LoggedRows:
    """Of one logger, on rank 0. Make it before the logger opens its file."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._count: int | None = None
        """How many rows the logger has been given; None: nobody counts yet."""
        self._before: dict[str, str] = {}
        """What was in the file before the logger removed it."""
        if logger._version is not None:
            self._remember(Path(logger.log_dir) / "metrics.csv")

    @staticmethod
    def fits(logger: Any) -> bool:
        return any(kind.__name__ == "CSVLogger" for kind in type(logger).__mro__)

    def state_dict(self) -> dict[str, Any]:
        file = self._file()
        return {"path": str(file.metrics_file_path), "rows": self._count or 0, "columns": list(file.metrics_keys)}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        file, columns = self._file(), kept["columns"]
        try:
            with open(kept["path"], encoding="utf-8", newline="") as lines:
                text = lines.read()
        except OSError:
            text = ""
        text = text or self._before.get(kept["path"], "")
        rows = list(itertools.islice(csv.DictReader(io.StringIO(text)), kept["rows"]))
        if len(rows) < kept["rows"]:
            say(f"{kept['path']} has {len(rows)} of the {kept['rows']} rows that were logged: the others are lost")
        file.metrics, file.metrics_keys, self._count = [], list(columns), len(rows)
        with open(file.metrics_file_path, "w", encoding="utf-8", newline="") as target:
            if rows:
                writer = csv.DictWriter(target, columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
        if not rows:
            Path(file.metrics_file_path).unlink()

    def _file(self) -> Any:
        """The logger's writer, whose rows are counted from now on."""
        file = self._logger.experiment
        if self._count is None:
            self._count, original = 0, file.log_metrics

            def log_metrics(*given: Any, **others: Any) -> None:
                self._count = (self._count or 0) + 1
                original(*given, **others)

            file.log_metrics = log_metrics
        return file

    def _remember(self, path: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._before[str(path)] = path.read_text(encoding="utf-8")
