"""A log as columns of numbers, read from CSV, TSV, JSON lines, trainer_state.json, TensorBoard events or npz.

What a file is, is told from its content; names and endings lie. Nothing here knows which column is the loss.
"""

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollback.backtest import tensorboard
from rollback.errors import UsageError
from rollback.rundir.paths import RunPaths

Cell = float | str | None
LogTable = dict[str, list[Cell]]
"""Columns by name, all of one length, in the file's order. None where a row has no value."""

_SUPPORTED = "CSV, TSV, JSON lines, Hugging Face trainer_state.json, TensorBoard event files and npz are read"
_NPZ = b"PK\x03\x04"
_SIZE_LIMIT = 2 << 30
_SNIFFED = 4096
_AT_ONCE = 1 << 20
_FILES_NAMED = 3


def read_table(path: Path) -> LogTable:
    """The columns of a log. Raises UsageError for a file that is missing, empty, binary or malformed."""
    content = _content(path)
    if content.startswith(_NPZ):
        return _from_npz(path, content)
    if tensorboard.is_event_file(content):
        return tensorboard.read_scalars(path)
    try:
        # Every end of a line becomes "\n". Nothing else ends one: JSON may hold what Unicode calls a line separator.
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text: byte {error.start} is no UTF-8", hint=_SUPPORTED) from error
    if not text.strip():
        raise UsageError(f"{path} is empty", hint=_SUPPORTED)
    if text.lstrip()[0] in "{[":
        return _columns_of(_json_rows(path, text))
    return _from_csv(path, text)


def _content(path: Path) -> bytearray:
    """All of a log, read in one go: what a pipe has given once (`<(zcat log.gz)`, /dev/stdin) it does not give again.

    Of an event file, which TensorBoard's reader opens by its name, the beginning.
    """
    content = bytearray()
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a directory", hint=_files_in(path))
        too_long = path.stat().st_size > _SIZE_LIMIT
        with path.open("rb") as file:
            while not too_long and (part := file.read(_AT_ONCE)):
                content += part
                if tensorboard.is_event_file(content):
                    if not file.seekable():
                        raise UsageError(f"{path} is an event file in a pipe", hint="name the event file itself")
                    return content
                if b"\0" in content[:_SNIFFED] and not content.startswith(_NPZ):
                    raise UsageError(f"{path} is a binary file of no kind that is read here", hint=_SUPPORTED)
                too_long = len(content) > _SIZE_LIMIT
    except OSError as error:
        raise _unreadable(path, error) from error
    if too_long:
        raise UsageError(f"{path} has more than {_SIZE_LIMIT >> 30} GiB", hint="cut it down to the metrics")
    return content


def _files_in(directory: Path) -> str:
    """Which file to name: TensorBoard is given directories, and writes the event files some levels below."""
    if (own := RunPaths(directory).metrics).is_file():
        return f"name the log of this run: {own}"
    events = sorted(directory.rglob("*tfevents*"))
    if not events:
        return f"name the log files in it, for example {directory}/*.csv"
    more = f", and {len(events) - _FILES_NAMED} more" if len(events) > _FILES_NAMED else ""
    return f"name the event file: {', '.join(map(str, events[:_FILES_NAMED]))}{more}"


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be read: {error.strerror}", hint="name an existing log file")


