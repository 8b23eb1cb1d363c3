"""The checkpoints of a run: what is on disk, and what the record says of it (`rollback ring list`)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from rollback.audit.cost import seconds_since_epoch
from rollback.audit.ledger import Entry
from rollback.audit.material import require_run_directory
from rollback.errors import CheckpointDamaged, JournalDamaged, NoUsableCheckpoint, RunDirectoryError, UsageError
from rollback.events import Attached
from rollback.policy import Held
from rollback.rundir import ring
from rollback.rundir.history import History, fold
from rollback.rundir.journal import read_journal
from rollback.rundir.manifest import Manifest, read_manifest
from rollback.rundir.paths import RunPaths, parse_checkpoint_name
from rollback.rundir.pins import pinned
from rollback.rundir.remote.told import good_ones_at
from rollback.rundir.resume import of_present_timeline
from rollback.rundir.tiers import in_slots

Status = Literal["good", "candidate", "discarded", "damaged", "quarantined", "unknown"]
NEWEST_GOOD, NEWEST = "newest-good", "newest"


class Checkpoint(Entry):
    """A checkpoint on disk. What only its manifest tells is null where that cannot be believed."""

    checkpoint: str
    step: int
    batch: int | None
    epoch: int | None
    timeline: int | None
    attempt: int | None
    created: str | None
    age: float | None = Field(description="seconds since it was taken, by this machine's clock")
    bytes: int | None = Field(description="of all its shards")
    status: Status = Field(
        description="damaged: its manifest cannot be believed; quarantined: put aside by the run as it could not be "
        "used; unknown: the journal cannot be read"
    )
    pinned: bool
    fault: str | None = Field(description="what is wrong with its manifest")


class Listing(Entry):
    """Schema of `rollback ring list --json`, version 1; conventions as in the ledger."""

    schema_version: Literal[1] = Field(1, alias="schema")
    directory: str
    checkpoints: list[Checkpoint] = Field(description="oldest first")
    leftovers: list[str] = Field(
        description="directories of checkpoints in the making or on their way out: of a live run, or of a crash; the "
        "next start removes those of a crash"
    )
    notices: list[str]

    def in_ring(self) -> list[Checkpoint]:
        """Those that are not put aside."""
        return [entry for entry in self.checkpoints if entry.status != "quarantined"]


def read_listing(root: Path) -> Listing:
    """All checkpoints of a run directory, by their manifests; no shard is read.

    A damaged journal costs the status, not the list. Raises UsageError or RunDirectoryError.
    """
    paths = require_run_directory(root)
    notices: list[str] = []
    history = _read_history(paths, notices)
    try:
        sound, damaged = ring.manifests(paths)
        # What a live run evicted while we looked is not damaged but gone.
        damaged = {name: fault for name, fault in damaged.items() if paths.checkpoint(name).exists()}
        pins, aside, leftovers = pinned(paths), _quarantined(paths), ring.leftovers(paths)
    except OSError as error:
        raise RunDirectoryError(f"reading {error.filename or root}: {error.strerror or error}") from error
    present = {manifest.name for manifest in of_present_timeline(history, sound)} if history else set()
    entries = [_entry(m, _status(m, history, present), m.name in pins) for m in sound]
    entries += [_without_manifest(name, "damaged", name in pins, fault) for name, fault in damaged.items()]
    entries += aside
    entries.sort(key=lambda entry: parse_checkpoint_name(entry.checkpoint) or (0, 0))
    held = {entry.checkpoint for entry in entries}
    notices += [f"{name} is pinned, but it is not in the ring any more" for name in pins if name not in held]
    return Listing(schema=1, directory=str(root), checkpoints=entries, leftovers=leftovers, notices=notices)


def read_held(root: Path) -> list[Checkpoint]:
    """The checkpoints of a run that may be gone back to, oldest first: also those in this host's memory alone, and the
    good ones that, by the record, are only at the URL of its ring.

    Those of the ring whose manifest is damaged are left out. Raises as `read_listing`.
    """
    paths = require_run_directory(root)
    history = _read_history(paths, [])
    entries = {entry.checkpoint: entry for entry in read_listing(root).in_ring()}
    in_memory = [place.manifest for place in in_slots(paths) if place.name not in entries]
    present = {manifest.name for manifest in of_present_timeline(history, in_memory)} if history else set()
    for manifest in in_memory:
        entries[manifest.name] = _entry(manifest, _status(manifest, history, present), pinned=False)
    for point in _at_url(paths):
        if point.name not in entries or entries[point.name].status == "damaged":
            away = _without_manifest(point.name, "good", pinned=False, fault=None)
            entries[point.name] = away.model_copy(update={"batch": point.batch})
    held = [entry for entry in entries.values() if entry.status in ("good", "candidate", "unknown")]
    return sorted(held, key=lambda entry: parse_checkpoint_name(entry.checkpoint) or (0, 0))


def choose(listing: Listing, word: str) -> str:
    """The name of the checkpoint that a word means: a name, `newest-good`, or `newest` (good or candidate).

    Raises UsageError for a name that is not in the ring, NoUsableCheckpoint where there is no such checkpoint.
    """
    held = listing.in_ring()
    if word not in (NEWEST_GOOD, NEWEST):
        if word not in [entry.checkpoint for entry in held]:
            names = " ".join(entry.checkpoint for entry in held) or "none"
            raise UsageError(
                f"there is no checkpoint {word} in the ring of {listing.directory}", hint=f"it has {names}"
            )
        return word
    wanted = ("good",) if word == NEWEST_GOOD else ("good", "candidate", "unknown")
    suitable = [entry.checkpoint for entry in held if entry.status in wanted]
    if not suitable:
        kind = "good checkpoint" if word == NEWEST_GOOD else "checkpoint that belongs to the run"
        raise NoUsableCheckpoint(
            f"the ring of {listing.directory} has no {kind}",
            hint="`rollback ring list` shows what there is; any of it can be named",
        )
    return suitable[-1]


def _at_url(paths: RunPaths) -> list[Held]:
    """Good checkpoints at the URL of the ring that the last attempt was started with."""
    try:
        ranks, supervisor = (read_journal(path).records for path in (paths.train_journal, paths.supervisor_journal))
    except JournalDamaged:
        return []
    attached = next((record.fact for record in reversed(ranks) if isinstance(record.fact, Attached)), None)
    url = attached.settings.get("ring") if attached is not None else None
    return good_ones_at(url, ranks, supervisor) if url else []


def _read_history(paths: RunPaths, notices: list[str]) -> History | None:
    try:
        return fold(read_journal(paths.train_journal).records)
    except JournalDamaged as error:
        notices.append(f"{error.message}; which checkpoints are good cannot be told")
        return None


def _status(manifest: Manifest, history: History | None, present: set[str]) -> Status:
    if history is None:
        return "unknown"
    if manifest.name not in present:
        return "discarded"
    return "good" if manifest.name in history.good else "candidate"


def _quarantined(paths: RunPaths) -> list[Checkpoint]:
    try:
        names = [name for name in os.listdir(paths.quarantine) if parse_checkpoint_name(name)]
    except FileNotFoundError:
        return []
    entries = []
    for name in names:
        try:
            entries.append(_entry(read_manifest(paths.quarantine / name), "quarantined", pinned=False))
        except CheckpointDamaged as error:
            entries.append(_without_manifest(name, "quarantined", pinned=False, fault=error.message))
    return entries


def _entry(manifest: Manifest, status: Status, pinned: bool) -> Checkpoint:
    taken = seconds_since_epoch(manifest.created)
    return Checkpoint(
        checkpoint=manifest.name,
        step=manifest.step,
        batch=manifest.batch,
        epoch=manifest.epoch,
        timeline=manifest.timeline,
        attempt=manifest.attempt,
        created=manifest.created,
        age=None if taken is None else max(0.0, time.time() - taken),
        bytes=manifest.bytes,
        status=status,
        pinned=pinned,
        fault=None,
    )


def _without_manifest(name: str, status: Status, pinned: bool, fault: str | None) -> Checkpoint:
    _, step = parse_checkpoint_name(name) or (0, 0)
    return Checkpoint(
        checkpoint=name, step=step, batch=None, epoch=None, timeline=None, attempt=None, created=None, age=None,
        bytes=None, status=status, pinned=pinned, fault=fault,
    )  # fmt: skip
