"""The small files of a run's record that were written on another host, where each host has a run directory of its own.

A follower hands them to its leader, which keeps them in its own run directory: what is new every few seconds, for the
host may be lost, and all of an attempt when it has ended there. Only the latter counts as handed over.

What is large stays where it is: the output of the ranks, the tensors of incidents, checkpoints. Of a file that grows
(skip records) the new lines are handed over, and added to those that the leader has.
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollback.errors import RollbackError
from rollback.rundir.beacon import Beacon
from rollback.rundir.elsewhere import read_handed_over
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import LineWriter
from rollback.supervisor.nodes.protocol import NodeReport
from rollback.system import files
from rollback.system.durable import end_of_lines, open_regular, read_small_file, write_file

_LIMIT = 1 << 18  # bytes of all files of a node together, as JSON: they go in one record
# What comes from another host is written into the run directory, so nothing else is believed.
_FILES = re.compile(
    r"failures/attempt-\d{4,9}/rank-\d{5,9}\.json"
    r"|stacks/attempt-\d{4,9}/(rank-\d{5,9}\.txt|processes-node-[A-Za-z0-9_.-]{1,200}\.json)"
    r"|incidents/\d{4,9}/rank-\d{5,9}\.json|skips/rank-\d{5,9}\.jsonl"
)
_GROWS = ".jsonl"
_KNOWN = 16 << 20  # bytes of the end of a file that grows, in which the leader looks for what it has already
_PATTERNS = ("failures/*/*", "stacks/*/*", "incidents/*/*", "skips/*")


class RecordFiles:
    """A follower's part: hands over what has changed since it was handed over last. say: takes a line for people.

    What an attempt has left whose leader, or whose supervisor here, was gone before it was handed over comes with the
    next attempt. So it is written down what has arrived (handed_over, as `read_handed_over`).
    """

    def __init__(self, paths: RunPaths, say: Callable[[str], None]) -> None:
        self._paths, self._say = paths, say
        self.handed_over = read_handed_over(paths)
        stamps = {name: self._stamp(name) for name in self._names()}
        self._ends: dict[str, int] = {}  # of the lines that were handed over, of each file that grows
        self._known = {name: stamp for name, stamp in stamps.items() if stamp and stamp[1] <= self.handed_over}

    def new(self) -> dict[str, str]:
        """The files by their path in the run directory, the smallest first, as many as one record takes."""
        stamps = {
            name: stamp for name in self._names() if (stamp := self._stamp(name)) not in (None, self._known.get(name))
        }
        found, room, left_out = {}, _LIMIT, []
        for name in sorted(stamps, key=lambda name: stamps[name][0]):
            whole, end = True, 0
            try:
                if name.endswith(_GROWS):
                    since = self._ends.get(name, 0)
                    text, start, end = _lines(self._paths.root / name, since, room // 2)  # JSON escapes their quotes
                    whole = start <= since
                else:
                    text = read_small_file(self._paths.root / name, room).decode("utf-8", "replace")
            except (OSError, ValueError):
                left_out.append(name)
                continue
            if (size := len(json.dumps(text))) > room:
                left_out.append(name)
                continue
            found[name], room = text, room - size
            self._known[name] = stamps[name]
            self._ends[name] = end
            left_out += [] if whole else [name]
        if left_out:
            what = f"{len(left_out)} files of the record stay on this host, or lines of them"
            self._say(f"{what}, as {self._paths.root / left_out[0]}")
        return found

    def arrived(self) -> None:
        """The leader has what was handed over: it asks for the next attempt."""
        self.handed_over = max([self.handed_over, *(changed for _, changed in self._known.values())])

    def _names(self) -> list[str]:
        found = (path for pattern in _PATTERNS for path in self._paths.root.glob(pattern))
        return sorted(name for path in found if _FILES.fullmatch(name := path.relative_to(self._paths.root).as_posix()))

    def _stamp(self, name: str) -> tuple[int, int] | None:
        try:
            status = (self._paths.root / name).lstat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns


@contextmanager
def handing_over(files: RecordFiles, beacon: Beacon[NodeReport], every: float) -> Iterator[None]:
    """A thread shows what is new: a disk that holds it up must not keep this host from saying that its ranks live."""
    over = threading.Event()

    def show() -> None:
        while not over.wait(every):
            with contextlib.suppress(OSError):  # when the attempt is over it is tried again
                beacon.show(files=files.new())

    thread = threading.Thread(target=show, name="rollback-record-files", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def keep_files(paths: RunPaths, given: Mapping[str, str], who: str, say: Callable[[str], None]) -> None:
    """The leader's part: write what a follower hands over to its place. who: that follower, for people."""
    faults: list[Exception] = []
    for name in filter(_FILES.fullmatch, given):
        try:
            _keep(paths.root / name, given[name])
        except (OSError, ValueError, RollbackError) as error:
            faults.append(error)
    if faults:
        say(f"{len(faults)} files of what {who} says of the attempt cannot be kept in {paths.root}: {faults[0]}")


def _keep(target: Path, text: str) -> None:
    if target.suffix != _GROWS:
        files.make_directory(target.parent)
        write_file(target, text.encode(), durable=False)
        return
    try:
        there, _, _ = _lines(target, 0, _KNOWN)
    except FileNotFoundError:
        there = ""
    known = {*there.splitlines()}  # a host that hands its files over anew has handed over some of them before
    writer = LineWriter(target)
    try:
        for line in text.splitlines():
            if line not in known:
                writer.write(line)
    finally:
        writer.close()


def _lines(path: Path, since: int, most: int) -> tuple[str, int, int]:
    """The whole lines of a file from byte `since` on, of more than `most` bytes the last ones; where they begin and
    end."""
    with open_regular(path) as file:
        end = end_of_lines(file)
        start = max(since if since <= end else 0, end - most)
        file.seek(max(0, start - 1))  # one byte before it tells whether a line begins there
        text = file.read(end - file.tell())
    if start:
        text = text.partition(b"\n")[2]
    return text.decode("utf-8", "replace"), end - len(text), end