def _from_npz(path: Path, content: bytearray) -> LogTable:
    """Arrays of one dimension in a NumPy archive. Object arrays, which would need unpickling, are refused."""
    import numpy

    try:
        with numpy.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if others := [name for name, array in arrays.items() if not isinstance(array, numpy.ndarray)]:
            raise ValueError(f"{others[0]} in it is no array")
    except Exception as error:  # of zip files, which may be damaged in any way, encrypted, or a spreadsheet
        raise UsageError(f"{path} is no NumPy archive of plain numbers: {error}", hint=_SUPPORTED) from error
    flat = {name: array for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "fiub"}
    if len({len(array) for array in flat.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in flat.items())
        raise UsageError(f"the arrays of {path} differ in length ({lengths})", hint="one entry for each logged step")
    return {name: [float(value) for value in array] for name, array in flat.items()}


def _from_csv(path: Path, text: str) -> LogTable:
    lines = [line for line in text.split("\n") if line.strip()]
    delimiter = max("\t,;", key=lines[0].count)
    rows = _separated(path, lines, delimiter) if lines[0].count(delimiter) else ([cell] for cell in lines)
    try:
        filled = [row for row in rows if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UsageError(f"{path} is not well-formed CSV: {error}", hint=_SUPPORTED) from error
    if not filled:
        raise UsageError(f"{path} is empty but for separators", hint=_SUPPORTED)
    return _named(path, filled)


def _separated(path: Path, lines: list[str], delimiter: str) -> Iterator[list[str]]:
    """Rows of cells. Text in quotes may go over lines, but not over rows: there a quote was not closed, and what came
    behind it, up to the next quote, would be missing without a word."""
    reader, read, width = csv.reader(lines, delimiter=delimiter), 0, 0
    for number, row in enumerate(reader, start=1):
        width = width or len(row)
        for line in lines[read + 1 : reader.line_num]:
            (cells,) = csv.reader([line], delimiter=delimiter)
            if len(cells) == width and any(isinstance(_cell(cell.strip()), float) for cell in cells):
                raise UsageError(
                    f"{path}: a quote in row {number} is not closed, and the row {line[:40]!r} would be inside of it",
                    hint="close that quote, or take it out",
                )
        read = reader.line_num
        yield row


def _named(path: Path, rows: list[list[str]]) -> LogTable:
    header = [cell.strip() for cell in rows[0]]
    if all(isinstance(_cell(cell), float) for cell in header):
        names = {1: ["loss"], 2: ["step", "loss"], 3: ["step", "loss", "grad_norm"]}.get(len(header))
        if names is None:
            raise UsageError(f"{path} has {len(header)} columns and no header", hint="add a first line that names them")
        header, rows = names, [[], *rows]
    named, header = header, _told_apart(header)
    table: LogTable = {name: [] for name in header if name}
    for number, row in enumerate(rows[1:], start=2):
        cells = [cell.strip() for cell in row]
        if cells == named:
            continue  # a log that was appended to by a second run repeats its header
        if len(cells) > len(header) and any(cells[len(header) :]):
            raise UsageError(
                f"{path}: row {number} has {len(cells)} cells where the header names {len(header)}",
                hint="see whether another program wrote into the file",
            )
        cells += [""] * (len(header) - len(cells))  # a torn last line, or trailing cells left out
        for name, cell in zip(header, cells, strict=False):
            if name:
                table[name].append(_cell(cell))
    return table


def _told_apart(header: list[str]) -> list[str]:
    """The names of columns; of those that come again, the second is `loss.1`, as pandas has it."""
    names: dict[str, str] = {}  # what a column is called here, and in the file
    for name in header:
        numbered = (f"{name}.{count}" for count in itertools.count(1))
        names[next(each for each in itertools.chain([name], numbered) if each not in names)] = name
    return [here if name else "" for here, name in names.items()]  # one without a name has none here either


def _cell(text: str) -> Cell:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    """Rows of a trainer_state.json, of one JSON list, or of JSON lines."""
    try:
        document = _parse(path, text)
    except json.JSONDecodeError:
        return list(_json_lines(path, text.rstrip("\n").split("\n")))
    if isinstance(document, dict) and isinstance(document.get("log_history"), list):
        document = document["log_history"]
    if isinstance(document, dict):
        document = [document]
    if not all(isinstance(row, dict) for row in document):
        raise UsageError(f"{path} is JSON, but no list of records", hint=_SUPPORTED)
    return list(document)


def _parse(path: Path, text: str) -> Any:
    try:
        return json.loads(text, parse_int=float)
    except RecursionError:
        raise UsageError(f"{path} is nested too deep for a log", hint=_SUPPORTED) from None


def _json_lines(path: Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse(path, line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return  # the writer was killed in the middle of its last line
            raise UsageError(f"{path}: line {number} is no JSON: {error.msg}", hint=_SUPPORTED) from error
        if not isinstance(row, dict):
            raise UsageError(f"{path}: line {number} is JSON, but no record", hint=_SUPPORTED)
        yield row


def _columns_of(rows: Iterable[dict[str, Any]]) -> LogTable:
    """Columns from records. Records that hold other records are flattened with `/`, as trackers write them."""
    table: LogTable = {}
    for count, row in enumerate(rows):
        for name, value in dict(_flat(row, "")).items():
            table.setdefault(name, [None] * count).append(_number(value))
        for column in table.values():
            if len(column) == count:
                column.append(None)
    return table


def _flat(row: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> Cell:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, list):
        return "|".join(str(part) for part in value)
    return _cell(value) if isinstance(value, str) else None
