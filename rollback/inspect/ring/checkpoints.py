"""The checkpoints of a run: where they are, and their status in the record (`rollback ring list`)."""

import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.checkpoints.pins import pinned
from rollback.checkpoints.resume import of_present_timeline
from rollback.checkpoints.tiers import fast_tier_of, look_into_slots
from rollback.errors import CheckpointUnusable, JournalDamaged, NoUsableCheckpoint, RunDirectoryError, UsageError
from rollback.facts.history import History
from rollback.facts.training import Tier
from rollback.inspect.document import Document, ReportItem
from rollback.inspect.record.cost import CLOCKS_DIFFER
from rollback.inspect.record.reading import lost_lines, require_run_directory
from rollback.policy import PolicyCheckpoint
from rollback.ring.schedule import good_ones_at
from rollback.rundir import seal
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.terminal.quantities import seconds_since_epoch

CheckpointStanding = Literal["good", "candidate", "discarded", "damaged", "quarantined", "unknown"]
NEWEST_GOOD, NEWEST, FINAL = "newest-good", "newest", "final"
_OF_A_MANIFEST = {"step", "batch", "epoch", "timeline", "attempt", "created"}
PLACES: dict[Tier, str] = {"fast": "memory", "durable": "the ring"}


class Checkpoint(ReportItem):
    """An existing checkpoint. The fields from its manifest are null where the manifest is damaged."""

    checkpoint: str
    tiers: list[Tier] = Field(
        description="where it is: `fast`, in memory of this host; `durable`, in the ring; none for one that is "
        "quarantined. A start looks in this order"
    )
    step: int
    batch: int | None
    epoch: int | None
    timeline: int | None
    attempt: int | None
    created: str | None
    age: float | None = Field(
        description="seconds since it was taken, by this machine's clock; null too where that clock is behind"
    )
    bytes: int | None = Field(description="of all its shards")
    ranks: int | None = Field(description="that wrote it, a shard each")
    status: CheckpointStanding = Field(
        description="damaged: its manifest cannot be believed; quarantined: put aside by the run as it could not be "
        "used; unknown: the journal cannot be read"
    )
    pinned: bool
    fault: str | None = Field(description="what is wrong with its manifest, that in the ring where it is in two tiers")


class DamagedSlot(ReportItem):
    """A slot of the fast tier with a damaged manifest: its checkpoint is unknown."""

    slot: str
    fault: str


class FrozenFile(ReportItem):
    """Weights that nothing trains, stored once for many checkpoints."""

    file: str = Field(description="in `frozen/` of the run directory")
    bytes: int
    checkpoints: int = Field(description="that need it")


class Listing(Document):
    """Schema of `rollback ring list --json`, version 1; conventions as in the audit."""

    directory: str
    ring: str = Field(description="where the ring is: a path that works from anywhere, or a URL")
    url: str | None = Field(
        None, description="where the run keeps a ring besides, of which nothing is listed here; null: at no URL"
    )
    checkpoints: list[Checkpoint] = Field(description="oldest first")
    final: str | None = Field(None, description="the one with the final state, where the run is complete")
    calm: bool = Field(True, description="whether the last step before it was judged healthy")
    damaged_slots: list[DamagedSlot]
    frozen: list[FrozenFile] = Field([], description="what the checkpoints share; their `bytes` do not count it")
    leftovers: list[str] = Field(
        description="directories of checkpoints in the making or on their way out: of a live run, or of a crash; the "
        "next start removes those of a crash"
    )
    notices: list[str]

    def held(self) -> list[Checkpoint]:
        """The checkpoints that are not in quarantine."""
        return [entry for entry in self.checkpoints if entry.tiers]


