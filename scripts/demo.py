"""The main job, end to end: a torchrun run goes bad twice, dies once, and finishes as if nothing had happened.

The same small GPT is trained three times, with two ranks:

- undisturbed: clean data, under torchrun;
- unprotected: data with two bad stretches (see stdlib_text.py), under torchrun;
- protected: the same bad data, under `rollback launch`; on the way one rank is killed with SIGKILL.

At the end come the audit of the protected run, a table of validation losses, and a comparison of what the audit says
was skipped with what was really bad. Exit status 0 if all of it is as it should be. Everything is kept under runs/.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.text import Text

from demo_view import Progress, View, clock, table
from rollback.facts.training import (
    Attached,
    AttemptEnded,
    AttemptStarted,
    Fact,
    Incident,
    Planned,
    Restored,
)
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.system.processes import runs
from stdlib_text import GARBAGE, NON_FINITE_WEIGHTS

SCRIPTS = Path(__file__).resolve().parent
STEPS = 300
RANKS = ["--standalone", "--nproc-per-node=2"]
# A run of 300 updates is a hundredth of a real one, and so is everything that is counted in updates. The windows begin
# at the onset because this data's faults are sharp; the default begins them at the restored checkpoint.
SETTINGS = ["--snapshot-every=10", "--probation=10", "--rewind=10", "--skip-from=onset", "--horizon=40"]
KILL_AT = 175  # between the two bad stretches
KILLED_RANK = 1
WITHIN = 0.02  # how near the protected run's validation loss must come to the undisturbed run's
STALLED_SECONDS = 180.0


class DemoFailed(Exception):
    """Something did not go as it should; the message says what."""


# Running --------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One training run: its command, its output files, and what is known of it so far."""

    progress: Progress
    command: list[str]
    out: Path
    err: Path
    _read: int = 0

    def start(self) -> subprocess.Popen[bytes]:
        # One thread for each rank: more than cores would only slow them down.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            return subprocess.Popen(self.command, stdout=out, stderr=err, env=environment)

    def reports(self) -> Iterator[dict[str, Any]]:
        """What rank 0 has printed since the last call. A line that is not whole yet waits for the next."""
        with self.out.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                with suppress(ValueError):
                    yield json.loads(line)

    def advance(self) -> bool:
        """Take in what is new. True if something was."""
        news = False
        for report in self.reports():
            news = True
            if "validation_loss" in report:
                self.progress.validation = report["validation_loss"]
            else:
                self.progress.update(report["step"], report["loss"])
        return news


@dataclass
class UnprotectedJob(Job):
    """A run that nobody watches; the demo says when it is lost."""

    _lost: bool = False

    def advance(self) -> bool:
        news = super().advance()
        last = last_healthy(self.progress)
        if last is not None and not self._lost:
            self._lost = True
            self.progress.tell(f"step {last + 1}: the loss is NaN, and so are the weights from here on", "red")
        return news


@dataclass
class ProtectedJob(Job):
    """The run under `rollback launch`, whose journals tell what happens to it."""

    run: RunPaths = field(kw_only=True)
    _told: dict[Path, int] = field(default_factory=dict)
    _killed: bool = False

    def advance(self) -> bool:
        news = super().advance()
        for journal in (self.run.supervisor_journal, self.run.train_journal):
            records = read_journal(journal).records if journal.exists() else []
            for record in records[self._told.get(journal, 0) :]:
                self._tell(record.fact, record.attempt)
            self._told[journal] = len(records)
        if not self._killed and self.progress.step >= KILL_AT:
            self._kill_rank()
        return news

    def _tell(self, fact: Fact, attempt: int) -> None:
        tell = self.progress.tell
        match fact:
            case Incident():
                tell(f"step {fact.detection_step}: {fact.explanation}", "red", "▲", fact.onset_step)
            case Planned(action="rollback", skip=window) if window is not None:
                again = "again, wider: " if fact.escalation else ""
                tell(f"{again}rewind to step {fact.step}, skip {window.in_words()}", "yellow")
            case Restored():
                tell(f"back at step {fact.step} in {fact.seconds * 1000:.0f} ms", "green")
            case AttemptEnded(status=status) if status != 0:
                tell(f"attempt {attempt} is over: {fact.cause}", "red")
            case AttemptStarted() if attempt > 1:
                tell(f"attempt {attempt} starts", "yellow")
            case Attached() if attempt > 1:
                tell(f"resumed at step {fact.step} from {fact.checkpoint}", "green")
            case _:
                pass

    def _kill_rank(self) -> None:
        heartbeat = read_heartbeats(self.run.ranks).get(KILLED_RANK)
        if heartbeat is None:
            return
        with suppress(psutil.NoSuchProcess):
            rank = psutil.Process(heartbeat.pid)
            if runs(rank.pid, heartbeat.start):  # and not another process that has got its number
                rank.send_signal(signal.SIGKILL)
                self._killed = True
                self.progress.tell(f"the demo kills rank {KILLED_RANK} (pid {heartbeat.pid}) with SIGKILL", "red", "✕")


