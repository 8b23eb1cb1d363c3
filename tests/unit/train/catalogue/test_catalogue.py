"""Which checkpoints are good: probation, what an onset holds back, what leaves."""

from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import manifest_of
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import Written
from rollback.policy import PolicyCheckpoint
from rollback.train.catalogue.catalogue import Catalogue, CatalogueEntry
from rollback.train.run import CheckpointAtStart

PROBATION = 4


def taken(catalogue: Catalogue, seq: int, step: int) -> str:
    manifest = manifest_of(seq, step)
    catalogue.add_snapshot(manifest)
    catalogue.land(manifest)
    return manifest.name


def good(catalogue: Catalogue) -> list[int]:
    return [point.step for point in catalogue.as_held() if point.good]


def test_the_state_before_any_step_is_good_at_once() -> None:
    catalogue = Catalogue(PROBATION)
    manifest = manifest_of(0, 0)
    catalogue.add_snapshot(manifest)
    assert catalogue.land(manifest)
    assert good(catalogue) == [0]
    assert [catalogue.judge(True, None) for _ in range(2 * PROBATION)] == [[]] * 2 * PROBATION, "it is said once"


def test_probation_runs_from_the_snapshot_and_ends_at_the_commit_at_the_earliest() -> None:
    catalogue = Catalogue(PROBATION)
    manifest = manifest_of(1, 10)
    catalogue.add_snapshot(manifest)
    for _ in range(PROBATION + 2):
        assert catalogue.judge(True, None) == []
    assert not catalogue.land(manifest)
    assert [passed.name for passed in catalogue.judge(True, None)] == [manifest.name]


def test_an_onset_holds_back_those_before_it_and_starts_those_behind_it_again() -> None:
    catalogue = Catalogue(PROBATION)
    taken(catalogue, 1, 10)
    taken(catalogue, 2, 13)
    for _ in range(PROBATION - 1):
        catalogue.judge(True, None)
    for _ in range(5):
        assert catalogue.judge(False, 12) == []
    assert [manifest.step for manifest in catalogue.judge(True, None)] == [10]
    for _ in range(PROBATION - 2):
        assert catalogue.judge(True, None) == []
    assert [manifest.step for manifest in catalogue.judge(True, None)] == [13]


def test_a_resumed_run_keeps_what_was_good_and_tries_the_others_anew() -> None:
    first, *others = (manifest_of(seq, 10 * seq) for seq in range(3))
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(first, good=True), *map(CheckpointAtStart, others)])
    assert good(catalogue) == [0]
    for _ in range(PROBATION - 1):
        assert catalogue.judge(True, None) == []
    assert [manifest.step for manifest in catalogue.judge(True, None)] == [10, 20]
    assert good(catalogue) == [0, 10, 20]


def test_verdicts_of_earlier_attempts_count_for_the_probation() -> None:
    first, second, third = (manifest_of(seq, 10 * seq) for seq in range(3))
    held = [
        CheckpointAtStart(first, good=True),
        CheckpointAtStart(second, healthy=PROBATION - 1),
        CheckpointAtStart(third),
    ]
    catalogue = Catalogue(PROBATION, held)
    assert [manifest.step for manifest in catalogue.judge(True, None)] == [10]
    for _ in range(PROBATION - 2):
        assert catalogue.judge(True, None) == []
    assert [manifest.step for manifest in catalogue.judge(True, None)] == [20]


def test_what_leaves_the_fast_tier_as_good_may_be_gone_back_to_where_the_ring_has_it() -> None:
    manifests = [manifest_of(seq, 10 * seq) for seq in range(3)]
    names = [manifest.name for manifest in manifests]
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(it, slot < 2, slot) for slot, it in enumerate(manifests)])
    for name in (names[0], names[2]):
        catalogue.leave(name)
    assert [point.name for point in catalogue.as_held()] == [names[1]]
    catalogue.consult([])
    assert [point.name for point in catalogue.as_held()] == [names[1]], "the ring does not have them yet"
    catalogue.consult([names[0], names[2]])
    assert [(point.name, point.good) for point in catalogue.as_held()] == [(names[0], True), (names[1], True)]
    assert catalogue.judge(True, None) == [], "what was good need not become so"


def test_of_what_has_left_the_fast_tier_there_is_not_a_line_for_each_rank() -> None:
    """A thousand ranks have 700 kB of them for each checkpoint, and a long run has thousands of those."""
    shards = tuple(ShardRecord.of(rank, Written(8, 32 * "0")) for rank in range(2))
    manifest = manifest_of(1, 10).model_copy(update={"shards": shards})
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest, good=True, slot=0)])
    catalogue.leave(manifest.name)
    catalogue.consult([manifest.name])
    (held,) = catalogue.as_held()
    assert (held.name, held.step, held.batch) == (manifest.name, manifest.step, manifest.batch)
    assert catalogue.manifest(manifest.name) == manifest.model_copy(update={"shards": ()})


