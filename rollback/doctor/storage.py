"""Where checkpoints go: room for the fast tier in memory; the run directory's disk and a ring at a URL: can they be
written, how fast, and does a sync mean what it says."""

import os
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoints.fast_tier.sizing import LEAST_SLOTS, free_memory, slots_that_fit
from rollback.checkpoints.format.direct import write_direct
from rollback.doctor.findings import Finding, fail, ok, size, warn
from rollback.environment import ENV_FAST_TIER
from rollback.errors import RollbackError
from rollback.ring.url.store import Store
from rollback.system.mounts import Mount, mount_of
from rollback.system.region import Region

_FAST_TIER = "fast tier"
_SMALL = 1 << 30
_FIRST, _LARGEST = 16 << 20, 256 << 20  # bytes that are written to see how fast it goes
_ENOUGH = 1.0  # seconds of writing after which more would tell nothing new
_SYNCS = 15
_IMPLAUSIBLE = 30e-6  # seconds; no device has made anything durable in less
_SLOW_SYNC = 0.1
_OBJECT = 4 << 20
_OBJECTS = 4
_RING_PATIENCE = 10.0
_IN_MEMORY = {"tmpfs", "ramfs"}
_IN_A_CONTAINER = {"overlay", "aufs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs", "wekafs"}


@dataclass(frozen=True)
class Disk:
    """What was measured in a directory. rate: bytes a second, synced; None: there is no room to measure it in.
    syncs: seconds of small writes with a sync."""

    directory: Path
    mount: Mount
    free: int
    rate: float | None
    syncs: tuple[float, ...]


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if os.path.exists(parent))


def look_at_disk(run: Path, state_bytes: int | None, keep: int) -> tuple[list[Finding], float | None]:
    """Findings about the disk of a run directory, which need not exist, and its rate; None: it cannot be measured."""
    directory = _nearest_existing(run)
    try:
        disk = measure(directory)
    except OSError as error:
        fix = "name another run directory with --run, or mend its permissions and free space"
        found = f"{directory} cannot be written: {error.strerror or error}"
        return [fail("run directory", found, fix)], None
    return [judge_kind(disk), judge_room(disk, state_bytes, keep), judge_syncs(disk)], disk.rate


