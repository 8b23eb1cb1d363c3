"""What a start refuses, what it puts aside, and what it adds to the record."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from asking import hand_in
from torch.utils.data import DataLoader, TensorDataset

from checkpoints import manifest_of, write_checkpoint
from recorded_run import attached, incident, rollback_plan
from rollback.checkpoints import pins, ring, tiers
from rollback.checkpoints.fast_tier import end_marks, last_snapshot_result, slots
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.config import SamplesFrom, Settings
from rollback.environment import ENV_SUPERVISOR
from rollback.errors import NoUsableCheckpoint, StoppedAsStructural, UsageError
from rollback.facts.ending import GivingUp
from rollback.facts.history import History
from rollback.facts.supervisor import RunEnded
from rollback.facts.training import (
    Advice,
    Answered,
    Blamed,
    Committed,
    Evicted,
    Fact,
    Finished,
    LastSnapshotMade,
    Quarantined,
    Restored,
    SampleQuarantine,
    SkipAdded,
    Stopped,
    Window,
)
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import Journal, read_journal
from rollback.rundir.metrics.metric_lines import metric_line
from rollback.rundir.paths import RunPaths
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder
from rollback.train.data.cursor import cursor_for
from rollback.train.start.start_record import (
    NOT_ON_RECORD,
    evict_what_was_cut_off,
    finish_pending_plan,
    given_too_late,
    healthy_until,
    leave_out_what_is_new,
    left_out_by_order,
    not_on_record,
    put_aside,
    require_a_change,
    require_samples,
    take_over_last_snapshot,
    tell_of_unequal_epochs,
    where_it_goes_on,
)


def settings(*orders: tuple[int, tuple[int, ...]]) -> Settings:
    return Settings(skip_samples=tuple(SamplesFrom(batch=batch, samples=samples) for batch, samples in orders))


def blamed(*samples: int) -> Blamed:
    window = Window(first=8, last=8)
    return Blamed(
        window=window, batch=8, rank=0, step=4, fingerprint="f", error="E: torn", attempts=(1, 2), samples=samples
    )


def in_force(orders: list[SampleQuarantine]) -> list[tuple[int, tuple[int, ...]]]:
    return [(order.batch, order.samples) for order in orders]


AGAIN = [(10, (5,)), (20, ()), (30, (5,))]


def test_a_sample_that_was_left_out_released_and_left_out_again_is_so_from_each_batch_on() -> None:
    assert in_force(left_out_by_order([], settings(*AGAIN), [], 0)) == AGAIN


@pytest.mark.parametrize("batch", [0, 25, 90])
def test_a_later_start_adds_nothing_to_the_same_orders(batch: int) -> None:
    """Wherever the first one began, and whatever an operator has ordered since."""
    recorded = left_out_by_order([], settings(*AGAIN), [blamed(7)], batch)
    recorded.append(
        SampleQuarantine(batch=99, samples=(), added=(), released=(5, 7), who="ann@site", why="mended", request="r")
    )
    assert left_out_by_order(recorded, settings(*AGAIN), [blamed(7)], 120) == []


def test_of_orders_of_which_some_are_on_record_the_others_are_added() -> None:
    recorded = left_out_by_order([], settings(*AGAIN[:2]), [], 0)
    assert in_force(left_out_by_order(recorded, settings(*AGAIN), [], 0)) == AGAIN[2:]


def test_what_the_supervisor_leaves_out_ends_no_order_for_later_batches() -> None:
    recorded = left_out_by_order([], settings((10, (5,)), (20, ())), [], 0)
    new = left_out_by_order(recorded, settings((10, (5,)), (20, ())), [blamed(7)], 2)
    assert in_force(new) == [(8, (7,)), (10, (5, 7)), (20, (7,))]


def test_what_the_supervisor_blames_is_left_out_though_its_last_order_had_to_say_the_same_of_a_later_batch() -> None:
    """Else the sample raises in each attempt to come, and the record calls it left out."""
    orders = settings((10, (5,)), (20, ()))
    recorded = left_out_by_order([], orders, [], 0)
    recorded += left_out_by_order(recorded, orders, [blamed(7)], 2)
    again = blamed(5).model_copy(update={"window": Window(first=25, last=25), "batch": 25, "attempts": (3, 4)})
    assert in_force(left_out_by_order(recorded, orders, [blamed(7), again], 22)) == [(25, (5, 7))]


def test_of_whole_lists_the_one_that_is_given_last_counts_from_its_batch_on() -> None:
    """As a run has them that went back: `--skips-of` gives them in the order in which it had them."""
    lists = [(120, (5,)), (60, (5, 6)), (70, (6,))]
    assert in_force(left_out_by_order([], settings(*lists), [], 0)) == lists


@pytest.mark.parametrize(
    ("first", "last", "late"),
    [(10, 20, "batches 10:20"), (50, 70, "batches 50:59"), (59, 70, "batch 59"), (30, 41, "batches 30:41")],
)
def test_of_a_window_that_is_given_late_it_is_said_what_cannot_be_skipped_any_more(
    first: int, last: int, late: str
) -> None:
    said = given_too_late(Window(first=first, last=last), [Window(first=2, last=4), Window(first=30, last=40)], 60)
    assert f": {late} cannot be skipped any more: " in (said or "")


@pytest.mark.parametrize(("first", "last"), [(60, 70), (30, 35), (30, 40)])
def test_a_window_that_is_still_to_come_or_was_passed_over_is_not_late(first: int, last: int) -> None:
    assert given_too_late(Window(first=first, last=last), [Window(first=30, last=40)], 60) is None


# --- with a run directory ---------------------------------------------------------------------------------------------

C0, C1, C2 = "c000000-s00000000", "c000001-s00000020", "c000002-s00000040"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.ring.mkdir(parents=True)
    return paths


@pytest.fixture
def record(paths: RunPaths) -> Iterator[Recorder]:
    record = Recorder(paths, 2, is_rank_0=True)
    yield record
    record.close()


@pytest.fixture
def tier(paths: RunPaths, tmp_path: Path) -> SlotPaths:
    job = JobIdentity(world_size=2, model=[], optimizer={"class": "AdamW", "groups": [1]}, objects=[], data={})
    identity = new_identity(job)
    write_identity(paths, identity)
    tier = slots.tier_of(tmp_path / "memory", identity.run_id)
    tier.root.parent.parent.mkdir()
    slots.claim(tier, paths.root)
    tiers.point_to_fast_tier(paths, tier)
    return tier


def commit(tier: SlotPaths, number: int, seq: int) -> None:
    tier.slot(number).mkdir()
    slots.commit(tier, number, manifest_of(seq, 20 * seq))


def history_of(paths: RunPaths, *facts: Fact) -> History:
    record = Recorder(paths, 1, is_rank_0=True)
    for fact in facts:
        record.note(fact)
    record.close()
    return fold_journal(paths.train_journal).history


def noted(paths: RunPaths, attempt: int = 2) -> list[Fact]:
    return [entry.fact for entry in read_journal(paths.train_journal).records if entry.attempt == attempt]


def committed(name: str, step: int) -> Committed:
    return Committed(checkpoint=name, step=step, batch=2 * step, timeline=0, bytes=1, seconds=0.1)


def stopped(reason: GivingUp) -> Stopped:
    return Stopped(reason=reason, step=40, batch=80, checkpoint=None, account="three rollbacks did not help")


def test_a_run_that_an_incident_stopped_goes_on_only_where_something_has_changed(paths: RunPaths) -> None:
    before = Settings(sensitivity="low")
    begun = attached(None, 0).model_copy(update={"settings": before.model_dump(mode="json", exclude_defaults=True)})
    history = history_of(paths, begun, stopped("structural"))
    with pytest.raises(StoppedAsStructural, match=r"as structural at step 40, .*: three rollbacks did not help"):
        require_a_change(paths, before, history)
    require_a_change(paths, before, history_of(paths, begun))
    history = history_of(paths, stopped("structural"))
    require_a_change(paths, Settings(sensitivity="high"), history)
    require_a_change(paths, Settings(sensitivity="low", accept_structural=True), history)
    with pytest.raises(StoppedAsStructural):
        require_a_change(paths, Settings(sensitivity="low", overhead=0.02), history)


def test_a_structural_stop_that_the_ranks_journal_could_not_take_is_known_by_the_supervisor_s(paths: RunPaths) -> None:
    """The disk was full when they stopped, and had room again when the supervisor wrote how the run had ended."""
    begun = attached(None, 0).model_copy(update={"settings": {}})
    history, journal = history_of(paths, begun), Journal(paths.supervisor_journal, 1)
    journal.append(RunEnded(exit_code=1, reason="rank 0 raised ValueError"))
    require_a_change(paths, Settings(), history)
    journal.append(RunEnded(exit_code=76, reason="the loss is nan"))
    journal.close()
    with pytest.raises(StoppedAsStructural, match=r"was stopped as structural, .*: the loss is nan"):
        require_a_change(paths, Settings(), history)
    require_a_change(paths, Settings(accept_structural=True), history)
    later = Recorder(paths, 2, is_rank_0=True)
    later.note(begun)
    later.close()
    require_a_change(paths, Settings(), fold_journal(paths.train_journal).history)


def test_for_want_of_a_checkpoint_it_is_said_so(paths: RunPaths) -> None:
    with pytest.raises(NoUsableCheckpoint, match="for want of a good checkpoint at step 40"):
        require_a_change(paths, Settings(), history_of(paths, stopped("no_checkpoint")))


def test_a_request_that_is_open_is_a_change_and_no_stop_is_and_none_that_was_answered(paths: RunPaths) -> None:
    hand_in(paths.root, "stop")
    with pytest.raises(StoppedAsStructural):
        require_a_change(paths, Settings(), history_of(paths, stopped("structural")))
    name = hand_in(paths.root, "skip", skip=(90, 99))
    require_a_change(paths, Settings(), history_of(paths))
    with pytest.raises(StoppedAsStructural):
        require_a_change(paths, Settings(), history_of(paths, Answered(request=name, carried_out=False, text="no")))


def test_where_requests_cannot_be_read_nothing_was_asked_for(paths: RunPaths) -> None:
    paths.requests.write_text("no directory")
    with pytest.raises(StoppedAsStructural):
        require_a_change(paths, Settings(), history_of(paths, stopped("structural")))


def test_samples_that_cannot_be_left_out_are_refused_and_where_other_data_are_accepted_only_those_of_no_data() -> None:
    data_set, stream = cursor_for(DataLoader(TensorDataset(torch.zeros(10)))), cursor_for(iter([1, 2]))
    require_samples(settings(), stream)
    require_samples(settings((0, (9,))), data_set)
    shrunk = settings((0, (10,)))
    with pytest.raises(UsageError, match="has 10 samples, and no sample 10"):
        require_samples(shrunk, data_set)
    accepting = shrunk.model_copy(update={"accept_data_change": True})
    require_samples(accepting, data_set)
    with pytest.raises(UsageError, match="no data set indices"):
        require_samples(accepting, stream)


@pytest.mark.parametrize("supervised", [False, True])
def test_what_the_ranks_have_kept_is_taken_over_with_the_metrics_that_nobody_could_write(
    paths: RunPaths, record: Recorder, tier: SlotPaths, supervised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_SUPERVISOR, "1" if supervised else "")
    marks = end_marks.marks_of(tier)
    end_marks.prepare(marks)
    kept = {"attempt": 1, "reason": "rank 1 has died", "step": 40, "seconds": 0.5}
    line = partial(metric_line, loss=2.0, grad_norm=None, verdict="healthy", attempt=1, timeline=0)
    rows = [line(step=step, batch=step) for step in (38, 39)]
    last_snapshot_result.write_result(
        marks, LastSnapshotResult(rank=0, checkpoint=C2, metrics=tuple(rows), tier="fast", **kept)
    )
    last_snapshot_result.write_result(marks, LastSnapshotResult(rank=1, checkpoint=C1, tier="durable", **kept))
    last_snapshot_result.write_result(marks, LastSnapshotResult(rank=2, checkpoint=None, why_not="no time", **kept))
    take_over_last_snapshot(paths, record.history, manifest_of(2, 40), record)
    assert healthy_until(paths, record.history, manifest_of(2, 40), record) == 2, "they count for what is on probation"
    made = LastSnapshotMade(reason="rank 1 has died", checkpoint=C2, step=40, rank=0, seconds=0.5)
    taken = Committed(checkpoint=C2, step=40, batch=80, timeline=0, bytes=0, seconds=0.5, tier="fast")
    assert noted(paths) == [taken] + ([] if supervised else [made])
    assert paths.metrics.read_text().splitlines() == rows
    take_over_last_snapshot(paths, record.history, manifest_of(2, 40), record)  # it is on record now
    take_over_last_snapshot(paths, record.history, None, record)
    assert len(noted(paths)) == 1 + (not supervised)
    take_over_last_snapshot(paths, record.history, manifest_of(1, 20), record)
    tiers_of = [fact.tier for fact in noted(paths) if isinstance(fact, Committed)]
    assert tiers_of == ["fast", "durable"]


def test_of_what_is_not_on_record_it_is_said_why_it_is_not_gone_on_from(paths: RunPaths) -> None:
    behind = manifest_of(3, 60).model_copy(update={"timeline": 1})
    history = history_of(paths, attached(None, 0))
    found = not_on_record(history, [manifest_of(1, 20), manifest_of(2, 40), behind], {C2})
    assert found == {C2: tiers.PUT_BACK, behind.name: NOT_ON_RECORD}


def test_without_a_tier_nothing_was_kept(paths: RunPaths, record: Recorder) -> None:
    take_over_last_snapshot(paths, record.history, manifest_of(2, 40), record)
    assert noted(paths) == []


def test_what_is_new_is_left_out_and_on_record_once(paths: RunPaths, record: Recorder) -> None:
    ordered = settings((0, (5,))).model_copy(update={"skip": (Window(first=30, last=33),)})
    for _ in range(2):
        history = fold_journal(paths.train_journal).history
        leave_out_what_is_new(history, [blamed(7), blamed()], ordered, 4, record)
        assert history.skip_list == [Window(first=30, last=33), Window(first=8, last=8)]
        assert [order.samples for order in history.quarantine] == [(5,), (5, 7)]
    assert [type(fact) for fact in noted(paths)] == [SampleQuarantine, SampleQuarantine, SkipAdded, SkipAdded]


def test_thousands_of_windows_are_on_disk_with_one_sync(
    paths: RunPaths, record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = tuple(Window(first=first, last=first) for first in range(10, 8010, 2))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    leave_out_what_is_new(History(), [], settings().model_copy(update={"skip": windows}), 4, record)
    assert len(synced) == 1
    assert tuple(fact.window for fact in noted(paths) if isinstance(fact, SkipAdded)) == windows


def test_where_quarantine_is_off_the_window_of_a_blamed_sample_is_skipped(paths: RunPaths, record: Recorder) -> None:
    history = History()
    leave_out_what_is_new(history, [blamed(7)], Settings(quarantine="off"), 4, record)
    assert (history.skip_list, history.quarantine) == ([Window(first=8, last=8)], [])


def test_a_rollback_that_a_crash_cut_off_is_on_record_as_carried_out_by_the_start(
    paths: RunPaths, record: Recorder
) -> None:
    for number in (1, 2, 3):
        record.note(incident(number, 45, 49))
        record.note(rollback_plan(number, C1, 20, (40, 101)))
        if number < 3:
            record.note(Restored(incident=number, checkpoint=C1, step=20, batch=40, steps_lost=30, seconds=0.1,
                                 route="in_process"))  # fmt: skip
    for _ in range(2):  # once
        history = fold_journal(paths.train_journal).history
        finish_pending_plan(history, manifest_of(1, 20), "fast", record)
        assert history.pending is None
    last = noted(paths)[-1]
    assert isinstance(last, Restored)
    assert (last.incident, last.checkpoint, last.steps_lost, last.seconds) == (3, C1, 30, 0.0)
    assert (last.route, last.tier) == ("relaunch", "fast")
    assert len(noted(paths)) == 9


@pytest.mark.parametrize(
    ("found", "newest"), [((C0, C1, C2), None), ((C0, C1), C2), ((C0,), C2), ((C1, C2), None), ((), C2)]
)
def test_where_it_goes_on_is_said_with_what_is_newer_and_gone(
    paths: RunPaths, found: tuple[str, ...], newest: str | None
) -> None:
    history = history_of(paths, committed(C0, 0), committed(C1, 20), committed(C2, 40))
    said = where_it_goes_on(history, manifest_of(1, 20), found)
    lost = f"; the newest checkpoint on record, {newest}, is missing" if newest else ""
    assert said == f"resuming at step 20, batch 40 ({C1}){lost}"


def test_of_what_is_older_and_gone_and_behind_a_plan_nothing_is_said(paths: RunPaths) -> None:
    history = history_of(paths, committed(C0, 0), committed(C1, 20), committed(C2, 40))
    assert "not there" not in where_it_goes_on(history, manifest_of(2, 40), (C2,))
    assert "not there" not in where_it_goes_on(history, manifest_of(2, 40), ())  # from the URL
    plan = rollback_plan(1, C1, 20, (40, 101))
    assert "not there" not in where_it_goes_on(history_of(paths, incident(1, 45, 49), plan), manifest_of(1, 20), (C1,))


def test_a_complete_run_is_said_to_be_complete(paths: RunPaths) -> None:
    end = Finished(step=40, batch=80, checkpoint=C2)
    history = history_of(paths, committed(C1, 20), committed(C2, 40), end)
    complete = f"the run was complete: it ended at step 40 (final state: {C2})"
    assert where_it_goes_on(history, manifest_of(2, 40), (C1, C2)) == complete
    assert where_it_goes_on(history, manifest_of(1, 20), (C1, C2)).startswith("resuming at step 20")
    history = history_of(paths, end.model_copy(update={"by": "early stopping", "left_over": 1}))
    assert ", by early stopping (final" in (said := where_it_goes_on(history, manifest_of(2, 40), (C1, C2)))
    assert said.endswith("; 1 batches behind its last update do not count if it goes on")


def test_what_cannot_be_used_is_put_aside_in_ring_and_slot_and_nothing_else_is(
    paths: RunPaths, record: Recorder, tier: SlotPaths
) -> None:
    write_checkpoint(paths, 1, 20)
    write_checkpoint(paths, 2, 40)
    commit(tier, 0, 2)
    commit(tier, 1, 3)
    commit(tier, 2, 4)
    in_slots = {C2: 0, (only_in_slot := manifest_of(3, 60).name): 1, manifest_of(4, 80).name: 2}
    put_aside(paths, {C2: "torn", only_in_slot: "torn", "c000009-s00000099": "gone"}, in_slots, Ranks(), record)
    assert ring.names(paths) == [C1]
    assert (paths.quarantine / C2).is_dir()
    assert [slots.is_committed(tier, number) for number in range(3)] == [False, False, True]
    assert [fact.checkpoint for fact in noted(paths) if isinstance(fact, Quarantined)] == [
        C2, only_in_slot, "c000009-s00000099",
    ]  # fmt: skip


def test_a_ring_that_does_not_let_go_of_a_checkpoint_keeps_no_slot_from_it(
    paths: RunPaths, record: Recorder, tier: SlotPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a later start, whose record has other rollbacks, finds it there."""
    write_checkpoint(paths, 2, 40)
    commit(tier, 0, 2)
    paths.quarantine.write_text("no directory")
    put_aside(paths, {C2: "torn"}, {C2: 0}, Ranks(), record)
    assert not slots.is_committed(tier, 0)
    assert f"moving checkpoint {C2} to quarantine failed" in capsys.readouterr().err


