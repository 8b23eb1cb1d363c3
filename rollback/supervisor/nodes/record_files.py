"""The small files of a run's record that were written on another host, where each host has a run directory of its own.

A follower hands them to its leader, which keeps them in its own run directory: what is new every few seconds, for the
host may be lost, and all of an attempt when it has ended there. Only the latter counts as handed over.

What is large stays where it is: the output of the ranks, the tensors of incidents, checkpoints. Of a file that grows
(skip records) the new lines are handed over, and added to those that the leader has.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rollback.errors import RollbackError
from rollback.facts.training import Window
from rollback.rundir.host_records import RecordPublisher
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.record_location import HandedOver, read_handed_over
from rollback.rundir.skip_records import SkippedBatch
from rollback.supervisor.nodes.protocol import NodeReport
from rollback.system import files
from rollback.system.durable import end_of_lines, open_regular, read_small_file, write_file
from rollback.system.lines import LineWriter
from rollback.system.small_json import parse_model
from rollback.system.threads import called_every

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
_MAY_BE_LOST = 60 * 10**9  # nanoseconds; a leader copies its record to the bucket every 30 seconds


class _Stamp(NamedTuple):
    """A file that has changed has another one."""

    size: int
    """In bytes; of a file that grows and was handed over, up to the end of its last line that was."""
    changed: int
    """Nanoseconds."""


class RecordFiles:
    """A follower's part: hands over what has changed. say: takes a line for people.

    What an attempt has left whose leader, or whose supervisor here, was gone before it was handed over comes with the
    next attempt. So it is written down what has arrived. What arrived in the last minute may be lost with that leader
    before the bucket has it: the next one gets it again. Failure records and stacks are in no bucket: what arrived of
    them before that is lost with that leader's disk, and stays on this host.
    """

    def __init__(self, paths: RunPaths, say: Callable[[str], None]) -> None:
        self._paths, self._say = paths, say
        self.handed_over = before = read_handed_over(paths)
        settled = before.until - _MAY_BE_LOST
        self._arrived = {
            name: stamp._replace(size=before.ends.get(name, 0)) if name.endswith(_GROWS) else stamp
            for name, stamp in self._stamps().items()
            if stamp.changed <= settled
        }
        self._known = {**self._arrived}

    def new(self) -> dict[str, str]:
        """What has changed since the last call: the files by their path in the run directory, the smallest first, as
        many as one record takes. The next calls have the lines that did not fit. The leader may miss it."""
        return self._take(oldest=True)[0]

    def all(self) -> dict[str, str]:
        """As `new`, of all that nobody has said to have arrived, of lines the last ones. The attempt is over: what has
        been in no call is told to stay here."""
        shown, self._known = self._known, {**self._arrived}
        found, missing = self._take()

        def has_been_in_a_call(name: str, stamp: _Stamp) -> bool:
            had = shown.get(name)
            if not name.endswith(_GROWS):
                return stamp == had
            return stamp.size <= max(had.size if had else 0, self.handed_over.ends.get(name, 0))

        if left_out := [name for name, stamp in missing.items() if not has_been_in_a_call(name, stamp)]:
            what = f"{len(left_out)} files of the record stay on this host, or lines of them"
            self._say(f"{what}, as {self._paths.root / left_out[0]}")
        return found

    def arrived(self) -> None:
        """The leader has what was handed over: it has read that this host is ready, and what came with that. When the
        attempt ended it may have taken this host for lost."""
        self._arrived = {**self._known}
        until = max([self.handed_over.until, *(stamp.changed for stamp in self._known.values())])
        ends = {name: stamp.size for name, stamp in self._known.items() if name.endswith(_GROWS)}
        self.handed_over = HandedOver(until, {**self.handed_over.ends, **ends})

    def _take(self, *, oldest: bool = False) -> tuple[dict[str, str], dict[str, _Stamp]]:
        """What has changed, which is known from now on; and the files of which something is left out, up to where that
        is. oldest: of lines that are too many, take the first ones."""
        changed = {name: stamp for name, stamp in self._stamps().items() if stamp != self._known.get(name)}
        found, missing, room = dict[str, str](), dict[str, _Stamp](), _LIMIT
        growing = sum(name.endswith(_GROWS) for name in changed)
        for name, stamp in sorted(changed.items(), key=lambda one: one[1].size):
            path, grows, text = self._paths.root / name, name.endswith(_GROWS), None
            since = self._known[name].size if grows and name in self._known else 0
            start, end = since, stamp.size
            with contextlib.suppress(OSError, ValueError):
                if grows:  # JSON escapes the quotes of lines
                    text, start, end = _lines(path, since, room // 2 // growing, oldest=oldest)
                else:
                    text = read_small_file(path, room).decode("utf-8", "replace")
            growing -= grows
            if text is None or (size := len(json.dumps(text))) > room or (end > since and not text):
                missing[name] = stamp._replace(size=end)
                continue
            if start > since:
                missing[name] = stamp._replace(size=start)
            if text or not grows:
                found[name], room = text, room - size
            self._known[name] = stamp._replace(size=end)
        return found, missing

    def _stamps(self) -> dict[str, _Stamp]:
        """A directory that cannot be listed is in place of its files: it cannot be read either, and is told of so."""
        names, stamps = list[str](), dict[str, _Stamp]()
        for pattern in _PATTERNS:
            try:
                found = (path.relative_to(self._paths.root).as_posix() for path in self._paths.root.glob(pattern))
                names += filter(_FILES.fullmatch, found)
            except OSError:
                names.append(pattern.partition("/")[0])
        for name in sorted(names):
            with contextlib.suppress(OSError):
                status = (self._paths.root / name).lstat()
                stamps[name] = _Stamp(status.st_size, status.st_mtime_ns)
        return stamps


def handing_over(
    files: RecordFiles, publisher: RecordPublisher[NodeReport], every: float
) -> AbstractContextManager[None]:
    """A thread shows what is new: a disk that holds it up must not keep this host from saying that its ranks live."""

    def show() -> None:
        with contextlib.suppress(OSError):  # when the attempt is over it is tried again
            publisher.show(files=files.new())

    return called_every("rollback-record-files", every, show)


class RecordKeeper:
    """The leader's part: writes what followers hand over to its place in the record. say: takes a line for people."""

    def __init__(self, paths: RunPaths, say: Callable[[str], None]) -> None:
        self._paths, self._say = paths, say
        self._looked_at: dict[str, Mapping[str, str]] = {}
        self._kept: dict[str, Mapping[str, str]] = {}
        self._told: dict[str, str] = {}

    def keep(self, launch: str, who: str, given: Mapping[str, str]) -> None:
        """given: by a follower, which may have given it before. who: that follower, for people. What the disk refuses
        is tried again at the follower's next sign of life, which makes `given` another object."""
        if not given or given is self._looked_at.get(launch):
            return
        self._looked_at[launch] = given
        before, kept = self._kept.get(launch, {}), dict[str, str]()
        skip_list = cache(self._skip_list)
        faults: list[Exception] = []
        for name in filter(_FILES.fullmatch, given):
            try:
                if given[name] != before.get(name):
                    self._write(self._paths.root / name, given[name], skip_list)
                kept[name] = given[name]
            except (OSError, ValueError, RollbackError) as error:
                faults.append(error)
        self._kept[launch] = kept
        trouble = str(getattr(faults[0], "strerror", faults[0])) if faults else ""
        told, self._told[launch] = self._told.get(launch), trouble
        if trouble and trouble != told:  # a disk that is full stays so, and every few seconds there is news
            what = f"{len(faults)} files of what {who} says of the attempt cannot be kept in {self._paths.root}"
            self._say(f"{what}: {faults[0]}")

    def _write(self, target: Path, text: str, skip_list: Callable[[], Sequence[Window]]) -> None:
        if target.suffix != _GROWS:
            files.make_directory(target.parent)
            write_file(target, text.encode(), durable=False)
            return
        try:
            there, _, _ = _lines(target, 0, _KNOWN)
        except FileNotFoundError:
            there = ""
        known = {*there.splitlines()}  # a host that hands its files over anew has handed over some of them before
        if not (new := [line for line in text.splitlines() if line not in known]):
            return
        windows = skip_list()
        writer = LineWriter(target)
        try:
            for line in _of_the_record(new, windows):
                writer.write(line)
        finally:
            writer.close()

    def _skip_list(self) -> Sequence[Window]:
        return Window.merged(fold_journal(self._paths.train_journal).history.skip_list)


def _of_the_record(lines: Sequence[str], windows: Sequence[Window]) -> Iterator[str]:
    """The skipped batches that the skip list has. It is journalled before anything is skipped, so what it does not have
    is from a time that was lost with another leader: there is no trace of it in the record, and those batches may have
    been trained since."""
    for line in lines:
        with contextlib.suppress(ValueError):
            batch = parse_model(line.encode(), SkippedBatch).batch
            if Window.holding(windows, batch) is not None:
                yield line


def _lines(path: Path, since: int, most: int, *, oldest: bool = False) -> tuple[str, int, int]:
    """The whole lines of a file from byte `since` on, of more than `most` bytes the last ones; where they begin and
    end; none, and both the end, where not one fits. oldest: the first ones."""
    with open_regular(path) as file:
        end = end_of_lines(file)
        since = since if since <= end else 0
        if oldest and end - since > most:
            file.seek(since)
            if not (whole := file.read(most).rfind(b"\n") + 1):
                return "", end, end
            end = since + whole
        start = max(since, end - most)
        file.seek(max(0, start - 1))  # one byte before it tells whether a line begins there
        text = file.read(end - file.tell())
    if start:
        text = text.partition(b"\n")[2]
    return text.decode("utf-8", "replace"), end - len(text), end
