"""The run directories of the hosts beside rank 0's, where every host has one of its own.

They have no journals. Each has the run's `run.json`, so that it is known whose it is, and what its host keeps: slots'
place, heartbeats, failure records, stacks, evidence, skip records.
"""

from typing import Any

from rollback.checkpoints import ring
from rollback.config import host_name
from rollback.errors import RollbackError, RunDoesNotFit, message_of
from rollback.rundir.identity import Identity, read_identity, write_identity
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.train.comm.ranks import Ranks


def require_one_run(paths: RunPaths, identity: dict[str, Any] | None, ranks: Ranks) -> None:
    """Collective: raise RunDoesNotFit, on all ranks, where a host's directory holds another run than rank 0's.

    identity: the content of rank 0's run.json; None: the run begins.
    """
    fault, hint = None, "name another directory with --run DIR there; nothing was changed"
    if ranks.first_in_directory and not ranks.first:
        try:
            own = read_identity(paths)
            expected = identity["run_id"] if identity is not None else None
            if own is not None and own.run_id != expected:
                there = f"run {expected}" if expected is not None else "no run yet"
                fault = (
                    f"the run directory {paths.root} on {host_name()} belongs to run {own.run_id}; rank 0's, and the "
                    f"ring, have {there}"
                )
        except RollbackError as error:
            fault = f"on {host_name()}: {error.message}"
    if (found := ranks.first_fault(fault)) is not None:
        raise RunDoesNotFit(found, hint=hint)


def first_writes_of_host(paths: RunPaths, ranks: Ranks) -> str:
    """Collective: make what is missing in the hosts' directories, as rank 0's is complete. Returns the fault in words;
    empty: there is none."""
    whose = read_identity(paths) if ranks.first else None
    body = ranks.from_first(whose.model_dump(mode="json") if whose is not None else None)
    fault = None
    if ranks.first_in_directory and not ranks.first:
        try:
            for directory in (paths.ring, paths.ranks, paths.skips):
                files.make_directory(directory)
            identity = Identity.model_validate(body)
            if read_identity(paths) != identity:  # as it is, it stays: a disk that is full by now ends no attempt
                write_identity(paths, identity)
            ring.sweep(paths)
        except (OSError, RollbackError) as error:
            why = message_of(error)  # the caller gives a hint
            fault = f"writing to the run directory {paths.root} on {host_name()}: {why}"
    return ranks.first_fault(fault) or ""