def test_only_one_rank_puts_aside(paths: RunPaths, record: Recorder, tier: SlotPaths) -> None:
    write_checkpoint(paths, 2, 40)
    commit(tier, 0, 2)
    other = Ranks()
    other.rank, other.on_this_host = 1, [0, 1]
    put_aside(paths, {C2: "torn"}, {C2: 0}, other, record)
    assert ring.names(paths) == [C2]
    assert slots.is_committed(tier, 0)


def test_what_a_plan_has_cut_off_is_evicted_but_for_what_is_pinned_or_stuck(
    paths: RunPaths, record: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    for seq in (1, 2, 3):
        write_checkpoint(paths, seq, 20 * seq)
    pins.pin(paths, C2)
    evict_what_was_cut_off(paths, ["c000009-s00000099", C1, C2, C0], ["c000009-s00000099", C1, C2], record)
    assert "evicting checkpoint c000009-s00000099 failed" in capsys.readouterr().err
    assert [*map(str, ring.names(paths))] == [C2, manifest_of(3, 60).name]
    cut_off = "beyond where the run goes on"
    assert noted(paths) == [
        Evicted(checkpoint=C1, reason=cut_off), Evicted(checkpoint=C0, reason=cut_off, tier="fast")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([10, 10, 9, 9], "the ranks have different numbers of batches in an epoch (9 on rank 2, 10 on rank 0)"),
        ([10, 10], None),
        ([10, None], None),
    ],
)
def test_of_ranks_with_epochs_of_different_lengths_that_is_said_at_the_start(
    paths: RunPaths, record: Recorder, batches: list[int | None], told: str | None
) -> None:
    tell_of_unequal_epochs(batches, record)
    advised = [fact.text for fact in noted(paths) if isinstance(fact, Advice)]
    assert [text.partition(":")[0] for text in advised] == ([] if told is None else [told])
    assert all("Accelerate with even_batches=True" in text for text in advised), (
        "not every loader has a sampler of torch's"
    )
