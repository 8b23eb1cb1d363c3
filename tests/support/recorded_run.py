"""A run directory as a run would leave it, written by the real writers with a clock that the test winds."""

import json
import os
import socket
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from rollback.facts.training import (
    Attached,
    AttemptEnded,
    AttemptStarted,
    BecameGood,
    Committed,
    Concluded,
    Fact,
    Finished,
    Incident,
    Noticed,
    PassedOver,
    Planned,
    RestartScheduled,
    Restored,
    RunEnded,
    Stopped,
    Window,
)
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal import journal
from rollback.rundir.journal.journal import Journal
from rollback.rundir.metrics.metric_lines import Metric, metric_line
from rollback.rundir.paths import RunPaths
from rollback.rundir.skip_records import SkippedBatch
from rollback.system.lines import LineWriter
from rollback.system.processes import start_of

START = datetime(2030, 1, 1, tzinfo=timezone.utc)


def incident(number: int, onset: int, detected: int, *, timeline: int = 0, **changed: Any) -> Incident:
    """An incident of a run that has two batches in a step."""
    fields: dict[str, Any] = {
        "incident": number, "verdict": "spike", "cause": "loss", "rule": "loss-level", "value": 6.5,
        "threshold": 3.25, "explanation": f"loss 6.5 at step {detected}", "window": (2.5, 2.25), "ranks": (1,),
        "onset_step": onset, "onset_batch": 2 * onset, "detection_step": detected, "detection_batch": 2 * detected + 1,
        "step": detected + 1, "timeline": timeline,
    }  # fmt: skip
    return Incident(**{**fields, **changed})


def rollback_plan(number: int, checkpoint: str, step: int, skip: tuple[int, int] | None, **changed: Any) -> Planned:
    fields: dict[str, Any] = {
        "incident": number, "action": "rollback", "escalation": 0, "checkpoint": checkpoint, "step": step,
        "batch": 2 * step, "skip": Window(first=skip[0], last=skip[1]) if skip else None, "discards": (),
        "through": 2 * step + 19, "timeline": 1, "reason": "first answer to this trouble",
    }  # fmt: skip
    return Planned(**{**fields, **changed})


