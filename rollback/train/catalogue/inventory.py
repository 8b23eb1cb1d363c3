"""The checkpoints in the slots when an attempt starts. Only those that every host has can be used."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rollback.checkpoints import tiers
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.tiers import Located
from rollback.rundir.paths import RunPaths
from rollback.train.comm.ranks import Ranks


@dataclass(frozen=True)
class InSlot:
    """A checkpoint in a slot. content: its identity, by its hashes; see `Manifest.content`."""

    slot: int
    name: str
    content: str


@dataclass(frozen=True)
class Inventory:
    """manifests, slots: of checkpoints that every host has in the slot of the same number. strays: names of checkpoints
    that only some hosts have. ahead: of the first, those that are ahead of the record (`tiers.SlotsLook`)."""

    manifests: list[Manifest]
    slots: dict[str, int]
    strays: list[str]
    ahead: frozenset[str] = frozenset()


def take_inventory(paths: RunPaths, ranks: Ranks, in_ring: Collection[str]) -> Inventory:
    """Collective: take the inventory, the same on all ranks. The first rank of each host looks into the slots.

    in_ring: names of the checkpoints in the run directory, which are these and not what memory has ahead of it.
    """
    look = tiers.look_into_slots(paths) if ranks.first_of_host else tiers.SlotsLook([], [], {})
    places = [place for place in [*look.usable, *look.ahead] if is_enough(place, ranks)]
    told = [[place.slot, place.name, place.manifest.content] for place in places]
    answers = ranks.from_each(told if ranks.first_of_host else None)
    names = set[str]().union(*ranks.from_each([place.name for place in look.ahead]))
    held, strays = common([[InSlot(*item) for item in answer] for answer in answers if answer is not None])
    held = [item for item in held if item.name not in names.intersection(in_ring)]
    slots = {item.name: item.slot for item in held}
    own = [place.manifest.model_dump(mode="json") for place in places if slots.get(place.name) == place.slot]
    manifests = [Manifest.model_validate(body) for body in ranks.from_first(own)]
    return Inventory(manifests, slots, strays, frozenset(names & slots.keys()))


def is_enough(place: Located, ranks: Ranks) -> bool:
    """Whether a slot of this host has the shards that its ranks read: all if there is one host, else their own."""
    shards = place.manifest.shards
    if ranks.host_count > 1:
        if place.manifest.world_size != ranks.world_size:
            return False
        shards = tuple(shards[rank] for rank in ranks.on_this_host)
    return all(os.path.exists(place.directory / shard.file) for shard in shards)


def common(hosts: Sequence[Sequence[InSlot]]) -> tuple[list[InSlot], list[str]]:
    """What all hosts have in common, and the names of the rest. Pure."""
    held = [item for item in hosts[0] if all(item in host for host in hosts)]
    return held, sorted({item.name for host in hosts for item in host} - {item.name for item in held})
