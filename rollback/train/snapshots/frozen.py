"""Frozen weights: parameters that nothing trains are stored once in a run. docs/format.md, "Frozen weights", has the
protocol.

A parameter that requires no gradient may change all the same: a script may write to it (the slow copy of a momentum
encoder). Version counters do not show all writes, since a write through `.data` is not counted. So the weights are
digested with every snapshot, in the thread that writes it. The thread may do that late: weights that are then as they
were at the beginning were also so when the snapshot was taken.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
import xxhash
from torch import Tensor

from rollback.checkpoints.format import frozen
from rollback.checkpoints.format.frozen import digest_of
from rollback.checkpoints.format.manifest import FrozenRecord
from rollback.checkpoints.format.shard import ShardReader
from rollback.errors import CheckpointDamaged, CheckpointUnusable, RollbackError
from rollback.rundir.paths import RunPaths
from rollback.system.threads import Threads
from rollback.train.comm.ranks import Ranks
from rollback.train.snapshots import drift
from rollback.train.snapshots.capture import as_it_is_stored, bytes_of, piece_of
from rollback.train.snapshots.copy_stream import copy_stream, on_host
from rollback.train.state.image import Image
from rollback.train.state.state import TrainingState

LEAST = 1 << 20
"""Bytes of frozen weights from which on a file of their own is worth it."""


class NoLongerFrozen(RollbackError):
    """A snapshot left weights out, and the run's file does not have them as they are: it cannot become a checkpoint."""


