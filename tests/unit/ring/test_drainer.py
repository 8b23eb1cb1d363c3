"""The thread that fills the durable ring, apart from what it copies."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollback.checkpoints.format.manifest import Manifest
from rollback.errors import RingUnavailable
from rollback.facts.training import Fact
from rollback.ring import drainer as draining
from rollback.ring.drainer import Drainer, Phase
from rollback.ring.schedule import DrainPace
from rollback.rundir.paths import RunPaths

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

    def evict(self, name: str) -> None:
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
    assert not drainer.wait(Phase.CLOSED, 0)
    drainer.finish()
    assert drainer.wait(Phase.FINISHED, 60)
    drainer.close()
    assert drainer.wait(Phase.CLOSED, 60)


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
    assert drainer.trouble == "nobody answers"
    drainer.close()
    assert drainer.wait(Phase.CLOSED, 60)
    assert ring.reached.is_set()
    assert told[1:] == (["the durable ring away:// works again"] if writes else [])
    assert drainer.trouble == (None if writes else "nobody answers")
