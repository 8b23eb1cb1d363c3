"""Makes the run directory of a long run with many incidents, in seconds and from a seed, through rollback's own facts.

Only what the ranks and the supervisor would have written is there: no training takes place. One attempt in every
`ATTEMPT` steps, a checkpoint in every `EVERY`, incidents at even distances with a rollback each.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.facts.checkpoints import BecameGood, Committed, Evicted
from rollback.facts.ending import Stopped
from rollback.facts.fact import Fact, Window
from rollback.facts.ring import Drained, LeftDurableRing
from rollback.facts.supervisor import AttemptEnded, AttemptStarted, RestartScheduled, RunEnded
from rollback.facts.training import Attached, Concluded, Incident, PassedOver, Planned, Restored
from rollback.rundir.evidence import BatchKept, NamedNorm, Norms, RankEvidence, StepSeen
from rollback.rundir.heartbeats import Heartbeat, write_heartbeat
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal.journal import GENESIS, journal_line
from rollback.rundir.metrics.metric_lines import metric_line
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.rundir.skip_records import SkippedBatch
from rollback.system.durable import write_file

ATTEMPT = 20_000  # steps: a crash or a maintenance window a few times a week
EVERY = 100  # steps
BACK = 150  # steps from an incident to the checkpoint that it goes back to
SKIPPED = 8  # batches
_STEP = timedelta(seconds=0.3)
_KEPT = 8  # checkpoints in the ring
_DRAINED = 10  # one in so many
_BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class MadeRun:
    """Size of a run."""

    steps: int
    incidents: int
    ranks: int
    shards: int = 1024
    seed: int = 0

    def write(self, root: Path) -> RunPaths:
        """Write it to a directory that does not exist."""
        paths = RunPaths(root)
        for directory in (paths.train_journal.parent, paths.metrics.parent, paths.ring, paths.ranks, paths.skips):
            directory.mkdir(parents=True)
        job = JobIdentity(
            world_size=self.ranks, model=[("weight", "torch.float32", [1])], optimizer={"class": "SGD"}, objects=[],
            data={"kind": "map", "length": 1 << 40, "batch_size": 1},
        )  # fmt: skip
        write_identity(paths, new_identity(job))
        self._journals(paths)
        self._metrics(paths)
        self._small_files(paths)
        return paths

    @property
    def _incident_every(self) -> int:
        return self.steps // self.incidents if self.incidents else self.steps + 1

    def _goes_back(self, step: int) -> int | None:
        """The step to which the run goes back once it has reached `step`."""
        found = step % self._incident_every == self._incident_every - 1 and step > BACK
        return (step - BACK) // EVERY * EVERY if found else None

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """Timeline, first and last step of each stretch."""
        first, timeline = 0, 0
        for step in range(self._incident_every - 1, self.steps, self._incident_every):
            back = self._goes_back(step)
            if back is not None:
                yield timeline, first, step
                first, timeline = back, timeline + 1
        yield timeline, first, self.steps - 1

    def _metrics(self, paths: RunPaths) -> None:
        chance = random.Random(self.seed)
        noise = [chance.gauss(0, 0.05) for _ in range(4096)]
        with paths.metrics.open("w") as file:
            for timeline, first, last in self._stretches():
                for step in range(first, last + 1):
                    loss = 2.0 + 8.0 / (1 + step / 1000) + noise[step & 4095]
                    norm = 1.0 + noise[(step * 7) & 4095]
                    file.write(
                        metric_line(
                            step=step, batch=step, loss=loss * (30 if step == last else 1), grad_norm=norm,
                            verdict="spike" if step == last else "healthy", attempt=1 + step // ATTEMPT,
                            timeline=timeline,
                        ) + "\n"
                    )  # fmt: skip

    def _journals(self, paths: RunPaths) -> None:
        seq, incident, now = -1, 0, timedelta(0)
        place = str(paths.ring)
        known: list[str] = []
        with _Written(paths.train_journal) as train, _Written(paths.supervisor_journal) as supervisor:
            attempt = 0
            for timeline, first, last in self._stretches():
                for step in range(first, last + 1, EVERY):
                    now += _STEP * EVERY
                    at, number = _BEGAN + now, 1 + step // ATTEMPT
                    if number > attempt:
                        if attempt:
                            supervisor.note(_ended(step), attempt, at)
                            supervisor.note(_RESTART, attempt, at)
                        attempt = number
                        supervisor.note(_STARTED, attempt, at)
                        train.note(self._attached(known[-1] if known else None, step), attempt, at)
                    seq += 1
                    name = str(CheckpointName.of(seq, step))
                    known.append(name)
                    train.note(_committed(name, step, timeline), attempt, at)
                    if len(known) > 2:
                        train.note(BecameGood(checkpoint=known[-2], step=CheckpointName(known[-2]).step), attempt, at)
                    if len(known) > _KEPT:
                        train.note(Evicted(checkpoint=known[-_KEPT - 1], reason="full", tier="fast"), attempt, at)
                    if seq % _DRAINED == 0:
                        copied = Drained(checkpoint=name, step=step, place=place, bytes=1, seconds=1)
                        supervisor.note(copied, attempt, at)
                        if seq > _DRAINED * _KEPT:
                            old = known[seq - _DRAINED * _KEPT]
                            gone = LeftDurableRing(checkpoint=old, place=place, reason="thinned")
                            supervisor.note(gone, attempt, at)
                if last != self.steps - 1:
                    incident += 1
                    back = self._goes_back(last)
                    assert back is not None
                    to = next(each for each in reversed(known) if CheckpointName(each).step <= back)
                    for fact in _incident(incident, last, to, timeline):
                        train.note(fact, attempt, _BEGAN + now)
            at = _BEGAN + now
            end = Stopped(reason="preempted", step=self.steps, batch=self.steps, checkpoint=known[-1], account="told")
            train.note(end, attempt, at)
            supervisor.note(_ended(self.steps), attempt, at)
            supervisor.note(RunEnded(exit_code=75, reason="told to stop"), attempt, at)
        for name in known[-_KEPT:]:
            self._checkpoint(paths, CheckpointName(name), attempt, timeline)

    def _attached(self, checkpoint: str | None, step: int) -> Attached:
        return Attached(
            world_size=self.ranks, host="host-0", pid=1, supervised=True, checkpoint=checkpoint, step=step, batch=step,
            torch="2.13", settings={"snapshot_every": EVERY, "keep": _KEPT},
        )  # fmt: skip

    def _checkpoint(self, paths: RunPaths, name: CheckpointName, attempt: int, timeline: int) -> None:
        """Manifest only: no status, audit or report opens a shard."""
        paths.checkpoint(name).mkdir()
        shards = tuple(
            ShardRecord(file=f"rank-{rank:05d}.safetensors", size=8, hash="0" * 32) for rank in range(self.shards)
        )
        manifest = Manifest(
            name=name, seq=name.seq, step=name.step, batch=name.step, epoch=0, timeline=timeline, attempt=attempt,
            created=str(_BEGAN), world_size=self.shards, shards=shards,
        )  # fmt: skip
        (paths.checkpoint(name) / "manifest.json").write_bytes(manifest.to_json())

    def _small_files(self, paths: RunPaths) -> None:
        """Evidence of two ranks of each incident; the skip record and last heartbeat of every rank."""
        ends = [last for _, _, last in self._stretches()][:-1]
        for number, step in enumerate(ends, start=1):
            paths.incident(number).mkdir(parents=True)
            for rank in {0, number % self.ranks}:
                evidence = _evidence(number, rank, step).model_dump_json()
                write_file(paths.evidence(number, rank), evidence.encode(), durable=False)
        record = paths.skip_record(0)
        with record.open("w") as file:
            for step in ends:
                for batch in range(step - SKIPPED + 1, step + 1):
                    line = SkippedBatch(batch=batch, epoch=0, offset=batch, indices=[batch], timeline=1)
                    file.write(line.model_dump_json() + "\n")
        beat = Heartbeat(
            pid=1, host="host-0", attempt=1, step=self.steps, batch=self.steps, doing="leaving", monotonic=1.0,
        )  # fmt: skip
        for rank in range(self.ranks):
            if rank:
                os.link(paths.skip_record(rank // 32_000), paths.skip_record(rank))
            write_heartbeat(paths.heartbeat(rank), beat)


class _Written:
    """A journal that is written in one go, without a sync for each line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._what, self._chain, self._seq = path.stem, GENESIS, 0

    def __enter__(self) -> "_Written":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def note(self, fact: Fact, attempt: int, at: datetime) -> None:
        line, self._chain = journal_line(
            fact, self._seq, at.isoformat(timespec="milliseconds"), attempt, self._chain, self._what
        )
        self._file.write(line)
        self._seq += 1


