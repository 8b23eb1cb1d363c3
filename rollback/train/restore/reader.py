"""A checkpoint that is open to be restored: it is verified, and its tensors are read into the live ones.

AllShards  every rank can read the shards of all ranks: in the ring, or in the slots of a single host
OwnShard   every rank has only its own shard: in the slots of many hosts. A rank sends the tensors that are not sharded
           to all others, and its parts to the ranks that have the same part and did not store it

Another number of ranks than then: the shared state is the same for all; of local parts those of a rank's own number
serve, and those of ranks that are no more are not used. That their batches have as many samples is checked before
(`rundir.identity`).

Reading into an existing tensor costs half as much as reading into a new one and copying it. If the live objects have
no such tensor (the optimizer of a new process has no state), a new one is made and given to `load_state_dict`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from rollback.checkpoints.format import frozen
from rollback.checkpoints.format.contents import Stored, parts_by_name, require_keys
from rollback.checkpoints.format.layout import TensorKind
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.format.parts import Part, cover, read_parts, whole
from rollback.checkpoints.format.shard import ShardReader
from rollback.errors import CheckpointDamaged
from rollback.system.small_json import parse_json
from rollback.train.comm.ranks import Ranks
from rollback.train.data import rng
from rollback.train.restore.made_later import like_parameters
from rollback.train.restore.reads import fitting, fresh, reading, threads_of
from rollback.train.sharded import holders_of, is_sharded, like_of, local_of, part_of, sharded_like
from rollback.train.snapshots.frozen import FrozenInCheckpoint
from rollback.train.state import tree
from rollback.train.state.image import LOCAL, STILL
from rollback.train.state.kept_values import GENERATOR
from rollback.train.state.state import TrainingState

Trees = tuple[dict[str, Any], dict[str, Any]]
"""What a checkpoint has of all ranks, and of one."""
_Stored = list[Any]
"""Of a part in a shard: its type, the shape of the whole, and offset and shape of the part."""


class AllShards:
    """All shards of a checkpoint, verified by the ranks of this host between them.

    shards: the open ones. memory: this rank's own shard, if the process has it mapped. Raises CheckpointUnusable. Call
    `close` at the end.
    """

    def __init__(self, manifest: Manifest, directory: Path, memory: memoryview | None, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self.shards: list[ShardReader] = []
        self.frozen = FrozenInCheckpoint({}, None)
        try:
            here, threads = ranks.on_this_host, threads_of(ranks)
            beside: dict[str, ShardReader] = {}
            for number, record in enumerate(manifest.shards):
                others = here[number % len(here)] != ranks.rank  # somebody else on this host hashes it
                own = memory if number == ranks.rank else None
                shard = beside[record.file] = ShardReader(
                    directory / record.file, record.written, start=record.start, beside=beside.get(record.file),
                    hashed=others, memory=own, threads=threads,
                )  # fmt: skip
                self.shards.append(shard)
            with _in_words(manifest.name):
                self._shared = parse_json(self.shards[0].metadata["shared"])
                self._local = parse_json(self._own.metadata["local"])
                self._parts = parts_by_name(self.shards)
                self.frozen = FrozenInCheckpoint(frozen.read_digests(self.shards[0].metadata), manifest.frozen)
                self._decode(_stand_in, self._whole, self.frozen.stand_in)
        except BaseException:
            self.close()
            raise

    @property
    def _own(self) -> ShardReader:
        return self.shards[source_of(self._rank, len(self.shards))]

    def read(self, ranks: Ranks, state: TrainingState) -> Trees:
        """Collective: the trees for `TrainingState.load`, their tensors read. Raises, on all ranks, what one meets."""
        return ranks.agreed(partial(self._read, ranks, state))

    def _read(self, ranks: Ranks, state: TrainingState) -> Trees:
        live, find = state.live_tensors(), state.places()
        target_of = targets(live, find)

        def part(key: str, like: Tensor, stored: Sequence[tuple[Part, Stored]]) -> Tensor:
            own_first = sorted(stored, key=lambda item: item[1].shard is not self._own)
            read = reads.want_part(own_first, part_of(like, key), live.get(key), local_of(like))
            return sharded_like(read, like) if is_sharded(like) else read

        def plain(shard: ShardReader, key: str) -> Tensor:
            like, entry = find(key), shard.entries[key]
            if like is not None and is_sharded(like) and tuple(like.shape) == entry.shape:  # it was not, then
                return part(key, like, [(whole(entry.shape), Stored(shard, key))])
            return reads.want(shard, key, target_of(key, (entry.dtype, entry.shape)))

        def sharded(key: str) -> Tensor:
            stored = self._parts[key]
            shape = stored[0][0].shape
            if (like := find(key)) is None:
                as_many = len(self.shards) == ranks.world_size
                like = like_parameters(key, shape, state, [it for it, _ in stored] if as_many else None)
            return part(key, like_of(like, shape), stored)

        with reading(ranks) as reads:
            shared, local = self._decode(plain, sharded, lambda key: self.frozen.take(key, plain))
        return shared, local_for(local, self._rank, len(self.shards))

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
        self.frozen.close()

    def _whole(self, key: str) -> Tensor:
        """An empty tensor in place of a sharded one, to check whether all its parts are there."""
        list(cover(key, [part for part, _ in self._parts[key]]))
        return torch.empty(0)

    def _decode(
        self,
        fetch: Callable[[ShardReader, str], Tensor],
        sharded: Callable[[str], Tensor],
        still: Callable[[str], Tensor],
    ) -> Trees:
        source = {key: shard for shard in self.shards for key in shard.entries}

        def find(key: str) -> Tensor:
            return fetch(source[key], key) if key in source else still(key)

        shared = tree.decode(self._shared, find, sharded)
        # The names of local tensors are the same in every shard, so they are looked up in this rank's own.
        local = tree.decode(self._local, lambda key: fetch(self._own, key))
        require_keys(shared, "shared")
        require_keys(local, "local")
        return shared, local


class OwnShard:
    """This rank's own shard, verified. `meet` learns from the other ranks what they have.

    shards, memory: as in `AllShards`. Raises CheckpointDamaged, also if this host does not have the shard. Call `close`
    at the end.
    """

    def __init__(self, manifest: Manifest, directory: Path, memory: memoryview | None, ranks: Ranks) -> None:
        if manifest.world_size != ranks.world_size:
            raise CheckpointDamaged(
                f"{manifest.name} lies in the slots of {manifest.world_size} ranks, and there are {ranks.world_size}"
            )
        record = manifest.shards[ranks.rank]
        self._name, self._content = manifest.name, manifest.content
        self._owner: dict[str, int] = {}
        self._kinds: dict[str, TensorKind] = {}
        """Of tensors that are not sharded: each is in one rank's shard."""
        self._parts: dict[str, Part] = {}
        """This rank's."""
        self._wanted: dict[str, None] = {}
        self._wanted_parts: dict[str, None] = {}
        """What the tree of all ranks refers to, in its order."""
        self.frozen = FrozenInCheckpoint({}, None)
        self._shard = ShardReader(directory / record.file, record.written, memory=memory, threads=threads_of(ranks))
        self.shards = [self._shard]
        try:
            with _in_words(self._name):
                shapes = {key: item.shape for key, item in self._shard.entries.items()}
                self._parts = read_parts(self._shard.metadata, shapes)
                self._shared = parse_json(self._shard.metadata["shared"]) if ranks.is_rank_0 else None
                self.frozen = FrozenInCheckpoint(frozen.read_digests(self._shard.metadata), manifest.frozen)
                self._local = parse_json(self._shard.metadata["local"])
                require_keys(tree.decode(self._local, lambda key: _stand_in(self._shard, key)), "local")
        except BaseException:
            self.close()
            raise

    def meet(self, ranks: Ranks) -> None:
        """Collective: learn which rank has which of the tensors that are not sharded. Raises CheckpointUnusable, on all
        ranks."""
        kinds = {
            key: (entry.dtype, entry.shape)
            for key, entry in self._shard.entries.items()
            if key not in self._parts and not key.startswith(LOCAL)
        }
        shards = ranks.from_each([self._content, kinds])
        self._shared, self.frozen.digests = ranks.from_first([self._shared, self.frozen.digests])
        ranks.agreed(partial(self._find_owners, shards))

    def _find_owners(self, shards: Sequence[list[Any]]) -> None:
        """shards: of each rank, the checkpoint's content and the kinds of what it has. Raises CheckpointDamaged."""
        if any(content != self._content for content, _ in shards):
            raise CheckpointDamaged(f"the hosts have different checkpoints in their slots by the name {self._name}")
        for rank, (_, kinds) in enumerate(shards):
            for key, (dtype, shape) in kinds.items():
                self._owner[key], self._kinds[key] = rank, (dtype, tuple(shape))

        def note(key: str) -> Tensor:
            if key not in self._owner:
                return self.frozen.stand_in(key)
            self._wanted[key] = None
            return torch.empty(0)

        def note_part(key: str) -> Tensor:
            self._wanted_parts[key] = None
            return torch.empty(0)

        with _in_words(self._name):
            require_keys(tree.decode(self._shared, note, note_part), "shared")

    def read(self, ranks: Ranks, state: TrainingState) -> Trees:
        """Collective: as `AllShards.read`. What may fail on one rank alone is agreed on before the next exchange."""
        live, find = ranks.agreed(lambda: (state.live_tensors(), state.places()))
        target_of = targets(live, find)
        there = self._meet_holders(find, ranks)
        likes, routes = ranks.agreed(partial(self._find_parts, there, find, state, ranks.rank))
        own = {key for key in self._wanted if self._owner[key] == ranks.rank}
        own |= {key for key, like in likes.items() if self._parts.get(key) == part_of(like, key)}
        read: dict[str, Tensor] = {}

        def read_own() -> Any:
            with reading(ranks) as reads:
                for key in sorted(own):
                    entry = self._shard.entries[key]
                    read[key] = reads.want(self._shard, key, target_of(key, (entry.dtype, entry.shape)))
                for key in self.frozen.digests.keys() - self._owner.keys():
                    read[key] = self.frozen.take(key, lambda file, key: reads.want(file, key, live.get(key)))
                return tree.decode(self._local, lambda key: reads.want(self._shard, key, live.get(key)))

        local = ranks.agreed(read_own)
        found = dict(read)
        by_owner: dict[int, dict[str, tuple[Tensor | None, TensorKind]]] = {}
        for key in self._wanted:
            kind = self._kinds[key]
            by_owner.setdefault(self._owner[key], {})[key] = target_of(key, kind), kind
        for source, plain in sorted(by_owner.items()):
            found |= self._receive(source, None, read, plain, ranks)
        for (source, to), kinds in sorted(routes.items()):
            found |= self._receive(source, to, read, {key: (live.get(key), kind) for key, kind in kinds.items()}, ranks)
        parts = {key: sharded_like(found[key].to(local_of(like).device), like) for key, like in likes.items()}
        return tree.decode(self._shared, found.__getitem__, parts.__getitem__), local

    def _meet_holders(self, find: Callable[[str], Tensor | None], ranks: Ranks) -> dict[int, dict[str, _Stored]]:
        """Collective: by rank, what is stored there of parts that may be this rank's too.

        The ranks that hold the same part of a parameter tell each other, and nobody else. What an optimizer keeps in
        another shape than its parameter's may be the same on other ranks, too: of that all are told.
        """
        of_parameters: dict[str, _Stored] = {}
        others: dict[str, _Stored] = {}
        alike: set[int] = set()
        for key in self._wanted_parts:
            beside, part = find(key), self._parts.get(key)
            if beside is not None and is_sharded(beside):
                alike.update(holders_of(beside))
            if part is not None:
                has_its_shape = beside is not None and tuple(beside.shape) == part.shape
                into = of_parameters if has_its_shape else others
                into[key] = [self._shard.entries[key].dtype, [*part.shape], [*part.box.at], [*part.box.shape]]
        there = {ranks.rank: of_parameters, **ranks.exchanged(of_parameters, alike)}
        for rank, told in enumerate(ranks.from_each(others)):
            if told:
                there[rank] = {**there.get(rank, {}), **told}
        return there

    def _find_parts(
        self,
        there: Mapping[int, Mapping[str, _Stored]],
        find: Callable[[str], Tensor | None],
        state: TrainingState,
        own: int,
    ) -> tuple[dict[str, Tensor], dict[tuple[int, int], dict[str, TensorKind]]]:
        """What each part is like; and what goes from one rank to another, from or to this one: the kinds, by the two.
        Of the ranks that have a part the first one sends it. Raises CheckpointDamaged."""
        likes: dict[str, Tensor] = {}
        routes: dict[tuple[int, int], dict[str, TensorKind]] = {}
        for key in self._wanted_parts:
            like, having = None, list[int]()
            same: tuple[int, ...] = (own,)
            if told := [it[key] for it in there.values() if key in it]:
                dtype, shape = told[0][:2]
                beside = find(key)
                beside = like_parameters(key, tuple(shape), state) if beside is None else beside
                like = like_of(beside, tuple(shape))
                same = holders_of(like) if is_sharded(like) else same
                part = part_of(like, key)
                place = [[*part.shape], [*part.box.at], [*part.box.shape]]
                having = [rank for rank in same if there.get(rank, {}).get(key, [])[1:] == place]
            if like is None or not having:  # before anybody waits for a tensor that does not come
                raise CheckpointDamaged(f"this rank had another part of {key!r}: the ranks share it otherwise now")
            likes[key] = like
            for rank in same:
                if rank not in having and own in (rank, having[0]):
                    routes.setdefault((having[0], rank), {})[key] = dtype, tuple(local_of(like).shape)
        return likes, routes

    def close(self) -> None:
        self._shard.close()
        self.frozen.close()

    @staticmethod
    def _receive(
        source: int,
        to: int | None,
        read: Mapping[str, Tensor],
        wanted: Mapping[str, tuple[Tensor | None, TensorKind]],
        ranks: Ranks,
    ) -> dict[str, Tensor]:
        """Send what rank `source` has read to rank `to` (None: to all others, collectively). Returns what came here.

        wanted: by name, the existing tensor and the kind that it must have.
        """
        if ranks.rank == source:
            ranks.spread([read[key].contiguous() for key in wanted], source, to)
            return {}
        present = {key: fitting(item, kind) for key, (item, kind) in wanted.items()}
        received = {
            key: item if item is not None and item.is_contiguous() else fresh(wanted[key][1])
            for key, item in present.items()
        }
        ranks.spread(list(received.values()), source, to)
        return {
            key: target if (item := present[key]) is None or item is target else item.copy_(target)
            for key, target in received.items()
        }


