"""The table that moves the snapshot in flight, and what ranks write each other about it."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import manifest_of
from rollback.checkpoints.format.shard import Written
from rollback.train.snapshots.in_flight import (
    TRANSITIONS,
    ShardReport,
    ShardReports,
    SnapshotEvent,
    SnapshotInFlight,
    SnapshotStage,
)

WRITING, WRITTEN, TELLING, COMMITTING, COMMITTED, WAITING, FAILED, ENDED = SnapshotStage
DONE, FAULT, ALL_WRITTEN, TO_COMMIT, OTHERS_COMMIT, ALL_COMMITTED, REFUSED = SnapshotEvent

LEADS_TO = {
    WRITING: {DONE: WRITTEN, FAULT: FAILED, REFUSED: ENDED},
    WRITTEN: {ALL_WRITTEN: TELLING, REFUSED: ENDED},
    TELLING: {TO_COMMIT: COMMITTING, OTHERS_COMMIT: WAITING, REFUSED: ENDED},
    COMMITTING: {DONE: COMMITTED, FAULT: FAILED, REFUSED: ENDED},
    COMMITTED: {ALL_COMMITTED: ENDED, REFUSED: ENDED},
    WAITING: {ALL_COMMITTED: ENDED, REFUSED: ENDED},
    FAILED: {REFUSED: ENDED},
    ENDED: {},
}


def in_flight(stage: SnapshotStage = WRITING) -> SnapshotInFlight:
    return SnapshotInFlight(manifest_of(1, 10), None, 0.0, stage)


@pytest.mark.parametrize(("stage", "event"), list(product(SnapshotStage, SnapshotEvent)), ids=lambda item: item.value)
def test_each_event_moves_each_stage_as_the_table_says_or_is_refused(
    stage: SnapshotStage, event: SnapshotEvent
) -> None:
    flight = in_flight(stage)
    if event in LEADS_TO[stage]:
        flight.move(event)
        assert flight.stage is LEADS_TO[stage][event]
    else:
        with pytest.raises(KeyError):
            flight.move(event)
        assert flight.stage is stage, "what is refused moves nothing"


def test_whatever_stage_a_rank_is_in_the_others_can_end_its_snapshot() -> None:
    assert {stage for stage, event in TRANSITIONS if event is REFUSED} == set(SnapshotStage) - {ENDED}


def test_no_rank_lands_a_snapshot_of_which_its_own_part_has_failed() -> None:
    assert (FAILED, ALL_COMMITTED) not in TRANSITIONS


def test_a_snapshot_that_fails_knows_why_and_waits_for_its_thread_no_more() -> None:
    flight = in_flight()
    assert flight.thread_works
    flight.fail("the disk is full")
    assert (flight.stage, str(flight.fault), flight.thread_works) == (FAILED, "the disk is full", False)


@given(st.integers(8, 2**50), st.binary(min_size=16, max_size=16), st.integers(0, 2**52 - 1), st.integers(0, 9))
def test_a_shard_report_arrives_as_it_was_written(size: int, digest: bytes, parameters: int, nonfinite: int) -> None:
    report = ShardReport(Written(size, digest.hex()), parameters, nonfinite)
    assert all(0 <= word < 2**53 for word in report.words())
    reports = ShardReports(torch.tensor([report.words(), report.words()]))
    assert [shard.written for shard in reports.shards()] == [report.written] * 2
    assert (reports.digests.tolist(), reports.nonfinite.tolist()) == ([parameters] * 2, [nonfinite] * 2)
