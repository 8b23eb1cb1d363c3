"""The heartbeats of all ranks, on whichever host they are."""

import contextlib

from pydantic import BaseModel

from rollback.rundir.beacon import read_in_place
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import Heartbeat, read_heartbeats
from rollback.system.small_json import parse_model


class HostBeats(BaseModel, frozen=True):
    """What a supervisor's report (nodes/node-NAME.json) says of the ranks on its host."""

    beats: dict[int, Heartbeat] = {}


def read_all_heartbeats(paths: RunPaths) -> dict[int, Heartbeat]:
    """The heartbeats of this host's ranks and, while a job on many hosts runs, of the others, as their supervisors
    report. The newest of each rank: what a host said last that was lost lies beside what is said in its place."""
    told: list[dict[int, Heartbeat]] = []
    for path in sorted(paths.nodes.glob("node-*.json")) if paths.nodes.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            told.append(parse_model(read_in_place(path), HostBeats).beats)
    found: dict[int, Heartbeat] = {}
    for beats in (*told, read_heartbeats(paths.ranks)):
        for rank, beat in beats.items():
            if rank not in found or (beat.attempt, beat.looked) >= (found[rank].attempt, found[rank].looked):
                found[rank] = beat
    return found