def test_what_is_neither_in_the_ring_nor_in_a_slot_cannot_be_gone_back_to() -> None:
    manifests = [manifest_of(seq, 10 * seq) for seq in range(3)]
    catalogue = Catalogue(PROBATION, [*map(CheckpointAtStart, manifests[:2]), CheckpointAtStart(manifests[2], slot=1)])
    catalogue.consult([manifests[0].name])
    assert [point.step for point in catalogue.as_held()] == [0, 20]
    assert catalogue.manifest(manifests[0].name) == manifests[0]
    assert Catalogue(PROBATION, map(CheckpointAtStart, manifests)).newest() == manifests[2]


def test_what_was_dropped_does_not_come_back_from_the_ring() -> None:
    """A checkpoint that a rollback went back behind may still be on its way out of the ring."""
    manifest = manifest_of(1, 10)
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest, good=True)])
    catalogue.leave(manifest.name)
    catalogue.drop(manifest.name)
    catalogue.consult([manifest.name])
    assert catalogue.as_held() == []
    assert catalogue.newest() is None


def test_a_checkpoint_that_is_admitted_is_good_at_once_or_has_its_probation_before_it() -> None:
    known, fetched, candidate = (manifest_of(seq, 10 * seq) for seq in range(3))
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(known)])
    catalogue.judge(True, None)
    catalogue.admit(fetched, good=True)
    catalogue.admit(candidate, good=False)
    catalogue.admit(known, good=True)
    assert good(catalogue) == [10], "what is held stays what it is"
    for _ in range(PROBATION - 2):
        assert catalogue.judge(True, None) == []
    assert catalogue.judge(True, None) == [known]
    assert catalogue.judge(True, None) == [candidate]


def test_what_left_and_is_admitted_again_does_not_come_back_a_second_time() -> None:
    manifest = manifest_of(1, 10)
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest, good=True)])
    catalogue.leave(manifest.name)
    catalogue.admit(manifest, good=False)
    catalogue.consult([manifest.name])
    assert [point.good for point in catalogue.as_held()] == [False]


def test_what_was_dropped_and_is_fetched_again_as_good_need_not_become_so() -> None:
    manifest = manifest_of(1, 10)
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest)])
    catalogue.drop(manifest.name)
    catalogue.admit(manifest, good=True)
    assert [catalogue.judge(True, None) for _ in range(2 * PROBATION)] == [[]] * 2 * PROBATION


def test_after_a_rollback_candidates_have_their_whole_probation_before_them() -> None:
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest_of(1, 10))])
    for _ in range(PROBATION - 1):
        catalogue.judge(True, None)
    catalogue.restart_probation()
    for _ in range(PROBATION - 1):
        assert catalogue.judge(True, None) == []
    assert [manifest.step for manifest in catalogue.judge(True, None)] == [10]


def test_a_watch_without_an_onset_holds_all_back_and_starts_none_again() -> None:
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest_of(1, 10))])
    for _ in range(PROBATION - 1):
        catalogue.judge(True, None)
    assert catalogue.judge(False, None) == []
    assert [manifest.step for manifest in catalogue.judge(True, None)] == [10]


def point_of(manifest: Manifest) -> PolicyCheckpoint:
    return PolicyCheckpoint(manifest.name, manifest.step, manifest.batch, True)


def test_what_is_only_at_the_url_may_be_chosen_and_is_held_once_it_was_fetched() -> None:
    here, away = manifest_of(2, 20), manifest_of(1, 10)
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(here, good=True)])
    catalogue.offer([point_of(away), point_of(here)])
    assert [point.name for point in catalogue.to_choose_from()] == [away.name, here.name]
    assert [catalogue.is_remote(each.name) for each in (away, here)] == [True, False]
    assert [point.name for point in catalogue.as_held()] == [here.name]
    assert catalogue.newest() == here
    catalogue.admit(away, good=True)
    assert not catalogue.is_remote(away.name)
    assert good(catalogue) == [10, 20]


def test_what_is_not_offered_again_cannot_be_fetched_any_more() -> None:
    first, second = manifest_of(1, 10), manifest_of(2, 20)
    catalogue = Catalogue(PROBATION)
    catalogue.offer([point_of(first), point_of(second)])
    catalogue.offer([point_of(second)])
    assert [point.name for point in catalogue.to_choose_from()] == [second.name]
    assert not catalogue.is_remote(first.name)


