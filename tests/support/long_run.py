"""The record of a run of any length with any number of incidents, made faster than the writers would."""

import json
import math
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np

from recorded_run import attached, incident, rollback_plan
from rollback.facts.training import (
    BecameGood,
    Committed,
    Concluded,
    Evicted,
    Fact,
    Finished,
    PassedOver,
    Restored,
)
from rollback.rundir.evidence import BatchKept, NamedNorm, Norms, RankEvidence, write_evidence
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal import journal
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.rundir.skip_records import SkippedBatch

START = datetime(2030, 1, 1, tzinfo=timezone.utc)
EVERY, KEEP = 100, 6  # steps between checkpoints; how many stay
BACK, SEEN = 40, 4  # a rollback's reach back from the onset; steps from onset to detection


class LongRun:
    """`steps` steps, a second each, two batches each; incidents evenly spread, the odd ones non-finite."""

    def __init__(self, root: Path, steps: int, incidents: int, name: str = "layers.{}.weight") -> None:
        self.paths = RunPaths(root)
        self.onsets = [round((number + 0.5) * steps / incidents) for number in range(incidents)]
        self._steps, self._name = steps, name
        self._lines: list[str] = []
        self._chain = "0" * 32
        root.mkdir(parents=True)
        for folder in (self.paths.train_journal.parent, self.paths.metrics.parent, self.paths.skips):
            folder.mkdir()
        data: dict[str, Any] = {"kind": "map-style", "length": 10 * steps}
        job = JobIdentity(world_size=2, model=[("w", "F32", [2, 2])], optimizer={}, objects=[], data=data)
        write_identity(self.paths, new_identity(job))
        self._write()

    def _tell(self, seconds: float, fact: Fact) -> None:
        at = (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
        body = {"seq": len(self._lines), "at": at, "attempt": 1, **json.loads(fact.model_dump_json())}
        self._chain = journal._chain(self._chain, body)
        self._lines.append(json.dumps({**body, "chain": self._chain}))

    def _write(self) -> None:
        noise = np.random.default_rng(1).normal(size=self._steps + 1000)
        clock, timeline, metrics = 0.0, 0, []
        self._tell(0, attached(None, 0))
        held: list[str] = []
        skips = [open(self.paths.skip_record(rank), "w") for rank in (0, 1)]  # noqa: SIM115

        def run(first: int, last: int, bad: int | None) -> None:
            nonlocal clock
            for step in range(first, last):
                clock += 1
                if step % EVERY == 0:
                    self._commit(clock, step, timeline, held)
                loss = 2.0 + 8.0 / math.sqrt(1 + step / 50) + 0.05 * noise[step]
                grad = 0.5 + abs(noise[step + 500])
                if bad is not None and step >= bad:
                    odd = bad % 2
                    loss, grad = ('"NaN"', '"Infinity"') if odd and step > bad else (loss * 4, grad * 50)
                verdict = "healthy" if bad is None or step < bad else "watch"
                metrics.append(
                    f'{{"step": {step}, "batch": {2 * step + 1}, "loss": {loss}, "grad_norm": {grad}, '
                    f'"verdict": "{verdict}", "attempt": 1, "timeline": {timeline}}}\n'
                )

        begin = 0
        for number, onset in enumerate(self.onsets):
            seen = onset + SEEN
            run(begin, seen + 1, onset)
            back = (onset - BACK) // EVERY * EVERY
            name = next(each for each in held if each.endswith(f"{back:08d}"))
            value = math.nan if onset % 2 else 9.5
            self._tell(clock, incident(number, onset, seen, timeline=timeline, value=value))
            first, last = 2 * onset, 2 * seen + 21
            self._tell(clock, rollback_plan(number, name, back, (first, last), timeline=timeline + 1))
            self._evidence(number, onset, seen)
            timeline += 1
            back_at = {"checkpoint": name, "step": back, "batch": 2 * back, "seconds": 0.2, "route": "in_process"}
            self._tell(clock, Restored(incident=number, steps_lost=seen + 1 - back, **back_at))
            self._tell(clock + 1, PassedOver(first=first, last=last, step=onset, timeline=timeline))
            for rank, file in enumerate(skips):
                for batch in range(first, last + 1):
                    indices = [100 * batch + 10 * rank + place for place in range(4)]
                    file.write(
                        SkippedBatch(
                            batch=batch, epoch=0, offset=batch, indices=indices, timeline=timeline
                        ).model_dump_json()
                        + "\n"
                    )
            self._tell(clock + 2, Concluded(incident=number, outcome="recovered", step=seen + 50))
            begin = back
        run(begin, self._steps, None)
        self._tell(clock, Finished(step=self._steps, batch=2 * self._steps))
        for file in skips:
            file.close()
        self.paths.metrics.write_text("".join(metrics))
        self.paths.train_journal.write_text("\n".join(self._lines) + "\n")

    def _commit(self, clock: float, step: int, timeline: int, held: list[str]) -> None:
        name = CheckpointName.of(len(self._lines), step)
        self._tell(
            clock,
            Committed(checkpoint=name, step=step, batch=2 * step, timeline=timeline, bytes=1 << 30, seconds=0.5),
        )
        self._tell(clock, BecameGood(checkpoint=name, step=step))
        held.append(name)
        if len(held) > KEEP:
            self._tell(clock, Evicted(checkpoint=held.pop(0), reason="superseded"))

    def _evidence(self, number: int, onset: int, seen: int) -> None:
        each = [NamedNorm(name=self._name.format(layer), norm=1.5**layer) for layer in range(30)]
        norms = Norms(
            tensors=30, total=1e6, largest=each[::-1][:5], smallest=each[:5], vanishing=[],
            exploding={"large": [self._name.format(29)]}, each=each,
        )  # fmt: skip
        self.paths.incident(number).mkdir(parents=True)
        write_evidence(
            self.paths.evidence(number, 0),
            RankEvidence(
                incident=number, rank=0, attempt=1, timeline=number, onset_step=onset, detection_step=seen, origin=None,
                steps=[], gradients=norms, gradients_step=onset, weights=norms, nonfinite_buffers=[],
                batch=BatchKept(step=onset, file=None, tensors=[], left_out=[]),
            ),
        )  # fmt: skip
