"""The user's own files among those that are running: which lines call, and what their source says of them."""

import importlib.util
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType
from typing import Any

from rollback.source.loops import OwnCounter, ScriptLoops, steered

_OURS = os.path.dirname(importlib.util.find_spec("rollback").origin or "")  # type: ignore[union-attr]
_LIBRARIES = tuple(os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), _OURS))


class ScriptSources:
    """The files are read as they come."""

    def __init__(self) -> None:
        self._files: dict[str, ScriptLoops | None] = {}
        self._script = ""

    def compiled(self, source: bytes, filename: str) -> CodeType:
        """The script, steered. Raises SyntaxError as Python does."""
        compile(source, filename, "exec", dont_inherit=True)
        text = importlib.util.decode_source(source)
        self._files[filename], self._script = ScriptLoops(text), filename
        return compile(steered(text), filename, "exec", dont_inherit=True)

    def callers(self) -> Iterator[tuple[str, int]]:
        """Files and lines of the user's own that have called this, innermost first."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith((*_LIBRARIES, "<")) and "-packages" + os.sep not in name:
                yield name, frame.f_lineno
            frame = frame.f_back

    def caller(self) -> str:
        return next((f"{os.path.basename(name)}, line {line}" for name, line in self.callers()), "in a library")

    def trains(self) -> bool | None:
        """Whether the loader that is iterated by a caller is trained on; None where no source tells."""
        for name, line in self.callers():
            loops = self._loops(name)
            if loops is not None and (trains := loops.trains_at(line)) is not None:
                return trains
        return None

    def epochs_at(self) -> int | None:
        """The line of the loop over epochs in the script that iterates a loader; None where it is in none."""
        taken = False
        for name, line in self.callers():
            if (loops := self._loops(name)) is None:
                continue
            taken = taken or loops.takes_at(line)
            if name == self._script and (found := loops.steerable_at(line)) is not None:
                return None if taken and loops.trains_elsewhere else found
        return None

    def cycles(self) -> bool:
        """Whether it is `itertools.cycle` that iterates the loader."""
        name, line = next(self.callers(), ("", 0))
        loops = self._loops(name)
        return loops is not None and loops.cycles_at(line)

    def _loops(self, name: str) -> ScriptLoops | None:
        if name not in self._files:
            self._files[name] = _loops_of(name)
        return self._files[name]

    def counters(self) -> Iterator[tuple[str, OwnCounter]]:
        """Those of the training loops in the files that were read, and where that is."""
        for name, loops in self._files.items():
            ours = name == self._script
            for counter in loops.counters(is_steered=ours) if loops is not None else ():
                yield f"{'' if ours else os.path.basename(name) + ', '}line {counter.line}", counter


def _loops_of(filename: str) -> ScriptLoops | None:
    try:
        return ScriptLoops("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None