_STARTED = AttemptStarted(command=("torchrun", "train.py"), host="host-0", pid=1, script="0" * 32, arguments=())
_RESTART = RestartScheduled(delay=0.0, budget_left=3, reason="it had made progress")


def _ended(step: int) -> AttemptEnded:
    return AttemptEnded(status=1, cause="a rank was killed by SIGKILL", step=step, seconds=1.0, why="signal", rank=3)


def _committed(name: str, step: int, timeline: int) -> Committed:
    return Committed(checkpoint=name, step=step, batch=step, timeline=timeline, bytes=1 << 30, seconds=1.0, tier="fast")


def _incident(number: int, step: int, checkpoint: str, timeline: int) -> list[Fact]:
    to = CheckpointName(checkpoint).step
    window = Window(first=step - SKIPPED + 1, last=step)
    return [
        Incident(
            incident=number, verdict="spike", cause="loss", rule="spike", value=60.0, threshold=8.0,
            explanation="the loss is far above its trend", window=(2.0,) * 32, ranks=(number % 64,), onset_step=step,
            onset_batch=step, detection_step=step, detection_batch=step, step=step, timeline=timeline,
        ),
        Planned(
            incident=number, action="rollback", escalation=0, checkpoint=checkpoint, step=to, batch=to, skip=window,
            discards=(), through=step, timeline=timeline + 1, reason="first answer to this trouble",
        ),
        Restored(
            incident=number, checkpoint=checkpoint, step=to, batch=to, steps_lost=step - to, seconds=0.5,
            route="in_process", tier="fast",
        ),
        PassedOver(first=window.first, last=window.last, step=step, timeline=timeline + 1),
        Concluded(incident=number, outcome="recovered", step=step + 50),
    ]  # fmt: skip


def _evidence(number: int, rank: int, step: int) -> RankEvidence:
    norms = Norms(
        tensors=24, total=1.0, largest=[NamedNorm(name="layer.0", norm=1.0)], smallest=[], vanishing=[], exploding={},
        each=[NamedNorm(name=f"layer.{n}", norm=1.0) for n in range(24)],
    )  # fmt: skip
    return RankEvidence(
        incident=number, rank=rank, attempt=1, timeline=number - 1, onset_step=step, detection_step=step, origin=None,
        steps=[StepSeen(step=step, losses=[60.0], grad_norm=1.0, kind=None)], gradients=norms, gradients_step=step,
        weights=norms, nonfinite_buffers=[], batch=BatchKept(step=step, file=None, tensors=[], left_out=[]),
    )  # fmt: skip
