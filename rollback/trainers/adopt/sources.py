"""The user's own files among those that are running: which lines call, and what their source says of them.

The script and the modules of its own that train are compiled `instrumented`, whichever of them has the training loop.
"""

import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import islice
from types import CodeType, ModuleType
from typing import NoReturn

from rollback.errors import UsageError
from rollback.source.instrumentation import instrumented
from rollback.source.loop_counters import LoopCounter, loop_counters
from rollback.source.loop_variables import LoopVariable
from rollback.source.loops import ScriptLoops
from rollback.source.syntax import begins_at, catches_end, comes_to, cycles_at, demands_item
from rollback.train.introspection import is_own, own_callers

_TRAINS = b"backward", b"optim", b"zero_grad"
"""What a file without loops to instrument has none of."""


class ScriptSources:
    """The files are read as they come. add_variable: told of each variable that is restored in a file, with its name
    there. refuse: ends the rank, for a file that is nested too deeply."""

    def __init__(
        self, add_variable: Callable[[str, str, LoopVariable], object], refuse: Callable[[UsageError], NoReturn]
    ) -> None:
        self._add_variable, self._refuse = add_variable, refuse
        self._files: dict[str, ScriptLoops] = {}
        self._counters: dict[str, list[LoopCounter]] = {}
        self._script = ""
        self._instrumented: dict[str, tuple[ScriptLoops, list[str]]] = {}
        """Those that are, each with the counts of iterations in it."""

    def read_script(self, source: bytes, filename: str) -> CodeType:
        """The script, instrumented. Raises SyntaxError as Python does."""
        self._script = filename
        code = self._compiled(source, filename)
        self._files[filename] = self._instrumented[filename][0]
        return code

    def watch_imports(self) -> None:
        """From now on the script's own modules are instrumented, too. What is found elsewhere is left to its finder."""
        finder = _OwnModules(self._compiled)
        sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)

    def _compiled(self, source: bytes, filename: str) -> CodeType:
        compile(source, filename, "exec", dont_inherit=True)
        try:
            loops = ScriptLoops(importlib.util.decode_source(source), is_script=filename == self._script)
        except UsageError as error:
            self._refuse(UsageError(f"{filename}: {error.message}", hint=error.hint))
        found = instrumented(loops, filename)
        self._instrumented[filename] = loops, found.counts
        for name, variable in found.variables.items():
            self._add_variable(name, filename, variable)
        return compile(found.tree, filename, "exec", dont_inherit=True)

    def _callers(self) -> Iterator[tuple[str, ScriptLoops, int]]:
        """Files and lines of the user's own that have called this, innermost first, and what these files say."""
        for frame in own_callers():
            name = frame.f_code.co_filename
            if name not in self._files:
                self._files[name] = self._instrumented[name][0] if name in self._instrumented else _loops_of(name)
            yield name, self._files[name], frame.f_lineno

    def caller(self) -> str:
        found = (f"{os.path.basename(name)}, line {line}" for name, _, line in self._callers())
        return next(found, "in a library")

    def trains(self) -> bool | None:
        """Whether the loader that is iterated by a caller is trained on; None where no source tells."""
        for place, (_, loops, line) in enumerate(self._callers()):
            if (trains := loops.trains_at(line)) is not None:
                return trains
            if not place and loops.gathers_at(line):
                return False
        return None

    def sets_mode(self) -> bool:
        """Whether the loop that iterates a loader puts the model in training mode by itself, batch by batch."""
        return any(loops.sets_mode_at(line) for _, loops, line in self._callers())

    def gathers_updates(self) -> bool:
        """Whether the loop that iterates a loader gathers the batches of updates in a list. One batch makes none, and
        code behind the loop may train on what is in the list."""
        return any(begins_at(loop, line) for _, loops, line in self._callers() for loop in loops.gathering_loops)

    def demands(self) -> bool:
        """Whether a batch is asked for by `next`, and nothing that calls it is prepared for there being none."""
        places = [(loops.tree, line) for _, loops, line in self._callers()]
        return bool(places) and demands_item(*places[0]) and not any(catches_end(*place) for place in places)

    def epochs_at(self) -> tuple[str, int] | None:
        """File and line of the led loop over epochs in which a loader is iterated; None where that is in none."""
        taken = False
        for name, loops, line in self._callers():
            taken = taken or loops.takes_at(line)
            if name in self._instrumented and (found := loops.epoch_loop_at(line)) is not None:
                return None if taken and loops.trains_elsewhere else (name, found)
        return None

    def left_at(self) -> str | None:
        """Where the loop is by which a loader is iterated anew, in words; None where the source does not tell."""
        for name, loops, line in self._callers():
            if (found := loops.restarting_loop_at(line)) is not None:
                return f"{self._where(name)}line {found.lineno}"
            if loops.takes_at(line):
                return None
        return None

    def cycles(self) -> bool:
        """Whether it is `itertools.cycle` that iterates the loader."""
        return any(cycles_at(loops.tree, line) for _, loops, line in islice(self._callers(), 1))

    def counters(self) -> Iterator[tuple[str, LoopCounter]]:
        """Those of the training loops in the files that were read that are not restored, and where that is."""
        for name in self._files:
            for counter in self._counters_in(name):
                if not (counter.restored and name in self._instrumented):
                    yield f"{self._where(name)}line {counter.line}", counter

    def _counters_in(self, name: str) -> list[LoopCounter]:
        if name not in self._counters:
            self._counters[name] = loop_counters(self._files[name])
        return self._counters[name]

    def is_here(self, counter: LoopCounter) -> bool:
        """Whether it counts the batches of a loop that iterates the loader now, or that comes next."""
        return any(comes_to(loops.tree, counter.loop, line) for _, loops, line in self._callers())

    def ends_by_what_is_restored(self) -> bool:
        """Whether it is that by which a training loop, or one over epochs, ends, for all that can be seen."""
        ending = any(counter.ends for name in self._files for counter in self._counters_in(name))
        return ending and not any(counter.ends for _, counter in self.counters())

    def step_counts(self) -> Iterator[tuple[str, str]]:
        """File and name of each."""
        return (
            (name, count) for name in self._files if name in self._instrumented for count in self._instrumented[name][1]
        )

    def _where(self, name: str) -> str:
        return "" if name == self._script else f"{os.path.basename(name)}, "


class _OwnModules:
    """Finds modules where Python does, and has those of the user's own compiled by `compiled`."""

    def __init__(self, compiled: Callable[[bytes, str], CodeType]) -> None:
        self._compiled = compiled

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target)
        if found is None or type(found.loader) is not SourceFileLoader or not is_own(found.loader.path):
            return None
        found.loader = _OwnLoader(found.loader, self._compiled)
        return found


class _OwnLoader(SourceFileLoader):
    """Bytecode that is instrumented is not cached: without `--adopt` nobody wants it."""

    def __init__(self, found: SourceFileLoader, compiled: Callable[[bytes, str], CodeType]) -> None:
        super().__init__(found.name, found.path)
        self._compiled = compiled

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path)
        trains = any(word in source for word in _TRAINS)
        return self._compiled(source, self.path) if trains else super().get_code(fullname)


def _loops_of(filename: str) -> ScriptLoops:
    """Without any where the file has changed since to what is no Python, or is nested too deeply."""
    try:
        return ScriptLoops("".join(linecache.getlines(filename)), is_script=False)
    except (SyntaxError, UsageError):
        return ScriptLoops("", is_script=False)
