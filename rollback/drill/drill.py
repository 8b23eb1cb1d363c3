"""Which runs a drill has, in which order, and what each is compared with.

One run is undisturbed. Each fault has one of its own. A run that has skipped batches is compared with one that is told
the same skip list at the start; faults that led to the same list share it. Only where end states differ is the job run
undisturbed a second time, to see whether it ever does the same thing twice.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from rollback.config import option
from rollback.drill.faults import Expected, PlannedFault
from rollback.drill.judge import Comparison, Difference, DrillRow, compare, differences, judge, parts
from rollback.drill.plan import FEWEST_STEPS, REHEARSAL_STEPS, plan, steps_for
from rollback.drill.trials import DrillStage, Trial
from rollback.errors import ExitCode, RollbackError, UsageError, reporting
from rollback.facts.fact import Window
from rollback.inspect.document import Document
from rollback.rundir.exercise import Exercise

_REHEARSAL_LIMIT = 3600.0  # a large model may take long to start
_LEAST_LIMIT = 120.0
_LEAST_HANG = 20.0  # seconds
_LIMIT_OF_UNDISTURBED = 4.0  # a run may replay half of itself, and start twice
_SEED = 20240229
_LEAVES_ITS_TRACE = (Expected.CAUGHT, Expected.CAUGHT_OR_HARMLESS, Expected.FOUND)
"""Unless something was done about them."""


class DrillReport(Document):
    """Schema of `rollback drill --json`, version 1; conventions as in the audit."""

    script: str
    scratch: str = Field(description="where the runs are; their checkpoints are removed")
    ranks: int
    steps: int = Field(description="updates of each run")
    strike: int = Field(description="the update that faults strike")
    undisturbed_seconds: float
    seconds: float = Field(description="of the whole drill")
    rows: list[DrillRow]
    notices: list[str]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


@dataclass
class Drill:
    """Planned faults on a job. steps: None to choose by pace. settings: of the guard, as the user gave them, by name.
    tell: takes a line for people. own_hang_limit: whether the user said when a job hangs; else runs here are short
    enough to say."""

    script: str
    stage: DrillStage
    faults: Sequence[PlannedFault]
    steps: int | None
    settings: Mapping[str, Any]
    tell: Callable[[str], None]
    own_hang_limit: bool = False
    _same_skips: dict[tuple[Window, ...], Trial] = field(default_factory=dict)
    _again: Trial | None = None

    def run(self) -> DrillReport:
        """Blocks for as long as a dozen short runs of the job take.

        Raises UsageError or RollbackError where the job does not run by itself, so that there is nothing to drill.
        """
        began = time.monotonic()
        steps = self.steps or self._steps_by_rehearsal()
        self._plan = plan(steps, self.settings)
        self.tell(f"an undisturbed run of {steps} updates")
        undisturbed = self._undisturbed = self._perform("undisturbed", None, _REHEARSAL_LIMIT)
        self._require_sound(undisturbed, steps)
        self._limit = max(_LEAST_LIMIT, _LIMIT_OF_UNDISTURBED * undisturbed.seconds)
        ranks = len(undisturbed.ends)
        estimate = (len(self.faults) + 3) * 1.3 * undisturbed.seconds
        self.tell(
            f"{undisturbed.seconds:.0f} s; faults strike update {self._plan.strike}; in all about {estimate:.0f} s"
        )
        rows = [self._row(fault, ranks) for fault in self.faults]
        return DrillReport(
            script=self.script,
            scratch=str(self.stage.scratch),
            ranks=ranks,
            steps=steps,
            strike=self._plan.strike,
            undisturbed_seconds=round(undisturbed.seconds, 1),
            seconds=round(time.monotonic() - began, 1),
            rows=rows,
            notices=notices_of(undisturbed, self._again),
        )

    def _steps_by_rehearsal(self) -> int:
        self.tell(f"a rehearsal of {REHEARSAL_STEPS} updates, for the job's pace")
        self._plan = plan(FEWEST_STEPS, self.settings)
        exercise = Exercise(run="", steps=REHEARSAL_STEPS)
        trial = self.stage.perform("rehearsal", exercise, limit=_REHEARSAL_LIMIT, flags=self._flags())
        self._require_sound(trial, REHEARSAL_STEPS)
        assert trial.audit is not None
        attempt = trial.audit.attempts[0]
        seconds = (trial.audit.totals.seconds or 0.0) / REHEARSAL_STEPS
        # The first updates are the slowest, and the record begins with torchrun's own start.
        steps = steps_for(seconds / 4)
        self.tell(f"attempt {attempt.attempt} ended well; runs of {steps} updates (--steps says otherwise)")
        return steps

    def _row(self, fault: PlannedFault, ranks: int) -> DrillRow:
        replicas = max(end.replicas for end in self._undisturbed.ends)
        if ranks < fault.ranks or (fault.expected is Expected.FOUND and replicas < fault.ranks):
            why = f"needs {fault.ranks} ranks or more: with one there is nothing to compare it with"
            if ranks >= fault.ranks:
                why = "each rank has a part of the weights that no other rank has: there is nothing to compare it with"
            row = DrillRow(fault=fault.name, says=fault.says, passed=True, skipped=True, why=why)
        else:
            self.tell(f"{fault.name}: {fault.says}")
            trial = self._perform(fault.name, fault, self._limit, self._flags_for(fault))
            row = judge(fault, trial, self._undisturbed, self._compare(fault, trial))
        self.tell(f"{fault.name}: {'passed' if row.passed else f'FAILED: {row.why}'}")
        return row

    def _perform(self, name: str, fault: PlannedFault | None, limit: float, flags: Sequence[str] = ()) -> Trial:
        ranks = len(self._undisturbed.ends) if fault else 1
        plan = self._plan
        exercise = Exercise(
            run="",
            steps=plan.steps,
            fault=fault.name if fault else None,
            step=plan.strike,
            rank=ranks - 1,
            lasts=plan.lasts if fault and fault.expected is Expected.LIVED_WITH else 0,
            seed=_SEED,
        )
        return self.stage.perform(name, exercise, limit=limit, flags=[*self._flags(), *flags])

    def _flags_for(self, fault: PlannedFault) -> list[str]:
        """What a fault's run needs to be one."""
        if fault.name == "full-disk":
            return ["--fast-tier=off"]  # a snapshot in memory does not meet the disk
        if fault.name == "hung-rank" and not self.own_hang_limit:
            # No part of a run that went well was silent for longer than all of it took.
            return [f"--hang-after={max(_LEAST_HANG, self._undisturbed.seconds):.0f}"]
        return []

    def _flags(self) -> list[str]:
        return [f"{option(name)}={value}" for name, value in self._plan.settings.items()]

    def _compare(self, fault: PlannedFault, trial: Trial) -> Comparison | None:
        """Beside a run that nothing befell. None where that says nothing: a fault leaves a trace."""
        if not trial.ended_well:
            return None
        acted = len(trial.attempts) > 1 or any(entry.restored for entry in trial.incidents)
        if fault.expected in _LEAVES_ITS_TRACE and not acted:
            return None
        differs = differences(trial, self._reference(trial))
        return compare(differs, self._anyway() if differs else set())

    def _anyway(self) -> set[Difference]:
        """In what two undisturbed runs differ. Only asked for where a difference must be explained."""
        if self._again is None:
            self.tell("end states differ: is this job the same twice? a second undisturbed run")
            self._again = self._perform("undisturbed-again", None, self._limit)
        return differences(self._again, self._undisturbed)

    def _reference(self, trial: Trial) -> Trial:
        if not (skips := trial.skips):
            return self._undisturbed
        if skips not in self._same_skips:
            name = f"same-skips-as-{trial.name}"
            self.tell(f"an undisturbed run that skips what {trial.name} skipped")
            self._same_skips[skips] = self._perform(name, None, self._limit, [f"--skips-of={trial.run}"])
        return self._same_skips[skips]

    def _require_sound(self, trial: Trial, steps: int) -> None:
        output = trial.folder / "output.txt"
        if trial.overdue:
            raise RollbackError(f"the job did not end {steps} updates in {trial.seconds:.0f} s; see {output}")
        if trial.codes[-1] != 0:
            raise RollbackError(
                f"the undisturbed job failed with exit code {trial.codes[-1]}; its last lines:\n{trial.tail}",
                hint=f"get `rollback launch` to run it first; all of its output is in {output}",
                exit_code=ExitCode.USAGE if trial.codes[-1] == ExitCode.USAGE else None,
            )
        if not trial.ends:
            told = f"it ended by itself before update {steps}"
            hint = f"a drill needs {FEWEST_STEPS} updates or more of a guarded loop; give the script more to do"
            if not any(attempt.begins for attempt in trial.attempts):
                told, hint = "no rank made a rollback.Guard", "`rollback adopt` shows how to write one into a script"
            raise UsageError(f"there is nothing to drill: {told}", hint=hint)
        reached = min(end.step for end in trial.ends)
        if reached < steps:
            raise UsageError(
                f"the script ends after {reached} updates, and the drill's runs have {steps}",
                hint=f"--steps {reached}" if reached >= FEWEST_STEPS else "give the script more to do",
            )


