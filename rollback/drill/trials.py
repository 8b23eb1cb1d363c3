"""One run of the job under `rollback launch`, in a run directory of its own, and everything that it left."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollback import instructions
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.tiers import fast_tier_of
from rollback.errors import ExitCode, OutputNotWritten, RollbackError, reporting
from rollback.facts.fact import Window
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.audit.report import AttemptEntry, AuditReport, CheckpointEntry, IncidentEntry
from rollback.rundir.exercise import ENV_DRILL, EndState, Exercise, Folder, Injected
from rollback.rundir.metrics.metric_columns import joined, metric_pieces
from rollback.rundir.paths import RunPaths

_MANNERS = 30.0  # seconds that a launch has to end when it is told to
_TAIL = 12
_PROGRAM = tuple(instructions.program("rollback.__main__")[1:])


@dataclass(frozen=True)
class Trial:
    """What a run left.

    codes: exit codes of the launches, more than one where the run was resumed. seconds: of them all. overdue: whether
    it had to be ended, since its time was up. audit: None where it left no record. losses: of the updates that count;
    None where the guard was told none. tail: the last lines that it printed.
    """

    name: str
    exercise: Exercise
    folder: Path
    codes: tuple[int, ...]
    seconds: float
    overdue: bool
    audit: AuditReport | None
    injected: list[Injected] = field(default_factory=list)
    ends: list[EndState] = field(default_factory=list)
    losses: dict[int, float | None] = field(default_factory=dict)
    tail: str = ""

    @property
    def run(self) -> Path:
        return Path(self.exercise.run)

    @property
    def ended_well(self) -> bool:
        """The last launch says that training is done, and every rank has said with what."""
        return self.codes[-1] == ExitCode.DONE and bool(self.ends) and not self.overdue

    @property
    def attempts(self) -> list[AttemptEntry]:
        return self.audit.attempts if self.audit else []

    @property
    def incidents(self) -> list[IncidentEntry]:
        return self.audit.incidents if self.audit else []

    @property
    def checkpoints(self) -> list[CheckpointEntry]:
        return self.audit.checkpoints if self.audit else []

    @property
    def told_a_loss(self) -> bool:
        return any(loss is not None for loss in self.losses.values())

    @property
    def skips(self) -> tuple[Window, ...]:
        """What its own incidents had it pass over, in order."""
        skipped = self.audit.skipped if self.audit else []
        return tuple(Window.merged(Window(first=e.batch, last=e.batch) for e in skipped if e.incidents))


class DrillStage:
    """Where the trials of a drill take place. flags: of `rollback launch`; job: script and arguments; program: ours,
    as Python's words."""

    def __init__(
        self, scratch: Path, flags: Sequence[str], job: Sequence[str], program: Sequence[str] = _PROGRAM
    ) -> None:
        self.scratch = scratch
        self._flags, self._job = list(flags), list(job)
        self._program = [sys.executable, *program]

    def perform(self, name: str, exercise: Exercise, *, limit: float, flags: Sequence[str] = ()) -> Trial:
        """Run the job as the exercise says, for at most `limit` seconds a launch; resume it if it was stopped.

        Blocks. The checkpoints are removed at the end: a drill has a dozen runs of them. Raises OutputNotWritten.
        """
        folder = Folder(self.scratch / name)
        run = folder.root / "run"
        exercise = exercise.model_copy(update={"run": str(run.absolute())})
        output = folder.root / "output.txt"
        # Without these a run would not be the one that was planned. What a full disk does to a run is the run's matter.
        hint = "make room there, or have the runs of the drill elsewhere with --scratch DIR"
        with reporting(OutputNotWritten, f"preparing a run of the drill in {folder.root}", hint):
            folder.root.mkdir(parents=True)
            folder.write(folder.exercise, exercise)
            output.touch()
        command = [*self._program, "launch", "--run", str(run), *self._flags, *flags, *self._job]
        environment = {**os.environ, ENV_DRILL: str(folder.root.absolute()), "NO_COLOR": "1"}
        began, codes = time.monotonic(), []
        try:
            while True:
                code = _run(command, environment, output, limit)
                codes.append(code if code is not None else -1)
                if code != ExitCode.RESUMABLE or len(codes) == 2:
                    break
            seconds = time.monotonic() - began
            return _gather(name, exercise, folder, tuple(codes), seconds, overdue=code is None)
        finally:
            _remove_checkpoints(RunPaths(run))


def _remove_checkpoints(run: RunPaths) -> None:
    if tier := fast_tier_of(run):
        with contextlib.suppress(OSError):
            slots.remove(tier)
    shutil.rmtree(run.ring, ignore_errors=True)


def _run(command: Sequence[str], environment: Mapping[str, str], output: Path, limit: float) -> int | None:
    """The exit code, or None where it was ended because its time was up. Nothing of it is left on return."""
    with output.open("ab") as file:
        process = subprocess.Popen(command, env=dict(environment), stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Twice the same signal means: now. A launch that is killed takes its ranks along within seconds."""
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    try:
        process.wait(_MANNERS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _gather(
    name: str, exercise: Exercise, folder: Folder, codes: tuple[int, ...], seconds: float, *, overdue: bool
) -> Trial:
    run = RunPaths(Path(exercise.run))
    try:
        audit = compile_audit(read_run_contents(run.root))
    except RollbackError:
        audit = None
    losses: dict[int, float | None] = {}
    if audit:
        judged = joined(metric_pieces(run.metrics, []))
        told = zip(judged.step.tolist(), judged.loss.tolist(), judged.no_loss.tolist(), strict=True)
        losses = {step: None if missing else loss for step, loss, missing in told}
    lines = (folder.root / "output.txt").read_text(errors="replace").splitlines()
    return Trial(
        name=name,
        exercise=exercise,
        folder=folder.root,
        codes=codes,
        seconds=seconds,
        overdue=overdue,
        audit=audit,
        injected=folder.all_injected(),
        ends=folder.all_ends(),
        losses=losses,
        tail="\n".join(lines[-_TAIL:]),
    )


def mean_loss(trial: Trial, steps: Sequence[int]) -> tuple[float, float] | None:
    """Mean and standard deviation of the losses of these updates; None where one is missing."""
    values = [trial.losses.get(step) for step in steps]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
        return None
    mean = sum(known) / len(known)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in known) / len(known))
