"""What is copied to the durable ring, when, and what leaves it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_run import incident, rollback_plan
from rollback.facts.history import History, fold, in_durable_ring
from rollback.facts.training import (
    BecameGood,
    Committed,
    Drained,
    Evicted,
    Finished,
    JournalEntry,
    LeftDurableRing,
    Quarantined,
    Restored,
)
from rollback.policy import PolicyCheckpoint
from rollback.ring.schedule import (
    DrainPace,
    LastCopy,
    Situation,
    good_ones_at,
    in_memory_alone,
    next_to_drain,
    to_evict,
)
from rollback.rundir.paths import CheckpointName

AUTO = DrainPace()


def history(committed: list[tuple[int, int]], good: int, evicted: int = 0) -> History:
    """Checkpoints as (step, timeline), of which the first `good` are good and the first `evicted` have left."""
    names = [CheckpointName.of(seq, step) for seq, (step, _) in enumerate(committed)]
    facts: list[Any] = [
        Committed(checkpoint=name, step=step, batch=step, timeline=timeline, bytes=1, seconds=0.0)
        for name, (step, timeline) in zip(names, committed, strict=True)
    ]
    facts += [BecameGood(checkpoint=name, step=0) for name in names[:good]]
    facts += [Evicted(checkpoint=name, reason="the ring is full") for name in names[:evicted]]
    return fold(JournalEntry(seq=seq, at="", attempt=1, fact=fact) for seq, fact in enumerate(facts))


def names(count: int, every: int = 10) -> list[str]:
    return [CheckpointName.of(seq, every * seq) for seq in range(count)]


def run_of(count: int, good: int, evicted: int = 0) -> History:
    return history([(10 * seq, 0) for seq in range(count)], good, evicted)


def test_the_first_good_one_goes_at_once_and_a_candidate_does_not() -> None:
    assert next_to_drain(Situation(run_of(3, good=2), ()), DrainPace(steps=10**6), 0.0) == names(3)[1]
    later = history([(10, 0), (20, 0)], good=0)
    assert next_to_drain(Situation(later, ()), AUTO, 0.0) is None


def test_at_the_end_the_newest_goes_good_or_not_and_then_the_newest_good_one() -> None:
    now = Situation(run_of(4, good=2), (), ending=True)
    assert next_to_drain(now, DrainPace(seconds=1e9), 0.0) == names(4)[3]
    now = Situation(run_of(4, good=2), (names(4)[3],), ending=True)
    assert next_to_drain(now, DrainPace(seconds=1e9), 0.0) == names(4)[1]
    now = Situation(run_of(4, good=2), (names(4)[1], names(4)[3]), ending=True)
    assert next_to_drain(now, DrainPace(seconds=1e9), 0.0) is None


def test_a_final_state_whose_commit_the_journal_has_lost_goes_at_the_end() -> None:
    final = CheckpointName.of(7, 70)
    run = run_of(4, good=2)
    fold(
        [JournalEntry(seq=99, at="", attempt=2, fact=Finished(step=70, batch=70, checkpoint=final, by="max_steps=70"))],
        run,
    )
    there = tuple(names(4))
    assert next_to_drain(Situation(run, there), AUTO, 0.0) is None
    assert next_to_drain(Situation(run, there, ending=True), AUTO, 0.0) == final
    assert next_to_drain(Situation(run, (*there, final), ending=True), AUTO, 0.0) is None
    assert next_to_drain(Situation(run, there, lost={final}, ending=True), AUTO, 0.0) is None
    assert final not in dict(to_evict(Situation(run, (*there, final)), keep=1))


def test_what_memory_alone_has_is_what_the_next_start_would_go_on_from() -> None:
    run, (first, second, third) = run_of(3, good=2), names(3)
    assert in_memory_alone(Situation(run, (first,)), {second, third}, ()) == third
    for elsewhere in (Situation(run, (third,)), Situation(run, (first,), lost=(third,))):
        assert in_memory_alone(elsewhere, {second, third}, ()) is None
    assert in_memory_alone(Situation(run, (first,)), {second, third}, {third}) is None
    assert in_memory_alone(Situation(run, ()), (), {first}) is None, "it has left memory"
    unnamed = CheckpointName.of(3, 30)
    ended = fold([JournalEntry(seq=9, at="", attempt=1, fact=Finished(step=30, batch=30, checkpoint=unnamed))], run)
    assert in_memory_alone(Situation(ended, (third,)), {third, unnamed}, ()) == unnamed, "no line says its commit"


def test_what_is_pinned_goes_whatever_the_pace_is() -> None:
    now = Situation(run_of(4, good=3), (names(4)[0],), pinned={names(4)[1]}, last=LastCopy(0.0, 1.0))
    assert next_to_drain(now, DrainPace(steps=10**6), 0.0) == names(4)[1]


def test_what_cannot_be_copied_is_passed_over() -> None:
    now = Situation(run_of(4, good=3), (), lost={names(4)[2]})
    assert next_to_drain(now, AUTO, 0.0) == names(4)[1]


def test_after_a_rollback_the_pace_is_counted_from_what_is_left() -> None:
    facts: list[Any] = [
        incident(0, 25, 30), rollback_plan(0, CheckpointName.of(1, 10), 10, None, discards=(CheckpointName.of(2, 20),)),
        Restored(incident=0, checkpoint=CheckpointName.of(1, 10), step=10, batch=10, steps_lost=20, seconds=0.0,
                 route="in_process"),
        Committed(checkpoint=CheckpointName.of(3, 20), step=20, batch=20, timeline=1, bytes=1, seconds=0.0),
        BecameGood(checkpoint=CheckpointName.of(3, 20), step=20),
    ]  # fmt: skip
    before = run_of(3, good=3)
    after = fold((JournalEntry(seq=9, at="", attempt=1, fact=fact) for fact in facts), before)
    drained = (CheckpointName.of(0, 0), CheckpointName.of(2, 20))
    assert next_to_drain(Situation(after, drained), DrainPace(steps=20), 0.0) == CheckpointName.of(3, 20)
    assert to_evict(Situation(after, drained), keep=3) == [(drained[1], "beyond a restored checkpoint")]


def test_nothing_leaves_while_a_rollback_is_planned_and_not_carried_out() -> None:
    facts: list[Any] = [incident(0, 25, 30), rollback_plan(0, names(3)[1], 10, None, discards=(names(3)[2],))]
    pending = fold((JournalEntry(seq=9, at="", attempt=1, fact=fact) for fact in facts), run_of(3, good=3))
    assert to_evict(Situation(pending, tuple(names(3))), keep=3) == []


@pytest.mark.parametrize(
    ("pace", "due"),
    [("20", False), ("10", True), ("99s", False), ("98s", True), ("2m", False), ("1h", False), ("auto", False)],
)
def test_the_pace_is_in_steps_or_time_or_a_share_of_it(pace: str, due: bool) -> None:
    now = Situation(run_of(3, good=3), tuple(names(2)), last=LastCopy(began=2.0, seconds=5.0))
    assert (next_to_drain(now, DrainPace.parse(pace), 100.0) is not None) == due
    assert next_to_drain(now, DrainPace.parse("auto"), 102.0) == names(3)[2], "twenty times five seconds have passed"


situations = st.builds(
    lambda steps, good, drained, pinned, last, ending: Situation(
        run_of(steps, min(good, steps)),
        tuple(name for place, name in enumerate(names(steps)) if place in drained),
        frozenset(name for place, name in enumerate(names(steps)) if place in pinned),
        frozenset(),
        last,
        ending,
    ),
    st.integers(0, 8), st.integers(0, 8), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)),
    st.none() | st.builds(LastCopy, st.floats(0, 100), st.floats(0, 10)), st.booleans(),
)  # fmt: skip
paces = st.sampled_from([AUTO, DrainPace(steps=1), DrainPace(steps=30), DrainPace(seconds=1.0), DrainPace(seconds=1e9)])


@given(situations, paces, st.floats(0, 1000))
def test_what_is_copied_is_there_not_copied_yet_and_good_unless_pinned_or_at_the_end(
    now: Situation, pace: DrainPace, clock: float
) -> None:
    name = next_to_drain(now, pace, clock)
    if name is not None:
        assert name in now.history.committed
        assert name not in now.drained
        assert name in now.history.good or name in now.pinned or now.ending


@given(situations, paces, st.floats(0, 1000))
def test_copying_comes_to_an_end(now: Situation, pace: DrainPace, clock: float) -> None:
    for _ in range(20):
        name = next_to_drain(now, pace, clock)
        if name is None:
            break
        drained = tuple(sorted({*now.drained, name}, key=lambda held: CheckpointName(held).sort_key))
        now = Situation(now.history, drained, now.pinned, now.lost, LastCopy(clock, 1.0), now.ending)
    else:
        raise AssertionError("it goes on for ever")
    if now.ending and now.history.committed:
        assert max(now.history.committed) in now.drained


@given(situations, st.integers(3, 5), st.integers(0, 8))
def test_the_newest_good_one_and_what_is_pinned_never_leave(now: Situation, keep: int, evicted: int) -> None:
    gone = {name for name, _ in to_evict(now, keep)}
    assert gone <= set(now.drained)
    assert not gone & set(now.pinned)
    good = [name for name in now.drained if name in now.history.good]
    assert not good or good[-1] not in gone
    assert len([name for name in now.drained if name not in gone and name not in now.pinned]) <= keep
    local = run_of(len(now.history.committed), len(now.history.good), min(evicted, len(now.history.committed)))
    elsewhere = Situation(local, now.drained, now.pinned, now.lost, now.last, now.ending)
    assert to_evict(elsewhere, keep) == to_evict(now, keep), "what the local ring holds is another matter"


# --- what a ring at a URL holds by what the journals say --------------------------------------------------------------

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
