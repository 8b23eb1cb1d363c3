"""Where the checkpoints of a run are: in slots of the fast tier on this host, in the run directory's ring, or in both.

A checkpoint has one name and one content wherever it lies. Which directory is looked at first is decided here: the fast
tier's, then the ring's.
"""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoints import ring
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.record_marks import is_ahead_of
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.environment import ENV_FAST_TIER
from rollback.errors import (
    CheckpointDamaged,
    CheckpointUnreadable,
    CheckpointUnusable,
    RunDirectoryError,
    unreadable,
)
from rollback.facts.training import Tier
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import FORMAT, FORMATS, RunPaths
from rollback.system.durable import write_file
from rollback.system.small_json import read_json

_POINTER_LIMIT = 1 << 16
PUT_BACK = (
    "the journal lacks lines that were there when it was made: an older copy of it was put back, and what was skipped "
    "before that checkpoint is not known"
)
"""Why what is ahead of the record is not gone on from."""


@dataclass(frozen=True)
class Located:
    """A committed checkpoint in one place. slot: its number, in the fast tier."""

    manifest: Manifest
    directory: Path
    tier: Tier
    slot: int | None = None

    @property
    def name(self) -> str:
        return self.manifest.name


@dataclass(frozen=True)
class SlotsLook:
    """What a look into this host's slots has found. ahead: checkpoints that are not used, since the journal lacks lines
    that were there when they were committed. unused: by slot, why what is committed there is not used; where the slots
    cannot be listed, by the name of the tier."""

    usable: list[Located]
    ahead: list[Located]
    unused: dict[str, CheckpointUnusable]


