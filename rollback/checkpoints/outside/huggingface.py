"""Weights in Hugging Face's layout: one safetensors file, or several and an index that says which tensor is in which.

`model.safetensors`, or `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`. Who finds the
one file reads it; else the index is read. So these two are the *entries*: without one there is nothing to load.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoints.format.layout import TensorKind, bytes_of
from rollback.system.small_json import parse_json

MODEL = "model.safetensors"
INDEX_SUFFIX = ".index.json"
_INDEX_LIMIT = 64 << 20


def split(kinds: Mapping[str, TensorKind], largest: int) -> list[list[str]]:
    """The tensors of each file, in their order: as many as fit into `largest` bytes, one at least."""
    files: list[list[str]] = [[]]
    room = largest
    for name, kind in kinds.items():
        if files[-1] and bytes_of(*kind) > room:
            files.append([])
            room = largest
        files[-1].append(name)
        room -= bytes_of(*kind)
    return files


def index_of(entry: Path) -> Path:
    """The index beside the name of the one file."""
    return entry.with_name(entry.name + INDEX_SUFFIX)


def file_names(entry: Path, count: int) -> list[Path]:
    """The files of a layout of so many; of one, `entry` itself."""
    if count == 1:
        return [entry]
    return [entry.with_name(f"{entry.stem}-{place:05d}-of-{count:05d}{entry.suffix}") for place in range(1, count + 1)]


def present(entry: Path) -> list[Path]:
    """All files of earlier layouts by this name, whole or not: first the entries, then the others."""
    part = re.compile(rf"{re.escape(entry.stem)}-\d{{5}}-of-\d{{5}}{re.escape(entry.suffix)}")
    parts = sorted(path for path in entry.parent.iterdir() if part.fullmatch(path.name))
    return [path for path in (entry, index_of(entry)) if path.is_file()] + parts


def write_index(path: Path, files: Mapping[str, Sequence[str]], kinds: Mapping[str, TensorKind]) -> None:
    """Write an index. files: the tensors of each file, by its name. Raises OSError."""
    body = {
        "metadata": {"total_size": sum(bytes_of(*kind) for kind in kinds.values())},
        "weight_map": {name: file for file, names in sorted(files.items()) for name in names},
    }
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class FoundWeights:
    """Files of a layout. index: the tensors that each file has to have; None: there is one file and no index."""

    files: Sequence[Path]
    index: Mapping[str, str] | None


def find(place: Path) -> FoundWeights:
    """The files at `place`: a safetensors file, an index, or a folder with one of them.

    Raises OSError; ValueError where there is none, where it is ambiguous, or where an index is no index.
    """
    if not place.is_dir():
        return _listed(place) if place.name.endswith(INDEX_SUFFIX) else FoundWeights([place], None)
    model = place / MODEL
    if model.is_file():
        return FoundWeights([model], None)
    if index_of(model).is_file():
        return _listed(index_of(model))
    indexes = sorted(place.glob(f"*.safetensors{INDEX_SUFFIX}"))
    files = [] if indexes else sorted(place.glob("*.safetensors"))
    if len(indexes) + len(files) != 1:
        what = f"{len(indexes)} indexes and {len(files)} files" if indexes or files else "no file"
        raise ValueError(f"it has neither {MODEL} nor {MODEL}{INDEX_SUFFIX}, and {what} of safetensors by other names")
    return _listed(indexes[0]) if indexes else FoundWeights(files, None)


def _listed(index: Path) -> FoundWeights:
    with open(index, "rb") as file:
        text = file.read(_INDEX_LIMIT + 1)
    if len(text) > _INDEX_LIMIT:
        raise ValueError(f"{index.name} has more than {_INDEX_LIMIT} bytes")
    body = parse_json(text)
    named = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise ValueError(f"{index.name} has no weight_map of names and files")
    if outside := [file for file in named.values() if Path(file).name != file or file in ("", ".", "..")]:
        raise ValueError(f"{index.name} names the file {outside[0]!r}, which is not beside it")
    return FoundWeights([index.with_name(file) for file in sorted(set(named.values()))], named)
