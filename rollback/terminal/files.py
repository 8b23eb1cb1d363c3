"""Files that a reading command was asked to write: whole or not at all. A device or a pipe is written as it is."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollback.errors import OutputNotWritten, UsageError, reporting
from rollback.system.durable import sync_directory


def require_place(output: Path, run: Path | None) -> None:
    """Raise UsageError where no file may be written: inside the run directory `run`, in no directory, or over one; and
    for `-`, by which nobody means a file of that name.

    Raises OutputNotWritten where the system does not let this user look.
    """
    if str(output) == "-":
        raise UsageError("- is no file", hint="write /dev/stdout for the output of this command")
    with reporting(OutputNotWritten, f"writing {output}"):
        if run is not None and Path(os.path.realpath(run)) in Path(os.path.realpath(output)).parents:
            raise UsageError(f"{output} is inside the run directory {run}", hint="write it somewhere else")
        if not output.parent.is_dir():
            raise UsageError(f"there is no directory {output.parent} to write {output.name} into")
        if output.is_dir():
            raise UsageError(f"{output} is a directory", hint="name a file")


def without_links(output: Path) -> Path:
    """The same place, in a directory by its real path: what writes files durably follows no link on the way, and where
    an output lies is the user's choice."""
    return Path(os.path.realpath(output.parent)) / output.name


def stream_at(output: Path) -> int | None:
    """The descriptor, where an output is what this command prints to and that goes to a file, as `/dev/stdout` in
    `rollback report RUN -o /dev/stdout > FILE`. A file in its place would get what FILE was to have, and be everybody's
    `/dev/stdout` where root writes it."""
    for descriptor in (1, 2):
        with suppress(OSError):  # closed
            if output.is_file() and os.path.samestat(os.stat(output), os.fstat(descriptor)):
                return descriptor
    return None


@contextmanager
def replacing(output: Path, run: Path | None = None) -> Iterator[Path]:
    """A path to write to, which becomes `output` at the end, replacing a file that is there, and vanishes on an error.

    Where `output` is no regular file (`/dev/null`, a pipe) it is that path itself: nothing takes its place. Nor does
    anything where it is what this command prints to (`stream_at`).
    Raises as `require_place`, and OutputNotWritten where the disk refuses, also for an OSError of the body.
    """
    require_place(output, run)
    through, place = output.exists() and not output.is_file(), without_links(output)
    temporary = output if through else place.with_name(f".{output.name}.{os.getpid()}.tmp")
    hint = "check the permissions and the free space there; what was there before is untouched"
    with reporting(OutputNotWritten, f"writing {output}", hint):
        if (stream := stream_at(output)) is not None:
            with tempfile.TemporaryDirectory() as folder:
                yield (path := Path(folder, output.name))
                with open(path, "rb") as file, open(stream, "wb", closefd=False) as printed:
                    shutil.copyfileobj(file, printed)  # behind what is there already, as of `>> FILE`
            return
        try:
            yield temporary
            if through:
                return
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, place)
        finally:
            if not through:
                temporary.unlink(missing_ok=True)
        sync_directory(place.parent)
