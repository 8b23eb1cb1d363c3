"""The thread that fills the durable ring, apart from what it copies."""

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from waiting import wait_for

from checkpoints import write_checkpoint
from recorded_run import incident, rollback_plan
from rollback.checkpoints import pins, tiers
from rollback.checkpoints import ring as checkpoint_ring
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.retention import choose_evictions
from rollback.config import Settings
from rollback.errors import CheckpointLeft, CheckpointUnreadable, RingUnavailable, RunDoesNotFit
from rollback.facts.training import BecameGood, Committed, DrainFailed, Fact, Finished, LeftDurableRing
from rollback.ring import drainer as draining
from rollback.ring.drainer import Drainer, DrainPhase, DurableRing
from rollback.ring.in_run import RingInRun
from rollback.ring.schedule import DrainPace
from rollback.ring.url.ring import RingAtUrl, RunFromUrl
from rollback.ring.url.store import PATIENCE, Store
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.system import files

FAILURES = 1100  # more than a float can be doubled


class AwayForDays:
    """A ring that cannot be reached for so many tries."""

    place = "away://"

    def __init__(self) -> None:
        self.tries = 0
        self.reached = threading.Event()

    def open(self) -> None:
        self.tries += 1
        if self.tries <= FAILURES:
            raise RingUnavailable("nobody answers")
        self.reached.set()

    def held(self) -> Sequence[str]:
        return ()

    def put(self, manifest: Manifest, directory: Path) -> None:
        raise AssertionError("there is nothing to copy")

    def evict(self, name: str) -> bool:
        raise AssertionError("there is nothing to remove")

    def keep_record(self) -> bool:
        return True

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_ring_that_was_away_for_days_is_filled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With five minutes between two tries, a thousand of them are three days and a half."""
    monkeypatch.setattr(draining, "_LONGEST_WAIT", 0.0)
    ring, facts = AwayForDays(), list[Fact]()
    drainer = Drainer(RunPaths(tmp_path), ring, DrainPace.parse("10"), 3, facts.append, lambda text: None)  # type: ignore[arg-type]
    drainer.start()
    assert ring.reached.wait(60), f"it was tried {ring.tries} times"
    assert not drainer.wait(DrainPhase.CLOSED, 0)
    drainer.finish()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)


class BreaksOnce(AwayForDays):
    """A file system whose own error nobody has foreseen."""

    def open(self) -> None:
        self.tries += 1
        if self.tries == 1:
            raise KeyError("ETag")
        self.reached.set()


def test_an_error_that_nobody_has_foreseen_is_told_and_what_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FIRST_WAIT", 0.0)
    ring, facts, told = BreaksOnce(), list[Fact](), list[str]()
    drainer = Drainer(RunPaths(tmp_path), ring, DrainPace.parse("10"), 3, facts.append, told.append)  # type: ignore[arg-type]
    drainer.start()
    assert ring.reached.wait(60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert "KeyError('ETag'); it is tried again" in told[0]
    assert [type(fact) for fact in facts] == [DrainFailed]


class FailsOnce(AwayForDays):
    """A ring that cannot be reached at the first try. writes: whether keeping the record writes anything there."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.tries = FAILURES - 1
        self._writes = writes

    def keep_record(self) -> bool:
        return self._writes


@pytest.mark.parametrize("writes", [True, False])
def test_a_ring_is_told_to_work_again_only_once_something_was_written_there(tmp_path: Path, writes: bool) -> None:
    ring, told, complained = FailsOnce(writes=writes), list[str](), threading.Event()

    def say(text: str) -> None:
        told.append(text)
        complained.set()

    drainer = Drainer(RunPaths(tmp_path), ring, DrainPace.parse("10"), 3, lambda fact: None, say)  # type: ignore[arg-type]
    drainer.start()
    assert complained.wait(60)
    assert told == ["the durable ring: nobody answers; it is tried again, and training does not wait for it"]
    assert drainer.trouble == "nobody answers"
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert ring.reached.is_set()
    assert told[1:] == (["the durable ring away:// works again"] if writes else [])
    assert drainer.trouble == (None if writes else "nobody answers")


