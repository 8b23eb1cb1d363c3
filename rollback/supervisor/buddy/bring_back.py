"""Brings this host's part of a snapshot back from its buddy's memory, before its ranks start."""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import buddy_copies, slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.errors import RollbackError
from rollback.facts.training import PartBroughtBack
from rollback.rundir.identity import Identity, read_identity, require_seal, write_identity
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.supervisor.buddy.wire import (
    Buddies,
    BuddyRefused,
    BuddyRequest,
    connect,
    receive_manifest,
    receive_shards,
)
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import parse_model


def bring_back(
    paths: RunPaths, base: Path, node: str, seat: int, buddies: Buddies, address: str, given_up: Callable[[], bool]
) -> PartBroughtBack | None:
    """Put what the buddy at `address` has of the wanted snapshots into this host's slots, unless they have one as new.
    None: nothing is. Raises wire.FAULTS; what was in the slots is there then, too."""
    began = time.monotonic()
    with connect(address, buddies.secret, given_up) as connection:
        connection.say(BuddyRequest(run=buddies.run, seat=seat, give=buddies.wanted))
        if (parcel := connection.answer().parcel) is None:
            return None
        manifest, body = receive_manifest(connection, parcel)
        here = {place.name for place in tiers.in_slots(paths) if parcel.is_in(place.directory)}
        if not is_needed(manifest.name, buddies.wanted, here):
            return None
        tier = _tier(paths, base, buddies, connection.receive(parcel.identity), address)
        with buddy_copies.arriving(tier, "slot") as arrived:
            receive_shards(connection, parcel, manifest, arrived)
            _take_over(tier, parcel.slot, arrived, body)
    return PartBroughtBack(
        node=node, checkpoint=manifest.name, step=manifest.step, bytes=parcel.bytes(manifest),
        seconds=round(time.monotonic() - began, 3), source=address.rpartition(":")[0],
    )  # fmt: skip


def is_needed(offered: str, wanted: Sequence[str], here: Collection[str]) -> bool:
    """Whether a checkpoint is of use: it is wanted, and neither it nor one that is wanted more is here. Pure."""
    if offered not in wanted:
        raise BuddyRefused(f"it offers {offered}, which nobody wants")
    return not {*wanted[: wanted.index(offered) + 1]}.intersection(here)


def _take_over(tier: SlotPaths, number: int, arrived: Path, manifest: bytes) -> None:
    directory = tier.slot(number)
    if not slots.uncommit(tier, number):
        raise BuddyRefused(f"somebody reads {directory}")
    slots.discard(tier, number)
    arrived.rename(directory)
    write_file(directory / MANIFEST, manifest, durable=False)


def _tier(paths: RunPaths, base: Path, buddies: Buddies, identity: bytes, address: str) -> SlotPaths:
    """This host's fast tier of the run, made if it is not there, with the files by which it is found."""
    told = parse_model(identity, Identity)
    require_seal(told, f"run.json from {address}")
    if told.run_id != buddies.run:
        raise BuddyRefused("the copy is of another run")
    tier = slots.tier_of(base, told.run_id)
    slots.claim(tier, paths.root)
    if read_identity(paths) is None:
        files.make_directory(paths.root)
        write_identity(paths, told)
    if tiers.fast_tier_of(paths) is None:
        tiers.point_to_fast_tier(paths, tier, len(buddies.addresses))
    if tiers.fast_tier_of(paths) != tier:
        raise RollbackError(f"the fast tier {tier.root} is not the one that {paths.root} names")
    return tier