def read_listing(root: Path) -> Listing:
    """All checkpoints of a run, in the ring and in the fast tier of this host. Reads manifests, no shards.

    With a damaged journal the status is unknown. Raises UsageError or RunDirectoryError.
    """
    paths = require_run_directory(root)
    notices: list[str] = []
    history = _read_history(paths, notices)
    try:
        slots = look_into_slots(paths)
        in_ring, damaged = ring.manifests(paths)
        # A checkpoint that a running run evicted meanwhile is not damaged.
        faults = {name: error.message for name, error in damaged.items() if paths.checkpoint(name).exists()}
        pins, aside, leftovers = pinned(paths), _quarantined(paths), ring.leftovers(paths)
    except OSError as error:
        raise RunDirectoryError(f"reading {error.filename or root}: {error.strerror or error}") from error
    if history is not None:
        all_there = [*in_ring, *(place.manifest for place in slots.usable)]
        notices += lost_lines(paths, history, all_there)
    fast, durable = {place.name: place.manifest for place in slots.usable}, {m.name: m for m in in_ring}
    sound = fast | durable
    present = {m.name for m in of_present_timeline(history, list(sound.values()))} if history else set()
    entries = aside
    for name in sound.keys() | faults.keys():
        tiers: list[Tier] = ["fast"] if name in fast else []
        tiers += ["durable"] if name in durable or name in faults else []
        manifest, pinned_, fault = sound.get(name), name in pins, faults.get(name)
        status = _status(manifest, history, present) if manifest else "damaged"
        entries.append(_entry(name, manifest, status, tiers=tiers, pinned=pinned_, fault=fault))
    entries.sort(key=lambda entry: CheckpointName(entry.checkpoint).sort_key)
    shared = Counter(manifest.frozen for manifest in sound.values() if manifest.frozen)
    finished = history.finished if history else None
    final = finished.checkpoint if finished and finished.checkpoint in present else None
    here = {entry.checkpoint for entry in entries if entry.tiers != ["fast"]}
    notices += [f"{name} is pinned, but it is not in the ring any more" for name in pins if name not in here]
    notices += _elsewhere(paths, history, here | fast.keys())
    return Listing(
        directory=str(root),
        ring=str(paths.ring.absolute()),
        url=history.settings.get("ring") if history else None,
        checkpoints=entries,
        final=final,
        calm=finished.calm if finished else True,
        damaged_slots=[DamagedSlot(slot=slot, fault=error.message) for slot, error in slots.unused.items()],
        frozen=[FrozenFile(file=it.file, bytes=it.size, checkpoints=count) for it, count in shared.items()],
        leftovers=leftovers,
        notices=notices,
    )


def read_held(root: Path) -> list[Checkpoint]:
    """The checkpoints that a run may go back to, oldest first. Raises as `read_listing`.

    Among them are checkpoints that are only in this host's memory, and good ones that are only at the ring's URL.
    """
    entries = {entry.checkpoint: entry for entry in read_listing(root).held()}
    for point in _at_url(require_run_directory(root)):
        if point.name not in entries or entries[point.name].status == "damaged":
            away = _entry(point.name, None, "good")
            entries[point.name] = away.model_copy(update={"batch": point.batch})
    held = [entry for entry in entries.values() if entry.status in ("good", "candidate", "unknown")]
    return sorted(held, key=lambda entry: CheckpointName(entry.checkpoint).sort_key)


def has_memory_elsewhere(paths: RunPaths) -> bool:
    """Whether the run has a fast tier on another host, whose checkpoints only the ranks know."""
    return paths.fast_pointer.exists() and fast_tier_of(paths) is None


def choose(listing: Listing, word: str) -> str:
    """The name of a checkpoint. word: a name, `final`, `newest-good`, or `newest` (good or candidate).

    Raises UsageError for an unknown name, NoUsableCheckpoint where no checkpoint fits the word.
    """
    held = listing.held()
    if word == FINAL:
        if listing.final is None:
            raise NoUsableCheckpoint(
                f"{listing.directory} has no final state: the run is not complete, or its final state is not there",
                hint="`rollback ring list` shows what there is, `rollback status` where the run stands",
            )
        return listing.final
    if word not in (NEWEST_GOOD, NEWEST):
        if word not in [entry.checkpoint for entry in held]:
            names = " ".join(entry.checkpoint for entry in held) or "none"
            raise UsageError(f"there is no checkpoint {word} in {listing.directory}", hint=f"it has {names}")
        return word
    wanted = ("good",) if word == NEWEST_GOOD else ("good", "candidate", "unknown")
    suitable = [entry.checkpoint for entry in held if entry.status in wanted]
    if not suitable:
        kind = "good checkpoint" if word == NEWEST_GOOD else "checkpoint that belongs to the run"
        raise NoUsableCheckpoint(
            f"{listing.directory} has no {kind}",
            hint="`rollback ring list` shows what there is; any of it can be named",
        )
    return suitable[-1]


