"""Many logs: one after the other, or over all processors, with results in the order of the arguments."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from rollback.backtest.columns import Overrides
from rollback.backtest.replay import Replay, replay
from rollback.config import Settings
from rollback.errors import UsageError
from rollback.system.files import size_of

_WORTH_A_POOL = 4 << 20
"""Bytes of logs from which on starting processes pays."""


def replay_all(paths: list[Path], overrides: Overrides, settings: Settings) -> Iterator[Replay | UsageError]:
    """The result for each log, or why there is none."""
    work = partial(_replay_or_error, overrides=overrides, settings=settings)
    processors = len(os.sched_getaffinity(0))
    if processors > 1 and len(paths) > 1 and sum(map(size_of, paths)) > _WORTH_A_POOL:
        with ProcessPoolExecutor(min(processors, len(paths))) as pool:
            yield from pool.map(work, paths, chunksize=max(1, min(16, len(paths) // processors)))
    else:
        yield from map(work, paths)


def _replay_or_error(path: Path, overrides: Overrides, settings: Settings) -> Replay | UsageError:
    try:
        return replay(path, overrides, settings)
    except UsageError as error:
        return error