class HeldUp(AwayForDays):
    """A ring that does not answer for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()

    def open(self) -> None:
        self.asked.set()
        assert self.answers.wait(60)
        super().open()


def test_who_has_no_time_left_may_close_it_while_it_copies(tmp_path: Path) -> None:
    """Else it waits in vain: whoever gives up closes at once, and the ring answers when it answers."""
    ring = HeldUp()
    drainer = Drainer(RunPaths(tmp_path), ring, DrainPace.parse("10"), 3, lambda fact: None, lambda text: None)  # type: ignore[arg-type]
    drainer.finish()
    drainer.start()
    assert ring.asked.wait(60)
    drainer.give_up()
    drainer.close()
    ring.answers.set()
    assert drainer.wait(DrainPhase.CLOSED, 20)


def test_a_run_directory_that_was_moved_and_brought_back_is_copied_from_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FIRST_WAIT", 0.01)
    paths, told = RunPaths(tmp_path / "run"), list[str]()
    ring = RingAtUrl(paths, Store((tmp_path / "bucket").as_uri()), told.append)
    drainer = Drainer(paths, ring, DrainPace.parse("10"), 3, lambda fact: None, told.append)
    drainer.start()
    wait_for(lambda: told)
    assert "run.json: it is gone" in told[0]
    begin(paths)
    wait_for((tmp_path / "bucket" / "index-1.json").exists)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)


def test_a_file_system_that_cannot_be_reached_when_the_run_begins_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some reach for the network when they are made, as that of sftp does."""
    monkeypatch.setattr(draining, "_FIRST_WAIT", 0.01)
    paths, told, made = RunPaths(tmp_path / "run"), list[str](), fsspec.core.url_to_fs

    def away(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(fsspec.core, "url_to_fs", made)
        raise ConnectionResetError("nobody answers yet")

    monkeypatch.setattr(fsspec.core, "url_to_fs", away)
    begin(paths)
    settings = Settings(ring=(tmp_path / "bucket").as_uri())
    drainer = draining.drainer_for(paths, settings, lambda fact: None, told.append)
    assert drainer is not None
    drainer.start()
    wait_for((tmp_path / "bucket" / "index-1.json").exists)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert "nobody answers yet; it is tried again, and training does not wait for it" in told[0]


def begin(paths: RunPaths) -> None:
    """The ranks have attached."""
    paths.root.mkdir()
    write_identity(paths, new_identity(JobIdentity(world_size=2, model=[], optimizer={}, objects=[], data={})))


class Home:
    """The run directory's own ring."""

    def __init__(self) -> None:
        self.has: list[str] = []
        self.reached = threading.Event()

    def open(self) -> None:
        pass

    def put(self, manifest: Manifest, directory: Path) -> None:
        self.has.append(manifest.name)
        shutil.copytree(directory, directory.parent / "home" / "ring" / manifest.name)
        self.reached.set()


class Mute(AwayForDays):
    """It does not answer before the final state is at home."""

    def __init__(self, home: Home) -> None:
        super().__init__()
        self._home = home

    def open(self) -> None:
        assert self._home.reached.wait(60)
        super().open()


@pytest.fixture
def at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunPaths, str, list[str | None]]:
    """A complete run, its final state, which is in memory alone, and for which final state memory was given back."""
    paths, released = RunPaths(tmp_path / "home"), list[str | None]()
    journal = Journal(paths.train_journal, 1)
    name = write_checkpoint(paths, 1, 10)
    (place,) = tiers.locate(paths)
    slot = Path(shutil.move(paths.checkpoint(name), tmp_path / "slot"))
    place = dataclasses.replace(place, directory=slot)
    journal.append(Committed(checkpoint=name, step=10, batch=10, timeline=0, bytes=1, seconds=0.1))
    journal.append(Finished(step=10, batch=10, checkpoint=name))
    journal.close()
    monkeypatch.setattr(tiers, "look_into_slots", lambda paths: tiers.SlotsLook([place], [], {}))
    monkeypatch.setattr(tiers, "hold_slot", lambda place: contextlib.nullcontext())
    monkeypatch.setattr(tiers, "release", lambda paths, durable, final: released.append(final))
    return paths, name, released


@pytest.mark.parametrize("back", [False, True], ids=["stays away", "comes back at the very end"])
def test_the_final_state_comes_home_where_the_ring_is_away_and_the_memory_is_given_back(
    at_its_end: tuple[RunPaths, str, list[str | None]], back: bool
) -> None:
    (paths, name, released), told, home = at_its_end, list[str](), Home()
    ring = Mute(home)
    drainer = Drainer(paths, ring, DrainPace.parse("10"), 3, lambda fact: None, told.append, home)  # type: ignore[arg-type]
    drainer.finish()
    drainer.start()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    ring.tries = FAILURES if back else 0
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert (home.has, released) == ([name], [name])
    (line,) = told  # that it works again would be no help: there is no time left for the checkpoint
    assert line == "the durable ring: nobody answers; this launch does not try it again"


