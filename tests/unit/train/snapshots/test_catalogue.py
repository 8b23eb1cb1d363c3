"""Which checkpoints are good: probation, what an onset holds back, what leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkpoints import manifest_of
from rollback.train.snapshots.catalogue import Catalogue

PROBATION = 4


def taken(holdings: Catalogue, seq: int, step: int) -> str:
    manifest = manifest_of(seq, step)
    holdings.begin(manifest.name)
    holdings.land(manifest)
    return manifest.name


def good(holdings: Catalogue) -> list[int]:
    return [point.step for point in holdings.as_held() if point.good]


def test_the_state_before_any_step_is_good_at_once() -> None:
    holdings = Catalogue(PROBATION, [], [])
    manifest = manifest_of(0, 0)
    holdings.begin(manifest.name)
    assert holdings.land(manifest)
    assert good(holdings) == [0]
    assert [holdings.judge(True, None) for _ in range(2 * PROBATION)] == [[]] * 2 * PROBATION, "it is said once"


def test_probation_runs_from_the_snapshot_and_ends_at_the_commit_at_the_earliest() -> None:
    holdings = Catalogue(PROBATION, [], [])
    manifest = manifest_of(1, 10)
    holdings.begin(manifest.name)
    for _ in range(PROBATION + 2):
        assert holdings.judge(True, None) == []
    assert not holdings.land(manifest)
    assert [passed.name for passed in holdings.judge(True, None)] == [manifest.name]


def test_an_onset_holds_back_those_before_it_and_starts_those_behind_it_again() -> None:
    holdings = Catalogue(PROBATION, [], [])
    taken(holdings, 1, 10)
    taken(holdings, 2, 13)
    for _ in range(PROBATION - 1):
        holdings.judge(True, None)
    for _ in range(5):
        assert holdings.judge(False, 12) == []
    assert [manifest.step for manifest in holdings.judge(True, None)] == [10]
    for _ in range(PROBATION - 2):
        assert holdings.judge(True, None) == []
    assert [manifest.step for manifest in holdings.judge(True, None)] == [13]


def test_a_resumed_run_keeps_what_was_good_and_tries_the_others_anew() -> None:
    manifests = [manifest_of(seq, 10 * seq) for seq in range(3)]
    holdings = Catalogue(PROBATION, manifests, [manifests[0].name, "c000009-s00000090"])
    assert good(holdings) == [0]
    for _ in range(PROBATION - 1):
        assert holdings.judge(True, None) == []
    assert [manifest.step for manifest in holdings.judge(True, None)] == [10, 20]
    assert good(holdings) == [0, 10, 20]


def test_what_leaves_the_fast_tier_as_good_may_be_gone_back_to_where_the_ring_has_it() -> None:
    manifests = [manifest_of(seq, 10 * seq) for seq in range(3)]
    names = [manifest.name for manifest in manifests]
    holdings = Catalogue(PROBATION, manifests, names[:2])
    for name in (names[0], names[2]):
        holdings.leave(name)
    assert [point.name for point in holdings.as_held()] == [names[1]]
    holdings.consult([], [names[1]])
    assert [point.name for point in holdings.as_held()] == [names[1]], "the ring does not have them yet"
    holdings.consult([names[0], names[2]], [names[1]])
    assert [(point.name, point.good) for point in holdings.as_held()] == [(names[0], True), (names[1], True)]
    assert holdings.judge(True, None) == [], "what was good need not become so"


def test_what_is_neither_in_the_ring_nor_in_a_slot_cannot_be_gone_back_to() -> None:
    manifests = [manifest_of(seq, 10 * seq) for seq in range(3)]
    holdings = Catalogue(PROBATION, manifests, [])
    holdings.consult([manifests[0].name], [manifests[2].name])
    assert [point.step for point in holdings.as_held()] == [0, 20]
    assert holdings.manifest(manifests[0].name) == manifests[0]
    assert Catalogue(PROBATION, manifests, []).newest() == manifests[2]


def test_what_was_dropped_does_not_come_back_from_the_ring() -> None:
    """A checkpoint that a rollback went back behind may still be on its way out of the ring."""
    manifest = manifest_of(1, 10)
    holdings = Catalogue(PROBATION, [manifest], [manifest.name])
    holdings.leave(manifest.name)
    holdings.drop(manifest.name)
    holdings.consult([manifest.name], [])
    assert holdings.as_held() == []
    assert holdings.newest() is None


def test_a_checkpoint_that_is_admitted_is_good_at_once_or_has_its_probation_before_it() -> None:
    known, fetched, candidate = (manifest_of(seq, 10 * seq) for seq in range(3))
    holdings = Catalogue(PROBATION, [known], [])
    holdings.judge(True, None)
    holdings.admit(fetched, good=True)
    holdings.admit(candidate, good=False)
    holdings.admit(known, good=True)
    assert good(holdings) == [10], "what is held stays what it is"
    for _ in range(PROBATION - 2):
        assert holdings.judge(True, None) == []
    assert holdings.judge(True, None) == [known]
    assert holdings.judge(True, None) == [candidate]


def test_what_left_and_is_admitted_again_does_not_come_back_a_second_time() -> None:
    manifest = manifest_of(1, 10)
    holdings = Catalogue(PROBATION, [manifest], [manifest.name])
    holdings.leave(manifest.name)
    holdings.admit(manifest, good=False)
    holdings.consult([manifest.name], [])
    assert [point.good for point in holdings.as_held()] == [False]


def test_what_was_dropped_and_is_fetched_again_as_good_need_not_become_so() -> None:
    manifest = manifest_of(1, 10)
    holdings = Catalogue(PROBATION, [manifest], [])
    holdings.drop(manifest.name)
    holdings.admit(manifest, good=True)
    assert [holdings.judge(True, None) for _ in range(2 * PROBATION)] == [[]] * 2 * PROBATION


def test_after_a_rollback_candidates_have_their_whole_probation_before_them() -> None:
    holdings = Catalogue(PROBATION, [manifest_of(1, 10)], [])
    for _ in range(PROBATION - 1):
        holdings.judge(True, None)
    holdings.restart_probation()
    for _ in range(PROBATION - 1):
        assert holdings.judge(True, None) == []
    assert [manifest.step for manifest in holdings.judge(True, None)] == [10]


def test_a_watch_without_an_onset_holds_all_back_and_starts_none_again() -> None:
    holdings = Catalogue(PROBATION, [manifest_of(1, 10)], [])
    for _ in range(PROBATION - 1):
        holdings.judge(True, None)
    assert holdings.judge(False, None) == []
    assert [manifest.step for manifest in holdings.judge(True, None)] == [10]


def test_a_checkpoint_at_the_onset_itself_is_the_state_before_it_and_keeps_what_it_has() -> None:
    holdings = Catalogue(PROBATION, [manifest_of(1, 10), manifest_of(2, 11)], [])
    for _ in range(PROBATION - 1):
        holdings.judge(True, None)
    holdings.judge(False, 10)
    assert [manifest.step for manifest in holdings.judge(True, None)] == [10]


def test_what_must_leave_is_counted_among_those_of_one_tier() -> None:
    manifests = [manifest_of(seq, 10 * seq) for seq in range(8)]
    names = [manifest.name for manifest in manifests]
    holdings = Catalogue(PROBATION, manifests, names)
    assert holdings.surplus(5, names[:5]) == []
    assert {name for name, _ in holdings.surplus(3, names[:5])} < set(names[:5])
    assert len(holdings.surplus(3, names[:5])) == 2
    assert len(holdings.surplus(4)) == 4


events = st.lists(st.sampled_from(["take", "healthy", "watch", "drop"]), max_size=80)


@given(events, st.integers(1, 12))
def test_nothing_is_good_that_has_an_onset_behind_it_within_probation(told: list[str], back: int) -> None:
    """Good is what has had `probation` healthy verdicts since it was taken, or since an onset before it."""
    holdings, step, seq = Catalogue(PROBATION, [], []), 1, 0
    healthy: dict[int, int] = {}
    for event in told:
        if event == "take" and step not in healthy:
            seq += 1
            taken(holdings, seq, step)
            healthy[step] = 0
        elif event == "drop" and (held := holdings.as_held()):
            holdings.drop(held[0].name)
            del healthy[held[0].step]
        elif event in ("healthy", "watch"):
            step += 1
            onset = max(0, step - back) if event == "watch" else None
            holdings.judge(onset is None, onset)
            for point, count in healthy.items():
                if onset is None:
                    healthy[point] = count + 1
                elif point > onset and count < PROBATION:
                    healthy[point] = 0
        assert good(holdings) == [point for point in sorted(healthy) if healthy[point] >= PROBATION]


@given(st.integers(3, 6), st.integers(0, 20), st.sets(st.integers(0, 20)))
def test_a_full_ring_keeps_the_newest_good_one_and_the_newest(keep: int, count: int, named: set[int]) -> None:
    manifests = [manifest_of(seq, seq + 1) for seq in range(count)]
    holdings = Catalogue(PROBATION, manifests, [manifests[seq].name for seq in named if seq < count])
    before = holdings.as_held()
    for name, _ in holdings.surplus(keep):
        holdings.drop(name)
    after = holdings.as_held()
    assert len(after) == min(keep, count)
    assert after[-1:] == before[-1:]
    assert good(holdings)[-1:] == [point.step for point in before if point.good][-1:]
