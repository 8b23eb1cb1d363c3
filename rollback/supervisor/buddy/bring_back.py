"""Brings this host's part of the newest snapshot back from the memory of another host, before its ranks start."""

import time
from pathlib import Path

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import buddy_copies, slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.errors import RollbackError
from rollback.facts.training import PartBroughtBack
from rollback.rundir.identity import Identity, read_identity, write_identity
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.supervisor.buddy.wire import Answer, Buddies, BuddyRequest, Refused, answer, connect, receive_files, say
from rollback.system import files
from rollback.system.durable import write_file


def bring_back(paths: RunPaths, base: Path, node: str, seat: int, buddies: Buddies) -> PartBroughtBack | None:
    """Put the newest snapshot of a seat that any other host has a copy of into this host's slots, if that is newer than
    all that is there. None: nothing is. Raises OSError and RollbackError; what was in the slots is there then, too."""
    began = time.monotonic()
    request = BuddyRequest(secret=buddies.secret, run=buddies.run, seat=seat, wants="look")
    found = {address: told for address in _others(buddies, seat) if (told := _look(address, request)) is not None}
    address = max(found, key=lambda address: found[address].seq, default=None)
    own = max((place.manifest.seq for place in tiers.in_slots(paths)), default=-1)
    if address is None or found[address].seq <= own:
        return None
    with connect(address) as connection, connection.makefile("rb") as stream:
        say(connection, request.model_copy(update={"wants": "give"}))
        given = answer(stream)
        if given.parcel is None or given.identity is None:
            return None  # it was given up meanwhile
        tier = _tier(paths, base, buddies, given.identity)
        arriving = buddy_copies.prepare(tier, seat, given.parcel.slot)
        try:
            manifest, body = receive_files(stream, given.parcel, arriving)
            _take_over(tier, given.parcel.slot, arriving, body)
        finally:
            files.remove_directory(arriving)
    return PartBroughtBack(
        node=node, checkpoint=manifest.name, step=manifest.step, bytes=given.parcel.bytes,
        seconds=round(time.monotonic() - began, 3), source=address.rpartition(":")[0],
    )  # fmt: skip


def _take_over(tier: SlotPaths, number: int, arrived: Path, manifest: bytes) -> None:
    directory = tier.slot(number)
    if not slots.uncommit(tier, number):
        raise Refused(f"somebody reads {directory}")
    slots.discard(tier, number)
    arrived.rename(directory)
    write_file(directory / MANIFEST, manifest, durable=False)


def _others(buddies: Buddies, seat: int) -> list[str]:
    """The other hosts, the buddy of this seat first."""
    behind = [*buddies.addresses[seat + 1 :], *buddies.addresses[:seat]]
    return [address for address in behind if address]


def _look(address: str, request: BuddyRequest) -> Answer | None:
    try:
        with connect(address) as connection, connection.makefile("rb") as stream:
            say(connection, request)
            return answer(stream)
    except OSError:
        return None


def _tier(paths: RunPaths, base: Path, buddies: Buddies, identity: dict[str, object]) -> SlotPaths:
    """This host's fast tier of the run, made if it is not there, with the files by which it is found."""
    told = Identity.model_validate(identity)
    if told.run_id != buddies.run:
        raise Refused("the copy is of another run")
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