class FrozenWeights:
    """The weights that the snapshots of one attempt leave out. They are chosen once; later there may only be fewer.

    record: the file; None: nothing is left out. digests: by name, the digest of a tensor's bytes. Both are the same on
    all ranks.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.record: FrozenRecord | None = None
        self.digests: dict[str, str] = {}
        self._paths = paths
        self._prints: dict[str, str] = {}  # of this rank's own weights, when they were chosen
        self._chosen = False
        self._stored = False  # whether the file is there, as far as rank 0 knows
        self._changed: set[str] = set()  # what this rank has found to be frozen no more

    def agree(self, image: Image, ranks: Ranks) -> None:
        """Collective: choose what is left out. Later calls leave less out if a rank has found a change."""
        changed = set[str]().union(*ranks.from_each(sorted(self._changed)))
        self._changed.clear()
        if not self._chosen:
            self._choose(image, image.frozen, ranks)
            self._chosen = True
        elif changed and ranks.from_first(self._stored):  # the file stays, and has more than is looked for in it
            self.digests = {name: digest for name, digest in self.digests.items() if name not in changed}
            self.record = self.record if self.digests else None
        elif changed:
            self._choose(image, image.frozen & self.digests.keys() - changed, ranks)

    def _choose(self, image: Image, names: frozenset[str], ranks: Ranks) -> None:
        tensors = {name: image.shared_tensors[name] for name in sorted(names)}
        if sum(item.nbytes for item in tensors.values()) < LEAST:
            tensors = {}
        self._prints = prints_of(tensors)
        told = xxhash.xxh3_128_hexdigest(repr(self._prints).encode())
        if len({*ranks.from_each(told)}) > 1:  # `drift` finds that replicas differ, in what is stored
            tensors = {}
        record, digests = None, {}
        if tensors and ranks.is_rank_0:
            digests = self._prints | _digests_of({name: item for name, item in tensors.items() if item.is_cuda})
            record = frozen.describe([piece_of(*item) for item in tensors.items()])
            self._stored = frozen.is_there(self._paths, record)
        told_record, self.digests = ranks.from_first([record.model_dump() if record else None, digests])
        self.record = FrozenRecord(**told_record) if told_record else None

    def require_frozen(self, image: Image) -> None:
        """Raise NoLongerFrozen if a weight that is left out may be trained now."""
        self._give_up(self.digests.keys() - image.frozen, "require a gradient now, or are not what they were")

    def require_stored(self, tensors: Mapping[str, Tensor], *, is_rank_0: bool) -> None:
        """In the thread: raise NoLongerFrozen unless these weights, which a snapshot leaves out, are those of the file.

        is_rank_0: whether this is rank 0, which writes the file if it is missing.
        """
        if not tensors or self.record is None:
            return
        if is_rank_0 and not self._stored:
            try:
                pieces = [piece_of(*item) for item in tensors.items()]  # on a device: copied one at a time
                self._stored = frozen.store(self._paths, self.record, pieces)
            except OSError as error:
                self._give_up(tensors.keys(), f"could not be written to {self._paths.frozen}: {error}")
        now = prints_of(tensors)
        self._give_up({name for name in now if now[name] != self._prints[name]}, "have changed")
        if is_rank_0 and not self._stored:
            self._give_up(tensors.keys(), "changed while they were written, and changed back")

    def _give_up(self, names: AbstractSet[str], why: str) -> None:
        if names:
            self._changed |= names
            which = f"{len(names)} frozen weights ({min(names)!r}{', ...' if len(names) > 1 else ''})"
            raise NoLongerFrozen(f"{which} {why}; every checkpoint stores them from now on")

    @property
    def unchanged(self) -> set[str]:
        """The weights that are left out and that this rank has not found to have changed."""
        return self.digests.keys() - self._changed

    def in_words(self) -> str:
        """What is left out, in words. Empty: nothing."""
        if self.record is None:
            return ""
        return f"; {len(self.digests)} frozen weights ({self.record.size / 1e6:.1f} MB) are stored once"


class FrozenInCheckpoint:
    """The frozen weights of a checkpoint that is restored. Those that differ from the live ones are read.

    Call `compare` first, and `close` at the end.
    """

    def __init__(self, digests: Mapping[str, str], record: FrozenRecord | None) -> None:
        self.digests = digests
        self.file: ShardReader | None = None
        self._record = record
        self._live: dict[str, Tensor] = {}

    def compare(self, paths: RunPaths, state: TrainingState, threads: int) -> None:
        """Find out what has to be read, and verify that it can be read. Raises CheckpointUnusable."""
        live = state.live_tensors(whole=True)
        known = {name: live[name] for name in self.digests if name in live}
        found = _digests_of(known, threads)
        self._live = {name: item for name, item in known.items() if found[name] == self.digests[name]}
        differing = self.digests.keys() - self._live.keys()
        if not differing:
            return
        try:
            if self._record is None:
                raise CheckpointDamaged("its manifest names no file with the frozen weights")
            self.file = frozen.read_frozen(paths, self._record, hashed=True)
            for name in differing:
                if name not in self.file.entries or digest_of(self.file.data(name)) != self.digests[name]:
                    path = self.file.path
                    raise CheckpointDamaged(f"the file {path} has not, or damaged, what was stored of {name!r}")
        except CheckpointUnusable as error:
            raise type(error)(
                f"{len(differing)} of {len(self.digests)} frozen weights of the model, as {min(differing)!r}, are not "
                f"those of the run, and cannot be put back: {error.message}"
            ) from error

    def stand_in(self, name: str) -> Tensor:
        """An empty tensor in place of a frozen one, to check a tree. Raises KeyError for other names."""
        self.digests[name]
        return torch.empty(0)

    def take(self, name: str, read: Callable[[ShardReader, str], Tensor]) -> Tensor:
        """The live tensor if it has the right values, else the one that `read` reads from the file. After `compare`."""
        if name in self._live:
            return self._live[name]
        assert self.file is not None
        return read(self.file, name)

    @property
    def reread(self) -> int:
        """How many tensors are read from the file."""
        return len(self.digests) - len(self._live)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def prints_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A text for each tensor, which changes with every changed bit: a digest by the host, or by the tensor's device."""
    on_device = {name: item for name, item in tensors.items() if item.is_cuda}
    sums: Sequence[int] = []
    if on_device:
        with copy_stream(next(iter(on_device.values())).device):
            sums = on_host(torch.stack([drift.on_device([item]) for item in on_device.values()])).tolist()
    here = _digests_of({name: item for name, item in tensors.items() if name not in on_device})
    return {**dict(zip(on_device, map(str, sums), strict=True)), **here}


def _digests_of(tensors: Mapping[str, Tensor], threads: int = 1) -> dict[str, str]:
    """The digest of each tensor's bytes, on the host or on a device."""
    with Threads(threads, "rollback-digest") as pool:
        found = pool.map(_digest, tensors.values()) if threads > 1 else map(_digest, tensors.values())
        return dict(zip(tensors, found, strict=True))


def _digest(item: Tensor) -> str:
    return digest_of(bytes_of(as_it_is_stored(on_host(item))))
