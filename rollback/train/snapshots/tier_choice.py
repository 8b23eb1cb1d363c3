"""How this job takes its snapshots: in which tier, in how many slots, at once or overlapped. Chosen once, and said."""

from dataclasses import dataclass
from pathlib import Path

import torch

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.sizing import bytes_of_tier, free_memory, slots_that_fit
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.errors import RollbackError, message_of
from rollback.facts.checkpoints import CaptureMode
from rollback.rundir.paths import RunPaths
from rollback.system.cgroups import cores_here
from rollback.train.comm.ranks import Ranks

_PAGE = 4096
_MANIFEST = 1 << 16  # bytes of a slot for its manifest, amply

SWITCHED_OFF = "it is switched off"
"""Why there is no fast tier, where that was asked for."""


OpenedTier = tuple[SlotPaths | None, str]
"""A fast tier, or None and why there is none."""


def open_tier(paths: RunPaths, ranks: Ranks, run_id: str, base: Path | None) -> OpenedTier:
    """Collective: make the run's fast tier on every host, or find it. None and why, on all ranks, if one host cannot.

    Without a base on any rank, that of an earlier attempt is found, if there is one, but none is made.
    """
    tier, fault = None, ""
    try:
        tier = slots.tier_of(base, run_id) if base is not None else None
    except RollbackError as error:
        fault = f"{base} cannot be used ({message_of(error)})"
    # Each host has options and variables of its own, so all ask the same before they part.
    places = ranks.from_each(None if base is None else str(tier.root) if tier is not None else "")
    off = [place is None for place in places]
    if all(off):
        known = tiers.fast_tier_of(paths)
        return (known if ranks.all_of(known is not None) else None), SWITCHED_OFF
    if any(off):
        return None, f"on rank {off.index(True)} it is switched off, and on rank {off.index(False)} it is not"
    roots = sorted(set(places))
    if len(roots) > 1:  # one file in the run directory says where it is, on every host
        return None, f"the ranks name different places for it: {', '.join(roots)}"
    try:
        if tier is not None and ranks.first_of_host:
            seen = tiers.fast_tier_of(paths) == tier
            slots.claim(tier, paths.root)
            if not seen:  # this start has gone on from something else, and so must the next one
                for number in tier.numbers():
                    slots.forget(tier, number)
    except (OSError, RollbackError) as error:
        fault = f"{base} cannot be used ({message_of(error)})"
    if tier is not None and not fault and ranks.first_in_directory:
        try:
            tiers.point_to_fast_tier(paths, tier, ranks.host_count)
        except OSError as error:
            fault = (
                f"the fast tier {tier.root} would be found by {paths.fast_pointer}, and that cannot be written "
                f"({error}); see to the disk of the run directory"
            )
    found = ranks.first_fault(fault)
    return (None, found) if found is not None else (tier, "")


@dataclass(frozen=True)
class Allotment:
    """slots: in use on each host, 0 for none. slot_bytes: of the host that stores most."""

    slots: int
    slot_bytes: int
    reason: str


def allot(tier: SlotPaths | None, why_not: str, ranks: Ranks, shard_bytes: int, keep: int) -> Allotment:
    """Collective: how many slots every host can give. shard_bytes: of this rank."""
    stored = ranks.from_each(shard_bytes)
    here = sum(-(-stored[rank] // _PAGE) * _PAGE for rank in ranks.on_this_host) + _MANIFEST
    free = 0
    if tier is not None:
        try:
            free = free_memory(tier.root) + bytes_of_tier(tier.root)
        except OSError as error:
            why_not = f"{tier.root} cannot be measured ({error})"
    fitting = slots_that_fit(here, free, keep) if tier is not None else 0
    answers = ranks.from_each([fitting, here, free])
    count, slot_bytes, free = min(answers)
    largest = max(answer[1] for answer in answers)
    if tier is None:
        return Allotment(0, largest, f"checkpoints are written to the run directory: {why_not}")
    if count == 0:
        place = f" for {tier.root}" if ranks.host_count == 1 else ""  # else it may be another host's that is short
        reason = f"checkpoints are written to the run directory: {_size(free)} of memory are free{place}, "
        return Allotment(0, largest, f"{reason}and half of it has no room for four slots of {_size(slot_bytes)}")
    each = f" on each of {ranks.host_count} hosts" if ranks.host_count > 1 else ""
    return Allotment(count, largest, f"{count} slots of {_size(slot_bytes)} in {tier.root}{each}")


def capture_mode(on_device: bool, cores: int, ranks_on_host: int, threads: int) -> tuple[CaptureMode, str]:
    """Whether a thread copies while training goes on, and why.

    threads: that torch computes with in each rank. Where all cores compute, a copy at the same time costs the training
    about what it hides, and a short one in one go is cheaper.
    """
    if on_device:
        return "overlapped", "the device copies beside its computing"
    busy = ranks_on_host * threads
    computing = f"{ranks_on_host} rank{'s' * (ranks_on_host > 1)} of {threads} thread{'s' * (threads > 1)}"
    if cores > busy:
        return "overlapped", f"{computing} leave {cores - busy} of {cores} cores free"
    return "at_once", f"{computing} leave none of {cores} cores free"


def usual_capture_mode(on_device: bool, ranks: Ranks) -> tuple[CaptureMode, str]:
    return capture_mode(on_device, cores_here(), len(ranks.on_this_host), torch.get_num_threads())


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
