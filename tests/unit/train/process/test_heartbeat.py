"""What a rank tells of itself from its first heartbeat on."""

from pathlib import Path
from typing import Any

import pytest
from toy import Toy, train

import rollback
from rollback.rundir.heartbeats import Heartbeat
from rollback.train.process.heartbeat import HeartbeatWriter


def test_a_rank_that_resumes_has_never_been_at_another_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came there from step 0 would seem to have trained: the supervisor prepares the next attempt then, beside
    the first step of this one, and takes its time for that of some steps."""

    class Over(Exception):
        pass

    def leave(guard: rollback.Guard | None, position: int) -> None:
        if position == 9:
            raise Over

    toy, ordinary = Toy(samples=60).with_settings(snapshot_every=4, last_snapshot="off"), HeartbeatWriter._beat
    with pytest.raises(Over):
        train(toy, tmp_path / "run", hook=leave)
    beats: list[Heartbeat] = []

    def noted(self: Any) -> Heartbeat:
        beats.append(ordinary(self))
        return beats[-1]

    monkeypatch.setattr(HeartbeatWriter, "_beat", noted)
    begun: list[int] = []
    train(toy, tmp_path / "run", hook=lambda _, position: begun.append(position))
    assert begun[0] > 0
    assert {(beat.step, beat.batch) for beat in beats if beat.doing == "attaching"} == {(begun[0], begun[0])}