class Refuses(AwayForDays):
    """A ring that answers, and refuses for so many seconds; each try takes 5 of them."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._seconds, self._clock = seconds, 1000.0
        self.has: list[str] = []
        monkeypatch.setattr(draining, "_FIRST_WAIT", 0.0)
        monkeypatch.setattr(draining, "time", SimpleNamespace(monotonic=lambda: self._clock, time=lambda: self._clock))

    def open(self) -> None:
        self.tries += 1
        self._clock += 5.0
        if self._clock <= 1000.0 + self._seconds:
            raise RingUnavailable("Access Denied")

    def held(self) -> Sequence[str]:
        return self.has

    def if_stuck(self, let_go: Callable[[], None]) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def put(self, manifest: Manifest, directory: Path) -> None:
        self.has.append(manifest.name)


def of_hosts_apart(
    paths: RunPaths, ring: DurableRing, note: Callable[[Fact], None], say: Callable[[str], None]
) -> Drainer:
    home = RunFromUrl(paths, Store(f"file://{paths.root}/bucket"), lambda text: None)
    return Drainer(paths, ring, DrainPace.parse("10"), 3, note, say, home, patience=60.0)


WAITED_FOR = (
    "Access Denied; {name} is in memory alone: it is tried again until 00:17:45 UTC"  # 60 s behind the first refusal
)


@pytest.mark.parametrize(("seconds", "tries"), [(45.0, 10), (3600.0, 13)], ids=["for a while", "for good"])
def test_what_memory_alone_has_is_tried_again_at_the_end_for_as_long_as_a_url_that_does_not_answer(
    at_its_end: tuple[RunPaths, str, list[str | None]], monkeypatch: pytest.MonkeyPatch, seconds: float, tries: int
) -> None:
    """A key that was changed a moment ago, a clock that is off: a container that ends takes the memory with it."""
    (paths, name, released), told, facts = at_its_end, list[str](), list[Fact]()
    ring = Refuses(seconds, monkeypatch)
    drainer = of_hosts_apart(paths, ring, facts.append, told.append)  # type: ignore[arg-type]
    monkeypatch.setattr(drainer._in_run, "put", lambda *_: None)
    drainer.finish()
    drainer.start()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    waits, *rest = told
    expected = WAITED_FOR.format(name=name)
    assert waits == f"the durable ring: {expected}, for 60 s (interrupt twice to end now)"
    (failed,) = [fact for fact in facts if isinstance(fact, DrainFailed)]
    assert failed.error == expected, "`rollback status` tells it"
    assert (ring.tries, ring.has) == (tries, [name] if seconds < 60.0 else [])
    assert rest == (["the durable ring away:// works again"] if ring.has else [])
    assert drainer.trouble == (None if ring.has else "Access Denied")
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert released == [name]


def test_who_gives_up_does_not_wait_for_a_ring_that_refuses(
    at_its_end: tuple[RunPaths, str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (paths, _, _), waits = at_its_end, threading.Event()
    ring = Refuses(3600.0, monkeypatch)
    monkeypatch.setattr(draining, "_FIRST_WAIT", 3600.0)
    drainer = of_hosts_apart(paths, ring, lambda fact: None, lambda text: waits.set())  # type: ignore[arg-type]
    drainer.finish()
    drainer.start()
    assert waits.wait(60)
    assert not drainer.wait(DrainPhase.FINISHED, 0)
    drainer.give_up()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)


def test_hosts_apart_alone_wait_for_a_ring_that_refuses(tmp_path: Path) -> None:
    """One host has its run directory, or the disk that refuses."""
    paths, url = RunPaths(tmp_path), Settings(ring="file:///bucket/run")
    for transport, expected in ((None, 0.0), (SimpleNamespace(), PATIENCE)):
        drainer = draining.drainer_for(paths, url, lambda fact: None, print, transport)  # type: ignore[arg-type]
        assert drainer is not None
        assert drainer._patience == expected


class Overtaken(AwayForDays):
    """Another process goes on with the run there."""

    def open(self) -> None:
        self.tries += 1
        self.reached.set()
        raise RunDoesNotFit("another process goes on with this run", hint="name another URL")


@pytest.mark.parametrize("seen", ["in mid run", "at the end"])
def test_the_final_state_of_a_run_that_was_overtaken_at_its_url_comes_home(
    at_its_end: tuple[RunPaths, str, list[str | None]], seen: str
) -> None:
    (paths, name, released), told, home = at_its_end, list[str](), Home()
    ring = Overtaken()
    drainer = Drainer(paths, ring, DrainPace.parse("10"), 3, lambda fact: None, told.append, home)  # type: ignore[arg-type]
    if seen == "in mid run":
        drainer.start()
        wait_for(lambda: drainer.unfit)
        drainer.finish()
    else:
        drainer.finish()
        drainer.start()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert (home.has, released, ring.tries) == ([name], [name], 1), "nothing is tried at that ring again"
    (line,) = told
    assert "nothing more is copied to it (name another URL)" in line
    assert line.endswith(", and training does not wait for it") is (seen == "in mid run")


def test_of_hosts_apart_nothing_is_brought_home_from_a_url_where_another_goes_on(
    at_its_end: tuple[RunPaths, str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has by that name may be the other one's."""
    paths, name, _ = at_its_end
    monkeypatch.setattr(Overtaken, "held", lambda ring: (name,))
    home = RunFromUrl(paths, Store(f"file://{paths.root}/bucket"), lambda text: None)
    monkeypatch.setattr(home, "put", lambda *_: pytest.fail("it was brought home"))
    drainer = Drainer(paths, Overtaken(), DrainPace.parse("10"), 3, lambda fact: None, lambda text: None, home)  # type: ignore[arg-type]
    drainer.start()
    wait_for(lambda: drainer.unfit)
    drainer.finish()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert drainer.trouble == "another process goes on with this run"