def measure(directory: Path) -> Disk:
    """Write a few files below a directory, for a second or two, and remove them. Raises OSError."""
    mount = mount_of(directory.resolve())
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    with _scratch(directory) as scratch:
        return Disk(directory, mount, free, _rate(scratch, free), _syncs(scratch))


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=".rollback-doctor-", dir=directory))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _rate(scratch: Path, free: int) -> float | None:
    """Of files as checkpoints are written; larger ones until it has taken long enough to mean something."""
    length, rate = min(_FIRST, free // 16), None
    while length > 0:
        data = Region(length).view
        data[:] = os.urandom(length)  # a file system that compresses is not flattered
        began = time.perf_counter()
        write_direct(scratch / f"shard-{length}", data)
        took = time.perf_counter() - began
        rate = length / max(took, 1e-9)
        if took > _ENOUGH or length >= _LARGEST or 4 * length > free // 8:
            break
        length = min(4 * length, _LARGEST)
    return rate


def _syncs(scratch: Path) -> tuple[float, ...]:
    """As a journal does: append a line, sync it."""
    fd = os.open(scratch / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    took = []
    try:
        for _ in range(_SYNCS):
            os.write(fd, b"x" * 200)
            began = time.perf_counter()
            os.fsync(fd)
            took.append(time.perf_counter() - began)
    finally:
        os.close(fd)
    return tuple(took)


def judge_kind(disk: Disk) -> Finding:
    """What kind of file system it is, and what that means for a checkpoint in it."""
    mount = disk.mount
    takes = "is full" if disk.rate is None else f"takes {size(disk.rate)} a second"
    found = f"{disk.directory} is on {mount.kind} ({mount.source}), which {takes}"
    if mount.kind in _IN_MEMORY:
        fix = "put it on a disk (--run DIR), or give a ring elsewhere (--ring URL)"
        return warn("run directory", f"{found}: a restart of the machine empties it", fix)
    if mount.kind in _IN_A_CONTAINER:
        fix = "mount a volume and put it there (--run DIR), or give a ring elsewhere (--ring URL)"
        return warn("run directory", f"{found}: it goes with the container", fix)
    if mount.kind in _NETWORK or mount.kind.startswith("fuse"):
        fix = "see that the server syncs (NFS: no `async` export) and that locks work (NFS: no `nolock`)"
        return warn("run directory", f"{found}: what a sync means is its server's affair", fix)
    return ok("run directory", found)


def judge_room(disk: Disk, state_bytes: int | None, keep: int) -> Finding:
    found = f"{size(disk.free)} free"
    if state_bytes is None and disk.rate is None:
        return fail("disk space", found, "make room, or put the run directory elsewhere (--run DIR)")
    if state_bytes is None:
        return ok("disk space", f"{found}; --state-bytes would tell whether that suffices")
    need = (keep + 1) * state_bytes
    found = f"{found}; {keep} checkpoints of {size(state_bytes)}, and one being written, take {size(need)}"
    if disk.free >= need:
        return ok("disk space", found)
    fix = "make room, keep fewer (--keep), or put the run directory elsewhere (--run DIR)"
    level = "fail" if disk.free < 2 * state_bytes else "warn"
    return Finding(topic="disk space", level=level, found=found, fix=fix)


def judge_syncs(disk: Disk) -> Finding:
    """Whether a sync seems to reach a device. Only what is impossible can be told: a slow lie looks like the truth."""
    median = statistics.median(disk.syncs)
    slowest = f"slowest of {len(disk.syncs)}: {max(disk.syncs) * 1000:.1f} ms"
    found = f"a line of the journal is synced in {median * 1000:.2f} ms ({slowest})"
    if disk.mount.kind in _IN_MEMORY:
        return ok("sync", f"{found}, in memory, where it means nothing")
    if median < _IMPLAUSIBLE:
        fix = "look for eatmydata, a virtual disk with cache=unsafe, libeatmydata, a mount with barrier=0"
        return warn("sync", f"{found}: faster than a device can be; it is not durable", fix)
    if median > _SLOW_SYNC:
        fix = "a faster disk for the run directory; its journal is synced at every checkpoint, incident and skip"
        return warn("sync", found, fix)
    return ok("sync", found)


def look_at_ring(url: str) -> tuple[Finding, float | None]:
    """Write, read and delete objects below a ring's URL: the finding, and the rate; None where it cannot be used."""
    try:
        store = Store(url, patience=_RING_PATIENCE)
        began = time.perf_counter()
        store.probe()
        answer = time.perf_counter() - began
        rate = _rate_of_ring(store)
    except RollbackError as error:
        return fail("ring", error.message, error.hint or "mend it, or leave --ring out"), None
    found = f"{url} takes {size(rate)} a second; writing, reading and deleting an object took {answer * 1000:.0f} ms"
    return ok("ring", found), rate


def _rate_of_ring(store: Store) -> float:
    data = os.urandom(_OBJECT)
    began, written = time.perf_counter(), 0
    key = f"rollback-doctor-{uuid.uuid4().hex}"  # another doctor may look at the same ring now
    try:
        for _ in range(_OBJECTS):
            store.put(key, data)
            written += len(data)
            if time.perf_counter() - began > _ENOUGH:
                break
    finally:
        store.delete(key)
    return written / max(time.perf_counter() - began, 1e-9)


def judge_save(state_bytes: int | None, rate: float | None, grace: float, where: str) -> Finding | None:
    """Whether a checkpoint can be saved in the time that a preempted job has. None where it cannot be told."""
    if state_bytes is None or rate is None:
        return None
    seconds = state_bytes / rate
    found = f"a checkpoint of {size(state_bytes)} takes about {seconds:.1f} s to {where}; the grace is {grace:g} s"
    fix = "a longer --grace, if the scheduler allows one; a faster disk; more ranks (each writes its share)"
    level = "fail" if seconds > grace else "warn"
    if seconds <= grace / 2:
        return ok(f"saving to {where}", found)
    return Finding(topic=f"saving to {where}", level=level, found=found, fix=fix)


def look_at_fast_tier(base: Path | None, state_bytes: int | None, keep: int, *, held: int = 0) -> Finding:
    """base: None where the environment switches it off. held: bytes that the run's slots take already."""
    if base is None:
        return ok(_FAST_TIER, f"off ({ENV_FAST_TIER}): the ranks will write straight to the disk")
    if base.exists() and not base.is_dir():
        return warn(
            _FAST_TIER,
            f"{base} is not a directory: the ranks will write straight to the disk",
            f"name a directory on a tmpfs ({ENV_FAST_TIER}), or leave it to be /dev/shm",
        )
    try:
        free = free_memory(base) + held
    except OSError as error:
        return warn(
            _FAST_TIER,
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
            return warn(_FAST_TIER, f"{room}, which is little", larger)
        return ok(_FAST_TIER, f"{room}; --state-bytes would tell whether that suffices")
    slots = slots_that_fit(state_bytes, free, keep)
    need = f"a checkpoint has {size(state_bytes)}"
    if not slots:
        least = 2 * LEAST_SLOTS * state_bytes
        return warn(
            _FAST_TIER,
            f"{room}, {need}: no room for {LEAST_SLOTS} in half of it; the ranks will write straight to the disk",
            f"{larger}; {size(least)} would do",
        )
    if slots < keep + 1:
        return warn(
            _FAST_TIER,
            f"{room}, {need}: {slots} slots of the {keep + 1} that --keep {keep} asks for",
            "fewer checkpoints (--keep), or " + larger,
        )
    return ok(_FAST_TIER, f"{room}, {need}: {slots} slots")
