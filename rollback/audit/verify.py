"""Proving checkpoints readable: a restore into nothing (`rollback ring verify`).

In the order in which a restore believes things: manifest, then each shard's size, hash and header, then the trees, then
whether what they hold is what the run's job takes. What fails is named; what stands behind it is then not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rollback.audit.at_url import ReadableRun
from rollback.audit.checkpoints import Status, choose, read_listing
from rollback.audit.ledger import Entry
from rollback.errors import CheckpointDamaged, ExitCode
from rollback.rundir.contents import Contents, Stored, read_contents
from rollback.rundir.identity import Job, read_identity
from rollback.rundir.layout import DTYPE_NAME
from rollback.rundir.manifest import Manifest, read_manifest
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.rundir.shard import ShardReader


class Fault(Entry):
    """One thing that is wrong with a checkpoint."""

    file: str | None = Field(description="inside the checkpoint; null where it is not one file's")
    fault: str


class Verified(Entry):
    """A checkpoint that was looked at."""

    checkpoint: str
    step: int
    status: Status
    bytes: int | None
    intact: bool
    faults: list[Fault]


class Verification(Entry):
    """Schema of `rollback ring verify --json`, version 1; conventions as in the ledger."""

    schema_version: Literal[1] = Field(1, alias="schema")
    directory: str
    checkpoints: list[Verified] = Field(description="oldest first")
    intact: int
    usable: int = Field(description="intact ones that were not discarded")
    leftovers: list[str] = Field(description="as in `rollback ring list`")
    notices: list[str]

    @property
    def exit_code(self) -> ExitCode:
        """0: all are intact. 65: there is none that the run could resume from. 1: some are damaged, and one can."""
        if not self.usable:
            return ExitCode.NO_CHECKPOINT
        return ExitCode.DONE if self.intact == len(self.checkpoints) else ExitCode.FAILED


def verify(run: Path | ReadableRun, words: Sequence[str] = ()) -> Verification:
    """Verify the checkpoints that the words mean (see `choose`), by default all in the ring. Changes nothing.

    Raises UsageError, NoUsableCheckpoint, RunDirectoryError or RunDoesNotFit.
    """
    run = run if isinstance(run, ReadableRun) else ReadableRun(run, str(run))
    listing = read_listing(run.root)
    paths = RunPaths(run.root)
    identity = read_identity(paths)
    notices = list(listing.notices)
    if identity is None:
        notices.append("there is no run.json: whether the tensors are those of the run's model was not looked at")
    chosen = {choose(listing, word) for word in words} or {entry.checkpoint for entry in listing.in_ring()}
    verified = []
    for entry in listing.in_ring():
        if entry.checkpoint not in chosen:
            continue
        directory = paths.checkpoint(entry.checkpoint)
        faults = _faults(run, entry.checkpoint, identity.job if identity else None)
        if faults and not directory.exists():
            notices.append(f"{entry.checkpoint} left the ring while it was looked at")
            continue
        verified.append(
            Verified(
                checkpoint=entry.checkpoint,
                step=entry.step,
                status=entry.status,
                bytes=entry.bytes,
                intact=not faults,
                faults=faults,
            )
        )
    return Verification(
        schema=1,
        directory=run.name,
        checkpoints=verified,
        intact=sum(entry.intact for entry in verified),
        usable=sum(entry.intact and entry.status != "discarded" for entry in verified),
        leftovers=listing.leftovers,
        notices=notices,
    )


def _faults(run: ReadableRun, checkpoint: str, job: Job | None) -> list[Fault]:
    try:
        with run.shards(checkpoint):
            return find_faults(RunPaths(run.root).checkpoint(checkpoint), job)
    except CheckpointDamaged as error:
        return [Fault(file=None, fault=error.message)]


def find_faults(directory: Path, job: Job | None) -> list[Fault]:
    """Everything that is wrong with a checkpoint; nothing where a restore would succeed."""
    try:
        manifest = read_manifest(directory)
    except CheckpointDamaged as error:
        return [Fault(file=MANIFEST, fault=error.message)]
    with ExitStack() as stack:
        shards, faults = [], []
        for record in manifest.shards:
            try:
                shards.append(stack.enter_context(ShardReader(directory / record.file, record.written)))
            except CheckpointDamaged as error:
                faults.append(Fault(file=record.file, fault=error.message))
        if faults:
            return faults
        try:
            contents = read_contents(shards)
        except CheckpointDamaged as error:
            return [Fault(file=None, fault=error.message)]
        return [Fault(file=None, fault=text) for text in misfits(manifest, contents, job)] if job else []


def misfits(manifest: Manifest, contents: Contents, job: Job) -> list[str]:
    """In what the content differs from what the run's job takes."""
    found = [text for rank in range(manifest.world_size) for text in _model_misfits(contents.model(rank), job)]
    found += _optimizer_misfits(contents.shared["optimizer"], job)
    if (objects := sorted(map(str, contents.shared["objects"]))) != job.objects:
        found.append(f"it keeps the objects {objects}; the run has {job.objects}")
    return list(dict.fromkeys(found))


def _model_misfits(state: dict[str, Any], job: Job) -> Iterator[str]:
    wanted = {name: f"{dtype}{shape}" for name, dtype, shape in job.model}
    held = {name: value.entry for name, value in state.items() if isinstance(value, Stored)}
    for name, kind in wanted.items():
        if name not in held:
            yield f"the model's tensor {name!r} is missing"
        elif (has := f"{DTYPE_NAME[held[name].dtype]}{list(held[name].shape)}") != kind:
            yield f"the model's tensor {name!r} is {has}; in the run it is {kind}"
    for name in sorted(held.keys() - wanted.keys(), key=str):
        yield f"the run's model has no tensor {name!r}"


def _optimizer_misfits(state: Any, job: Job) -> Iterator[str]:
    try:
        groups = [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        yield "the optimizer's state has no parameter groups"
        return
    if groups != job.optimizer.get("groups"):
        yield f"the optimizer's groups have {groups} parameters; in the run they have {job.optimizer.get('groups')}"