@pytest.mark.parametrize("url", [None, "file:///bucket/run"])
def test_the_run_directory_s_own_ring_is_no_second_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    """Else the final state would be there before it is copied, and no journal would have that it was."""
    monkeypatch.setattr(tiers, "fast_tier_of", lambda paths: SlotPaths(tmp_path))
    drainer = draining.drainer_for(RunPaths(tmp_path), Settings(ring=url), lambda fact: None, print)
    assert drainer is not None
    assert (drainer._in_run is None) == (url is None)


class TakenWhileItIsRead(AwayForDays):
    """The ranks want the slot of a checkpoint, and it leaves, before it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = FAILURES
        self.taken = threading.Event()

    def if_stuck(self, let_go: Callable[[], None]) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def put(self, manifest: Manifest, directory: Path) -> None:
        shutil.rmtree(directory)
        self.taken.set()
        raise CheckpointUnreadable("no such file")


def test_a_checkpoint_that_leaves_before_it_is_read_is_no_trouble(tmp_path: Path) -> None:
    paths, facts, told = RunPaths(tmp_path), list[Fact](), list[str]()
    journal = Journal(paths.train_journal, 1)
    name = write_checkpoint(paths, 1, 10)
    journal.append(Committed(checkpoint=name, step=10, batch=10, timeline=0, bytes=1, seconds=0.1))
    journal.append(BecameGood(checkpoint=name, step=10))
    ring = TakenWhileItIsRead()
    drainer = Drainer(paths, ring, DrainPace.parse("10"), 3, facts.append, told.append)  # type: ignore[arg-type]
    drainer.start()
    assert ring.taken.wait(60)
    drainer.finish()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert (facts, told, drainer.trouble) == ([], [], None)


class LeftElsewhere(AwayForDays):
    """Another host has given each checkpoint up when it is asked for its part."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = FAILURES
        self.asked: list[str] = []

    def if_stuck(self, let_go: Callable[[], None]) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def put(self, manifest: Manifest, directory: Path) -> None:
        self.asked.append(manifest.name)
        raise CheckpointLeft(f"another host cannot copy its part of {manifest.name}")


