"""run.json: the job that a run directory belongs to, and the comparison with another job."""

import json
import uuid
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from rollback.errors import RanksDoNotFit, RunDirectoryError, RunDoesNotFit
from rollback.facts.training import Accepted
from rollback.rundir import seal
from rollback.rundir.paths import FORMATS, READS, RunPaths, format_for
from rollback.system.durable import write_file
from rollback.system.small_json import fault_of, read_json
from rollback.wording import counted

_SHOWN = 6  # differences that are spelt out; the rest is counted
_IN_WORDS = {
    "groups": "parameters in each group",
    "batch_size": "batch size",
    "drop_last": "whether a last batch that is not full is left out",
    "shares": "ranks that read batches of their own",
    "subset": "hash of the samples that belong to the subset",
    "workers": "worker processes",
}
"""What `JobIdentity.optimizer` and `data` have by a name that says it to nobody else."""


class JobIdentity(BaseModel, frozen=True, extra="forbid"):
    """What must stay the same over all attempts of a run."""

    world_size: int
    model: list[tuple[str, str, list[int]]]
    optimizer: dict[str, Any]
    objects: list[str]
    data: dict[str, Any]


class Identity(BaseModel, frozen=True, extra="forbid"):
    """Content of run.json."""

    format: int
    run_id: str = Field(pattern=r"^[0-9A-Za-z-]{8,64}$", description="a directory of the fast tier has its name")
    created: str
    job: JobIdentity
    seal: str | None = None

    def canonical(self) -> str:
        """The text that the seal covers."""
        return json.dumps(self.model_dump(mode="json", exclude={"seal"}), sort_keys=True, separators=(",", ":"))


def new_identity(job: JobIdentity) -> Identity:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Identity(format=format_for(job.world_size), run_id=uuid.uuid4().hex, created=now, job=job)


def write_identity(paths: RunPaths, identity: Identity) -> None:
    """Write run.json, sealed where there is a key. Raises OSError."""
    key = seal.present()
    identity = identity.model_copy(update={"seal": key.of("run", identity.canonical()) if key else None})
    write_file(paths.identity, identity.model_dump_json(indent=1, exclude_none=True).encode())


def read_identity(paths: RunPaths) -> Identity | None:
    """Identity of a run, or None where run.json does not exist. Raises RunDirectoryError if it fails validation."""
    path = paths.identity
    try:
        body = read_json(path)
        _require_format(path, body)
        identity = Identity.model_validate(body)
        require_seal(identity, str(path))
        return identity
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"reading {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RunDirectoryError(
            f"reading {path}: it is damaged ({fault_of(error)})",
            hint="restore the file from a copy, or use another run directory",
        ) from error


def require_format(paths: RunPaths) -> None:
    """Raise RunDoesNotFit where another version of rollback wrote run.json. Damage is told by who needs all of it."""
    with suppress(OSError, ValueError):
        _require_format(paths.identity, read_json(paths.identity))


def _require_format(path: Path, body: Any) -> None:
    found = body.get("format") if isinstance(body, dict) else None
    if isinstance(found, int) and found not in FORMATS:  # one without a format is no other version's
        raise RunDoesNotFit(
            f"{path} has format {found}; this version of rollback reads {READS}",
            hint="use the version of rollback that wrote it, or another run directory",
        )


def require_seal(identity: Identity, where: str) -> None:
    """Raise RunDoesNotFit where there is a key and run.json does not bear its seal."""
    key = seal.present()
    if key is not None and not key.is_on("run", identity.canonical(), identity.seal):
        fault = "is not sealed" if identity.seal is None else "is not what was sealed, or not with this key"
        raise RunDoesNotFit(
            f"{where} {fault}",
            hint="name the key that the run was begun with; a run that was begun without one goes on without --seal",
        )


def require_key(paths: RunPaths, sealed_lines: int = 0) -> None:
    """Raise RunDoesNotFit where a run is sealed and the key is missing: nothing may be restored from it then.

    sealed_lines: number of sealed lines in its journals, where known. Also raises as `read_identity`.
    """
    identity = read_identity(paths)
    require_key_for(bool(sealed_lines) or (identity is not None and identity.seal is not None), str(paths.root))


def require_key_for(is_sealed: bool, where: str) -> None:
    """As `require_key`, for a run at `where`. A key that cannot be used is found before anything is written with it."""
    if seal.present() is None and is_sealed:
        raise RunDoesNotFit(
            f"the run {where} is sealed, and without its key nothing is restored of it",
            hint=f"name the key: --seal KEYFILE, or {seal.ENV_SEAL} in the environment; nothing was changed",
        )


def require_same_job(
    paths: RunPaths, recorded: JobIdentity, present: JobIdentity, *, accept_data_change: bool = False
) -> list[Accepted]:
    """Raise RunDoesNotFit, with the differences, unless the run can go on with the present job.

    Returns the accepted differences: another number of ranks with which every batch has the same samples; with
    `accept_data_change`, another length of the data set.
    """
    accepted, differences = _compare(recorded, present, accept_data_change)
    if not differences:
        return accepted
    shown = "".join(f"\n  - {line}" for line in differences[:_SHOWN])
    more = f"\n  - and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    accepting_helps = not accept_data_change and not _compare(recorded, present, True)[1]
    raise (RanksDoNotFit if _would_fit_as_many(recorded, present, accept_data_change) else RunDoesNotFit)(
        f"the run directory {paths.root} belongs to another job:{shown}{more}",
        hint="start this job with its own run directory (--run DIR) and, with a ring, its own URL (--ring URL), "
        "or start the recorded job; nothing was changed"
        + ("; --accept-data-change goes on with the changed data" if accepting_helps else "")
        + _of_another_version(recorded, present),
    )