class RecordedRun:
    """Writes a run directory line by line. `at` is seconds since the run's start; every fact is stamped with it.

    ahead: seconds by which the clock of rank 0's host is ahead of the supervisor's.
    """

    _ahead = 0.0

    def __init__(self, root: Path, monkeypatch: Any, *, world_size: int = 2, ahead: float = 0.0) -> None:
        self.paths = RunPaths(root)
        self.at = 0.0
        self._ahead = ahead
        self._monkeypatch = monkeypatch
        clock = self

        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return START + timedelta(seconds=clock.at)

        monkeypatch.setattr(journal, "datetime", Clock)
        root.mkdir(parents=True, exist_ok=True)
        job = JobIdentity(
            world_size=world_size,
            model=[("w", "F32", [2, 2])],
            optimizer={"class": "AdamW", "groups": [1]},
            objects=[],
            data={"kind": "map-style", "length": 1000},
        )
        write_identity(self.paths, new_identity(job))

    def tell(self, at: float, fact: Fact, attempt: int = 1) -> None:
        """Append a fact to the journal it belongs to."""
        self.at = at + (self._ahead if fact.writer == "train" else 0.0)
        path = self.paths.train_journal if fact.writer == "train" else self.paths.supervisor_journal
        writer = Journal(path, attempt)
        writer.append(fact)
        writer.close()

    def attach(self, at: float, attempt: int, checkpoint: str | None, step: int) -> None:
        self.tell(at, attached(checkpoint, step), attempt)

    def commit(
        self, at: float, name: str, step: int, *, attempt: int = 1, timeline: int = 0, good: bool = True
    ) -> None:
        """A checkpoint that took half a second to write, and became good at once."""
        fact = Committed(checkpoint=name, step=step, batch=2 * step, timeline=timeline, bytes=4096, seconds=0.5)
        self.tell(at + 0.5, fact, attempt)
        if good:
            self.tell(at + 0.5, BecameGood(checkpoint=name, step=step), attempt)

    def judge(self, first: int, last: int, *, attempt: int = 1, timeline: int = 0) -> None:
        writer = LineWriter(self.paths.metrics)
        for step in range(first, last + 1):
            line = Metric(
                step=step,
                batch=2 * step + 1,
                loss=2.5,
                grad_norm=1.0,
                verdict="healthy",
                attempt=attempt,
                timeline=timeline,
            )
            writer.write(metric_line(**dict(line)))
        writer.flush()
        writer.close()

    def pass_over(
        self, at: float, first: int, last: int, *, attempt: int = 1, timeline: int = 1, ranks: int = 2
    ) -> None:
        """Skip records of both ranks, four samples a batch, then the journal's line."""
        for rank in range(ranks):
            writer = LineWriter(self.paths.skip_record(rank))
            for batch in range(first, last + 1):
                indices = [100 * batch + 10 * rank + place for place in range(4)]
                skipped = SkippedBatch(batch=batch, epoch=0, offset=batch, indices=indices, timeline=timeline)
                writer.write(skipped.model_dump_json())
            writer.flush()
            writer.close()
        self.tell(at, PassedOver(first=first, last=last, step=first // 2, timeline=timeline), attempt)


def attached(checkpoint: str | None, step: int, *, supervised: bool = True) -> Attached:
    return Attached(
        world_size=2,
        host="node1",
        pid=4242,
        supervised=supervised,
        checkpoint=checkpoint,
        step=step,
        batch=2 * step,
        torch="2.10.0",
        settings={"policy": "balanced"},
    )


def stopped_by_themselves(root: Path, monkeypatch: Any) -> RecordedRun:
    """A supervisor began its attempt, the ranks saved and stopped, and the supervisor has recorded no end of it."""
    run = RecordedRun(root, monkeypatch)
    run.tell(0, AttemptStarted(command=("torchrun",), host="node1", pid=1))
    run.attach(1, 1, None, 0)
    run.commit(20, "c000001-s00000020", 20)
    run.judge(0, 19)
    stop = Stopped(reason="preempted", step=20, batch=40, checkpoint="c000001-s00000020", account="told to stop")
    run.tell(21, stop)
    return run


def hold(paths: RunPaths, *, alive: bool, host: str = "") -> None:
    """Say that this process holds the run directory, or, not alive, one that had its pid before and was killed.

    host: another one on which it runs."""
    start = start_of(os.getpid())
    holder = {"pid": os.getpid(), "start": start, "host": host or socket.gethostname(), "role": "supervisor"}
    paths.holder.write_text(json.dumps(holder if alive else {**holder, "start": "1@another boot"}))


def eventful_run(root: Path, monkeypatch: Any, *, ahead: float = 0.0) -> RecordedRun:
    """A trouble that comes back and is widened, a death, a trouble that recovers, a blip, the end.

    One step a second. Batches 2k and 2k+1 belong to step k.
    """
    run = RecordedRun(root, monkeypatch, ahead=ahead)
    c0, c1, c2, c3 = "c000000-s00000000", "c000001-s00000020", "c000002-s00000040", "c000003-s00000060"
    run.tell(0, AttemptStarted(command=("torchrun", "train.py"), host="node1", pid=4000))
    run.attach(2, 1, None, 0)
    run.commit(2, c0, 0)
    run.commit(22, c1, 20)
    run.commit(42, c2, 40)
    run.judge(0, 49)
    # step 49 at 52 s: first answer, back to step 40
    run.tell(52, incident(1, 45, 49))
    run.tell(52, rollback_plan(1, c2, 40, (80, 101)))
    run.tell(53, Restored(incident=1, checkpoint=c2, step=40, batch=80, steps_lost=10, seconds=0.5, route="in_process"))
    run.pass_over(53, 80, 101)
    run.judge(40, 49, timeline=1)
    # ten steps on: the same again, back to step 20 and twice as far
    run.tell(63, Concluded(incident=1, outcome="repeated", step=50))
    run.tell(63, incident(2, 46, 49, timeline=1))
    run.tell(63, rollback_plan(2, c1, 20, (40, 103), escalation=1, discards=(c2,), timeline=2, reason="it came back"))
    run.tell(64, Restored(incident=2, checkpoint=c1, step=20, batch=40, steps_lost=30, seconds=0.5, route="in_process"))
    run.pass_over(64, 40, 103, timeline=2)
    run.judge(20, 69, timeline=2)
    run.commit(104, c3, 60, timeline=2)
    noticed = Noticed(
        first_step=65, last_step=66, peak=4.0, threshold=3.25, rule="loss-level", fate="back after 2 steps"
    )
    run.tell(113, noticed)
    # killed at 114 s with 70 steps done; up again at 124 s
    run.tell(114, AttemptEnded(status=1, cause="rank 1 was killed by signal 9", step=70, seconds=114.0))
    run.tell(114, RestartScheduled(delay=1.0, budget_left=2, reason="a rank died"))
    run.tell(115, AttemptStarted(command=("torchrun", "train.py"), host="node1", pid=5000), 2)
    run.attach(124, 2, c3, 60)
    run.judge(60, 99, attempt=2, timeline=2)
    run.tell(144, Concluded(incident=2, outcome="recovered", step=80), 2)
    run.tell(164, Finished(step=100, batch=200), 2)
    run.tell(165, AttemptEnded(status=0, cause="finished", step=100, seconds=50.0), 2)
    run.tell(165, RunEnded(exit_code=0, reason="finished"), 2)
    return run
