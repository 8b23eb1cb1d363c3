"""For all tests: one thread in each process, so that sums are added in the same order wherever a job runs, and examples
that are the same in each run, with all the time that a busy machine takes for them."""

import gc
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from counted import TOLD, Tell

if TYPE_CHECKING:
    from attempts import Forker
    from faulty import Bucket

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported here, and for the processes that tests start
# torch asks for the name of whoever connects to a store. Where a name server loses a question, that takes 5 s else.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
os.environ["ROLLBACK_FAST_TIER"] = "off"  # unless a test says otherwise: most look into the run directory's ring
if "TESTS_REGISTER" not in os.environ:  # of processes that are forked warm: see warm.py
    _register = tempfile.TemporaryDirectory(prefix="rollback-tests-")
    os.environ["TESTS_REGISTER"] = _register.name

# A shell that starts the tests in the background has them ignore these (the last one: nohup), and every process of
# theirs would as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile("ours", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ours")


gc.disable()  # while tests are collected, as little is garbage as there is much to look at


def pytest_collection_finish() -> None:
    """What is there now stays: no collection need look at it again, in this process or in those forked from it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the plugin that reads -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `covering`, those that meet no value for the first time are soak tests."""
    cases: dict[str, dict[pytest.Item, set[tuple[str, str]]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            values = {(name, repr(value)) for name, value in item.callspec.params.items()}
            cases.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    for values_of in cases.values():
        unmet = set.union(*values_of.values())
        met: Counter[tuple[str, str]] = Counter()
        while unmet:  # mixed as well as can be: of those that meet as many for the first time, the one with the rarest
            chosen = max(values_of, key=lambda i: (len(values_of[i] & unmet), -sum(met[each] for each in values_of[i])))
            met.update(values := values_of.pop(chosen))
            unmet -= values
        for item in values_of:
            item.add_marker(pytest.mark.soak)
    items[:] = _mixed(items)


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """File by file, tests of real processes between those of this one: the former wait for one another half of the
    time, the latter compute, and several workers use all cores with both at once. First those with trainers of
    libraries, which take longest: no worker is to be left alone with one at the end."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    here = [path for path in files if "unit" in path.parts]
    apart = sorted((path for path in files if "unit" not in path.parts), key=lambda path: "trainers" not in path.parts)
    rest = iter(here)
    mixed = [path for each in apart for path in (each, *islice(rest, len(here) // len(apart)))]
    return [item for path in (*mixed, *rest) for item in files[path]]


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    """See `counted`."""
    return lambda text: record_property(TOLD, text)


@pytest.fixture
def bucket() -> "Bucket":
    from faulty import new_bucket  # not on top: of most tests none asks for it

    return new_bucket("bucket")


@pytest.fixture(scope="module")
def forker() -> "Iterator[Forker]":
    from attempts import Forker

    with Forker() as forker:
        yield forker


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = terminalreporter.stats.get("passed", [])
    told = [(text, each.nodeid) for each in passed for name, text in each.user_properties if name == TOLD]
    if told:
        terminalreporter.section("counted")
    for text, test in told:
        terminalreporter.write_line(f"{text}: {test}")
