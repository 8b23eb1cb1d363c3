"""A host's part in filling the durable ring, where a process on another host fills it: see `copy_requests`."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection

from rollback.checkpoints import tiers
from rollback.checkpoints.format.manifest import CheckpointFile, Manifest
from rollback.errors import (
    CheckpointDamaged,
    CheckpointLeft,
    CheckpointUnreadable,
    RingUnavailable,
    RollbackError,
    RunDirectoryError,
    message_of,
)
from rollback.facts import training as facts
from rollback.facts.ending import EndedTogether
from rollback.facts.history import in_durable_ring
from rollback.ring.copy_requests import ERRORS, CopyFault, CopyReport, CopyRequest, tidy
from rollback.ring.in_run import copy_shard
from rollback.ring.url.ring import own_files, put_checkpoint_file
from rollback.ring.url.store import Store
from rollback.rundir.host_records import RecordPublisher, RecordWatcher, SharedDirectory, Transport
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import JournalTail
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.threads import lower_priority, start_thread

_POLL = 0.2
_MOMENT = 5.0


class ShardCopier:
    """A thread that copies the wanted shards out of this host's slots. It runs in the supervisor of a following node;
    without supervisors, in the first rank of each host other than rank 0's. `close` it.

    host: the name of this host, unique among all hosts. say: takes a line for people, called from the thread.
    transport: reaches the process that fills the ring (default: by the run directory). ring: the only URL to which
    shards are copied from a run directory of this host's own; None: the run directory is shared. waits: whether the
    ranks run on other hosts only: no part of a checkpoint is here then, and nothing is answered.
    """

    def __init__(
        self,
        paths: RunPaths,
        host: str,
        say: Callable[[str], None],
        transport: Transport | None = None,
        ring: str | None = None,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        self._paths, self._host, self._say, self._ring, self._waits = paths, host, say, ring, waits
        self._transport: Transport = transport or SharedDirectory(paths.nodes)
        self._watcher = RecordWatcher(self._transport, paths.wanted.name, CopyRequest)
        self._publisher: RecordPublisher[CopyReport] | None = None
        self._store: Store | None = None
        self._served = ""
        self._met = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollback-shard-copier", daemon=True)

    def start(self) -> None:
        """Raises RollbackError where no thread can be made."""
        start_thread(self._thread)

    def linger(self, patience: float) -> None:
        """Stay while another process fills the ring, at most so many seconds. The ranks of this host have finished.

        A rank that an exception ended must not keep the others waiting: without a report that all ranks ended together,
        the thread stays for a moment only.
        """
        began, tail, ended = time.monotonic(), JournalTail(self._paths.train_journal), False
        if tiers.fast_tier_of(self._paths) is None:
            return
        while self._wanted() is not None or not self._met:
            if time.monotonic() - began > (patience if ended and self._met else _MOMENT):
                return
            with contextlib.suppress(RunDirectoryError):  # a record that cannot be read reports nothing
                for record in tail.new():
                    if isinstance(record.fact, facts.Attached | EndedTogether):
                        ended = not isinstance(record.fact, facts.Attached)
            time.sleep(_POLL)

    def close(self, *, over: bool, durable: Collection[str] = ()) -> None:
        """End the thread. over: the run has ended and no rank of this host runs any more, so the host's memory may be
        given back. durable: what the ring has then, where the journals are on another host."""
        self._ended.set()
        if (store := self._store) is not None:
            store.give_up()
        self._thread.join()
        if over:
            try:
                ranks, supervisor = (
                    fold_journal(path).history for path in (self._paths.train_journal, self._paths.supervisor_journal)
                )
                tiers.release(self._paths, in_durable_ring(ranks, supervisor) | {*durable}, ranks.final)
            except (RollbackError, OSError) as error:
                self._say(f"giving back the memory of this host's fast tier failed: {error}")
        tidy(self._paths)

    def _run(self) -> None:
        lower_priority()
        with contextlib.suppress(OSError):
            self._transport.remove(self._paths.part(self._host).name)  # that of a process that was killed
        try:
            while not self._ended.wait(_POLL + 3 * self._transport.pace):  # its news are not urgent
                try:
                    self._turn()
                # The run directory cannot be used (who fills the ring will say so, too), or no thread can be made.
                except (OSError, RollbackError) as error:
                    self._say(f"copying this host's part of a checkpoint: {message_of(error)}")
                    self._ended.wait(5.0)
        finally:
            self._stop_publishing()

    def _turn(self) -> None:
        wanted = self._wanted()
        if wanted is None or not wanted.order:
            self._stop_publishing()
        elif wanted.order != self._served:
            if self._publisher is None:
                name = self._paths.part(self._host).name
                self._publisher = RecordPublisher(self._transport, name, CopyReport(order=wanted.order), self._say)
            self._served = wanted.order
            self._publisher.show(order=wanted.order, shards=(), done=(), fault=None)
            self._serve(wanted, self._publisher)

    def _serve(self, wanted: CopyRequest, publisher: RecordPublisher[CopyReport]) -> None:
        place: tiers.Located | None = None
        try:
            if tiers.fast_tier_of(self._paths) is None:
                raise RingUnavailable(f"there is no fast tier on {self._host}")  # its ranks may be about to make it
            look = tiers.look_into_slots(self._paths)
            here = [place for place in look.usable if place.name == wanted.name]
            place = next((place for place in here if place.manifest.content == wanted.content), None)
            if place is None and here:
                raise CheckpointDamaged(f"{wanted.name} has another manifest in the slots of {self._host}")
            others = {place.directory.name for place in look.ahead if place.name != wanted.name}
            faults = [error for slot, error in look.unused.items() if slot not in others]  # it may lie in one of these
            if place is None and faults:
                worst = next((error for error in faults if isinstance(error, CheckpointUnreadable)), faults[0])
                raise type(worst)(f"{wanted.name} is in no slot that can be used: {worst.message}")
            if place is None:
                raise CheckpointLeft(f"{wanted.name} is not, or no longer, in the slots of {self._host}")
            with tiers.hold_slot(place) as let_go:
                shards = place.manifest.shards
                own = tuple(rank for rank in wanted.shards if (place.directory / shards[rank].file).exists())
                publisher.show(shards=own)
                for file in self._files(wanted, place.manifest, own):
                    if self._ended.is_set() or (now := self._wanted()) is None or now.order != wanted.order:
                        return
                    self._copy(wanted, file, place, let_go)
                    publisher.show(done=(*publisher.record.done, *file.shards))
        except Exception as error:  # noqa: BLE001 - a file system's own, say: who waits for this host is told
            kind: CopyFault = next((kind for kind, its in ERRORS.items() if isinstance(error, its)), "unavailable")
            if isinstance(error, IndexError):
                kind = "damaged"
            # What was read of it may have been another one's by then.
            if kind != "unavailable" and place is not None and tiers.has_left(place):
                kind = "left"
            told = message_of(error) if isinstance(error, RollbackError | OSError | IndexError) else repr(error)
            publisher.show(fault=f"{self._host}: {told}", kind=kind)

    @staticmethod
    def _files(wanted: CopyRequest, manifest: Manifest, own: tuple[int, ...]) -> list[CheckpointFile]:
        """What this host writes: at a URL whole files, in the run directory its shards in them, one after the other."""
        if wanted.ring is not None:
            return own_files(manifest, own)
        shards = manifest.packed().shards
        return [CheckpointFile(shards[rank].file, {rank: shards[rank]}) for rank in own]

    def _copy(
        self, wanted: CopyRequest, file: CheckpointFile, place: tiers.Located, let_go: Callable[[], None]
    ) -> None:  # fmt: skip
        if self._ring is not None and wanted.ring != self._ring.rstrip("/"):
            raise CheckpointDamaged(f"a copy to {wanted.ring} is wanted, and the ring of this host is {self._ring}")
        if wanted.ring is not None:
            if self._store is None or self._store.url != wanted.ring.rstrip("/"):
                self._store = Store(wanted.ring)
            with self._store.if_stuck(let_go):
                put_checkpoint_file(self._store, file, place.manifest, place.directory)
            return
        arriving = self._paths.draining(wanted.name)
        ((rank, shard),) = file.shards.items()
        source = place.directory / place.manifest.shards[rank].file
        if shard.start is not None:
            copy_shard(source, arriving / file.name, shard)
            return
        temporary = arriving / f".{file.name}.{wanted.order}"  # what has its name is whole
        copy_shard(source, temporary, shard)
        files.rename(temporary, arriving / file.name)

    def _wanted(self) -> CopyRequest | None:
        wanted = self._watcher.look().get(self._paths.wanted.name) if not self._waits() else None
        self._met |= wanted is not None
        return wanted

    def _stop_publishing(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.stop()
