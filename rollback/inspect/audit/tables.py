"""Writes the table of skipped samples as CSV, JSON lines or Parquet, one row at a time.

Text in a journal may come from anywhere. In CSV a text that a spreadsheet would read as a formula (it begins with `=`,
`+`, `-`, `@`, a tab or a line break) gets an apostrophe in front, and control characters become escapes. Numbers stay
numbers. JSON is ASCII only. Parquet has the text unchanged.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from rollback.errors import UsageError
from rollback.inspect.audit.samples import COLUMNS, ColumnType, Row
from rollback.system.lines import json_number
from rollback.terminal.extras import require_extra
from rollback.terminal.messages import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_ROW_GROUP = 1 << 16


def write_csv(rows: Iterable[Row], file: IO[str]) -> None:
    """Write CSV with a header line. Null is an empty field; several incidents are separated by blanks."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.name for column in COLUMNS])
    shown = [_CSV[column.type] for column in COLUMNS]
    for row in rows:
        writer.writerow(["" if value is None else show(value) for show, value in zip(shown, row, strict=True)])


def harmless(text: str) -> str:
    """The text in a form that a spreadsheet does not calculate."""
    return ("'" if text.startswith(_FORMULA) else "") + printable(text)


_CSV: dict[ColumnType, Callable[[Any], Any]] = {
    "integer": int,
    "number": json.dumps,  # NaN, Infinity, -Infinity, as in the journal
    "text": harmless,
    "flag": lambda value: "true" if value else "false",
    "integers": lambda values: " ".join(map(str, values)),
}


def write_jsonl(rows: Iterable[Row], file: IO[str]) -> None:
    """Write one JSON object in each line. The strings "NaN", "Infinity" and "-Infinity" stand for these numbers."""
    names = [column.name for column in COLUMNS]
    for row in rows:
        values = [json_number(value) if isinstance(value, float) else value for value in row]
        file.write(json.dumps(dict(zip(names, values, strict=True)), allow_nan=False) + "\n")


def write_parquet(rows: Iterable[Row], path: Path) -> None:
    """Write row groups of 65,536 rows. Raises UsageError where pyarrow is missing, or a number does not fit; OSError
    where the disk refuses."""
    require_pyarrow()
    import pyarrow
    from pyarrow import parquet

    types = {
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "text": pyarrow.string(),
        "flag": pyarrow.bool_(),
        "integers": pyarrow.list_(pyarrow.int64()),
    }
    schema = pyarrow.schema([
        pyarrow.field(column.name, types[column.type], metadata={"says": column.says}) for column in COLUMNS
    ])  # fmt: skip
    with parquet.ParquetWriter(path, schema) as writer:
        left = iter(rows)
        while group := list(itertools.islice(left, _ROW_GROUP)):
            columns = [list(values) for values in zip(*group, strict=True)]
            try:
                table = pyarrow.table(columns, schema=schema)
            except (OverflowError, pyarrow.ArrowInvalid) as error:  # a sampler may give hashes of 64 bits
                raise UsageError(
                    f"a number does not fit Parquet's integers of 64 bits with a sign ({error})",
                    hint="take --format csv or jsonl, which have any number",
                ) from error
            writer.write_table(table)


def require_pyarrow() -> None:
    """Raise UsageError, before anything is read or written, where Parquet cannot be written."""
    require_extra("pyarrow", "writing Parquet needs pyarrow", "parquet", ", or take --format csv")
