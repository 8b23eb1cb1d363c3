"""ranks/rank-NNNNN.json: the ranks' heartbeats as files, and all of a run, also as other hosts tell them. Those that a
host's supervisor reads lie in its memory: `heartbeat_board`."""

import contextlib
from pathlib import Path

from pydantic import BaseModel, Field, FiniteFloat

from rollback.facts.ending import EndedAs
from rollback.rundir.host_records import read_in_place
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import parse_model, sound_models

LEAVING = "leaving"
"""`Heartbeat.doing` of a rank whose guard is closed and whose interpreter ends."""

READING = "reading"
"""`Heartbeat.doing` of a rank that asks its data for the next batch."""

END_OF_DATA, SAVING_AT = "the end of the data", "saving at {}"
"""What has ended a pass; `Heartbeat.doing` of a rank whose pass has ended, by which those are told apart whose data end
apart."""


class UnrecordedEnd(BaseModel, frozen=True):
    """Training has ended, and the ranks' journal could not take that."""

    how: EndedAs
    why: str
    step: int
    batch: int


class Heartbeat(BaseModel, frozen=True):
    """ranks/rank-NNNNN.json. Times are by the host's monotonic clock.

    A rank that waits in a collective looks and does not move. A rank that is stopped, or whose interpreter lock is
    held, does neither.
    """

    pid: int
    host: str
    attempt: int = Field(ge=0, lt=1 << 53)
    step: int = Field(ge=0, lt=1 << 53)
    batch: int = Field(ge=0, lt=1 << 53)
    doing: str
    monotonic: FiniteFloat
    """When the rank's Python last moved."""
    start: str = ""
    """When the process began, as from `rollback.system.processes.start_of`; empty where unknown."""
    looked: FiniteFloat = 0.0
    """When the rank last looked."""
    collectives: int | None = None
    """Number of collectives that its default process group has begun."""
    unrecorded_end: UnrecordedEnd | None = None
    """Of rank 0, which writes the journal."""


def write_heartbeat(path: Path, heartbeat: Heartbeat) -> None:
    """Replace a rank's heartbeat. Not synced: it matters only while the processes live. Raises OSError.

    Where their directory was removed it comes back, since without one `rollback status` sees no rank. The run directory
    does not: it may have been moved.
    """
    content = heartbeat.model_dump_json().encode()
    try:
        write_file(path, content, durable=False)
    except FileNotFoundError:
        if not path.parent.parent.is_dir():
            raise
        files.make_directory(path.parent)
        write_file(path, content, durable=False)


def read_heartbeats(directory: Path) -> dict[int, Heartbeat]:
    """The readable heartbeats by rank, without those that are absent, damaged or just being replaced."""
    found = sound_models(directory, "rank-*.json", Heartbeat, 1 << 16)
    numbers = {name: name.removeprefix("rank-").removesuffix(".json") for name in found}
    return {int(number): found[name] for name, number in numbers.items() if number.isdecimal()}


class HostBeats(BaseModel, frozen=True):
    """What a supervisor's report (nodes/node-NAME.json) says of the ranks on its host."""

    beats: dict[int, Heartbeat] = {}


def read_all_heartbeats(paths: RunPaths) -> dict[int, Heartbeat]:
    """The heartbeats of this host's ranks and, while a job on many hosts runs, of the others, as their supervisors
    report. The newest of each rank: what a host said last that was lost lies beside what is said in its place."""
    told: list[dict[int, Heartbeat]] = []
    with contextlib.suppress(OSError):  # of a directory that cannot be listed at present
        for path in sorted(paths.nodes.glob("node-*.json")):
            with contextlib.suppress(OSError, ValueError):
                told.append(parse_model(read_in_place(path), HostBeats).beats)
    found: dict[int, Heartbeat] = {}
    for beats in (*told, read_heartbeats(paths.ranks)):
        for rank, beat in beats.items():
            if rank not in found or (beat.attempt, beat.looked) >= (found[rank].attempt, found[rank].looked):
                found[rank] = beat
    return found
