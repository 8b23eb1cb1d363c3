"""Verifies checkpoints by the checks of a restore (`rollback ring verify`).

The order is that of a restore: the manifest; then size, hash and header of each shard; then the trees; then whether the
content fits the run's job. After the first check that fails, later checks are left out.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from rollback.checkpoints.format.contents import Contents, Stored, StoredParts, read_contents
from rollback.checkpoints.format.frozen import FrozenFiles
from rollback.checkpoints.format.layout import DTYPE_NAME
from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.checkpoints.format.shard import ShardReader
from rollback.checkpoints.tiers import has_left, host_count, in_slots
from rollback.errors import CheckpointLeft, CheckpointUnreadable, CheckpointUnusable, ExitCode
from rollback.facts.training import Tier
from rollback.inspect.document import Document, ReportItem
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.checkpoints import PLACES, CheckpointStanding, DamagedSlot, choose
from rollback.rundir.identity import JobIdentity, read_identity
from rollback.rundir.paths import MANIFEST, RunPaths


class CheckpointFault(ReportItem):
    tier: Tier
    file: str | None = Field(
        description="inside the checkpoint, or in `frozen/` of the run directory; null where it is not one file's"
    )
    fault: str
    unreadable: bool = Field(False, description="it could not be read: what is there may be sound")


class Verified(ReportItem):
    """A verified checkpoint, in each tier that has it."""

    checkpoint: str
    tiers: list[Tier] = Field(description="where it was looked at, as in `rollback ring list`")
    sound: list[Tier] = Field(description="where there is nothing wrong with it: one is enough for a start")
    step: int
    status: CheckpointStanding
    bytes: int | None
    intact: bool = Field(description="in all these tiers")
    faults: list[CheckpointFault]

    @property
    def unreadable(self) -> bool:
        """Whether it is not intact for nothing but what could not be read."""
        return bool(self.faults) and all(fault.unreadable for fault in self.faults)


class Verification(Document):
    """Schema of `rollback ring verify --json`, version 1; conventions as in the audit."""

    directory: str
    checkpoints: list[Verified] = Field(description="oldest first")
    intact: int
    usable: int = Field(description="sound in some tier, and not discarded")
    damaged_slots: list[DamagedSlot] = Field(description="as in `rollback ring list`; looked at unless names are given")
    leftovers: list[str] = Field(description="as in `rollback ring list`")
    notices: list[str]

    @property
    def exit_code(self) -> ExitCode:
        """0: all are intact. 65: there is none that the run could resume from. 1: some are damaged, and one can."""
        if not self.usable:
            return ExitCode.NO_CHECKPOINT
        whole = self.intact == len(self.checkpoints) and not self.damaged_slots
        return ExitCode.DONE if whole else ExitCode.FAILED


def verify(run: ReadableRun, words: Sequence[str] = ()) -> Verification:
    """Verify checkpoints. Changes nothing. words: which ones, see `choose`; default: all.

    Slots of the fast tier are not held, so the job may overwrite one meanwhile.

    Raises UsageError, NoUsableCheckpoint, RunDirectoryError or RunDoesNotFit.
    """
    listing = run.listing()
    paths = RunPaths(run.root)
    identity = read_identity(paths)
    notices = list(listing.notices)
    if identity is None:
        notices.append("there is no run.json: whether the tensors are those of the run's model was not looked at")
    chosen = {choose(listing, word) for word in words} or {entry.checkpoint for entry in listing.held()}
    verified = []
    with FrozenFiles(paths) as frozen:
        for entry in listing.held():
            if entry.checkpoint not in chosen:
                continue
            found: dict[Tier, list[CheckpointFault]] = {}
            for tier in entry.tiers:
                faults = _faults(run, entry.checkpoint, tier, identity.job if identity else None, frozen)
                if faults is None:
                    notices.append(f"{entry.checkpoint} left {PLACES[tier]} while it was looked at")
                else:
                    found[tier] = faults
            if found:
                verified.append(
                    Verified(
                        checkpoint=entry.checkpoint,
                        tiers=list(found),
                        sound=[tier for tier, faults in found.items() if not faults],
                        step=entry.step,
                        status=entry.status,
                        bytes=entry.bytes,
                        intact=not any(found.values()),
                        faults=[fault for faults in found.values() for fault in faults],
                    )
                )
    if (hosts := host_count(paths)) > 1 and any("fast" in entry.tiers for entry in verified):
        notices.append(f"the run's memory is that of {hosts} hosts: only the shards of this one were looked at there")
    return Verification(
        directory=run.name,
        checkpoints=verified,
        intact=sum(entry.intact for entry in verified),
        usable=sum(bool(entry.sound) and entry.status != "discarded" for entry in verified),
        damaged_slots=[] if words else listing.damaged_slots,
        leftovers=listing.leftovers,
        notices=notices,
    )


def _faults(
    run: ReadableRun, checkpoint: str, tier: Tier, job: JobIdentity | None, frozen: FrozenFiles
) -> list[CheckpointFault] | None:
    """The faults of a checkpoint in a tier; None: it has left the tier meanwhile."""
    paths = RunPaths(run.root)
    if tier == "fast":
        place = next((place for place in in_slots(paths) if place.name == checkpoint), None)
        partly = host_count(paths) > 1
        faults = find_faults(place.directory, tier, job, frozen, partly=partly) if place else []
        return None if place is None or has_left(place) else faults
    directory = paths.checkpoint(checkpoint)
    try:
        with run.shards(checkpoint):
            faults = find_faults(directory, tier, job, frozen)
    except CheckpointLeft:
        return None
    except CheckpointUnusable as error:
        faults = [_fault(tier, None, error)]
    return faults if directory.exists() else None


def find_faults(
    directory: Path, tier: Tier, job: JobIdentity | None, frozen: FrozenFiles, *, partly: bool = False
) -> list[CheckpointFault]:
    """All faults of a checkpoint; none where a restore would succeed, whatever frozen weights the script loads.

    partly: other hosts have the missing shards, so only existing shards are verified.
    """
    fault = partial(_fault, tier)
    try:
        manifest = read_manifest(directory, in_slot=tier == "fast")
    except CheckpointUnusable as error:
        return [fault(MANIFEST, error)]
    with ExitStack() as stack:
        shards, faults = [], []
        for rank, record in enumerate(manifest.shards):
            if partly and not os.path.lexists(directory / record.file):
                continue
            try:
                shard = ShardReader(directory / record.file, record.written, start=record.start)
                shards.append(stack.enter_context(shard))
            except CheckpointUnusable as error:
                whose = "" if record.start is None else f"rank {rank}: "  # a pack is the file of several
                faults.append(fault(record.file, error, whose))
        weights = None
        try:
            weights = frozen.open(manifest.frozen)
        except CheckpointUnusable as error:
            faults.append(fault(f"frozen/{manifest.frozen.file}" if manifest.frozen else None, error))
        if faults or len(shards) < len(manifest.shards):
            return faults
        try:
            contents = read_contents(shards, weights)
        except CheckpointUnusable as error:
            return [fault(None, error)]
        found = misfits(manifest, contents, job) if job else []
        return [CheckpointFault(tier=tier, file=None, fault=text) for text in found]


def _fault(tier: Tier, file: str | None, error: CheckpointUnusable, whose: str = "") -> CheckpointFault:
    unreadable = isinstance(error, CheckpointUnreadable)
    return CheckpointFault(tier=tier, file=file, fault=whose + error.message, unreadable=unreadable)


def misfits(manifest: Manifest, contents: Contents, job: JobIdentity) -> list[str]:
    """The differences between the content and the run's job."""
    found = [text for rank in range(manifest.world_size) for text in _model_misfits(contents.model(rank), job)]
    found += _optimizer_misfits(contents.shared["optimizer"], job)
    if (objects := sorted(map(str, contents.shared["objects"]))) != job.objects:
        found.append(f"it keeps the objects {objects}; the run has {job.objects}")
    return list(dict.fromkeys(found))


def _model_misfits(state: dict[str, Any], job: JobIdentity) -> Iterator[str]:
    wanted = {name: f"{dtype}{shape}" for name, dtype, shape in job.model}
    held = {name: value.entry for name, value in state.items() if isinstance(value, Stored | StoredParts)}
    for name, kind in wanted.items():
        if name not in held:
            yield f"the model's tensor {name!r} is missing"
        elif (has := f"{DTYPE_NAME[held[name].dtype]}{list(held[name].shape)}") != kind:
            yield f"the model's tensor {name!r} is {has}; in the run it is {kind}"
    for name in sorted(held.keys() - wanted.keys(), key=str):
        yield f"the run's model has no tensor {name!r}"


def _optimizer_misfits(state: Any, job: JobIdentity) -> Iterator[str]:
    try:
        groups = [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        yield "the optimizer's state has no parameter groups"
        return
    if groups != job.optimizer.get("groups"):
        yield f"the optimizer's groups have {groups} parameters; in the run they have {job.optimizer.get('groups')}"