def test_what_has_left_its_slot_and_is_offered_comes_from_the_run_directory_once_that_has_it() -> None:
    manifest = manifest_of(1, 10)
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest, good=True, slot=2)])
    assert (catalogue.slot(manifest.name), catalogue.in_slots()) == (2, {manifest.name})
    catalogue.leave(manifest.name)
    assert (catalogue.slot(manifest.name), catalogue.in_slots()) == (None, set())
    catalogue.offer([point_of(manifest)])
    assert catalogue.is_remote(manifest.name)
    catalogue.offer([])
    assert not catalogue.is_remote(manifest.name)
    catalogue.consult([manifest.name])
    assert [(point.name, point.good) for point in catalogue.as_held()] == [(manifest.name, True)]
    catalogue.offer([point_of(manifest)])
    assert not catalogue.is_remote(manifest.name), "it is here"


def test_a_snapshot_in_flight_has_its_slot_but_is_no_checkpoint() -> None:
    manifest = manifest_of(1, 10)
    catalogue = Catalogue(PROBATION)
    catalogue.add_snapshot(manifest, 3)
    assert (catalogue.slot(manifest.name), catalogue.in_slots()) == (3, set())
    assert (catalogue.as_held(), catalogue.newest()) == ([], None)
    catalogue.land(manifest)
    assert (catalogue.in_slots(), catalogue.newest()) == ({manifest.name}, manifest)


def test_a_checkpoint_at_the_onset_itself_is_the_state_before_it_and_keeps_what_it_has() -> None:
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest_of(1, 10)), CheckpointAtStart(manifest_of(2, 11))])
    for _ in range(PROBATION - 1):
        catalogue.judge(True, None)
    catalogue.judge(False, 10)
    assert [manifest.step for manifest in catalogue.judge(True, None)] == [10]


def test_what_must_leave_is_counted_among_those_of_one_tier() -> None:
    manifests = [manifest_of(seq, 10 * seq) for seq in range(8)]
    names = [manifest.name for manifest in manifests]
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(manifest, good=True) for manifest in manifests])
    assert catalogue.surplus(5, names[:5]) == []
    assert {name for name, _ in catalogue.surplus(3, names[:5])} < set(names[:5])
    assert len(catalogue.surplus(3, names[:5])) == 2
    assert len(catalogue.surplus(4)) == 4


events = st.lists(st.sampled_from(["take", "healthy", "watch", "drop"]), max_size=80)


@given(events, st.integers(1, 12))
def test_nothing_is_good_that_has_an_onset_behind_it_within_probation(told: list[str], back: int) -> None:
    """Good is what has had `probation` healthy verdicts since it was taken, or since an onset before it."""
    catalogue, step, seq = Catalogue(PROBATION), 1, 0
    healthy: dict[int, int] = {}
    for event in told:
        if event == "take" and step not in healthy:
            seq += 1
            taken(catalogue, seq, step)
            healthy[step] = 0
        elif event == "drop" and (held := catalogue.as_held()):
            catalogue.drop(held[0].name)
            del healthy[held[0].step]
        elif event in ("healthy", "watch"):
            step += 1
            onset = max(0, step - back) if event == "watch" else None
            catalogue.judge(onset is None, onset)
            for point, count in healthy.items():
                if onset is None:
                    healthy[point] = count + 1
                elif point > onset and count < PROBATION:
                    healthy[point] = 0
        assert good(catalogue) == [point for point in sorted(healthy) if healthy[point] >= PROBATION]


@given(st.integers(3, 6), st.integers(0, 20), st.sets(st.integers(0, 20)))
def test_a_full_ring_keeps_the_newest_good_one_and_the_newest(keep: int, count: int, named: set[int]) -> None:
    manifests = [manifest_of(seq, seq + 1) for seq in range(count)]
    catalogue = Catalogue(PROBATION, [CheckpointAtStart(it, seq in named) for seq, it in enumerate(manifests)])
    before = catalogue.as_held()
    for name, _ in catalogue.surplus(keep):
        catalogue.drop(name)
    after = catalogue.as_held()
    assert len(after) == min(keep, count)
    assert after[-1:] == before[-1:]
    assert good(catalogue)[-1:] == [point.step for point in before if point.good][-1:]


def test_a_verdict_costs_no_more_for_all_that_a_long_run_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverLookedThrough(dict[str, CatalogueEntry]):
        def values(self) -> NoReturn:
            raise AssertionError("a step looks at every checkpoint of the run")

        items = __iter__ = values

    catalogue = Catalogue(PROBATION)
    for seq in range(1, 4):
        name = taken(catalogue, seq, 10 * seq)
        assert [[m.name for m in catalogue.judge(True, None)] for _ in range(PROBATION)][-1] == [name]
        catalogue.leave(name)
    name = taken(catalogue, 4, 40)
    monkeypatch.setattr(catalogue, "_entries", NeverLookedThrough(catalogue._entries))
    for _ in range(PROBATION - 1):
        assert catalogue.judge(True, None) == []
    assert catalogue.judge(False, None) == []
    assert catalogue.about_to_pass() == [name]
    assert [m.name for m in catalogue.judge(True, None)] == [name]
    assert catalogue.about_to_pass() == []
