"""Writes a checkpoint of a run as one of torch.distributed.checkpoint (`rollback ring export --dcp`).

DCP's own writer writes it, from placeholders without values; each tensor is read when its turn comes. It has a file for
each tensor: into one file, the writer would take all of them into memory.
"""

import io
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from rollback.checkpoints.format.contents import Contents, Stored, StoredParts
from rollback.checkpoints.format.layout import DTYPE_NAME
from rollback.errors import CheckpointDamaged, CheckpointUnusable, OutputNotWritten, UsageError, reporting
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.export import Exported, open_checkpoint
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import RunPaths
from rollback.system.durable import sync_directory
from rollback.terminal.files import without_links

MODEL, OPTIMIZER = "model", "optim"
"""The names under which the two states are saved, as in torch's own examples."""
_METADATA = ".metadata"


def export_dcp(run: ReadableRun, word: str | None, output: Path, *, force: bool = False) -> Exported:
    """Write `{"model": ..., "optim": ...}` with the names that `get_model_state_dict` and `get_optimizer_state_dict`
    give. `torch.distributed.checkpoint.load` reads it on any number of ranks.

    word: as for `export`. `output`: a directory that is not there, or is empty, or (force) has such a checkpoint. It
    takes its name when all is written. Memory is that of the largest tensor.

    Raises as `export`, and UsageError where the checkpoint does not say which parameter the optimizer's state is of.
    """
    with reporting(OutputNotWritten, f"writing {output}"):
        _require_place(output, run.root, force=force)
    with open_checkpoint(run, word) as found:
        identity = read_identity(RunPaths(run.root))
        if identity is None:
            raise UsageError(f"{run.name} has no run.json, which says what its model is", hint="restore it from a copy")
        model, left_out = found.model()
        optimizer = _optimizer_state(found.contents, [name for name, _, _ in identity.job.model])
        placeholders: dict[int, Stored | StoredParts] = {}
        state = {MODEL: _placeholders(model, placeholders), OPTIMIZER: _placeholders(optimizer, placeholders)}
        with _replacing_directory(output) as temporary:
            writer = FileSystemWriter(temporary, single_file_per_rank=False, per_thread_copy_ahead=0)
            try:
                with warnings.catch_warnings():  # that it saves from one process, which is what is wanted
                    warnings.simplefilter("ignore", UserWarning)
                    save(state, storage_writer=writer, planner=_Planner(placeholders), no_dist=True)
            except CheckpointException as error:
                raise _first_cause(error) from error
            size = sum(path.stat().st_size for path in temporary.iterdir())
    notices = [*found.notices, *_left_out(found.contents.shared["objects"])]
    return Exported(found.name, found.manifest.step, len(placeholders), size, left_out, notices)


def _left_out(objects: Mapping[str, Any]) -> list[str]:
    """A notice of what the guard keeps by names of its own that somebody may look for: a second optimizer, weights."""
    names = [name for name, state in objects.items() if _is_of_an_optimizer(state) or _has_tensors(state)]
    if not names:
        return []
    listed = ", ".join(map(repr, sorted(names)))
    return [f"left out, since this form has one model and one optimizer: what the guard keeps as {listed}"]


def _is_of_an_optimizer(state: Any) -> bool:
    return isinstance(state, Mapping) and "param_groups" in state


def _has_tensors(state: Any) -> bool:
    if isinstance(state, Mapping | list | tuple):
        return any(map(_has_tensors, state.values() if isinstance(state, Mapping) else state))
    return isinstance(state, Stored | StoredParts)


class _Planner(DefaultSavePlanner):
    """Of placeholders: the tensor itself is read when it is written."""

    def __init__(self, stored: Mapping[int, Stored | StoredParts]) -> None:
        super().__init__()
        self._stored = stored

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        if (stored := self._stored.get(id(object))) is not None:
            return _read(stored)
        made: torch.Tensor | io.BytesIO = super().transform_object(write_item, object)
        return made


def _placeholders(value: Any, stored: dict[int, Stored | StoredParts] | None) -> Any:
    """The state with a tensor without values for each one that is stored, which is noted by that tensor's id. stored:
    None: the tensors themselves are wanted."""
    if isinstance(value, Stored | StoredParts):
        if stored is None:
            return _read(value)
        dtype = getattr(torch, DTYPE_NAME[value.entry.dtype])
        placeholder = torch.empty(value.entry.shape, dtype=dtype, device="meta")
        stored[id(placeholder)] = value
        return placeholder
    if isinstance(value, Mapping):
        return {key: _placeholders(item, stored) for key, item in value.items()}
    if isinstance(value, list):
        return [_placeholders(item, stored) for item in value]
    if isinstance(value, tuple):  # DCP pickles it as it is
        return tuple(_placeholders(item, None) for item in value)
    return value.item() if isinstance(value, np.generic) else value  # DCP pickles what is no tensor