def _of_another_version(recorded: JobIdentity, present: JobIdentity) -> str:
    """What to do where the script is the recorded job's, and rollback finds more to keep in it than it did then."""
    added = set(present.objects) - set(recorded.objects)
    if not added or _compare(recorded.model_copy(update={"objects": present.objects}), present, False)[1]:
        return ""
    return (
        f"; where the script is the same, the version of rollback that began the run goes on with it, and did not keep "
        f"{', '.join(sorted(added))}"
    )


def _would_fit_as_many(recorded: JobIdentity, present: JobIdentity, accept_data_change: bool) -> bool:
    """Whether the job would fit if it had the recorded number of ranks. How many batches each rank has follows from how
    many ranks share the data."""
    if recorded.world_size == present.world_size:
        return False
    data = {**present.data, "batches": recorded.data.get("batches")}
    as_many = present.model_copy(update={"world_size": recorded.world_size, "data": data})
    return not _compare(recorded, as_many, accept_data_change)[1]


def _compare(recorded: JobIdentity, present: JobIdentity, accept_data_change: bool) -> tuple[list[Accepted], list[str]]:
    """The differences between a job and the recorded one: the accepted ones, and the others in words."""
    accepted = []
    if accept_data_change and (change := _change_of_length(recorded, present)):
        accepted.append(change)
        recorded = recorded.model_copy(update={"data": {**recorded.data, **change.after}})
    obstacle = None
    if recorded.world_size != present.world_size:
        obstacle = _why_batches_would_differ(recorded, present)
        if obstacle is None:
            accepted.append(_change_of_ranks(recorded, present))
            data = {**recorded.data, "batch_size": present.data["batch_size"]}
            recorded = recorded.model_copy(update={"world_size": present.world_size, "data": data})
    differences = [*_model_differences(recorded, present), *_field_differences(recorded, present)]
    return accepted, [*differences, *([obstacle] if obstacle else [])]


def _change_of_length(recorded: JobIdentity, present: JobIdentity) -> Accepted | None:
    before, after = ({key: job.data.get(key) for key in ("length", "batches")} for job in (recorded, present))
    if before == after:
        return None
    return Accepted(what="data", before=before, after=after)


def _change_of_ranks(recorded: JobIdentity, present: JobIdentity) -> Accepted:
    before, after = (
        {"world_size": job.world_size, "batch_size": job.data["batch_size"]} for job in (recorded, present)
    )
    return Accepted(what="ranks", before=before, after=after)


def _why_batches_would_differ(recorded: JobIdentity, present: JobIdentity) -> str | None:
    """Why another number of ranks would train on other batches; None where the batches stay the same.

    torch's DistributedSampler deals one order of the data set out to the ranks in turn. So batch b of all ranks
    together is one stretch of that order, which begins at b times the ranks times the batch size.
    """
    for job in (recorded, present):
        if job.data.get("kind") != "map-style" or job.data.get("sampler") != "DistributedSampler":
            return (
                "another number of ranks needs a map-style DataLoader with torch's DistributedSampler: with others "
                "each rank has an order of its own, and which samples come next cannot be told"
            )
        if (shares := job.data.get("shares")) is not None:
            return (
                f"of {job.world_size} ranks, {shares} read batches of their own, and the others the same ones, as with "
                "tensor parallelism: those must draw the same random numbers, and a new rank would draw other ones"
            )
    then, now = (job.data.get("batch_size") for job in (recorded, present))
    if not isinstance(then, int) or not isinstance(now, int):
        return "another number of ranks needs a loader with a batch size"
    if then * recorded.world_size != now * present.world_size:
        return (
            f"a batch had {recorded.world_size} x {then} samples and would have {present.world_size} x {now}: every "
            "position in the data would mean other samples; keep ranks times batch size the same"
        )
    return None


def _field_differences(recorded: JobIdentity, present: JobIdentity) -> list[str]:
    lines = []
    if recorded.world_size != present.world_size:
        lines.append(f"world size: the run has {counted(recorded.world_size, 'rank')}, this job {present.world_size}")
    for what, old, new in (
        ("optimizer", recorded.optimizer, present.optimizer),
        ("data", recorded.data, present.data),
    ):
        for key in sorted(old):  # what an earlier version did not record cannot be compared
            if old[key] != new.get(key):
                lines.append(
                    f"{what}, {_IN_WORDS.get(key, key)}: the run has {old.get(key)!r}, this job {new.get(key)!r}"
                )
    if recorded.objects != present.objects:
        lines.append(f"objects: the run has {recorded.objects}, this job {present.objects}")
    return lines


def _model_differences(recorded: JobIdentity, present: JobIdentity) -> list[str]:
    old = {name: (dtype, shape) for name, dtype, shape in recorded.model}
    new = {name: (dtype, shape) for name, dtype, shape in present.model}
    lines = []
    for name in sorted({*old, *new}):
        if name not in new:
            lines.append(f"model: this job has no {name!r} {_tensor(*old[name])}")
        elif name not in old:
            lines.append(f"model: the run has no {name!r} {_tensor(*new[name])}")
        elif old[name] != new[name]:
            lines.append(f"model: {name!r} is {_tensor(*old[name])} in the run, {_tensor(*new[name])} in this job")
    return lines


def _tensor(dtype: str, shape: list[int]) -> str:
    return f"{dtype}{shape}"