def base_of(setting: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The directory in which fast tiers are made: None for none. `auto` is what the environment says, else /dev/shm."""
    chosen = (environment.get(ENV_FAST_TIER) if setting == "auto" else setting) or "auto"
    if chosen == "off":
        return None
    return slots.DEFAULT_BASE if chosen == "auto" else Path(chosen)


def locate(paths: RunPaths) -> list[Located]:
    """All committed checkpoints by their manifests, oldest first; of two places of one, the fast tier's comes first.

    Shards are not looked at: where the ranks are on many hosts, a slot here has those of this host's ranks only. What
    cannot be believed is left out (`ring.manifests` tells of the ring's).
    """
    durable, _ = ring.manifests(paths)
    found = [Located(manifest, paths.checkpoint(manifest.name), "durable") for manifest in durable]
    found += in_slots(paths)
    return sorted(found, key=lambda place: (place.manifest.seq, place.manifest.name, place.tier == "durable"))


def find(paths: RunPaths, name: str) -> Located | None:
    """A checkpoint where it is looked for first; None: it is nowhere. Raises CheckpointUnusable where it is there, or
    may be in a slot, and its manifest cannot be read or believed."""
    look, directory = look_into_slots(paths), paths.checkpoint(name)
    if (place := next((found for found in look.usable if found.name == name), None)) is not None:
        return place
    try:
        return Located(read_manifest(directory), directory, "durable")
    except CheckpointUnusable:
        if directory.exists():
            raise
    others = {found.directory.name for found in look.ahead if found.name != name}
    for slot, fault in look.unused.items():
        if slot not in others and isinstance(fault, CheckpointUnreadable):
            raise fault
    return None


def in_slots(paths: RunPaths) -> list[Located]:
    """What this host's fast tier holds of a run, by its record. A slot whose manifest cannot be believed holds
    nothing."""
    return look_into_slots(paths).usable


def look_into_slots(paths: RunPaths) -> SlotsLook:
    """No slot is held meanwhile: ranks that want one do not notice."""
    look = SlotsLook([], [], {})
    if (tier := fast_tier_of(paths)) is None:
        return look
    try:
        numbers = tier.numbers()
    except FileNotFoundError:  # it was given back a moment ago
        return look
    except OSError as error:
        look.unused[tier.root.name] = unreadable(f"looking into the fast tier {tier.root}", error)
        return look
    for number in numbers:
        directory = tier.slot(number)
        try:
            if (manifest := _manifest_in(tier, number)) is None:
                continue
        except CheckpointUnusable as error:
            look.unused[directory.name] = error
            continue
        place = Located(manifest, directory, "fast", number)
        if is_ahead_of(directory, place.name, paths.train_journal):
            look.ahead.append(place)
            look.unused[directory.name] = CheckpointUnreadable(f"{place.name} is not used: {PUT_BACK}")
        else:
            look.usable.append(place)
    return look


def _manifest_in(tier: SlotPaths, number: int) -> Manifest | None:
    try:
        return read_manifest(tier.slot(number), in_slot=True)
    except CheckpointUnusable:
        if not slots.is_committed(tier, number):
            return None
        return read_manifest(tier.slot(number), in_slot=True)  # it may have been committed between the two looks


def is_whole(place: Located) -> bool:
    """Whether all shards are in that place: in a slot, where the ranks are on many hosts, the others' are not."""
    return place.tier == "durable" or all((place.directory / shard.file).exists() for shard in place.manifest.shards)


@contextlib.contextmanager
def hold_slot(place: Located) -> Iterator[Callable[[], None]]:
    """Keep a checkpoint where it is while it is read. Raises CheckpointUnusable where it has left already.

    Gives what lets it go before: for a reader that is kept waiting, as ranks want the slot. Who reads on compares
    hashes, and asks `has_left` where they do not fit.
    """
    if place.tier == "durable":  # it leaves by rename: what is open stays readable, the rest is damage to a reader
        yield lambda: None
        return
    with slots.reading(place.directory) as (manifest, let_go):
        if manifest.name != place.name:
            raise CheckpointDamaged(f"the slot {place.directory} holds {manifest.name} now, not {place.name}")
        yield let_go


def has_left(place: Located) -> bool:
    """Whether a checkpoint is no longer where it was. What was read of it before may be of another one, or of none.

    For readers who must not hold a slot, however long they take: no name comes back to a slot once it has left.
    """
    if place.slot is None:
        return not place.directory.exists()
    try:
        manifest = _manifest_in(SlotPaths(place.directory.parent), place.slot)
    except CheckpointUnusable:
        return False
    return manifest is None or manifest.name != place.name


def release(paths: RunPaths, durable: Collection[str], final: str | None) -> bool:
    """Give the memory of a run's fast tier back, if the newest of what it holds is among the durable ones, or the final
    state of a complete run is in the run directory: then nobody goes on from anything else. What cannot be read now, or
    is ahead of the journal, may be that newest one.

    Called when no rank runs any more. Whether it was given back. Raises OSError.
    """
    tier, look = fast_tier_of(paths), look_into_slots(paths)
    newest = max(look.usable, key=lambda place: place.manifest.seq, default=None)
    complete = final is not None and paths.checkpoint(final).exists()
    is_known = not any(isinstance(fault, CheckpointUnreadable) for fault in look.unused.values())
    if tier is None or not (complete or (is_known and (newest is None or newest.name in durable))):
        return False
    slots.remove(tier)
    return True


def point_to_fast_tier(paths: RunPaths, tier: SlotPaths, hosts: int = 1) -> None:
    """Write down where a run's fast tier is on each of its hosts. Rank 0 only. Raises OSError.

    Nothing is written where that stands there: the disk may be full when an attempt goes on with the same tier.
    """
    body = {"format": FORMAT, "directory": str(tier.root), "hosts": hosts}
    with contextlib.suppress(OSError, ValueError):
        if read_json(paths.fast_pointer, _POINTER_LIMIT) == body:
            return
    write_file(paths.fast_pointer, json.dumps(body).encode())


def host_count(paths: RunPaths) -> int:
    """On how many hosts a run's fast tier is: 1 where that is not known."""
    try:
        return int(read_json(paths.fast_pointer, _POINTER_LIMIT)["hosts"])
    except (OSError, ValueError, TypeError, KeyError):
        return 1


def fast_tier_of(paths: RunPaths) -> SlotPaths | None:
    """The run's fast tier on this host, if it has one and it may be believed: where a tier of this user's and of that
    name is, closed to others, and with this run directory's own `tier.json`."""
    try:
        body = read_json(paths.fast_pointer, _POINTER_LIMIT)
        tier = SlotPaths(Path(body["directory"])) if body["format"] in FORMATS else None
        identity = read_identity(paths)
        if tier is None or identity is None or tier != slots.tier_of(tier.root.parent.parent, identity.run_id):
            return None
        for directory in (tier.root.parent, tier.root):
            slots.require_own(directory)
    except (OSError, ValueError, TypeError, KeyError, RunDirectoryError):
        return None
    owner = slots.owner_of(tier)
    return tier if owner is not None and slots.may_be_of(owner, paths.root) else None
