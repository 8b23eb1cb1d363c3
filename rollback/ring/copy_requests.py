"""How many hosts copy one checkpoint from their slots to the durable ring: each host copies the shards of its ranks.

The process that fills the ring writes what it wants (`nodes/wanted.json`). The other hosts copy it and report
(`nodes/part-*.json`); docs/format.md, "Slots of many hosts". Every file has one writer. Only the process that fills the
ring commits a checkpoint there, and only when all shards are there.
"""

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from rollback.checkpoints import tiers
from rollback.checkpoints.format.manifest import Manifest
from rollback.errors import CheckpointDamaged, CheckpointLeft, CheckpointUnreadable, RingUnavailable, RollbackError
from rollback.rundir.host_records import RecordPublisher, RecordWatcher, SharedDirectory, Transport
from rollback.rundir.paths import RunPaths, has_packs

_POLL = 0.1
PATIENCE = 30.0  # seconds in which some living host must say that it has a shard


class CopyRequest(BaseModel, frozen=True):
    """nodes/wanted.json."""

    order: str = ""
    """A unique name of this request; empty: nothing is wanted."""
    name: str = ""
    content: str = ""
    shards: tuple[int, ...] = ()
    ring: str | None = None
    """The URL of the ring; None for RUN/ring."""
    beat: int = 0


CopyFault = Literal["unavailable", "unreadable", "left", "damaged"]
"""`unavailable`: the target, or this host's memory, cannot be used now. `left`: the host has given its part up for a
newer checkpoint."""
ERRORS: dict[CopyFault, type[RollbackError]] = {
    "unavailable": RingUnavailable,
    "unreadable": CheckpointUnreadable,
    "left": CheckpointLeft,
    "damaged": CheckpointDamaged,
}
"""What each of them is to who fills the ring."""


class CopyReport(BaseModel, frozen=True):
    """nodes/part-NAME.json."""

    order: str
    shards: tuple[int, ...] = ()
    """The wanted shards that this host has."""
    done: tuple[int, ...] = ()
    """The shards that this host has copied."""
    fault: str | None = None
    """Why it cannot copy its part."""
    kind: CopyFault = "unavailable"
    """Of the fault."""
    beat: int = 0


def unclaimed(wanted: Collection[int], done: Collection[int], parts: Iterable[CopyReport]) -> list[int]:
    """The shards that are not in the ring and that no living host has claimed. Empty, and nothing `under_way`: all are
    there."""
    return sorted({*wanted} - {*done} - {number for part in parts for number in part.shards})


def under_way(parts: Iterable[CopyReport]) -> bool:
    """Whether a living host has not yet copied all shards that it claimed."""
    return any(part.fault is None and not {*part.shards} <= {*part.done} for part in parts)


@dataclass
class ShardShares:
    """Which host copies which shards of one checkpoint."""

    own: tuple[int, ...]
    others: frozenset[tuple[int, ...]] = frozenset()
    """Of each other host; known when all shards are at their target."""

    @property
    def all(self) -> list[tuple[int, ...]]:
        return [self.own, *sorted(self.others)]


class CopyingHosts:
    """The other hosts that copy their parts of a checkpoint, seen from the process that fills the ring.

    ring: the URL that is filled, None for RUN/ring. say: takes a line for people (default: nothing). transport: reaches
    the other hosts (default: by the run directory). One thread calls the methods; any thread may call `give_up`.
    `close` it.
    """

    def __init__(
        self,
        paths: RunPaths,
        ring: str | None = None,
        say: Callable[[str], None] = lambda text: None,
        transport: Transport | None = None,
    ) -> None:
        self._paths, self._ring, self._say = paths, ring, say
        self._transport: Transport = transport or SharedDirectory(paths.nodes)
        self._publisher: RecordPublisher[CopyRequest] | None = None
        self._watcher = RecordWatcher(self._transport, "part-*.json", CopyReport)
        self._given_up = threading.Event()
        self._orders = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())

    def meet(self) -> None:
        """Publish that a process fills the ring, where there are other hosts. Raises OSError, RollbackError."""
        if self._publisher is None and tiers.host_count(self._paths) > 1:
            self._publisher = RecordPublisher(self._transport, self._paths.wanted.name, CopyRequest(), self._say)

    @contextlib.contextmanager
    def copying(self, manifest: Manifest, directory: Path, *, into_run: bool = False) -> Iterator[ShardShares]:
        """The other hosts copy their shards of a checkpoint while the body copies the shards of this host. After the
        body, all shards are at their target: the ring that is filled, or the run directory's ring.

        Raises CheckpointUnusable where a host cannot copy its part, RingUnavailable where another try may succeed.
        """
        self.meet()
        here = tuple(number for number, shard in enumerate(manifest.shards) if (directory / shard.file).exists())
        wanted = tuple(sorted({*range(len(manifest.shards))} - {*here}))
        if self._publisher is None or not wanted:
            yield ShardShares(tuple(range(len(manifest.shards))))
            return
        order = next(self._orders)
        ring = None if into_run else self._ring
        self._publisher.show(order=order, name=manifest.name, content=manifest.content, shards=wanted, ring=ring)
        shares = ShardShares(here)
        try:
            yield shares
            shares.others = self._wait(order, manifest.name, wanted)
            # At a URL each of them would make a pack with it; in the run directory both write the same to one place.
            if ring is not None and has_packs(len(manifest.shards)) and sum(map(len, shares.others)) > len(wanted):
                raise RingUnavailable(f"two hosts say that they have the same shard of {manifest.name}")
        finally:
            self._publisher.show(order="", name="", content="", shards=(), ring=None)

    def give_up(self) -> None:
        self._given_up.set()

    def close(self) -> None:
        """Publish that nothing more is wanted."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.stop()
            tidy(self._paths)

    def _wait(self, order: str, name: str, wanted: Collection[int]) -> frozenset[tuple[int, ...]]:
        """Until all wanted shards are at their target: which of them each host has copied."""
        done: set[int] = set()
        shares: set[tuple[int, ...]] = set()
        since = time.monotonic()  # all shards were with somebody
        while True:
            parts = [part for part in self._watcher.look().values() if part.order == order]
            done |= {number for part in parts for number in part.done}
            shares |= {part.shards for part in parts if part.shards}
            if failed := next((part for part in parts if part.fault is not None), None):
                raise ERRORS[failed.kind](f"another host cannot copy its part of {name}: {failed.fault}")
            missing = unclaimed(wanted, done, parts)
            if not missing and not under_way(parts):
                return frozenset(shares)
            if not missing:
                since = time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                raise RingUnavailable(
                    f"no host has said within {PATIENCE:.0f} s that it has shard {missing[0]} of {name}"
                )
            if self._given_up.wait(_POLL):
                raise RingUnavailable(f"copying {name} together with other hosts: its time was up")


def tidy(paths: RunPaths) -> None:
    """Remove the directory of the hosts' files, where no other process uses it."""
    with contextlib.suppress(OSError):
        paths.nodes.rmdir()