def best_word(listing: Listing) -> str:
    """The default word: the final state of a complete run whose last step was healthy, else the newest good
    checkpoint."""
    return FINAL if listing.final is not None and listing.calm else NEWEST_GOOD


def choose_from_ring(listing: Listing, word: str) -> str:
    """As `choose`, among the checkpoints in the ring. Raises as `choose`."""
    in_memory = [entry.checkpoint for entry in listing.checkpoints if entry.tiers == ["fast"]]
    if word in in_memory:
        raise UsageError(
            f"the checkpoint {word} is not in the ring of {listing.directory}",
            hint="it is in memory only; it is copied to the ring when it is good and its turn comes",
        )
    in_ring = [entry for entry in listing.checkpoints if entry.checkpoint not in in_memory]
    return choose(listing.model_copy(update={"checkpoints": in_ring}), word)


def _at_url(paths: RunPaths) -> list[PolicyCheckpoint]:
    """Good checkpoints at the URL of the ring that the last attempt was started with."""
    try:
        ranks, supervisor = (fold_journal(path).history for path in (paths.train_journal, paths.supervisor_journal))
    except JournalDamaged:
        return []
    url = ranks.settings.get("ring")
    return good_ones_at(url, ranks, supervisor) if url else []


def _read_history(paths: RunPaths, notices: list[str]) -> History | None:
    try:
        journal = fold_journal(paths.train_journal)
        notices += seal.in_words(journal.reading.seals)
        return journal.history
    except JournalDamaged as error:
        notices.append(f"{error.message}; which checkpoints are good cannot be told")
        return None


def _status(manifest: Manifest, history: History | None, present: set[str]) -> CheckpointStanding:
    if history is None:
        return "unknown"
    if manifest.name not in present:
        return "discarded"
    return "good" if manifest.name in history.good else "candidate"


def _elsewhere(paths: RunPaths, history: History | None, here: Collection[str]) -> list[str]:
    """A notice, if the run goes on from a checkpoint that this host cannot see."""
    if history is None or not has_memory_elsewhere(paths):
        return []
    if not (held := history.restorable) or held[-1] in here:
        return []
    return [f"{held[-1]}, the newest, cannot be seen from here: in memory of another host, at the ring's URL, or lost"]


def _quarantined(paths: RunPaths) -> list[Checkpoint]:
    try:
        names = [name for name in os.listdir(paths.quarantine) if CheckpointName.parse(name)]
    except FileNotFoundError:
        return []
    entries = []
    for name in names:
        try:
            entries.append(_entry(name, read_manifest(paths.quarantine / name), "quarantined"))
        except CheckpointUnusable as error:
            entries.append(_entry(name, None, "quarantined", fault=error.message))
    return entries


def _entry(
    name: str,
    manifest: Manifest | None,
    status: CheckpointStanding,
    *,
    tiers: Sequence[Tier] = (),
    pinned: bool = False,
    fault: str | None = None,
) -> Checkpoint:
    if manifest is None:
        told = {**dict.fromkeys((*_OF_A_MANIFEST, "age", "bytes", "ranks")), "step": CheckpointName(name).step}
    else:
        taken = seconds_since_epoch(manifest.created)
        age = None if taken is None or taken > time.time() + CLOCKS_DIFFER else max(0.0, time.time() - taken)
        told = {**manifest.model_dump(include=_OF_A_MANIFEST), "age": age, "bytes": manifest.bytes}
        told["ranks"] = manifest.world_size
    return Checkpoint(checkpoint=name, tiers=list(tiers), status=status, pinned=pinned, fault=fault, **told)
