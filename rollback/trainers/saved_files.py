"""Which files a library's trainer has saved in a run, and where in it: those of what is undone are renamed.

A file says by itself neither whose it is nor, unless its pickle is loaded, of which step. So each is noted in the run
directory before it is written. What is undone goes by the batches that were read: a trainer also saves between the
batches of one update, as behind a validation, and a run goes on from that update's start. It also saves in an epoch's
end, behind the last batch, and a run that goes on from before that end does it again. Somebody else may have written
that note: it says of a file in a folder that the trainer saves to whether it is renamed, and of no other. Accelerate
gives what it saves numbers, by which it is known what is undone.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.lines import LineWriter
from rollback.train.comm.recorder import say

_LIMIT = 1 << 24  # bytes that are read, of the end: a file counts as it was saved last


class SavedAt(NamedTuple):
    """How far a training has come: completed updates; batches read, over all epochs; and whether the epoch of the last
    one has come to its end."""

    step: int
    batches: int
    ended: bool = False


class SavedFiles:
    """Of a rank that saves: rank 0, or the first one of each host. It notes what it saves itself, and knows what the
    others have noted. run: the run directory. Does not raise: training goes on without."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        self._paths, self._path = RunPaths(run), RunPaths(run).saved_files(rank)

    def note(self, file: str, place: SavedAt) -> None:
        """`file` is about to be saved there, or saved anew."""
        if "://" not in file:
            self._append([{"file": _known_as(file), **place._asdict()}])

    def has(self, file: str) -> bool:
        """Whether it was saved in this run, or leads to what was, as the link that Lightning makes to its last one."""
        return not self._read().keys().isdisjoint((_known_as(file), os.path.realpath(file)))

    def set_aside(self, place: SavedAt, folders: Iterable[str]) -> None:
        """Training stands there: rename what was saved in `folders` behind it."""
        known = {os.path.realpath(folder) for folder in folders}
        undone = []
        for file, saved in self._read().items():
            if saved is not None and saved[1:] > place[1:] and os.path.dirname(file) in known:
                if saved.step > place.step:
                    what = f"step {saved.step}, which is undone"
                elif saved.batches > place.batches:
                    what = f"batch {saved.batches - 1}, which is undone"
                else:
                    what = f"the end of the epoch at step {saved.step}, which is done again"
                undone += [file] if rename_undone(Path(file), what) else []
        for link in (path for folder in known for path in Path(folder).glob("*") if path.is_symlink()):
            if (file := os.path.realpath(link)) in undone:  # as Lightning links its last one, without a word
                rename_undone(link, f"{os.path.basename(file)}, which is undone")
        self._append([{"file": file, "step": 0} for file in undone])

    def move_aside(self, is_undone: Callable[[Path], bool]) -> None:
        """Rename those that are, and move them one folder up: what lies beside them counts as one of them."""
        undone = [file for file, saved in self._read().items() if saved is not None and is_undone(Path(file))]
        moved = [file for file in undone if rename_undone(Path(file), "training that is undone", Path(file).parents[1])]
        self._append([{"file": file, "step": 0} for file in moved])

    def _read(self) -> dict[str, SavedAt | None]:
        """The place of each file when it was saved last; None: it was set aside since. On disks of their own ranks may
        save files of one name, so what this rank has noted comes last."""
        found: dict[str, SavedAt | None] = {}
        for path in sorted(self._paths.all_saved_files(), key=lambda path: path == self._path):
            try:
                with os.fdopen(files.open_file(path, os.O_RDONLY), "rb") as lines:
                    lines.seek(max(0, os.fstat(lines.fileno()).st_size - _LIMIT))
                    noted = lines.read(_LIMIT).splitlines()
            except OSError as error:
                say(f"{path}: {error}; files of steps that are undone keep their names")
                continue
            for line in noted:
                try:
                    entry = json.loads(line)
                    step, batches = int(entry["step"]), entry.get("batches")  # older runs noted no batches and no ends
                    is_there = step > 0 or batches is not None
                    place = SavedAt(step, int(batches or step), bool(entry.get("ended"))) if is_there else None
                    found[str(entry["file"])] = place
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    continue  # a line that was being written when the process died, or the end of one
        return found

    def _append(self, entries: list[dict[str, str | int]]) -> None:
        if not entries:
            return
        try:
            writer = LineWriter(self._path)
            for entry in entries:
                writer.write(json.dumps(entry))
            writer.close()
        except OSError as error:
            say(f"{self._path}: {error}; files of steps that are undone may keep their names")


def _known_as(file: str) -> str:
    folder, name = os.path.split(file)
    return os.path.join(os.path.realpath(folder), name)


def rename_undone(path: Path, of: str, into: Path | None = None) -> bool:
    """Rename what was saved of steps that are undone, and say so. of: which steps, in words. into: another folder that
    it is moved to. False: it is not there, or cannot be renamed, which is said."""
    folder = into or path.parent
    names = (folder / f"undone-{f'{number}-' if number else ''}{path.name}" for number in itertools.count())
    undone = next(name for name in names if not os.path.lexists(name))
    try:
        path.rename(undone)
    except FileNotFoundError:
        return False
    except OSError as error:
        say(f"{path} is of {of}, and cannot be renamed: {error}")
        return False
    say(f"{path} is of {of}: " + (f"moved to {undone}" if into else f"renamed to {undone.name}"))
    return True