def _read(stored: Stored | StoredParts) -> torch.Tensor:
    entry = stored.entry
    tensor = torch.empty(entry.shape, dtype=getattr(torch, DTYPE_NAME[entry.dtype]))
    memory: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    place = 0
    for block in stored.blocks():
        memory[place : place + block.nbytes] = np.frombuffer(block, np.uint8)
        place += block.nbytes
    return tensor


def _optimizer_state(contents: Contents, order: list[str]) -> dict[str, Any]:
    """As get_optimizer_state_dict gives it: by the names of parameters in place of their numbers.

    order: the names in the model's state, for a checkpoint from before `trained` was kept: they are those of the
    optimizer's parameters if there are as many, in one group.
    """
    state = contents.shared["optimizer"]
    names = contents.shared.get("trained")
    groups, numbers = state["param_groups"], [number for group in state["param_groups"] for number in group["params"]]
    if names is None:
        names = [name for name in order if name in contents.shared["model"]]
        if len(groups) != 1 or len(names) != len(numbers):
            raise UsageError(
                "the checkpoint does not say which parameter each part of the optimizer's state is of: it is from "
                "before checkpoints said so, and the optimizer has several groups, or not all parameters",
                hint="run one more step with this version and export that checkpoint, or export without --dcp",
            )
    if len(names) != len(numbers):
        raise CheckpointDamaged("the checkpoint names another number of trained parameters than its optimizer has")
    if None in names:
        raise UsageError(
            "the optimizer trains parameters that are not the model's, for which DCP has no names",
            hint="export without --dcp: the model's weights alone",
        )
    named = dict(zip(numbers, names, strict=True))
    if others := [key for key in state["state"] if key not in named]:
        raise UsageError(
            f"the optimizer keeps {others[0]!r}, which is no parameter's, and for which DCP has no name",
            hint="export without --dcp: the model's weights alone",
        )
    return {
        "state": {named[number]: item for number, item in state["state"].items()},
        "param_groups": [{**group, "params": [named[number] for number in group["params"]]} for group in groups],
    }


def _require_place(output: Path, run: Path, *, force: bool) -> None:
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(run)):
        raise UsageError(f"{output} is inside the run directory {run}", hint="write it somewhere else")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {output.absolute().parent} to write {output.name} into")
    if not os.path.lexists(output):
        return
    if output.is_symlink() or not output.is_dir():
        raise UsageError(f"{output} is not a directory", hint="name one that is not there yet")
    there = [path.name for path in output.iterdir()]
    if others := [name for name in there if name != _METADATA and not name.endswith(".distcp")]:
        raise UsageError(
            f"{output} has other files than those of a DCP checkpoint ({others[0]})",
            hint="name a directory that is not there yet",
        )
    if there and not force:
        raise UsageError(f"{output} exists already", hint="--force replaces it")


@contextmanager
def _replacing_directory(output: Path) -> Iterator[Path]:
    """A directory to write to, which becomes `output` at the end, and vanishes on an error.

    What was there before steps aside first: whenever this is killed, `output` is old, new, or not there.
    """
    output = without_links(output)
    temporary, aside = (output.with_name(f".{output.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    hint = "check the permissions and the free space there; what was there before is untouched"
    with reporting(OutputNotWritten, f"writing {output}", hint):
        try:
            temporary.mkdir()
            yield temporary
            sync_directory(temporary)
            if output.exists():
                os.rename(output, aside)
            os.rename(temporary, output)
            sync_directory(output.parent)
        finally:
            if aside.exists() and not output.exists():  # what is new did not get its place
                os.rename(aside, output)
            for leftover in (temporary, aside):
                shutil.rmtree(leftover, ignore_errors=True)


def _first_cause(error: CheckpointException) -> Exception:
    """What DCP wraps: an error of ours or of the system as it was, any other in its own words."""
    cause: BaseException | None = next((found for found, _ in error.failures.values()), None)
    while cause is not None:
        if isinstance(cause, OSError | CheckpointUnusable):
            return cause
        last, cause = cause, cause.__cause__ or cause.__context__
    return OSError((str(last) or type(last).__name__).splitlines()[0]) if error.failures else OSError(str(error))
