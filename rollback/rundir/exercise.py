"""What `rollback drill` and the ranks of a drilled job tell each other: one folder of small files for each exercise.

    exercise.json              what is to happen (written by the drill, before the job starts)
    injected-00001.json        that it has happened, written just before it does (by that rank)
    samples-00001.jsonl        what was handed out: position in the data stream and a hash of the batch (by that rank)
    end-00001.json             the state at the end, as hashes (by that rank)

The folder lies beside the exercise's run directory, never in it. An exercise names its run directory, so a variable
left over in an environment does nothing to another run.
"""

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel

from rollback.rundir.paths import Below, NamedBelow
from rollback.system.durable import write_file
from rollback.system.small_json import sound_model, sound_models

ENV_DRILL = "ROLLBACK_DRILL"

FaultName = Literal[
    "nan-loss", "gradient-x10", "gradient-x1e4", "corrupt-batch", "weight-bit",
    "killed-rank", "hung-rank", "sigterm", "full-disk",
]  # fmt: skip

_LIMIT = 1 << 20
_Note = TypeVar("_Note", bound="_Written")


class _Written(BaseModel, frozen=True, extra="forbid"):
    """Base of what the files of an exercise hold."""


class Exercise(_Written):
    run: str
    """The run directory that it is meant for."""
    steps: int
    """The job ends after this many optimizer updates."""
    fault: FaultName | None = None
    """The fault to inject; None: an undisturbed run."""
    step: int = 0
    """The fault strikes when the first batch of this update is handed out."""
    rank: int = 0
    """The rank that the fault strikes, where it strikes one rank."""
    lasts: int = 0
    """A full disk has room again after this many updates."""
    seed: int = 0


class Injected(_Written):
    """A fault has struck on a rank."""

    rank: int
    step: int
    at: datetime
    """Wall-clock time."""
    batches: tuple[int, ...]
    """The positions that it affects."""
    what: str


class EndState(_Written):
    """Where a rank ended, and hashes of its state."""

    rank: int
    step: int
    batch: int
    replicas: int = 1
    """The most ranks, this one included, that have the same part of a weight: 1 where all weights are sharded."""
    parts: dict[str, str]
    """Hashes by part: `model`, `optimizer`, `random`, `data`, ..."""


class Folder:
    exercise = Below("exercise.json")
    injected = NamedBelow("injected-{:05d}.json")
    samples = NamedBelow("samples-{:05d}.jsonl")
    end = NamedBelow("end-{:05d}.json")

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))

    def write(self, path: Path, note: _Written) -> None:
        """Write a file, durable on return: the writing process may be killed the next moment. Raises OSError."""
        write_file(path, note.model_dump_json().encode())

    def all_injected(self) -> list[Injected]:
        """By rank."""
        return list(sound_models(self.root, "injected-*.json", Injected, _LIMIT).values())

    def all_ends(self) -> list[EndState]:
        """By rank."""
        return list(sound_models(self.root, "end-*.json", EndState, _LIMIT).values())


def read_note(path: Path, kind: type[_Note]) -> _Note | None:
    """The content of a file; None where there is none or it cannot be read."""
    return sound_model(path, kind, _LIMIT)


def exercise_of(run: Path, environment: Mapping[str, str] = os.environ) -> tuple[Exercise, Folder] | None:
    """The exercise that this process takes part in with that run directory; None outside of a drill."""
    given = environment.get(ENV_DRILL)
    if not given:
        return None
    folder = Folder(Path(given))
    exercise = read_note(folder.exercise, Exercise)
    return (exercise, folder) if exercise is not None and exercise.run == str(run.absolute()) else None
