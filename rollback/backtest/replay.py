"""Run the sentinel over a log as it is, or over many, and ask the policy what it would have answered.

The log goes on whatever is called: nothing is rewound, so the sentinel runs on over what a real run would have undone.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollback import policy
from rollback.backtest.columns import Columns, Overrides, find_columns, observations
from rollback.backtest.table import read_table
from rollback.checkpoints.retention import choose_evictions
from rollback.config import FIRST_PACE, Settings
from rollback.errors import RollbackError, UsageError
from rollback.facts.training import Incident, Planned
from rollback.rundir.paths import CheckpointName
from rollback.sentinel import Blip, Kind, Observation, Sentinel, Verdict
from rollback.sentinel.probe import OpenQuestion
from rollback.system.cgroups import cores_here
from rollback.system.files import size_of
from rollback.system.lines import json_number

SCHEMA = 1
_WORTH_A_POOL = 4 << 20
"""Bytes of logs from which on starting processes pays."""
_FOLLOWED = 1 << 14
"""Checkpoints before a call that are taken, and thinned, one by one. Of those before them hardly one would be left, and
a column that counts samples or tokens has billions of steps."""


@dataclass(frozen=True)
class Judged:
    """What the sentinel said of a log."""

    calls: list[Verdict]
    """Every verdict that demands action."""
    blips: list[Blip]
    """Every excursion that was left alone."""
    advice: list[Verdict]
    """What would have been called if the loss measured progress."""
    questions: list[tuple[int, OpenQuestion]]
    """Steps at which a job would have asked its model, and about what."""


@dataclass(frozen=True)
class Replay(Judged):
    """What would have happened on one log."""

    path: Path
    columns: Columns
    observations: list[Observation]
    plan: list[Planned]
    assumed: list[str]
    """What was assumed to read the log so, in words."""

    def to_json(self) -> dict[str, Any]:
        """The result as documented in docs/sentinel.md; JSON types only, numbers that are not finite as strings."""
        return {
            "schema": SCHEMA,
            "log": str(self.path),
            "observations": len(self.observations),
            "first_step": self.observations[0].step,
            "last_step": self.observations[-1].step,
            "columns": {name: column for name, column in vars(self.columns).items() if column is not None},
            "assumed": self.assumed,
            "calls": [_call(verdict) for verdict in self.calls],
            "blips": [_blip(blip) for blip in self.blips],
            "advice": [
                {"onset": verdict.onset, "step": verdict.step, "rule": verdict.rule, "text": verdict.advice}
                for verdict in self.advice
            ],
            "plan": [_planned(planned) for planned in self.plan],
            "probes": [
                {"step": step, "onset": about.onset, "level": json_number(about.level), "now": json_number(about.now)}
                for step, about in self.questions
            ],
        }


def replay(path: Path, overrides: Overrides, settings: Settings) -> Replay:
    """Read a log and run the sentinel over it. Raises UsageError if it cannot be read or has no loss."""
    table = read_table(path)
    columns = find_columns(path, table, overrides)
    seen, assumed = observations(path, table, columns)
    judged = judge(seen, Sentinel(settings.sensitivity, settings.objective))
    planned = plans(judged.calls, seen, settings)
    return Replay(**vars(judged), path=path, columns=columns, observations=seen, plan=planned, assumed=assumed)


def replay_all(paths: list[Path], overrides: Overrides, settings: Settings) -> Iterator[Replay | UsageError]:
    """The result for each log, or why there is none, in the order of the logs; over all processors where it pays."""
    work = partial(_replay_or_error, overrides=overrides, settings=settings)
    processors = cores_here()
    if processors > 1 and len(paths) > 1 and sum(map(size_of, paths)) > _WORTH_A_POOL:
        try:
            with ProcessPoolExecutor(min(processors, len(paths))) as pool:
                yield from pool.map(work, paths, chunksize=max(1, min(16, len(paths) // processors)))
        except BrokenProcessPool as error:
            raise RollbackError(
                "replaying logs: a process that does was killed, most likely for want of memory",
                hint="replay fewer of them, or the largest ones by themselves",
            ) from error
    else:
        yield from map(work, paths)


def _replay_or_error(path: Path, overrides: Overrides, settings: Settings) -> Replay | UsageError:
    try:
        return replay(path, overrides, settings)
    except UsageError as error:
        return error


def judge(seen: list[Observation], sentinel: Sentinel) -> Judged:
    """A stretch of non-finite steps is one call: the guard would have acted on the first.

    A log has no model to ask, so every question stays open, as if the model had given no clear answer.
    """
    calls: list[Verdict] = []
    blips: list[Blip] = []
    advice: list[Verdict] = []
    questions: list[tuple[int, OpenQuestion]] = []
    was_nonfinite = False
    for observation in seen:
        verdict = sentinel.update(observation)
        nonfinite = verdict.kind is Kind.NONFINITE
        if verdict.kind is Kind.SPIKE or (nonfinite and not was_nonfinite):
            calls.append(verdict)
        if verdict.ended is not None:
            blips.append(verdict.ended)
        if verdict.advice:
            advice.append(verdict)
        was_nonfinite = nonfinite
        if (question := sentinel.question(observation.step)) is not None:
            questions.append((observation.step, question))
            sentinel.asked(observation.step)
    return Judged(calls, blips, advice, questions)


def plans(calls: list[Verdict], seen: list[Observation], settings: Settings) -> list[Planned]:
    """The policy's answer to each call, with checkpoints where the settings would have put them.

    One batch a step is assumed. A checkpoint is good when it was `probation` steps old without a call; the state before
    the first step is good as it is, as in a run.
    """
    answers: list[Planned] = []
    carried_out: Planned | None = None
    first_step, logged = seen[0].step, {observation.step for observation in seen}
    last_detection, ring = first_step - 1, _Ring(0 if _begins_with_its_run(seen) else first_step, settings)
    for number, verdict in enumerate(calls):
        # Where the log has no line for the step before, that one's loss may have been the first that was not finite.
        in_hand = verdict.witness == "loss" and verdict.onset == verdict.step and verdict.step - 1 in logged
        incident = _incident(number, verdict, in_hand=in_hand and verdict.kind is Kind.NONFINITE)
        answer = policy.plan(incident, carried_out, ring.at(verdict.step, last_detection), settings)
        answers.append(answer)
        if answer.goes_back:
            carried_out = answer
        last_detection = verdict.step
    return answers


def _begins_with_its_run(seen: list[Observation]) -> bool:
    """Whether no line is missing in front: many loggers count from 1, or write the first line after some steps."""
    apart = seen[1].step - seen[0].step if len(seen) > 1 else 0
    return seen[0].step <= max(1, apart)


class _Ring:
    """The checkpoints that a run with these settings would hold, as its steps go by."""

    def __init__(self, first_step: int, settings: Settings) -> None:
        self._every = FIRST_PACE if settings.snapshot_every == "auto" else settings.snapshot_every
        self._keep, self._probation = settings.keep, settings.probation
        self._next = -(-first_step // self._every) * self._every if self._every else sys.maxsize
        self._taken = 0
        self._held: list[CheckpointName] = []

    def at(self, step: int, last_detection: int) -> list[policy.PolicyCheckpoint]:
        """Those that are held when `step` is judged. Call it with rising steps. last_detection: the last one before."""
        self._next += max(0, (step - self._next) // (self._every or 1) - _FOLLOWED) * self._every
        while self._next < step:
            self._held.append(CheckpointName.of(self._taken, self._next))
            good = [name for name in self._held if self._is_good(name, self._next, last_detection)]
            for name, _ in choose_evictions(self._held, good, (), self._keep):
                self._held.remove(CheckpointName(name))
            self._taken, self._next = self._taken + 1, self._next + self._every
        return [
            policy.PolicyCheckpoint(name, name.step, name.step, self._is_good(name, step, last_detection))
            for name in self._held
        ]

    def _is_good(self, name: CheckpointName, now: int, last_detection: int) -> bool:
        if name.step == 0:
            return True
        proved = name.step + self._probation
        return proved <= now and not name.step <= last_detection < proved


def _incident(number: int, verdict: Verdict, *, in_hand: bool) -> Incident:
    onset = max(0, verdict.onset if verdict.onset is not None else verdict.step)
    return Incident(
        incident=number,
        verdict="spike" if verdict.kind is Kind.SPIKE else "nonfinite",
        cause=verdict.rule,
        rule=verdict.rule,
        value=verdict.value,
        threshold=verdict.threshold,
        explanation=verdict.explanation,
        window=verdict.window,
        ranks=(),
        onset_step=onset,
        onset_batch=onset,
        detection_step=max(0, verdict.step),
        detection_batch=max(0, verdict.step),
        step=max(0, verdict.step),
        timeline=0,
        in_hand=in_hand,
    )


def _call(verdict: Verdict) -> dict[str, Any]:
    return {
        "onset": verdict.onset,
        "detected": verdict.step,
        "verdict": verdict.kind.value,
        "rule": verdict.rule,
        "witness": verdict.witness,
        "value": json_number(verdict.value),
        "threshold": json_number(verdict.threshold),
        "explanation": verdict.explanation,
    }


def _blip(blip: Blip) -> dict[str, Any]:
    return {**asdict(blip), "peak": json_number(blip.peak), "threshold": json_number(blip.threshold)}


def _planned(planned: Planned) -> dict[str, Any]:
    return {
        "call": planned.incident,
        "action": planned.action,
        "restore": planned.step,
        "skip": [planned.skip.first, planned.skip.last] if planned.skip else None,
        "escalation": planned.escalation,
        "reason": planned.reason,
    }
