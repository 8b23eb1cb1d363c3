"""Which trackers there are, and reading a run directory for them: once to its end, or on and on as it grows."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rollback.errors import UsageError
from rollback.facts.training import JournalEntry
from rollback.rundir.identity import read_identity
from rollback.rundir.journal.journal import JournalTail
from rollback.rundir.metrics.metric_lines import Metric, MetricTail
from rollback.rundir.paths import RunPaths
from rollback.terminal.extras import require_extra
from rollback.trackers.story import Leg, Story
from rollback.trackers.tensorboard import TensorBoard
from rollback.trackers.wandb import WeightsAndBiases

Tracker = TensorBoard | WeightsAndBiases
"""Hears a run's story, in order. `metric` is a judged step: in a new leg, steps from it on that older legs had no
longer count. Methods may raise OSError, or OutputNotWritten."""
_EVERYTHING = 1 << 62
_EVERY = 1.0  # seconds between two looks: the ranks write their metrics about as often


class Reader:
    """What is new in a run directory, which need not exist yet. after: attempts up to this one are passed over."""

    def __init__(self, root: Path, *, after: int = 0) -> None:
        paths = RunPaths(root)
        self._metrics = MetricTail(paths.metrics, _EVERYTHING)
        self._journal = JournalTail(paths.train_journal)
        self._story = Story()
        self._after = after

    def hand_on(self, trackers: Sequence[Tracker], *, last: bool = False) -> None:
        """Tell the trackers what is new. last: no more will come.

        Raises JournalDamaged or RunDirectoryError, or as trackers do.
        """
        news = True
        while news:
            records = self._journal.new()
            metrics = self._metrics.new()
            told = self._story.in_order(records, metrics)
            news = bool(metrics or told)
            self._tell(trackers, told)
        if last:
            self._tell(trackers, self._story.rest())
        for tracker in trackers:
            tracker.flush()

    def _tell(self, trackers: Sequence[Tracker], told: Sequence[tuple[Leg, Metric | JournalEntry]]) -> None:
        for leg, item in told:
            for tracker in trackers if leg.attempt > self._after else ():
                if isinstance(item, Metric):
                    tracker.metric(leg, item)
                else:
                    tracker.fact(leg, item.fact)


def follow(
    root: Path, trackers: Sequence[Tracker], *, over: Callable[[], bool], after: int = 0, every: float = _EVERY
) -> None:
    """Tell the trackers what comes until `over`, which is asked after each look; then look once more and close them."""
    reader = Reader(root, after=after)
    try:
        while True:
            last = over()
            reader.hand_on(trackers, last=last)
            if last:
                return
            time.sleep(every)
    finally:
        for tracker in trackers:
            tracker.close()


def name_of(root: Path) -> str:
    """What trackers call the run: its directory's name."""
    return root.absolute().name


def require_trackers(tensorboard: str | None, wandb: str | None, run: Path) -> None:
    """Raise UsageError where a tracker that was asked for cannot be had, or is told no place of its own.

    tensorboard: the directory for event files. wandb: the project. run: whose files are its own.
    """
    if tensorboard == "":
        raise UsageError("--tensorboard names no directory", hint="for example --tensorboard tb")
    if tensorboard is not None:
        place, root = (Path(os.path.realpath(path)) for path in (Path(tensorboard, name_of(run)), run))
        if place.is_relative_to(root):
            raise UsageError(
                f"--tensorboard {tensorboard}: the event files would be written to {place}, and {root} is the run "
                "directory",
                hint="name a directory apart from it, for example --tensorboard tb",
            )
        require_extra("tensorboard.summary.writer.event_file_writer", "--tensorboard needs TensorBoard", "tensorboard")
    if wandb is not None:
        if not wandb.strip():  # W&B would log to a project of its own choice, or fail later
            raise UsageError("--wandb names no project", hint="for example --wandb my-project")
        require_extra("wandb", "--wandb needs wandb", "wandb")


def group_of(root: Path) -> str:
    """What all legs of a run have in common: its id, or its directory's name where there is none yet."""
    identity = read_identity(RunPaths(root))
    return f"{name_of(root)}-{identity.run_id}" if identity else name_of(root)