def test_a_part_that_another_host_has_given_up_is_told_where_the_ring_gets_none_in_its_place(tmp_path: Path) -> None:
    """Once is ordinary: the ranks go on meanwhile, each on its host."""
    paths, facts, told = RunPaths(tmp_path), list[Fact](), list[str]()
    journal, ring = Journal(paths.train_journal, 1), LeftElsewhere()
    drainer = Drainer(paths, ring, DrainPace.parse("10"), 3, facts.append, told.append)  # type: ignore[arg-type]
    drainer.start()
    for seq in (1, 2):
        name = write_checkpoint(paths, seq, 10 * seq)
        journal.append(Committed(checkpoint=name, step=10 * seq, batch=10 * seq, timeline=0, bytes=1, seconds=0.1))
        journal.append(BecameGood(checkpoint=name, step=10 * seq))
        wait_for(lambda: len(ring.asked) == seq)  # noqa: B023 - called at once
        if seq == 1:
            assert told == []
    wait_for(lambda: facts)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert [fact.checkpoint for fact in facts if isinstance(fact, DrainFailed)] == [ring.asked[1]]
    (line,) = told
    assert "another host cannot copy its part" in line


class Taking(AwayForDays):
    """A ring that takes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tries, self.names = FAILURES, list[str]()

    def held(self) -> Sequence[str]:
        return tuple(self.names)

    def if_stuck(self, let_go: Callable[[], None]) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def put(self, manifest: Manifest, directory: Path) -> None:
        self.names.append(manifest.name)


@pytest.mark.parametrize("passes", [True, False])
def test_a_checkpoint_whose_manifest_cannot_be_read_is_tried_again_or_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    """As of one whose shards cannot be: it is there, and nobody has removed it."""
    monkeypatch.setattr(draining, "_FIRST_WAIT", 0.0)
    paths, facts, told, opens = RunPaths(tmp_path), list[Fact](), list[str](), files.open_file
    name, refusals = write_checkpoint(paths, 1, 10), iter([True] * 2 if passes else [])

    def open_or_refuse(path: Path, flags: int) -> int:
        if path == paths.checkpoint(name) / "manifest.json" and next(refusals, not passes):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opens(path, flags)

    monkeypatch.setattr(files, "open_file", open_or_refuse)
    with contextlib.closing(Journal(paths.train_journal, 1)) as journal:
        journal.append(Committed(checkpoint=name, step=10, batch=10, timeline=0, bytes=1, seconds=0.1))
        journal.append(BecameGood(checkpoint=name, step=10))
    ring = Taking()
    drainer = Drainer(paths, ring, DrainPace.parse("10"), 3, facts.append, told.append)  # type: ignore[arg-type]
    drainer.start()
    wait_for(lambda: ring.names or any(isinstance(fact, DrainFailed) and fact.checkpoint for fact in facts))
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert ring.names == ([name] if passes else [])
    assert [line for line in told if name in line and "Input/output error" in line]


class SlowToRemove(AwayForDays):
    """A full ring. While one checkpoint is removed, the ranks plan to go back to one that was about to leave, too."""

    def __init__(self, journal: Journal, names: list[CheckpointName], target: CheckpointName) -> None:
        super().__init__()
        self.tries = FAILURES
        self._journal, self._names, self._target = journal, names, target

    def held(self) -> Sequence[str]:
        return tuple(self._names)

    def evict(self, name: str) -> bool:
        if len(self._names) == 6:
            self._journal.append(incident(0, 35, 40))
            self._journal.append(rollback_plan(0, self._target, self._target.step, None))
        self._names.remove(CheckpointName(name))
        return True


class PinnedMeanwhile(RingInRun):
    """Somebody pins a checkpoint that is about to leave."""

    def evict(self, name: str) -> bool:
        if not pins.pinned(self._paths):
            pins.pin(self._paths, name)
        return super().evict(name)


def test_what_was_pinned_as_it_was_to_leave_has_not_left_on_the_record(tmp_path: Path) -> None:
    paths, names, noted = RunPaths(tmp_path), [CheckpointName.of(seq, 10 * seq) for seq in range(6)], list[Fact]()
    with contextlib.closing(Journal(paths.train_journal, 1)) as journal:
        for name in names:
            committed = Committed(checkpoint=name, step=name.step, batch=name.step, timeline=0, bytes=1, seconds=0.0)
            journal.append(committed)
            journal.append(BecameGood(checkpoint=name, step=name.step))
            paths.checkpoint(name).mkdir(parents=True)
    drainer = Drainer(paths, PinnedMeanwhile(paths), DrainPace.parse("1000"), 3, noted.append, lambda text: None)
    drainer.start()
    drainer.finish()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    left = {fact.checkpoint for fact in noted if isinstance(fact, LeftDurableRing)}
    there = {*checkpoint_ring.names(paths)}
    assert there & {*pins.pinned(paths)}
    assert left == {*names} - there


def test_what_a_plan_needs_stays_though_it_was_to_leave_when_the_removal_of_others_began(tmp_path: Path) -> None:
    paths, names = RunPaths(tmp_path), [CheckpointName.of(seq, 10 * seq) for seq in range(6)]
    journal = Journal(paths.train_journal, 1)
    for name in names:
        journal.append(Committed(checkpoint=name, step=name.step, batch=name.step, timeline=0, bytes=1, seconds=0.0))
        journal.append(BecameGood(checkpoint=name, step=name.step))
    leaving = [name for name, _ in choose_evictions(names, names, (), 3)]
    ring = SlowToRemove(journal, list(names), CheckpointName(leaving[1]))
    drainer = Drainer(paths, ring, DrainPace.parse("1000"), 3, lambda fact: None, lambda text: None)  # type: ignore[arg-type]
    drainer.start()
    drainer.finish()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    journal.close()
    assert [name for name in names if name not in ring.held()] == leaving[:1]


class RemovesNothing(AwayForDays):
    """A full ring of which nothing may be deleted."""

    def __init__(self, names: list[CheckpointName]) -> None:
        super().__init__()
        self.tries = FAILURES
        self.kept = 0
        self._names = names

    def held(self) -> Sequence[str]:
        return tuple(self._names)

    def evict(self, name: str) -> bool:
        raise RingUnavailable(f"deleting {name}: 403 Forbidden")

    def keep_record(self) -> bool:
        self.kept += 1
        return True


def test_where_nothing_may_be_deleted_the_record_is_kept_all_the_same_and_it_is_said_once(tmp_path: Path) -> None:
    paths, names, told = RunPaths(tmp_path), [CheckpointName.of(seq, 10 * seq) for seq in range(6)], list[str]()
    journal = Journal(paths.train_journal, 1)
    for name in names:
        journal.append(Committed(checkpoint=name, step=name.step, batch=name.step, timeline=0, bytes=1, seconds=0.0))
        journal.append(BecameGood(checkpoint=name, step=name.step))
    journal.close()
    ring = RemovesNothing(names)
    drainer = Drainer(paths, ring, DrainPace.parse("1000"), 3, lambda fact: None, told.append)  # type: ignore[arg-type]
    drainer.start()
    drainer.finish()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    assert ring.kept
    assert ["403 Forbidden" in line for line in told] == [True]
    assert drainer.trouble is not None


class RemovesNothingForNow(RemovesNothing):
    forbidden = True

    def if_stuck(self, act: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def put(self, manifest: Manifest, directory: Path) -> None:
        self._names.append(manifest.name)

    def evict(self, name: str) -> bool:
        if self.forbidden:
            super().evict(name)
        self._names.remove(CheckpointName(name))
        return True


def test_a_ring_that_takes_checkpoints_and_removes_none_is_not_told_to_work_again_with_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_FIRST_WAIT", 0.01)
    paths, told, refused, drained = RunPaths(tmp_path), list[str](), threading.Semaphore(0), threading.Semaphore(0)
    ring = RemovesNothingForNow([])

    def note(fact: Fact) -> None:
        (refused if isinstance(fact, DrainFailed) else drained).release()

    drainer = Drainer(paths, ring, DrainPace.parse("1"), 3, note, told.append)  # type: ignore[arg-type]
    drainer.start()
    journal = Journal(paths.train_journal, 1)
    for seq in range(7):
        name = CheckpointName(write_checkpoint(paths, seq, 10 * seq))
        journal.append(Committed(checkpoint=name, step=name.step, batch=name.step, timeline=0, bytes=1, seconds=0.0))
        journal.append(BecameGood(checkpoint=name, step=name.step))
        assert drained.acquire(timeout=20)
        assert len(ring.held()) <= 3 or refused.acquire(timeout=20)
    assert ["403 Forbidden" in line for line in told] == [True]
    assert drainer.trouble is not None
    ring.forbidden = False
    drainer.finish()
    assert drainer.wait(DrainPhase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 60)
    journal.close()
    assert told[1:] == ["the durable ring away:// works again"]
    assert len(ring.held()) == 3
