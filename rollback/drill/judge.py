"""What became of a fault: a pure function of what the runs left.

A row passes where what the table of faults expects has happened. Its words say what was seen, not what was hoped for.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from rollback.drill.faults import Expected, PlannedFault
from rollback.drill.trials import Trial, mean_loss
from rollback.errors import ExitCode
from rollback.inspect.audit.report import AttemptEntry, CheckpointEntry, IncidentEntry
from rollback.inspect.document import ReportItem
from rollback.rundir.exercise import FaultName

Bitwise = Literal["yes", "no", "cannot be told", "not compared"]
_HARMLESS = 0.05  # share of the undisturbed loss by which a harmless fault's may differ, or its noise if that is more
# Where these differ between two undisturbed runs the job is not deterministic; a random stream that was never seeded
# and never drawn from does not make it so.
_ESSENTIAL = {"end", "model", "buffers", "optimizer", "objects", "data"}
_NO_LOSS = "the guard was never told a loss: does the script call guard.observe(loss)?"
_NEVER_STRUCK = {
    "nan-loss": "the model that the guard holds was not called in that update, or gave no floating-point tensor",
    "corrupt-batch": "the batches hold no tensors",
    "weight-bit": "the model has no floating-point weights",
}


class DrillRow(ReportItem):
    fault: FaultName
    says: str = Field(description="what the fault is")
    passed: bool
    skipped: bool = Field(False, description="the job cannot have this fault; counts as passed")
    struck: str | None = Field(None, description="what was done, and to which update")
    caught: str | None = Field(None, description="by what it was noticed; null: it was not")
    caught_after_steps: int | None = None
    caught_after_seconds: float | None = None
    recovered: str | None = Field(None, description="how the run went on")
    bitwise: Bitwise = "not compared"
    differs: list[str] = Field(default_factory=list, description="parts of the end state that differ, by rank")
    steps_replayed: int | None = None
    batches_skipped: int | None = None
    seconds: float | None = Field(None, description="of the whole run")
    why: str | None = Field(None, description="why the row does not pass, or what to know of one that does")

    def having(self, **changed: Any) -> "DrillRow":
        """The same with these values in place of its own."""
        return self.model_copy(update=changed)


Difference = tuple[int, str]
"""A rank, and a part of the state that it ended with; the part `end` is where it ended."""


@dataclass(frozen=True)
class Comparison:
    """The end state beside that of a run that nothing befell, with the same skip list. why: what to know of it."""

    bitwise: Bitwise
    differs: list[str]
    why: str | None = None


def differences(trial: Trial, reference: Trial) -> set[Difference]:
    found: set[Difference] = set()
    others = {end.rank: end for end in reference.ends}
    for end in trial.ends:
        other = others.get(end.rank)
        if other is None or (other.step, other.batch) != (end.step, end.batch):
            found.add((end.rank, "end"))
        else:
            names = end.parts.keys() | other.parts.keys()
            found |= {(end.rank, name) for name in names if end.parts.get(name) != other.parts.get(name)}
    return found


def compare(differs: set[Difference], anyway: set[Difference]) -> Comparison:
    """What differences between a run and its reference mean. anyway: those between two undisturbed runs."""
    own = differs - anyway
    if _ESSENTIAL & {part for _, part in (anyway if own else differs)}:
        return Comparison("cannot be told", listed(differs), f"two undisturbed runs differ too: {parts(anyway)}")
    if own:
        return Comparison("no", listed(own))
    return Comparison("yes", [])


def listed(differs: set[Difference]) -> list[str]:
    """By rank: `rank 1: optimizer, random/torch`."""
    ranks = sorted({rank for rank, _ in differs})
    return [f"rank {rank}: {', '.join(sorted(part for of, part in differs if of == rank))}" for rank in ranks]


def parts(differs: set[Difference]) -> str:
    return ", ".join(sorted({part for _, part in differs}))


def judge(fault: PlannedFault, trial: Trial, undisturbed: Trial, comparison: Comparison | None) -> DrillRow:
    """The row of a fault. comparison: None where there is nothing to compare with, or nothing that can be compared."""
    totals = trial.audit.totals if trial.audit else None
    row = DrillRow(
        fault=fault.name, says=fault.says, passed=False, seconds=round(trial.seconds, 1),
        steps_replayed=totals.steps_lost if totals else None,
        batches_skipped=totals.skipped_batches if totals else None,
    )  # fmt: skip
    struck = next(iter(trial.injected), None)
    if struck is None:
        never = (
            "the job did not get that far" if trial.audit is None else _NEVER_STRUCK.get(fault.name, "it never came")
        )
        return row.having(why=f"it could not be made to happen: {never}{_unless_well(trial)}")
    row = row.having(struck=f"step {struck.step}: {struck.what}")
    if trial.audit is None:  # what became of it is not known
        return row.having(why=f"its record cannot be read{_unless_well(trial)}")
    if comparison is not None:
        row = row.having(bitwise=comparison.bitwise, differs=comparison.differs)
    row = _SEE[fault.expected](row, fault, trial, undisturbed)
    why = row.why
    if why is None and comparison is not None and comparison.bitwise == "no":
        why = f"the end state is not that of an undisturbed run: {'; '.join(comparison.differs)}"
    # A state that is not the same on all ranks is never kept, so the run cannot end as one that is complete.
    if why is None and not trial.ended_well and (fault.expected is not Expected.FOUND or trial.overdue):
        why = f"the run did not end well{_unless_well(trial)}"
    remark = why or (comparison.why if comparison else None)
    return row.having(passed=why is None, why=remark)


def _see_incident(row: DrillRow, fault: PlannedFault, trial: Trial, undisturbed: Trial) -> DrillRow:
    incident = _first_incident(trial)
    if incident is not None:
        row = _caught(row, trial, f"{incident.rule}: {incident.explanation}", incident.detection.step, incident.at)
        if incident.restored is not None:
            back = f"back at step {incident.restored.step} in {incident.restored.seconds:.2f} s"
            row = row.having(recovered=back)
    if not trial.told_a_loss:
        return row.having(why=_NO_LOSS)
    if incident is not None:
        return row if row.recovered else row.having(why=f"nothing was restored{_unless_well(trial)}")
    if fault.expected is Expected.CAUGHT_OR_HARMLESS and (harmless := _harmless(trial, undisturbed)):
        return row.having(recovered=f"left alone, rightly: {harmless}")
    traces = ", and the loss is not what it would have been" if trial.ended_well else _unless_well(trial)
    return row.having(why=f"it was not noticed{traces}")


def _see_relaunch(row: DrillRow, fault: PlannedFault, trial: Trial, undisturbed: Trial) -> DrillRow:
    attempts = trial.attempts
    if trial.overdue and len(attempts) < 2:
        return row.having(why=f"it was not noticed for {trial.seconds:.0f} s; the drill ended the run")
    if len(attempts) < 2:
        return row.having(why=f"there was no second attempt{_unless_well(trial)}")
    first, second = attempts[0], attempts[1]
    row = _caught(row, trial, first.cause or "the attempt ended without a word", None, first.ended_at)
    if second.begins is None:
        return row.having(why=f"the second attempt did not begin to train{_unless_well(trial)}")
    # The record may not know: a killed rank takes its last second of metrics along.
    replayed = max(0, trial.injected[0].step - second.begins.step)
    return row.having(recovered=_begins(second), steps_replayed=replayed)


def _see_stop(row: DrillRow, fault: PlannedFault, trial: Trial, undisturbed: Trial) -> DrillRow:
    attempts = trial.attempts
    if trial.codes[0] != ExitCode.RESUMABLE:
        return row.having(why=f"it exited with {trial.codes[0]} and not with 75{_unless_well(trial)}")
    first = attempts[0]
    row = _caught(row, trial, f"stopped together at step {first.reached}, exit 75", first.reached, first.ended_at)
    if len(attempts) < 2 or attempts[1].begins is None:
        return row.having(why=f"the next launch did not go on{_unless_well(trial)}")
    return row.having(recovered=_begins(attempts[1]))


def _see_full_disk(row: DrillRow, fault: PlannedFault, trial: Trial, undisturbed: Trial) -> DrillRow:
    dropped = _first_dropped(trial)
    if len(trial.attempts) > 1:
        return row.having(why=f"the attempt did not survive it: {trial.attempts[0].cause}")
    if dropped is None or dropped.step is None:
        return row.having(why=f"no checkpoint fell into the time when the disk was full{_unless_well(trial)}")
    words = f"checkpoint of step {dropped.step} dropped: {dropped.reason}"
    row = _caught(row, trial, words, dropped.step, dropped.at)
    later = [e.step for e in trial.checkpoints if e.status != "dropped" and (e.step or 0) > dropped.step]
    if not later:
        return row.having(why="no checkpoint was written once there was room again")
    return row.having(recovered=f"training went on; the next checkpoint is that of step {later[0]}")


def _see_drift(row: DrillRow, fault: PlannedFault, trial: Trial, undisturbed: Trial) -> DrillRow:
    if _first_incident(trial) is not None:
        return _see_incident(row, fault, trial, undisturbed)
    dropped, attempts = _first_dropped(trial), trial.attempts
    if dropped is not None and dropped.step is not None:
        words = f"checkpoint of step {dropped.step} not committed: {dropped.reason}"
        sound = max((e.step or 0 for e in trial.checkpoints if e.status != "dropped"), default=0)
        row = _caught(row, trial, words, dropped.step, dropped.at)
        row = row.having(recovered=f"no checkpoint has it; a start goes on from step {sound}")
    elif len(attempts) > 1:
        row = _caught(row, trial, attempts[0].cause, None, attempts[0].ended_at)
    else:
        return row.having(why="it was not noticed: that rank trains another model now, and says nothing")
    if len(attempts) > 1 and attempts[1].begins is not None:
        row = row.having(recovered=_begins(attempts[1]))
    return row


_SEE = {
    Expected.CAUGHT: _see_incident,
    Expected.CAUGHT_OR_HARMLESS: _see_incident,
    Expected.FOUND: _see_drift,
    Expected.RELAUNCHED: _see_relaunch,
    Expected.STOPPED: _see_stop,
    Expected.LIVED_WITH: _see_full_disk,
}


def _first_incident(trial: Trial) -> IncidentEntry | None:
    return next((e for e in trial.incidents if e.detection.step >= trial.injected[0].step), None)


def _first_dropped(trial: Trial) -> CheckpointEntry | None:
    return next((e for e in trial.checkpoints if e.status == "dropped"), None)


def _harmless(trial: Trial, undisturbed: Trial) -> str | None:
    """In words that the loss came back, or None if it did not."""
    struck, steps = trial.injected[0].step, trial.exercise.steps
    last = range(struck + (steps - struck) // 2, steps)
    ours, theirs = mean_loss(trial, last), mean_loss(undisturbed, last)
    if not trial.ended_well or ours is None or theirs is None:
        return None
    apart = abs(ours[0] - theirs[0])
    if apart > max(_HARMLESS * abs(theirs[0]), theirs[1]):
        return None
    return f"mean loss of the last {len(last)} updates {ours[0]:.4g}, undisturbed {theirs[0]:.4g}"


def _caught(row: DrillRow, trial: Trial, by: str | None, step: int | None, at: str | None) -> DrillRow:
    """The row of a fault that was noticed: by what, in which step (None: not known), and when."""
    struck = trial.injected[0]
    steps = None if step is None else step - struck.step
    return row.having(caught=by, caught_after_steps=steps, caught_after_seconds=_seconds(struck.at, at))


def _begins(attempt: AttemptEntry) -> str:
    assert attempt.begins is not None
    return f"went on from step {attempt.begins.step}"


def _seconds(since: datetime, at: str | None) -> float | None:
    """By the wall clock, of which both times are; a clock that was set in between makes this None or nonsense."""
    try:
        passed = (datetime.fromisoformat(at) - since).total_seconds() if at else None
    except (ValueError, TypeError):
        return None
    return None if passed is None or passed < 0 else round(passed, 2)


def _unless_well(trial: Trial) -> str:
    """How the launch ended, where it did not end as it should have."""
    if trial.ended_well:
        return ""
    if trial.overdue:
        return f" (it was ended after {trial.seconds:.0f} s)"
    account = trial.audit.ending.account if trial.audit and trial.audit.ending else None
    return f" (exit code {trial.codes[-1]}{': ' + account if account else ''}; see {trial.folder / 'output.txt'})"