OpenShards = AllShards | OwnShard


def targets(
    live: Mapping[str, Tensor], find: Callable[[str], Tensor | None]
) -> Callable[[str, TensorKind], Tensor | None]:
    """What a stored tensor of some name and kind is read into: the live one, if there is one.

    Of what another object keeps, or a parameter group, a new one on the device of its own: who gets it may keep it. An
    optimizer puts what it gets where it wants it. None: a new one in the host's memory.
    """

    def target(key: str, kind: TensorKind) -> Tensor | None:
        if (present := live.get(key)) is not None or key.startswith(STILL):
            return present
        own = find(key)
        if own is None or own.is_cpu or is_sharded(own) or isinstance(own, nn.Parameter):
            return None
        return fresh(kind, own.device)

    return target


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Turn the errors of a tree that does not fit its tensors into CheckpointDamaged."""
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(f"the trees of checkpoint {name} do not fit its tensors: {error!r}") from error


def _stand_in(shard: ShardReader, key: str) -> Tensor:
    """An empty tensor in place of a stored one, to check whether a tree can be decoded."""
    shard.entries[key]
    return torch.empty(0)


def source_of(rank: int, ranks_then: int) -> int:
    """The rank of the checkpoint whose local part a rank takes."""
    return rank % ranks_then


def local_for(local: Mapping[str, Any], rank: int, ranks_then: int) -> dict[str, Any]:
    """The `local` part of a checkpoint for `rank`; unchanged if the checkpoint has a rank of this number.

    Of the local parts, rank r takes that of rank r modulo the number of ranks then. Without a rank of its number it
    would draw the same as its source, so its random states are derived from the source's and from its number;
    generators of the script's own are as the script makes them.

    The cursor is that of a map-style loader; other loaders refuse another number of ranks.
    """
    if rank < ranks_then:
        return dict(local)
    cursor = dict(local["cursor"])
    # Data workers are seeded from the epoch's opening; those that outlive an epoch, from a seed that is kept.
    cursor["base_seed"] = _derived_seed(cursor["base_seed"], rank)
    if (opening := cursor["opening"]) is not None:
        random, seed = rng.derived(opening["rng"], f"rank {rank}, data"), _derived_seed(opening["base_seed"], rank)
        cursor["opening"] = {**opening, "rng": random, "base_seed": seed}
    kept = {name: value for name, value in local.get("kept", {}).items() if not name.startswith(GENERATOR)}
    return {**local, "random": rng.derived(local["random"], f"rank {rank}"), "cursor": cursor, "kept": kept}


def _derived_seed(seed: int | None, rank: int) -> int | None:
    return None if seed is None else int(xxhash.xxh3_64_intdigest(f"{seed}/{rank}".encode()) >> 1)
