"""Where torchrun sends what the ranks print: into a pipe for each stream, which the supervisor empties.

Runs in torchrun's process, by torchrun's own extension point for logs (`LogsSpecs`). torchrun itself would write
files, and a rank whose output goes straight into a file dies of its own `print` when the disk is full. One that writes
into a pipe does not, and the supervisor says how much it could not keep.
"""

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


class RankStreams(LogsSpecs):
    """Makes `rank-NNNNN.out` and `.err` in `log_dir` as named pipes, by global rank, so that no two nodes share one.

    torchrun makes it with `log_dir` and calls `reify` before it starts its ranks, again where the group re-forms.
    """

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folder = Path(self.root_log_dir)
        places = LogsDest()
        for local_rank, environment in envs.items():
            name = f"rank-{int(environment['RANK']):05d}"
            places.stdouts[local_rank] = str(_pipe(folder / f"{name}.out"))
            places.stderrs[local_rank] = str(_pipe(folder / f"{name}.err"))
            error_file = str(folder / f"{name}.error.json")
            places.error_files[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = error_file
        return places


def _pipe(path: Path) -> Path:
    """A named pipe that can be opened for writing at once. This process keeps it open, for as long as it lives."""
    if not path.exists():
        os.mkfifo(path, 0o600)
        os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    return path
