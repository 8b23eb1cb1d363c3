"""The rows that Lightning's CSVLogger has written: those of undone steps are taken back.

A job that is started again writes to a new file (Lightning counts versions), or has its old one removed: then the rows
up to where it goes on are the first ones of the new file.
"""

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
        self._told_of: set[Path] = set()
        self._before: dict[str, str] = {}
        """What was in the file before the logger removed it."""
        if logger._version is not None:
            path = Path(logger.log_dir) / "metrics.csv"
            self._before[str(path)] = _read(path)

    @staticmethod
    def fits(logger: Any) -> bool:
        """Whether it is a CSVLogger that writes to a disk of this machine."""
        return any(kind.__name__ == "CSVLogger" for kind in type(logger).__mro__) and "://" not in logger.save_dir

    def state_dict(self) -> dict[str, Any]:
        file = self._file()
        columns = sorted({*file.metrics_keys, *itertools.chain(*file.metrics)})  # as it will have when it is saved
        return {"path": str(file.metrics_file_path), "rows": self._count or 0, "columns": columns}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        file, path = self._file(), Path(kept["path"])
        with contextlib.suppress(OSError):
            file.save()  # the rows that it still holds
        texts = _read(path), self._before.get(str(path), "")  # a new process may have logged again what comes first
        rows = max((_rows(text)[: kept["rows"]] for text in texts), key=len)
        if len(rows) < kept["rows"]:
            if path not in self._told_of:  # what is put back is put back again where an epoch begins
                say(f"{path} has {len(rows)} of the {kept['rows']} rows that were logged: the others are lost")
            self._told_of.add(path)
        file.metrics, file.metrics_keys, self._count = [], list(kept["columns"]), len(rows)
        try:
            _write(Path(file.metrics_file_path), kept["columns"], rows)
        except OSError as error:
            say(f"{file.metrics_file_path}: {error}; it may have rows of steps that are undone")

    def _file(self) -> Any:
        """The logger's writer, whose rows are counted from now on. It may have some, as of a `trainer.validate`."""
        file = self._logger.experiment
        if self._count is None:
            original = file.log_metrics
            self._count = len(_rows(_read(Path(file.metrics_file_path)))) + len(file.metrics)

            def log_metrics(*given: Any, **others: Any) -> None:
                self._count = (self._count or 0) + 1
                original(*given, **others)

            file.log_metrics = log_metrics
        return file


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read().replace("\0", "")  # as a power cut leaves them at a file's end
    except (OSError, ValueError):
        return ""


def _rows(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


def _write(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    """As a whole: a kill, or a disk without room, leaves the rows that were there."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    new = path.with_name(f".{path.name}.new")
    try:
        with open(new, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