def run_to_end(job: Job, view: View) -> None:
    """Run a job and show it. Raises DemoFailed if it fails or stalls."""
    job.progress.begin()
    process = job.start()
    last_news = time.monotonic()
    try:
        while (status := process.poll()) is None:
            if job.advance():
                last_news = time.monotonic()
            view.show(job.progress)
            if time.monotonic() - last_news > STALLED_SECONDS:
                raise DemoFailed(
                    f"{job.progress.name}: nothing was heard of it for {STALLED_SECONDS:.0f} s{_tail(job)}"
                )
            time.sleep(0.25)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    job.advance()
    job.progress.end()
    view.show(job.progress)
    if status != 0 or job.progress.validation is None:
        raise DemoFailed(f"{job.progress.name}: `{shlex.join(job.command)}` ended with status {status}{_tail(job)}")


def _tail(job: Job) -> str:
    lines = job.err.read_text(errors="replace").splitlines()[-15:]
    return f"; the end of {job.err}:\n  " + "\n  ".join(lines)


# Judging --------------------------------------------------------------------------------------------------------------


def compare_with_planted(audit: dict[str, Any]) -> dict[str, Any]:
    """What `rollback audit --json` says was skipped, beside what was planted."""
    planted = {*GARBAGE, *NON_FINITE_WEIGHTS}
    skipped = {entry["batch"]: set().union(*entry["indices"].values()) for entry in audit["skipped"]}
    passed_over = set().union(*skipped.values())
    bad_batches = sorted(batch for batch, samples in skipped.items() if samples & planted)
    causes = {}
    for incident in audit["incidents"]:
        begin, end = incident["onset"]["batch"], incident["detection"]["batch"]
        seen = set().union(*(skipped.get(batch, set()) for batch in range(begin, end + 1)))
        causes[incident["incident"]] = (
            "garbage" if seen & {*GARBAGE} else "non-finite weights" if seen & {*NON_FINITE_WEIGHTS} else None
        )
    return {
        "planted_samples": len(planted),
        "planted_samples_not_skipped": sorted(planted - passed_over),
        "bad_batches": bad_batches,
        "good_batches_skipped": sorted(skipped.keys() - {*bad_batches}),
        "causes": causes,
        "widened": [entry["incident"] for entry in audit["incidents"] if entry["escalation"] > 0],
    }


def checks(progress: dict[str, Progress], audit: dict[str, Any], found: dict[str, Any]) -> list[tuple[bool, str]]:
    """What must hold of the three runs, each with whether it does."""
    undisturbed, unprotected, protected = (
        progress[name].validation or math.nan for name in ("undisturbed", "unprotected", "protected")
    )
    apart = protected / undisturbed - 1
    missed, beside = found["planted_samples_not_skipped"], found["good_batches_skipped"]
    widened = [number for number in found["widened"] if found["causes"][number] == "garbage"]
    numbers = ", ".join(map(str, widened)) or "none"
    harmed = "NaN" if math.isnan(unprotected) else f"{unprotected / undisturbed - 1:+.1%}"
    causes = ", ".join(f"{number}: {cause or 'nothing planted'}" for number, cause in found["causes"].items())
    return [
        (abs(apart) <= WITHIN, f"protected within {WITHIN:.0%} of undisturbed: {apart:+.2%}"),
        (not unprotected <= undisturbed * (1 + WITHIN), f"unprotected visibly worse: {harmed}"),
        (
            not missed,
            f"all {found['planted_samples']:,} bad samples, in {len(found['bad_batches'])} batches, were skipped"
            if not missed
            else f"{len(missed):,} of {found['planted_samples']:,} bad samples were not skipped",
        ),
        (len(beside) <= len(found["bad_batches"]), f"good batches skipped beside them: {len(beside)}"),
        (all(found["causes"].values()), f"causes of the incidents: {causes}"),
        (bool(widened), f"the garbage was longer than the first window; widened by incident {numbers}"),
        (audit["totals"]["attempts"] == 2, f"attempts: {audit['totals']['attempts']}, one rank having been killed"),
    ]