def notices_of(undisturbed: Trial, again: Trial | None) -> list[str]:
    """What is to be known of the undisturbed run, and of a second one, where there was one."""
    assert undisturbed.audit is not None
    notices = []
    if not undisturbed.told_a_loss:
        notices.append("the guard was never told a loss: the sentinel has nothing to judge by")
    if count := len(undisturbed.incidents):
        notices.append(f"the undisturbed run has {count} incidents of its own; rows may tell of those")
    if (count := len(undisturbed.attempts)) > 1:
        cause = undisturbed.attempts[0].cause or "it is not on record why"
        notices.append(
            f"the undisturbed run failed by itself, and had {count} attempts ({cause}); rows may tell of those"
        )
    if again is not None and (apart := differences(again, undisturbed)):
        notices.append(f"two undisturbed runs differ in {parts(apart)}: of these nothing can be told")
    return [*notices, *(f"advice: {message.text}" for message in undisturbed.audit.advice)]


def scratch_for(script: str, given: Path | None) -> Path:
    """A new directory for the runs. Raises UsageError where the one that was named has something in it."""
    scratch = given or Path("runs") / f"drill-{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    with reporting(UsageError, f"--scratch: {scratch} cannot be made"):
        scratch.mkdir(parents=True, exist_ok=True)
        taken = any(scratch.iterdir())
    if taken:
        raise UsageError(f"--scratch: {scratch} is not empty", hint="name a new directory")
    return scratch
