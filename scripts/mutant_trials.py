"""Mutants against the tests that pytest has collected, each in a fork of its own. What they are for: `mutants.py`."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mutations import Mutant

PACKAGE = Path(__file__).parents[1] / "rollback"
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where a sync costs nothing
TIMES, AT_LEAST = 5.0, 20.0  # a mutant may take so many times what its tests take without it, and so many seconds


def put_in_place(mutant: Mutant) -> None:
    """In a fork: let the functions of the mutant's module do what the mutant's do, and have its constants."""
    file = PACKAGE / mutant.path
    name = ".".join(("rollback", *Path(mutant.path).with_suffix("").parts))
    standing = importlib.import_module(name)
    namespace: dict[str, Any] = {"__name__": name, "__file__": str(file)}
    exec(compile(mutant.applied(file.read_bytes()), str(file), "exec"), namespace)
    for key, value in namespace.items():
        if isinstance(value, int | float | str | tuple):
            setattr(standing, key, value)
        elif getattr(value, "__module__", None) == name:
            _replace_code(getattr(standing, key), value)


def _replace_code(standing: Any, mutated: Any) -> None:
    if isinstance(mutated, type):
        for key, value in vars(mutated).items():
            if key in vars(standing):
                _replace_code(vars(standing)[key], value)
    elif isinstance(mutated, property):
        _replace_code(standing.fget, mutated.fget)
    elif isinstance(mutated, staticmethod | classmethod) or hasattr(mutated, "__wrapped__"):
        _replace_code(standing.__wrapped__, mutated.__wrapped__)
    elif isinstance(mutated, types.FunctionType):
        standing.__code__ = mutated.__code__
        standing.__defaults__, standing.__kwdefaults__ = mutated.__defaults__, mutated.__kwdefaults__


class Trial:
    """A fork in which tests run against a mutant, or against what stands. folder: for what they write, and theirs
    alone: pytest empties the one that it is given, and a test that another trial robs of its files kills any mutant."""

    def __init__(self, session: Any, tests: Sequence[Any], mutant: Mutant | None, seconds: Path, folder: str) -> None:
        self.mutant, self.began = mutant, time.monotonic()
        self._folder = tempfile.mkdtemp(dir=folder)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.environ["PYTEST_DEBUG_TEMPROOT"] = self._folder
                os._exit(self._run(session, tests, seconds))
            except BaseException:  # noqa: BLE001 - a mutant that cannot even be imported
                os._exit(1)

    def _run(self, session: Any, tests: Sequence[Any], seconds: Path) -> int:
        if self.mutant is not None:
            session.config.pluginmanager.unregister(name="terminalreporter")  # nobody reads why it failed
            put_in_place(self.mutant)
        took = {}
        for test, following in zip(tests, [*tests[1:], None], strict=True):
            began = time.monotonic()
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            took[test.nodeid] = time.monotonic() - began
            if session.testsfailed:
                return 1
        if self.mutant is None:
            seconds.write_text(json.dumps(took))
        return 0

    def ended(self, limit: float) -> str | None:
        """`killed`, `survived`, or `too long` where it took more than `limit` seconds; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() - self.began < limit:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with what the tests have started
        if not pid:
            os.waitpid(self.pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)  # a process of theirs may still write
        if not pid:
            return "too long"
        return "killed" if status else "survived"


class Trials:
    """A plugin of pytest that runs the tests which it has collected against each of some mutants."""

    def __init__(self, mutants: Sequence[Mutant], jobs: int, tell: Callable[[Mutant, str], None], memory: str) -> None:
        self._mutants, self._jobs, self._tell, self._memory = mutants, jobs, tell, memory
        self.sound = False

    def pytest_runtestloop(self, session: Any) -> bool:
        tests = list(session.items)
        with tempfile.TemporaryDirectory(prefix="rollback-mutants-") as folder:
            seconds = Path(folder, "seconds.json")
            clean = Trial(session, tests, None, seconds, self._memory)
            while (ended := clean.ended(600.0)) is None:
                time.sleep(0.01)
            self.sound = ended == "survived"
            if not self.sound:
                return True
            limit = max(AT_LEAST, TIMES * (time.monotonic() - clean.began))
            took = json.loads(seconds.read_text())
            tests.sort(key=lambda test: float(took[test.nodeid]))  # most mutants are killed by a quick one
            waiting, running = list(self._mutants)[::-1], list[Trial]()
            while waiting or running:
                while waiting and len(running) < self._jobs:
                    running.append(Trial(session, tests, waiting.pop(), seconds, self._memory))
                for trial in list(running):
                    if (ended := trial.ended(limit)) is not None:
                        running.remove(trial)
                        assert trial.mutant is not None
                        self._tell(trial.mutant, ended)
                time.sleep(0.005)
        return True


def try_mutants(
    mutants: Sequence[Mutant], tests: Sequence[str], jobs: int, tell: Callable[[Mutant, str], None]
) -> None:
    """Try mutants of one module, whose tests are in these files. Exits where they fail without one."""
    import pytest

    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not soak"]
    memory = tempfile.TemporaryDirectory(prefix="rollback-mutants-", dir=MEMORY)
    with memory as folder, contextlib.redirect_stdout(sys.stderr):
        trials = Trials(mutants, jobs, tell, folder)
        pytest.main([*options, *tests], plugins=[trials])
    if not trials.sound:
        sys.exit(f"the tests of {mutants[0].module} fail without a mutant")
