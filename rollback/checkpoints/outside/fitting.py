"""Checkpoints that others have written, for a run to begin with: what is in them, and whether it fits a job.

Two kinds: safetensors in Hugging Face's layout, and torch.distributed.checkpoint (DCP). Nothing here knows torch.
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from rollback.checkpoints.format.contents import Stored
from rollback.checkpoints.format.hashing import ShardHash
from rollback.checkpoints.format.layout import DTYPE_NAME, TensorKind
from rollback.checkpoints.format.parts import Part, whole
from rollback.checkpoints.format.shard import ShardReader, Written
from rollback.checkpoints.outside import dcp_files, huggingface
from rollback.errors import CheckpointUnusable, UsageError, message_of
from rollback.facts.fact import InitialLayout
from rollback.wording import first_few

StoredTensor = Sequence[tuple[Part, Stored]]
"""Parts that are the whole of a tensor together."""
_CHUNK = 1 << 20
_LISTED = 8


@dataclass(frozen=True)
class OutsideCheckpoint:
    """What was found. `close` it."""

    path: Path
    layout: InitialLayout
    files: Sequence[Path]
    tensors: Mapping[str, StoredTensor]
    shards: Sequence[ShardReader] = field(default=())

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by its name. Raises OSError."""
        return {file.name: file.stat().st_size for file in self.files}

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def open_outside(path: Path) -> OutsideCheckpoint:
    """Open what is at a path: a DCP checkpoint, a safetensors file, an index of them, or a folder with one of these.

    Reads tables of contents only. Raises UsageError where there is nothing that can be read.
    """
    try:
        if (path / dcp_files.METADATA).is_file():
            tensors, files = dcp_files.read_contents_of(path)
            return OutsideCheckpoint(path, "dcp", files, tensors)
        return _open_safetensors(path)
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, CheckpointUnusable) as error:
        why = message_of(error)
    raise UsageError(
        f"{path} cannot be read: {why}",
        hint="it takes a safetensors file, a folder with one or with an index, or a directory of "
        "torch.distributed.checkpoint (with .metadata)",
    )


def _open_safetensors(path: Path) -> OutsideCheckpoint:
    found = huggingface.find(path)
    shards: list[ShardReader] = []
    try:
        tensors: dict[str, StoredTensor] = {}
        for file in found.files:
            real = Path(os.path.realpath(file, strict=True))  # Hugging Face's cache has links
            shard = ShardReader(real, Written(real.stat().st_size, ""), hashed=True)
            shards.append(shard)
            for name, entry in shard.entries.items():
                if name in tensors or (found.index is not None and found.index.get(name) != file.name):
                    raise ValueError(f"{file.name} has the tensor {name!r}, which is in another file by the index")
                tensors[name] = [(whole(entry.shape), Stored(shard, name))]
        if missing := sorted((found.index or {}).keys() - tensors.keys()):
            raise ValueError(f"the index names tensors that its files have not: {first_few(missing, _LISTED)}")
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return OutsideCheckpoint(path, "safetensors", found.files, tensors, shards)


def hash_file(path: Path) -> str:
    """The hash of a file's bytes, by the same function as that of a shard. Raises OSError."""
    digest, memory = ShardHash(), memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while got := os.readv(file.fileno(), [memory]):
            digest.update(memory[:got])
    return digest.hexdigest()


def hash_together(hashes: Mapping[str, str]) -> str:
    """Of one file its hash; of several a hash over their names and hashes, in the order of the names."""
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return xxhash.xxh3_128(
        "".join(f"{name} {digest}\n" for name, digest in sorted(hashes.items())).encode()
    ).hexdigest()


_OTHER_MODEL = "make the model that it was saved from, under the names of its state_dict(), and in the same types"
_WITHOUT_STATE = (
    "the optimizer that was saved had no state of these: it did not have them, they were frozen, or they got no "
    "gradient. Set requires_grad_(False) for what is not trained, or give the weights alone (safetensors): all "
    "parameters then begin without a state"
)


# What of it is the model's, and the optimizer's ---------------------------------------------------------------------


