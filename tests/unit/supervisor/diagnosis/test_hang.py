"""When a job hangs and on which rank, with heartbeats and a clock that the test makes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollback.facts.training import Hung
from rollback.rundir.heartbeats import LEAVING, Heartbeat
from rollback.rundir.paths import RunPaths
from rollback.supervisor import hang_watch
from rollback.supervisor.diagnosis.hang import AT_EXIT, FLOOR, SLOW_FLOOR, HangDetector, HangLimits, suspect
from rollback.supervisor.hang_watch import HangWatcher
from rollback.supervisor.nodes.nodes import Nodes


def beat(step: int, *, moved: float = 0.0, looked: float = 0.0, doing: str = "training", **more: int) -> Heartbeat:
    fields = {"pid": 1, "host": "h", "attempt": 1, "batch": step, **more}
    return Heartbeat(step=step, doing=doing, monotonic=moved, looked=looked, **fields)  # type: ignore[arg-type]


class Job:
    """Two ranks whose heartbeats are looked at every second."""

    def __init__(self, limits: HangLimits) -> None:
        self.detector = HangDetector(limits, began=0.0)
        self.now = 0.0
        self.step = 0
        self.beats: dict[int, Heartbeat] = {}
        self.moved = 0.0

    def go(self, seconds: float, *, steps: float = 0.0, moving: bool = True, doing: str = "training") -> object:
        """The first finding while `seconds` go by; steps: a second."""
        done = float(self.step)
        for _ in range(int(seconds)):
            self.now += 1.0
            done += steps
            self.step = int(done)
            self.moved = self.now if moving else self.moved
            for rank in (0, 1):
                self.beats[rank] = beat(self.step, moved=self.moved, looked=self.now, doing=doing)
            if (found := self.detector.look(self.now, self.beats)) is not None:
                return found
        return None


AUTO = HangLimits("auto")


def test_a_job_that_trains_and_then_stands_still_hangs_after_the_floor() -> None:
    job = Job(AUTO)
    assert job.go(100, steps=2) is None
    assert job.go(FLOOR - 2, moving=False) is None
    found = job.go(3, moving=False)
    assert found is not None
    assert (found.limit, found.stalled) == (FLOOR, False)


def test_long_steps_make_a_long_limit() -> None:
    job = Job(AUTO)
    assert job.go(600, steps=0.01) is None
    assert job.detector.limit() == pytest.approx(1000, rel=0.02)


@pytest.mark.parametrize("doing", ["attaching", "saving", "rewinding", "ended"])
def test_what_may_wait_for_a_disk_has_more_time(doing: str) -> None:
    job = Job(AUTO)
    job.go(100, steps=1)
    assert job.go(SLOW_FLOOR - 2, moving=False, doing=doing) is None
    assert job.go(3, moving=False, doing=doing) is not None


def test_the_first_steps_may_compile_for_long() -> None:
    job = Job(AUTO)
    job.go(3)
    assert job.go(SLOW_FLOOR - 5, moving=False) is None


def test_an_evaluation_of_hours_is_no_hang_since_its_python_code_moves() -> None:
    job = Job(AUTO)
    job.go(100, steps=2)
    assert job.go(4 * 3600) is None


def test_one_rank_that_moves_is_what_the_others_wait_for() -> None:
    detector = HangDetector(HangLimits(5.0), began=0.0)
    for now in range(100):
        assert detector.look(now, {0: beat(3, moved=now, looked=now), 1: beat(3, looked=now)}) is None


def test_start_up_is_judged_only_where_the_user_sets_the_limit() -> None:
    assert all(HangDetector(AUTO, began=0.0).look(now, {}) is None for now in range(0, 10**5, 4))
    detector = HangDetector(HangLimits(10.0), began=0.0)
    assert all(detector.look(now, {}) is None for now in range(10))
    assert detector.look(10, {}) is not None


def test_off_is_off() -> None:
    job = Job(HangLimits(None))
    job.go(10, steps=1)
    assert job.go(10**4, moving=False) is None


def test_a_stall_is_python_that_moves_and_finishes_no_batch() -> None:
    job = Job(HangLimits("auto", stall=60.0))
    assert job.go(100, steps=0.1) is None
    found = job.go(70)
    assert found is not None
    assert found.stalled


def test_ranks_that_fetch_a_checkpoint_do_not_stall() -> None:
    """They see to it themselves that it ends; a rewind that moves and ends nothing is a stall all the same."""
    job = Job(HangLimits("auto", stall=60.0))
    assert job.go(100, steps=0.1) is None
    assert job.go(3600, doing="fetching") is None
    assert job.go(50, doing="rewinding") is None
    found = job.go(20, doing="rewinding")
    assert found is not None
    assert found.stalled


def test_a_supervisor_that_was_stopped_itself_blames_nobody() -> None:
    job = Job(HangLimits(10.0))
    job.go(20, steps=1)
    job.now += 3600.0
    assert job.go(9, moving=False) is None
    assert job.go(3, moving=False) is not None


def test_ranks_whose_threads_do_not_run_are_mute_unless_all_are() -> None:
    detector = HangDetector(HangLimits(10.0), began=0.0)
    found = None
    for now in range(20):
        found = found or detector.look(now, {0: beat(3, looked=now), 1: beat(3)})
    assert found is not None
    assert found.mute == {1}
    detector = HangDetector(HangLimits(10.0), began=0.0)
    found = None
    for now in range(20):
        found = found or detector.look(now, {0: beat(3), 1: beat(3)})
    assert found is not None
    assert found.mute == frozenset()


def test_a_rank_of_which_another_host_tells_every_few_seconds_is_not_mute_in_between() -> None:
    """Else a hang would be laid to a healthy rank: that something holds its interpreter lock."""
    detector, found = HangDetector(HangLimits(24.0), began=0.0, lag=5.0), None
    for now in range(40):
        told = now - now % 5
        found = found or detector.look(now, {0: beat(3, looked=now), 1: beat(3, looked=told), 2: beat(3)}, far={1, 2})
    assert found is not None
    assert found.mute == {2}


def test_a_rank_of_this_host_is_mute_as_soon_where_there_are_other_hosts() -> None:
    """A limit of the user's may be shorter than what those are late by."""
    detector, found = HangDetector(HangLimits(6.0), began=0.0, lag=5.0), None
    for now in range(10):
        beats = {0: beat(3), 1: beat(3, looked=now), 2: beat(3, looked=now - now % 5)}
        found = found or detector.look(now, beats, far={2})
    assert found is not None
    assert found.mute == {0}


