"""Exports the model weights of a checkpoint, in Hugging Face's layout (`rollback ring export`)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoints import ring
from rollback.checkpoints.format.contents import Contents, Stored, StoredParts, read_contents
from rollback.checkpoints.format.frozen import FrozenFiles
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.format.shard import ShardPiece, write_shard
from rollback.checkpoints.outside import huggingface
from rollback.checkpoints.tiers import hold_slot, locate
from rollback.errors import CheckpointDamaged, CheckpointUnusable, OutputNotWritten, UsageError, reporting
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.checkpoints import FINAL, best_word, choose
from rollback.inspect.ring.verify import misfits
from rollback.rundir.identity import Identity, read_identity
from rollback.rundir.paths import RunPaths
from rollback.system.durable import sync_directory
from rollback.terminal.files import replacing, require_place, stream_at, without_links

MAX_SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in a file, as transformers saves them."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A chosen and verified checkpoint, open for reading."""

    name: str
    manifest: Manifest
    contents: Contents
    run_id: str | None
    notices: list[str]
    """About the record, such as a seal that is not verified; and what the choice of the checkpoint passed over."""

    def model(self) -> tuple[dict[str, Stored | StoredParts], list[str]]:
        """The model's tensors as rank 0 has them, and the names of what is in its state and is no tensor."""
        state = self.contents.model(rank=0)
        stored = {key: value for key, value in state.items() if isinstance(value, Stored | StoredParts)}
        return stored, [key for key in state if key not in stored]


@dataclass(frozen=True)
class Exported:
    checkpoint: str
    step: int
    tensors: int
    bytes: int
    left_out: list[str]
    """Names in the model's state that are not tensors; the format cannot hold these."""
    notices: list[str]
    files: int = 1
    """That hold tensors; more than one have an index beside them."""


def export(
    run: ReadableRun,
    word: str | None,
    output: Path,
    *,
    force: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> Exported:
    """Write the model of a checkpoint: parameters, and the buffers of rank 0, under the names of `model.state_dict()`.

    word: which checkpoint, see `choose`; default: `best_word`. The checkpoint is verified first. Tensors are copied in
    parts of some MiB, so memory stays small. `output` is one file where all tensors fit into `max_shard_size` bytes;
    else several by its name, and an index. They are written whole or not at all: the file, or the index, takes its name
    last. force: replace existing files, also those of an earlier export into more or fewer files.

    Raises UsageError, NoUsableCheckpoint, CheckpointUnusable, RunDirectoryError, RunDoesNotFit or OutputNotWritten.
    """
    require_place(output, run.root)
    if (output.exists() and not output.is_file()) or stream_at(output) is not None:
        raise UsageError(
            f"{output} is no regular file of its own: tensors are not written to it",
            hint="name a file; to read a checkpoint and write nothing, `rollback ring verify RUN NAME`",
        )
    output = without_links(output)
    with reporting(OutputNotWritten, f"writing {output}"):
        there = huggingface.present(output)
    if there and not force:
        raise UsageError(f"{there[0]} exists already", hint="--force replaces it")
    with open_checkpoint(run, word) as found:
        stored, left_out = found.model()
        kinds = {key: (item.entry.dtype, item.entry.shape) for key, item in stored.items()}
        names = huggingface.split(kinds, max_shard_size)
        targets = huggingface.file_names(output, len(names))
        metadata = {"format": "pt", "checkpoint": found.name, "step": str(found.manifest.step)}
        metadata["batch"] = str(found.manifest.batch)
        if found.run_id:
            metadata["run_id"] = found.run_id
        size = 0
        with _layout(output, targets, there, run.root) as (files, index):
            for file, listed in zip(files, names, strict=True):
                pieces = [ShardPiece(key, *kinds[key], stored[key].blocks) for key in listed]
                size += write_shard(file, pieces, metadata).size
            if index is not None:
                placed = {path.name: listed for path, listed in zip(targets, names, strict=True)}
                huggingface.write_index(index, placed, kinds)
    return Exported(found.name, found.manifest.step, len(stored), size, left_out, found.notices, len(names))


@contextmanager
def _layout(
    output: Path, targets: Sequence[Path], there: Sequence[Path], run: Path
) -> Iterator[tuple[list[Path], Path | None]]:
    """Paths to write to, which take the names of the files, and of the index if there are several, at the end.

    Where there are several, what could be taken for a whole (one file, or an index) is removed before the first takes
    its name, and the index takes its own last. So whenever this is killed, what can be loaded is old, new, or nothing.
    """
    entry = output if len(targets) == 1 else huggingface.index_of(output)
    with replacing(entry, run) as last:
        if entry is output:
            yield [last], None
        else:
            parts = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in targets]
            try:
                yield parts, last
                for path in {output, entry}.intersection(there):
                    path.unlink()
                sync_directory(output.parent)
                for part, target in zip(parts, targets, strict=True):
                    os.replace(part, target)
                sync_directory(output.parent)
            finally:
                for part in parts:
                    part.unlink(missing_ok=True)
    for path in there:  # files of an earlier layout that nothing names any more
        if path not in (*targets, entry):
            with suppress(OSError):
                path.unlink(missing_ok=True)


@contextmanager
def open_checkpoint(run: ReadableRun, word: str | None) -> Iterator[OpenCheckpoint]:
    """The checkpoint of that word (default: `best_word`), verified: from the ring, else from memory, whose slot is then
    held. Raises as `export`; CheckpointUnusable where no place has it whole."""
    listing = run.listing()
    chosen = word or best_word(listing)
    name = choose(listing, chosen)
    identity = read_identity(RunPaths(run.root))
    notices = list(listing.notices)
    if word is None and listing.final is not None and chosen != FINAL:
        judged = "the last step of the run was not judged healthy"
        notices.append(f"{judged}; its final state is {listing.final} (`{FINAL}`)")
    with ExitStack() as stack:
        try:
            with reporting(OutputNotWritten, f"reading the checkpoint {name} of {run.name}", "nothing was written"):
                manifest, contents = _open(run, name, identity, stack)
        except CheckpointUnusable as error:
            raise CheckpointUnusable(
                f"{error.message}; nothing was written",
                hint="`rollback ring verify` tells which checkpoints are intact",
            ) from error
        yield OpenCheckpoint(name, manifest, contents, identity.run_id if identity else None, notices)


def _open(run: ReadableRun, name: str, identity: Identity | None, stack: ExitStack) -> tuple[Manifest, Contents]:
    """The checkpoint, open until the stack is closed."""
    paths, faults = RunPaths(run.root), []
    places = [place for place in locate(paths) if place.name == name]
    for place in sorted(places, key=lambda place: place.tier == "fast"):
        with ExitStack() as attempt:
            try:
                attempt.enter_context(run.shards(name) if place.tier == "durable" else hold_slot(place))
                shards = ring.open_shards(place.directory, place.manifest)
                for shard in shards:
                    attempt.callback(shard.close)
                weights = attempt.enter_context(FrozenFiles(paths)).open(place.manifest.frozen)
                contents = read_contents(shards, weights)
                if identity and (differences := misfits(place.manifest, contents, identity.job)):
                    raise CheckpointDamaged(f"the checkpoint {name} does not fit its run: {differences[0]}")
            except CheckpointUnusable as error:
                faults.append(error.message)
            else:
                stack.enter_context(attempt.pop_all())
                return place.manifest, contents
    raise CheckpointUnusable(
        "; ".join(faults) or f"the checkpoint {name} has left {run.name}, or has no sound manifest"
    )
