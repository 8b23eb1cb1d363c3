"""Which checkpoints are good: probation, what an onset holds back, what leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkpoints import manifest_of
from rollback.train.holdings import Holdings

PROBATION = 4


def taken(holdings: Holdings, seq: int, step: int) -> str:
    manifest = manifest_of(seq, step)
    holdings.begin(manifest.name)
    holdings.land(manifest)
    return manifest.name


def good(holdings: Holdings) -> list[int]:
    return [point.step for point in holdings.as_held() if point.good]


def test_the_state_before_any_step_is_good_at_once() -> None:
    holdings = Holdings(PROBATION, [], [])
    manifest = manifest_of(0, 0)
    holdings.begin(manifest.name)
    assert holdings.land(manifest)
    assert good(holdings) == [0]


def test_probation_runs_from_the_snapshot_and_ends_at_the_commit_at_the_earliest() -> None:
    holdings = Holdings(PROBATION, [], [])
    manifest = manifest_of(1, 10)
    holdings.begin(manifest.name)
    for _ in range(PROBATION + 2):
        assert holdings.judge(True, None) == []
    assert not holdings.land(manifest)
    assert [passed.name for passed in holdings.judge(True, None)] == [manifest.name]


def test_an_onset_holds_back_those_before_it_and_starts_those_behind_it_again() -> None:
    holdings = Holdings(PROBATION, [], [])
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
    holdings = Holdings(PROBATION, manifests, [manifests[0].name, "c000009-s00000090"])
    assert good(holdings) == [0]
    for _ in range(PROBATION):
        holdings.judge(True, None)
    assert good(holdings) == [0, 10, 20]


events = st.lists(st.sampled_from(["take", "healthy", "watch", "drop"]), max_size=80)


@given(events, st.integers(1, 12))
def test_nothing_is_good_that_has_an_onset_behind_it_within_probation(told: list[str], back: int) -> None:
    """Good is what has had `probation` healthy verdicts since it was taken, or since an onset before it."""
    holdings, step, seq = Holdings(PROBATION, [], []), 1, 0
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
    holdings = Holdings(PROBATION, manifests, [manifests[seq].name for seq in named if seq < count])
    before = holdings.as_held()
    for name, _ in holdings.surplus(keep):
        holdings.drop(name)
    after = holdings.as_held()
    assert len(after) == min(keep, count)
    assert after[-1:] == before[-1:]
    assert good(holdings)[-1:] == [point.step for point in before if point.good][-1:]