@given(st.lists(st.tuples(st.floats(0.1, 4.0), st.booleans(), st.integers(0, 2)), min_size=1))
def test_nothing_is_called_before_the_limit(looks: list[tuple[float, bool, int]]) -> None:
    detector, now, moved, step = HangDetector(HangLimits(30.0), began=0.0), 0.0, 0.0, 0
    for gap, moves, steps in looks:
        now, step = now + gap, step + steps
        moved = now if moves else moved
        if detector.look(now, {0: beat(step, moved=moved, looked=now)}) is not None:
            assert now - moved >= 30.0
            return


BEATS = {rank: beat(5, collectives=40) for rank in range(4)}


@pytest.mark.parametrize(
    ("beats", "states", "raised", "mute", "rank", "reason"),
    [
        ({}, {}, {}, (), None, "no rank has its Guard yet"),
        (BEATS, {1: "T"}, {2: "ValueError"}, (), 2, "rank 2 raised ValueError and did not end"),
        (BEATS, {0: "S", 1: "T", 2: "D"}, {}, (3,), 1, "rank 1 is stopped (SIGSTOP)"),
        (BEATS, {0: "X", 1: "T", 2: "D"}, {}, (0, 3), 1, "rank 1 is stopped (SIGSTOP), last seen training at step 5"),
        (
            BEATS,
            {0: "X", 2: "D"},
            {},
            (0, 3),
            0,
            "rank 0 has ended, but its peers have not, last seen training at step",
        ),
        (BEATS, {0: "X"}, {0: "ValueError"}, (0,), 0, "rank 0 raised ValueError and has ended, but its peers have not"),
        (BEATS, {0: "S", 2: "D"}, {}, (3,), 2, "rank 2 is in a system call that cannot be interrupted"),
        (BEATS, {0: "S"}, {}, (3,), 3, "no thread of rank 3 gets to run"),
        ({0: beat(5), 1: beat(4)}, {0: "S", 7: "X"}, {}, (), 1, "rank 1 is behind"),
        ({**BEATS, 2: beat(5, collectives=39)}, {}, {}, (), 2, "rank 2 is behind: training at step 5, batch 5, 39"),
        ({**BEATS, 0: beat(4, collectives=50)}, {}, {}, (), 0, "rank 0 is behind: training at step 4"),
        (BEATS, {}, {}, (), None, "all ranks stand at the same point, training at step 5"),
        ({0: beat(4), 1: beat(4), 2: beat(5)}, {}, {}, (), None, "ranks 0, 1 stand at the same point"),
        ({0: beat(4)}, {}, {}, (), 0, "rank 0 stands still, training at step 4, batch 4"),
    ],
)
def test_the_suspect(beats, states, raised, mute, rank, reason) -> None:  # type: ignore[no-untyped-def]
    found = suspect(beats, states, raised, mute)
    assert found.rank == rank
    assert found.reason.startswith(reason)


