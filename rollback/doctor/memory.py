"""Room for the fast tier: the tmpfs that checkpoints are kept in between the steps."""

from pathlib import Path

from rollback.checkpoints.fast_tier.sizing import LEAST_SLOTS, free_memory, slots_that_fit
from rollback.config import ENV_FAST_TIER
from rollback.doctor.findings import Finding, ok, size, warn

_TOPIC = "fast tier"
_SMALL = 1 << 30


def look_at_fast_tier(base: Path, state_bytes: int | None, keep: int, *, held: int = 0) -> Finding:
    """held: bytes that the run's slots take already."""
    if base.exists() and not base.is_dir():
        return warn(
            _TOPIC,
            f"{base} is not a directory: the ranks will write straight to the disk",
            f"name a directory on a tmpfs ({ENV_FAST_TIER}), or leave it to be /dev/shm",
        )
    try:
        free = free_memory(base) + held
    except OSError as error:
        return warn(
            _TOPIC,
            f"{base} cannot be used ({error.strerror or error}): the ranks will write straight to the disk",
            f"mount a tmpfs there: mount -t tmpfs -o size=50% tmpfs {base}",
        )
    return judge_fast_tier(base, free, state_bytes, keep)


def judge_fast_tier(base: Path, free: int, state_bytes: int | None, keep: int) -> Finding:
    """free: bytes that files there could take, by the file system, the host's memory and the container's limit."""
    room = f"{size(free)} could be had in {base}"
    larger = (
        "more memory for the container, and a larger /dev/shm: docker run --shm-size, or an emptyDir of medium Memory"
    )
    if state_bytes is None:
        if free < _SMALL:
            return warn(_TOPIC, f"{room}, which is little", larger)
        return ok(_TOPIC, f"{room}; --state-bytes would tell whether that suffices")
    slots = slots_that_fit(state_bytes, free, keep)
    need = f"a checkpoint has {size(state_bytes)}"
    if not slots:
        least = 2 * LEAST_SLOTS * state_bytes
        return warn(
            _TOPIC,
            f"{room}, {need}: no room for {LEAST_SLOTS} in half of it; the ranks will write straight to the disk",
            f"{larger}; {size(least)} would do",
        )
    if slots < keep + 1:
        return warn(
            _TOPIC,
            f"{room}, {need}: {slots} slots of the {keep + 1} that --keep {keep} asks for",
            "fewer checkpoints (--keep), or " + larger,
        )
    return ok(_TOPIC, f"{room}, {need}: {slots} slots")
