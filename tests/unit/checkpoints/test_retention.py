"""Which checkpoints leave a full ring, and how far back what stays reaches."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import manifest_of
from recorded_run import incident
from rollback.checkpoints.retention import choose_evictions
from rollback.config import Settings
from rollback.facts.history import fold
from rollback.facts.training import BecameGood, Committed, JournalEntry
from rollback.policy import PolicyCheckpoint, plan
from rollback.ring.schedule import Situation, to_evict
from rollback.rundir.paths import CheckpointName
from rollback.train.catalogue.catalogue import Catalogue
from rollback.train.run import CheckpointAtStart

NAMES = [CheckpointName.of(seq, 10 * seq) for seq in range(20)]


@st.composite
def rings(draw: st.DrawFn) -> tuple[list[str], set[str], set[str], int]:
    held = NAMES[: draw(st.integers(0, len(NAMES)))]
    some = st.sets(st.sampled_from(held)) if held else st.just(set())
    discarded = draw(some)
    return held, draw(some) - discarded, discarded, draw(st.integers(3, 8))


def step_of(name: str) -> int:
    return CheckpointName(name).step


def life(every: int, probation: int, keep: int, until: int) -> Iterator[tuple[int, list[str], set[str]]]:
    """Step by step: what a ring holds once a checkpoint has come, and what was ever good."""
    held: list[str] = []
    good = {CheckpointName.of(0, 0)}
    for seq, step in enumerate(range(0, until, every)):
        good |= {name for name in held if step - step_of(name) >= probation}
        held.append(CheckpointName.of(seq, step))
        gone = {name for name, _ in choose_evictions(held, good, (), keep)}
        held = [name for name in held if name not in gone]
        yield step, held, good


@given(rings())
def test_the_newest_good_the_next_good_and_the_newest_checkpoint_always_stay(
    case: tuple[list[str], set[str], set[str], int],
) -> None:
    held, good, discarded, keep = case
    leaving = {name for name, _ in choose_evictions(held, good, discarded, keep)}
    staying = [name for name in held if name not in leaving]
    present = [name for name in held if name not in discarded]
    newest_good = max((name for name in present if name in good), default="")
    assert newest_good in ("", *staying)
    assert [name for name in present if name > newest_good][:1] == [name for name in staying if name > newest_good][:1]
    assert present[-1:] == staying[-1:]


@given(rings())
def test_capacity_is_kept_and_nothing_leaves_below_it(case: tuple[list[str], set[str], set[str], int]) -> None:
    held, good, discarded, keep = case
    evictions = choose_evictions(held, good, discarded, keep)
    leaving = [name for name, _ in evictions]
    assert len(leaving) == len(set(leaving))
    assert discarded & set(held) <= set(leaving)
    present = len(held) - len(discarded)
    assert len(held) - len(leaving) == min(present, keep)
    assert all(reason for _, reason in evictions)


@given(rings(), st.randoms(use_true_random=False))
def test_the_answer_is_the_same_for_slots_for_both_rings_and_on_every_rank(
    case: tuple[list[str], set[str], set[str], int], random: Random
) -> None:
    """Ranks see sets in orders of their own, and must still let the same ones go."""
    held, good, _, keep = case
    answer = choose_evictions(held, good, (), keep)
    mixed = list(good)
    random.shuffle(mixed)
    assert choose_evictions(tuple(held), mixed, (), keep) == answer
    manifests = [manifest_of(seq, step_of(name)) for seq, name in enumerate(held)]
    assert Catalogue(25, [CheckpointAtStart(m, m.name in mixed) for m in manifests[::-1]]).surplus(keep) == answer
    facts: list[Committed | BecameGood] = [
        Committed(checkpoint=m.name, step=m.step, batch=m.step, timeline=0, bytes=1, seconds=0.0) for m in manifests
    ]
    facts += [BecameGood(checkpoint=name, step=0) for name in mixed]
    history = fold(JournalEntry(seq=seq, at="", attempt=1, fact=fact) for seq, fact in enumerate(facts))
    history.good &= good  # that of step 0 is good in every history
    assert to_evict(Situation(history, held), keep) == answer


@given(st.integers(1, 12), st.integers(1, 60), st.integers(3, 8))
def test_new_checkpoints_become_good_for_ever_however_often_they_come(every: int, probation: int, keep: int) -> None:
    """A ring that fills with candidates faster than probation passes must not evict each before it is good."""
    known: set[str] = set()
    became_good = []
    for _, _, good in life(every, probation, keep, 20 * (every + probation)):
        became_good += sorted(step_of(name) for name in good - known)
        known |= good
    gaps = [later - earlier for earlier, later in pairwise(became_good)]
    assert len(became_good) > 5
    assert max(gaps) <= 2 * (every + probation)


@given(st.integers(1, 100), st.integers(1, 60), st.integers(3, 7))
def test_how_far_back_a_ring_reaches_doubles_with_each_place(every: int, probation: int, keep: int) -> None:
    """Once the run itself is old enough, and wherever a place is in the thinning when somebody looks."""
    reach = every * 2 ** (keep - (2 if every >= probation else 3))
    for step, held, good in life(every, probation, keep, 4 * every * 2**keep + probation):
        if step >= reach + probation + every:
            oldest = next(step_of(name) for name in held if name in good)
            assert step - oldest >= reach, f"at step {step}: {held}"


@given(st.integers(1, 100), st.integers(1, 60), st.integers(3, 7))
def test_a_good_checkpoint_is_at_most_four_times_as_old_as_the_next_one(every: int, probation: int, keep: int) -> None:
    for step, held, good in life(every, probation, keep, 2 * every * 2**keep + probation):
        ages = [step - step_of(name) for name in held if name in good]
        assert all(older <= 4 * younger for older, younger in pairwise(ages) if younger), f"at step {step}: {held}"


def test_six_places_hold_the_newest_close_together_and_older_ones_further_and_further_apart() -> None:
    *_, (step, held, _) = life(50, 25, 6, 100_000)
    assert [(step - step_of(name)) // 50 for name in held] == [31, 13, 5, 2, 1, 0]


@pytest.mark.parametrize("ago", [150, 400, 700])
def test_a_drift_that_began_long_ago_is_gone_back_behind(ago: int) -> None:
    """With the default settings, at any moment of a long run."""
    for step, held, good in life(50, 25, 6, 10_000):
        if step > 2000:
            choice = [PolicyCheckpoint(name, step_of(name), step_of(name), name in good) for name in held]
            answer = plan(incident(0, step - ago, step), None, choice, Settings(max_skipped="100%"))
            assert answer.action == "rollback"
            assert answer.step is not None
            assert ago + 20 <= step - answer.step <= 4 * (ago + 20)


def test_the_only_one_that_is_not_needed_leaves() -> None:
    assert choose_evictions(NAMES[:4], {NAMES[0]}, (), 3) == [(NAMES[2], "the ring is full")]


def test_what_is_thinned_out_leaves_the_least_gap_in_proportion_to_its_neighbours_ages() -> None:
    """Of steps, whatever the sequence numbers are: checkpoints are not all as far apart."""

    def leaving(*steps: int) -> list[int]:
        held = [CheckpointName.of(seq, step) for seq, step in enumerate(steps)]
        return [step_of(name) for name, _ in choose_evictions(held, set(held), (), len(held) - 1)]

    assert leaving(0, 900, 990, 1000) == [0], "the others would be more than four times apart"
    assert leaving(0, 300, 400, 700, 1000) == [300]
    assert leaving(0, 300, 600, 650, 1000) == [600]
    assert leaving(988, 990, 996, 997, 999, 1000) == [990]
    assert leaving(0, 1000, 1000, 1000) == [1000], "the same step again, after a crash"