@dataclass(frozen=True)
class JobTensors:
    """What a job has. model: kinds by name. same: for names of one and the same tensor, the first of them. trained: the
    parameters of the optimizer that have a name. frozen: those of them that get no gradient. An optimizer that has
    trained without them keeps nothing of them."""

    model: Mapping[str, TensorKind]
    same: Mapping[str, str]
    trained: Sequence[str]
    frozen: Collection[str] = ()


@dataclass(frozen=True)
class Fitting:
    """What is to be read: names in the job, and the names that they have in the checkpoint."""

    model: Mapping[str, str]
    optimizer: Mapping[str, Mapping[str, str]]
    """By parameter and name of the state; empty: there is none."""
    left_aside: int
    """Tensors that are neither's."""


def fit(found: OutsideCheckpoint, job: JobTensors) -> Fitting:
    """Find the tensors of a job in a checkpoint. Raises UsageError with the list of what does not fit."""
    prefix = _model_prefix(found, job)
    state = {} if found.layout == "safetensors" else _optimizer_state(found.tensors, job.trained)
    of_state = {name for names in state.values() for name in names.values()}
    held = {name.removeprefix(prefix): name for name in found.tensors if name.startswith(prefix)}
    named = {job.same[name] for name in job.model if name in held}
    without_state = [name for name in job.trained if state and name not in state and name not in job.frozen]
    faults = {
        "missing": [name for name in job.model if job.same[name] not in named],
        "not the model's": [n for n, full in held.items() if n not in job.model and full not in of_state],
        "of another shape or type": [
            f"{name} is {_words(kind)}, and the model's is {_words(job.model[name])}"
            for name, full in held.items()
            if name in job.model and (kind := _kind_of(found.tensors[full])) != job.model[name]
        ],
        "missing of the optimizer's state": without_state,
    }
    if any(faults.values()):
        raise UsageError(
            f"what is in {found.path} does not fit this job; "
            + "; ".join(f"{len(names)} {what}: {first_few(names, _LISTED)}" for what, names in faults.items() if names),
            hint=_WITHOUT_STATE if without_state and sum(map(bool, faults.values())) == 1 else _OTHER_MODEL,
        )
    model = {name: held[name] for name in job.model if name in held}
    return Fitting(model, state, len(found.tensors) - len(model) - len(of_state))


def _model_prefix(found: OutsideCheckpoint, job: JobTensors) -> str:
    """What stands before the model's names: nothing in safetensors; in DCP whatever the saver has put it under."""
    if found.layout == "safetensors":
        return ""
    counts: Counter[str] = Counter()
    for name in found.tensors:
        rest = name
        place = 0
        while True:  # every ending of the name
            if rest in job.model:
                counts[name[:place]] += 1
            head, dot, rest = rest.partition(".")
            if not dot:
                break
            place += len(head) + 1
    most = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(most) > 1 and "model." not in most:
        raise UsageError(
            f"{found.path} has this model more than once, under {first_few(sorted(most), _LISTED)}",
            hint="save one of them under the name `model`",
        )
    return "model." if len(most) != 1 else most[0]


def _optimizer_state(tensors: Mapping[str, StoredTensor], trained: Sequence[str]) -> dict[str, dict[str, str]]:
    """Names in the checkpoint by parameter and name of the state, where `<anything>.state.<parameter>.<name>` stands
    for the most parameters."""
    by_owner: dict[str, dict[str, str]] = {}
    for name in tensors:
        owner, dot, last = name.rpartition(".")
        if dot:
            by_owner.setdefault(owner, {})[last] = name
    prefixes = {owner[: owner.index("state.") + 6] for owner in by_owner if ".state." in f".{owner}"}
    best: dict[str, dict[str, str]] = {}
    for prefix in sorted(prefixes):
        here = {name: by_owner[prefix + name] for name in trained if prefix + name in by_owner}
        best = max(best, here, key=len)
    return best


def _kind_of(stored: StoredTensor) -> TensorKind:
    (part, first), *_ = stored
    return first.entry.dtype, part.shape


def _words(kind: TensorKind) -> str:
    return f"{DTYPE_NAME[kind[0]]}{list(kind[1])}"