class TestStuckAtExit:
    def told(self, *doings: str, silent: float, beating: bool = False) -> float | None:
        """What is said of ranks that do that, of which nothing is heard for so long, but of the last if `beating`."""
        detector = HangDetector(AUTO, began=0.0)
        for now in range(int(silent) + 1):
            heard = [0.0] * (len(doings) - 1) + [float(now) if beating else 0.0]
            detector.look(now, {rank: beat(9, looked=heard[rank], doing=doing) for rank, doing in enumerate(doings)})
        return detector.stuck_at_exit(int(silent))

    def test_ranks_that_have_all_left_python_and_are_silent_are_stuck(self) -> None:
        assert self.told(LEAVING, LEAVING, silent=AT_EXIT - 1) is None
        assert self.told(LEAVING, LEAVING, silent=AT_EXIT) == AT_EXIT

    @pytest.mark.parametrize("other", ["ended", "training", "saving"])
    def test_where_one_is_still_in_its_script_nobody_is(self, other: str) -> None:
        assert self.told(LEAVING, other, silent=AT_EXIT + 60) is None

    def test_where_one_is_heard_of_nobody_is(self) -> None:
        assert self.told(LEAVING, LEAVING, silent=AT_EXIT + 60, beating=True) is None


def test_what_a_disk_may_hold_back_ends_no_job_whose_ranks_compute() -> None:
    detector = HangDetector(HangLimits(after=10), began=0.0)
    frozen = {rank: beat(5, moved=1.0, looked=1.0) for rank in (0, 1)}
    assert all(detector.look(float(now), frozen, {0}) is None for now in range(1, 100)), "rank 0 is unknown"
    found = next(silence for now in range(100, 200) if (silence := detector.look(float(now), frozen)))
    assert found.silent == 10, "nobody computes any more"


def test_a_rank_that_looks_and_does_not_move_is_not_unknown_because_it_computes() -> None:
    detector = HangDetector(HangLimits(after=10), began=0.0)
    assert any(detector.look(float(now), {0: beat(5, moved=1.0, looked=float(now))}, {0}) for now in range(1, 20))


def test_a_silent_rank_whose_heartbeat_cannot_be_read_any_more_is_the_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from a disk where there is no board, and the disk may be what the rank waits for."""
    now, beats = 0.0, {0: beat(5), 1: beat(5)}
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now)
    nothing: dict[int, str] = {}
    running: Any = SimpleNamespace(
        attempt=1, beats=lambda: beats, beats_in_memory=dict, look=lambda: nothing, computing=set, take_stacks=tuple
    )
    watcher = HangWatcher(RunPaths(tmp_path), HangLimits(4.0), running, Nodes())
    assert watcher.look() is None
    found = None
    while found is None:
        now += 1.0
        beats = {0: beat(5, looked=now)}
        found = watcher.look()
    assert isinstance(found, Hung)
    assert (found.suspect, found.silent) == (1, 4.0)
