"""How far an attempt had come, of what its ranks have left."""

from pathlib import Path

import pytest

from recorded_run import incident, rollback_plan
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.facts.training import Committed, Restored
from rollback.rundir.heartbeats import Heartbeat, UnrecordedEnd, write_heartbeat
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.evidence import TrainJournal, gather
from rollback.supervisor.diagnosis.outcome import HostOutcome

KEPT = LastSnapshotResult(
    attempt=1, reason="rank 1 is gone", checkpoint=None, step=None, rank=0, seconds=0.1, why_not="no", furthest=12
)


ENDED = UnrecordedEnd(how="complete", why="No space left on device", step=14, batch=14)
"""What the journal did not take: training went on to its end behind the rollback."""


@pytest.mark.parametrize(("kept", "unrecorded", "step"), [(KEPT, None, 12), (None, None, 8), (None, ENDED, 14)])
def test_steps_that_a_rollback_has_undone_are_not_where_an_attempt_stood(
    tmp_path: Path, kept: LastSnapshotResult | None, unrecorded: UnrecordedEnd | None, step: int
) -> None:
    paths = RunPaths(tmp_path)
    journal = Journal(paths.train_journal, 1)
    journal.append(Committed(checkpoint="c000002-s00000016", step=16, batch=16, timeline=0, bytes=1, seconds=0.1))
    journal.append(incident(0, 17, 17))
    journal.append(rollback_plan(0, "c000001-s00000008", 8, (17, 17)))
    journal.append(
        Restored(
            incident=0, checkpoint="c000001-s00000008", step=8, batch=8, steps_lost=10, seconds=0.1, route="in_process"
        )
    )
    journal.close()
    beat = Heartbeat(pid=1, host="h", attempt=1, step=18, batch=17, doing="rewinding", monotonic=1.0)
    write_heartbeat(paths.ranks / "rank-00001.json", beat)
    left = HostOutcome(status=1, kept=kept, unrecorded=unrecorded)
    evidence = gather(paths, TrainJournal(paths.train_journal), 1, left=left, told_to_stop=False)
    assert (evidence.step, evidence.furthest) == (step, 18)
