"""Why the final state is in no durable ring, as the supervisor tells it."""

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollback.errors import RunDoesNotFit
from rollback.facts.training import Drained
from rollback.ring.drainer import DrainPhase
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor import draining
from rollback.supervisor.draining import Draining
from rollback.system.threads import start_thread


class Copying:
    """A drainer that is never through with its work, or at once."""

    final_there: str | None = None

    def __init__(self, trouble: str | None, *, done: bool, unfit: RunDoesNotFit | None = None) -> None:
        self.trouble, self._done, self.unfit = trouble, done, unfit

    def start(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def wait(self, phase: DrainPhase, seconds: float) -> bool:
        self.waited = seconds
        return self._done

    def close(self) -> None:
        pass

    def give_up(self) -> None:
        self.trouble = "its time was up"


class Crowded(Copying):
    """There is no room for its thread."""

    def start(self) -> None:
        start_thread(threading.Thread(name="crowded"))


def test_where_no_thread_can_be_made_for_the_drainer_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drainers = iter([Crowded(None, done=True), Crowded(None, done=True), Copying("the disk is full", done=True)])
    said: list[str] = []
    side = Draining(RunPaths(tmp_path), SimpleNamespace(note=None), said.append)  # type: ignore[arg-type]
    history: Any = SimpleNamespace(attached=True, settings={})
    monkeypatch.setattr(draining, "drainer_for", lambda *_: next(drainers))
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            side.follow(history)
            side.finish(lambda: False)
    assert side.why_not() == "starting a thread (crowded): can't start new thread"
    (told,) = said
    assert "it is tried again" in told
    assert "ulimit -u" in told
    side.follow(history)
    side.finish(lambda: True)
    assert side.why_not() == "the disk is full"


def refuse(thread: threading.Thread) -> None:
    """As Python does where the system refuses."""
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("drainer", "expected"),
    [
        (Copying(None, done=False), "there was no time left to copy it"),
        (Copying("the disk is full", done=True), "the disk is full"),
        (Copying(None, done=True), "the fast tier cannot be found by "),
    ],
)
def test_the_reason_is_told_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drainer: Copying, expected: str
) -> None:
    monkeypatch.setattr(draining, "drainer_for", lambda *_: drainer)
    own_journal: Any = SimpleNamespace(note=None)
    history: Any = SimpleNamespace(attached=True, settings={})
    side = Draining(RunPaths(tmp_path), own_journal, lambda text: None)
    side.follow(history)
    side.finish(lambda: True)
    assert side.why_not().startswith(expected)


def test_that_there_is_no_time_is_said_and_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's end asks for it twice."""
    monkeypatch.setattr(draining, "drainer_for", lambda *_: Copying(None, done=False))
    said: list[str] = []
    side = Draining(RunPaths(tmp_path), SimpleNamespace(note=None), said.append)  # type: ignore[arg-type]
    side.follow(SimpleNamespace(attached=True, settings={}))  # type: ignore[arg-type]
    for _ in range(2):
        side.finish(lambda: True)
    assert [line.partition(" ")[0] for line in said] == ["the", "there"]


def test_a_run_that_another_version_attached_is_drained_by_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def drainer_for(_: RunPaths, settings: Any, *__: object) -> Copying:
        given.append(settings)
        return Copying(None, done=True)

    monkeypatch.setattr(draining, "drainer_for", drainer_for)
    side = Draining(RunPaths(tmp_path), SimpleNamespace(note=None), lambda text: None)  # type: ignore[arg-type]
    recorded = {"keep": 5, "a_setting_that_is_gone": 1, "lr_after": "0.001:100"}
    side.follow(SimpleNamespace(attached=True, settings=recorded))  # type: ignore[arg-type]
    assert (given[0].keep, given[0].ring, given[0].checkpoint_every) == (5, None, "auto")


@pytest.mark.parametrize("done", [False, True])
def test_who_was_told_to_end_now_does_not_wait_for_the_record_as_long_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    drainer = Copying(None, done=done)
    monkeypatch.setattr(draining, "drainer_for", lambda *_: drainer)
    side = Draining(RunPaths(tmp_path), SimpleNamespace(note=None), lambda text: None)  # type: ignore[arg-type]
    side.follow(SimpleNamespace(attached=True, settings={}))  # type: ignore[arg-type]
    side.finish(lambda: True)
    side.close()
    assert drainer.waited == (draining._PATIENCE_AT_THE_END if done else draining._LAST_WORDS)


def test_of_a_checkpoint_that_has_left_the_fast_tier_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining.tiers, "fast_tier_of", lambda paths: object())
    side = Draining(RunPaths(tmp_path), SimpleNamespace(note=None), lambda text: None)  # type: ignore[arg-type]
    assert side.why_not() == "it is not in the fast tier any more"


@pytest.mark.parametrize("url", [None, "memory://bucket/run/"])
def test_a_final_state_that_is_not_where_the_ring_is_told_with_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    """A machine may be given back behind exit code 0, and its disk with it. The ring may have it from elsewhere, or
    from a supervisor that died before it could journal that."""
    drainer = Copying("nobody answers", done=True)
    monkeypatch.setattr(draining, "drainer_for", lambda *_: drainer)
    paths, name = RunPaths(tmp_path), "c000001-s00000010"
    side = Draining(paths, SimpleNamespace(note=None), lambda text: None)  # type: ignore[arg-type]
    side.follow(SimpleNamespace(attached=True, settings={"ring": url}))  # type: ignore[arg-type]
    assert side.lacks(None) is None, "there is none"
    assert side.lacks(name) == "in no durable ring: nobody answers"
    (here := paths.checkpoint(name)).mkdir(parents=True)
    told = None if url is None else f"not at {url} (nobody answers): it is in {here}, and the same command copies it"
    assert side.lacks(name) == told
    drainer.final_there = name
    assert side.lacks(name) is None
    drainer.final_there = "c000000-s00000005"  # that of before the run was asked for more
    assert side.lacks(name) == told
    with contextlib.closing(Journal(paths.supervisor_journal, 1)) as journal:
        journal.append(Drained(checkpoint=name, step=10, place="memory://bucket/run", bytes=1, seconds=0.1))
    assert side.lacks(name) is None


def test_of_a_run_that_was_overtaken_at_its_url_it_is_not_said_that_the_same_command_copies_its_final_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfit = RunDoesNotFit("another process goes on", hint="name another URL")
    monkeypatch.setattr(draining, "drainer_for", lambda *_: Copying(unfit.message, done=True, unfit=unfit))
    paths, name, url = RunPaths(tmp_path), "c000001-s00000010", "memory://bucket/run"
    side = Draining(paths, SimpleNamespace(note=None), lambda text: None)  # type: ignore[arg-type]
    side.follow(SimpleNamespace(attached=True, settings={"ring": url}))  # type: ignore[arg-type]
    assert side.lacks(name) == "in no durable ring: another process goes on", "of hosts apart"
    (here := paths.checkpoint(name)).mkdir(parents=True)
    assert side.lacks(name) == f"not at {url} (another process goes on): it is in {here}"
    assert side.hint == "name another URL"
