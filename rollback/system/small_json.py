"""The one reader for small JSON: somebody else may have written it, so size, number of values and depth are bounded.

It refuses with ValueError, as for any other damage. A document takes at most a few hundred MB of memory.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from rollback.system.durable import read_small_file

SIZE = 16 << 20
_DEPTH = 64
_VALUES = 2_000_000
_OBJECTS = 400_000  # one takes as much memory as several other values
_Model = TypeVar("_Model", bound=BaseModel)
_NO_BRACKETS, _AS_LISTS = bytes({*range(256)} - {*b"[]{}"}), bytes.maketrans(b"{}", b"[]")


class TooDeep(ValueError):
    """A text is nested deeper than allowed."""

    def __init__(self) -> None:
        super().__init__(f"it is nested deeper than {_DEPTH} levels")


def fault_of(error: Exception) -> str:
    """What is wrong with a document that was refused, in a line for the reader: `seq: Field required`."""
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    fault = first["msg"].removeprefix("Value error, ")
    return f"{where}: {fault}" if where else fault


def parse_json(data: bytes | str) -> Any:
    """Parse a text. Raises ValueError where it is no JSON, or exceeds the bounds."""
    openings = require_modest(data)
    try:
        body = _parsed(data)
    except RecursionError:
        raise TooDeep from None
    if openings <= _DEPTH:
        return body
    level = [body]
    for _ in range(_DEPTH):
        level = [inner for item in level if type(item) in (dict, list) for inner in _members(item)]
        if not level:
            return body
    raise TooDeep


def _parsed(data: bytes | str) -> Any:
    try:
        return from_json(data)  # several times as fast
    except ValueError:
        return json.loads(data)  # which takes lone surrogates, and says what is wrong


def _members(item: Any) -> Any:
    return item.values() if type(item) is dict else item


def require_modest(data: bytes | str) -> int:
    """The number of objects and lists that a text has at most.

    Raises ValueError where it may have more values than allowed, whatever its strings contain.
    """
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    objects, lists = text.count(b"{"), text.count(b"[")
    if objects > _OBJECTS or objects + lists + text.count(b",") > _VALUES:
        raise ValueError(f"it has more than {_VALUES:,} values or {_OBJECTS:,} objects")
    return objects + lists


def require_shallow(text: str) -> None:
    """Raises TooDeep where `parse_json` would, and nothing else. Much quicker where all is well."""
    brackets = text.encode("utf-8", "surrogatepass").translate(_AS_LISTS, _NO_BRACKETS)
    for _ in range(_DEPTH - 1):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")  # the innermost level, or some of it
    try:
        parse_json(text)  # there may be brackets in its strings
    except TooDeep:
        raise
    except ValueError:
        return  # it is no JSON


def parse_model(data: bytes, model: type[_Model]) -> _Model:
    """Parse and validate a text. Raises ValueError (pydantic's is one) where it does not fit the model or exceeds the
    bounds."""
    require_modest(data)
    return model.model_validate_json(data)


def read_json(path: Path, limit: int = SIZE) -> Any:
    """The content of a file of at most `limit` bytes. Raises OSError, and ValueError as `parse_json`."""
    return parse_json(read_small_file(path, limit))


def sound_model(path: Path, model: type[_Model], limit: int) -> _Model | None:
    """As `read_model`; None where there is none, or none that can be believed."""
    try:
        return read_model(path, model, limit)
    except (OSError, ValueError):
        return None


def sound_models(directory: Path, pattern: str, model: type[_Model], limit: int) -> dict[str, _Model]:
    """Of the files in a directory whose names match, those that can be believed, by name. None where it does not exist,
    or cannot be listed at present."""
    paths = list[Path]()
    with contextlib.suppress(OSError):
        paths = sorted(directory.glob(pattern), key=os.fspath)  # a path compares slowly
    return {path.name: found for path in paths if (found := sound_model(path, model, limit)) is not None}


def read_model(path: Path, model: type[_Model], limit: int) -> _Model:
    """As `read_json`, validated by a model."""
    return parse_model(read_small_file(path, limit), model)
