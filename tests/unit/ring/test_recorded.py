"""What a ring at a URL holds by what the journals say."""

from typing import Any

from recorded_run import incident, rollback_plan
from rollback.facts.history import History, fold, in_durable_ring
from rollback.facts.training import (
    BecameGood,
    Committed,
    Drained,
    Evicted,
    JournalEntry,
    LeftDurableRing,
    Quarantined,
    Restored,
)
from rollback.policy import PolicyCheckpoint
from rollback.ring.schedule import good_ones_at
from rollback.rundir.paths import CheckpointName

URL = "s3://bucket/run"
NAMES = [CheckpointName.of(seq, 10 * seq) for seq in range(5)]


def journal(*facts: Any) -> History:
    return fold(JournalEntry(seq=seq, at="", attempt=1, fact=fact) for seq, fact in enumerate(facts))


def committed(count: int, timeline: int = 0) -> list[Any]:
    return [
        Committed(checkpoint=name, step=10 * seq, batch=20 * seq, timeline=timeline, bytes=1, seconds=0.0)
        for seq, name in enumerate(NAMES[:count])
    ]


def good(*names: str) -> list[Any]:
    return [BecameGood(checkpoint=name, step=0) for name in names]


def drained(*names: str, place: str = URL) -> list[Any]:
    return [Drained(checkpoint=name, step=0, place=place, bytes=1, seconds=0.0) for name in names]


def left(name: str) -> LeftDurableRing:
    return LeftDurableRing(checkpoint=name, place=URL, reason="the ring is full")


def test_what_was_drained_and_has_not_left_is_there_wherever_it_was_noted() -> None:
    ranks = journal(*committed(4), *good(*NAMES[1:4]), *drained(NAMES[0], NAMES[2]))
    supervisor = journal(*drained(NAMES[1], NAMES[3]), left(NAMES[2]))
    assert good_ones_at(f"{URL}/", ranks, supervisor) == [
        PolicyCheckpoint(NAMES[0], 0, 0, True),
        PolicyCheckpoint(NAMES[1], 10, 20, True),
        PolicyCheckpoint(NAMES[3], 30, 60, True),
    ]


def test_what_has_left_one_ring_and_what_came_back_are_in_a_ring() -> None:
    moved = journal(*drained(NAMES[0]), left(NAMES[0]), *drained(NAMES[0], place="/run/ring"))
    again = journal(*drained(NAMES[1], NAMES[2]), left(NAMES[1]), left(NAMES[2]), *drained(NAMES[1]))
    assert in_durable_ring(moved, again) == {NAMES[0], NAMES[1]}
    assert in_durable_ring(moved, again, place=URL) == {NAMES[1]}


def test_candidates_and_what_is_at_another_place_are_left_out() -> None:
    ranks = journal(*committed(4), *good(NAMES[1], NAMES[2]))
    supervisor = journal(*drained(NAMES[1], NAMES[3]), *drained(NAMES[2], place="/run/ring"))
    assert [point.name for point in good_ones_at(URL, ranks, supervisor)] == [NAMES[1]]


def test_what_a_rollback_has_cut_off_is_left_out() -> None:
    plan = rollback_plan(0, NAMES[1], 10, (20, 50), discards=(NAMES[2],), timeline=1)
    back = Restored(incident=0, checkpoint=NAMES[1], step=10, batch=20, steps_lost=9, seconds=0.0, route="in_process")
    ranks = journal(*committed(4), *good(*NAMES[1:4]), incident(0, 25, 26), plan, back)
    assert [point.name for point in good_ones_at(URL, ranks, journal(*drained(*NAMES[:4])))] == NAMES[:2]


def test_what_has_left_the_run_directory_or_was_damaged_there_is_there_all_the_same() -> None:
    ranks = journal(
        *committed(3), *good(*NAMES[1:3]), Evicted(checkpoint=NAMES[1], reason="the ring is full"),
        Quarantined(checkpoint=NAMES[2], reason="flipped bit"),
    )  # fmt: skip
    assert [point.name for point in good_ones_at(URL, ranks, journal(*drained(*NAMES[1:3])))] == NAMES[1:3]