def last_healthy(progress: Progress) -> int | None:
    """The last step before the loss went non-finite; None if it never did."""
    return next((step - 1 for step, loss in sorted(progress.losses.items()) if not math.isfinite(loss)), None)


def mean_loss(progress: Progress, last: int, count: int = 20) -> float:
    return sum(progress.losses[step] for step in range(last - count + 1, last + 1)) / count


def table_rows(progress: dict[str, Progress], totals: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The table at the end: run, validation loss, time, remark."""
    undisturbed, unprotected, protected = (progress[name] for name in ("undisturbed", "unprotected", "protected"))
    yield undisturbed.name, f"{undisturbed.validation:.4f}", clock(undisturbed.elapsed()), "clean data"
    remark = (
        f"{totals['rollbacks']} rewinds, {totals['skipped_batches']} batches skipped, a rank killed: "
        f"{(protected.validation or math.nan) / (undisturbed.validation or math.nan) - 1:+.2%}"
    )
    yield protected.name, f"{protected.validation:.4f}", clock(protected.elapsed()), remark
    last = last_healthy(unprotected)
    remark = "bad data, nothing done about it"
    if last is not None:
        remark = (
            f"NaN from step {last + 1} on; its training loss before that was {mean_loss(unprotected, last):.2f},"
            f" the undisturbed run's {mean_loss(undisturbed, last):.2f}"
        )
    yield unprotected.name, f"{unprotected.validation:.4f}", clock(unprotected.elapsed()), remark


# The demo -------------------------------------------------------------------------------------------------------------


def make_jobs(folder: Path) -> list[Job]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", *RANKS]
    plain, guarded = str(SCRIPTS / "train_gpt_plain.py"), str(SCRIPTS / "train_gpt.py")
    length = f"--steps={STEPS}"
    launch = [sys.executable, "-m", "rollback", "launch", *RANKS, "--run", str(folder / "run"), *SETTINGS]

    def files(name: str) -> tuple[Path, Path]:
        return folder / f"{name}.out", folder / f"{name}.err"

    return [
        Job(
            Progress("undisturbed", "clean data, torchrun", STEPS),
            [*torchrun, plain, length],
            *files("undisturbed"),
        ),
        UnprotectedJob(
            Progress("unprotected", "two stretches of bad data, torchrun", STEPS),
            [*torchrun, plain, length, "--corrupt"],
            *files("unprotected"),
        ),
        ProtectedJob(
            Progress("protected", "the same bad data, rollback launch", STEPS),
            [*launch, guarded, length, "--corrupt"],
            *files("protected"),
            run=RunPaths(folder / "run"),
        ),
    ]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    began = time.monotonic()
    console = Console(highlight=False)
    folder = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    jobs = make_jobs(folder)
    with View(console) as view:
        for job in jobs:
            run_to_end(job, view)

    command = [sys.executable, "-m", "rollback", "audit", str(folder / "run")]
    console.rule(Text(f"rollback audit {folder / 'run'}"), align="left")
    subprocess.run(command, check=True)
    audit = json.loads(subprocess.run([*command, "--json"], check=True, stdout=subprocess.PIPE).stdout)
    found = compare_with_planted(audit)
    progress = {job.progress.name: job.progress for job in jobs}
    results = checks(progress, audit, found)
    summary = {
        "validation_loss": {name: f"{one.validation}" for name, one in progress.items()},
        "seconds": {name: one.seconds for name, one in progress.items()},
        "planted": found,
        "checks": [{"holds": holds, "what": what} for holds, what in results],
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    console.rule(Text("the three runs"), align="left")
    console.print(table(list(table_rows(progress, audit["totals"])), ["run", "validation loss", "time", ""]))
    console.print()
    for holds, what in results:
        console.print(Text("  ok  " if holds else "  NO  ", style="green" if holds else "bold red") + Text(what))
    console.print(f"\n{clock(time.monotonic() - began)} in all; everything is in {folder}")
    return 0 if all(holds for holds, _ in results) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
