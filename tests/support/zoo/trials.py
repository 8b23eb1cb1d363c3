"""The trials of the zoo, and the judgement on what was trained on.

alone: nothing happens; compared with the same script without a guard.
stopped: SIGTERM in the middle of the second epoch, where it saves; started again.
killed: SIGKILL in the third epoch, so that it goes on from where that epoch began; started again.
skipped: a loss that is not finite in the second epoch: some steps of that epoch are done again, its batch is skipped.
retried: the same soon after an epoch's start, and the loss is finite the second time: all is done again from within
the epoch before, and nothing is skipped.

All but the first are compared with the script without a guard too, which costs least, where `alone` is to be exact; and
else with the guarded one that nothing happens to.
"""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attempts import Forker

from rollback.errors import ExitCode
from rollback.facts.history import fold
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from zoo.kinds import APART, BATCHES, EXACT, IDS, KINDS, REFUSED, STEPS

WRONG = "WRONG"
PROGRAM = Path(__file__).parents[1] / "zoo_attempt.py"
LATE = 2 * BATCHES + 4  # the checkpoint at the epoch's start is on disk by then
OFTEN = {"snapshot_every": 5}
_REFUSALS = {int(code) for code in (ExitCode.USAGE, ExitCode.UNFIT)}


@dataclass(frozen=True)
class Outcome:
    """word: exact, refused, WRONG, or what else is expected of `alone`. why: what was wrong, or why it was refused."""

    word: str
    why: str = ""


class _Wrong(Exception):
    pass


class _Refused(Exception):
    pass


Line = dict[str, Any]


class Specimen:
    """One loader kind, in a folder of its own."""

    def __init__(self, name: str, folder: Path, forker: Forker) -> None:
        self._name = name
        self._folder = folder
        self._forker = forker
        self._was_stopped = False
        self._refused: _Refused | None = None

    def outcome(self, trial: str) -> Outcome:
        """What is refused undisturbed is not tried further."""
        judged: Callable[[], str] = getattr(self, f"_{trial}")
        try:
            if self._refused is not None:
                raise self._refused
            assert self._undisturbed
            return Outcome(judged())
        except _Wrong as wrong:
            return Outcome(WRONG, str(wrong))
        except _Refused as refused:
            return Outcome(REFUSED, str(refused))

    # The trials -------------------------------------------------------------------------------------------------------

    def _alone(self) -> str:
        lines, plain = self._guarded, self._plain
        if lines == plain:
            return EXACT
        if [line.get("ids") for line in lines] == [line.get("ids") for line in plain]:
            return IDS
        return APART

    def _stopped(self) -> str:
        """Killed later on, so that `killed` need not begin anew."""
        self._attempt("resumed", stop=BATCHES + 3, expect=int(ExitCode.RESUMABLE))
        log = self._attempt("resumed", again=True, kill=LATE, expect=-signal.SIGKILL)
        lines = self._effective(log)
        word = self._compare(lines, self._undisturbed[: len(lines)])
        self._was_stopped = True
        return word

    def _killed(self) -> str:
        if self._was_stopped:
            return self._same(self._attempt("resumed", again=True))
        self._attempt("killed", kill=LATE, expect=-signal.SIGKILL)
        return self._same(self._attempt("killed", again=True))

    def _skipped(self) -> str:
        """In two epochs: the order of a third one would follow what the skipped step did not draw."""
        bad = BATCHES + 7
        log = self._attempt("skipped", nan=bad, settings=OFTEN, epochs=2)
        windows = fold(read_journal(RunPaths(self._folder / "skipped").train_journal).records).skip_list
        skipped = {batch for window in windows for batch in range(window.first, window.last + 1)}
        lines, expected = self._effective(log)[:-1], self._undisturbed
        at = [line["batch"] for line in lines]
        if (
            bad not in skipped
            or at != [batch for batch in range(max(at) + 1) if batch not in skipped]
            or at[-1] < 2 * BATCHES - 1
        ):
            raise _Wrong(f"trained on batches {at}, having skipped {sorted(skipped)}")
        self._compare(lines[:bad], expected[:bad])
        self._never_wrong(log)
        return EXACT

    def _retried(self) -> str:
        settings = {**OFTEN, "retry_first": True}
        return self._same(self._attempt("retried", nan=BATCHES + 2, nan_once=True, settings=settings))

    # The judgement ----------------------------------------------------------------------------------------------------

    @property
    def _undisturbed(self) -> list[Line]:
        lines = self._plain if KINDS[self._name].expected.get("alone") == EXACT else self._guarded
        if len(lines) <= STEPS or "weights" not in lines[-1]:
            raise _Wrong(f"ended after {len(lines)} steps")
        return lines

    @cached_property
    def _plain(self) -> list[Line]:
        return self._logged(self._attempt("plain", guarded=False))

    @cached_property
    def _guarded(self) -> list[Line]:
        try:
            return self._logged(self._attempt("alone"))
        except _Refused as refused:
            self._refused = refused
            raise

    def _same(self, log: Path) -> str:
        return self._compare(self._effective(log), self._undisturbed)

    def _compare(self, lines: list[Line], expected: list[Line]) -> str:
        for line, other in zip(lines, expected, strict=False):
            if line != other:
                raise _Wrong(f"{_shown(line)} instead of {_shown(other)}")
        if len(lines) != len(expected):
            raise _Wrong(f"{len(lines) - 1} steps count instead of {len(expected) - 1}")
        return EXACT

    def _effective(self, log: Path) -> list[Line]:
        """What counts of a log: a step that is done again undoes itself and all that came after it."""
        kept: list[Line] = []
        for line in self._logged(log):
            while kept and line.get("step", len(kept)) <= kept[-1].get("step", -1):
                kept.pop()
            kept.append(line)
        return kept

    def _never_wrong(self, log: Path) -> None:
        """No batch was trained on that is not the one at its position, whatever came of it in the end."""
        expected = {line.get("batch"): line["ids"] for line in self._undisturbed[:-1]}
        for line in self._logged(log):
            if line.get("batch") in expected and line["ids"] != expected[line["batch"]]:
                raise _Wrong(f"{_shown(line)} instead of {expected[line['batch']]}")

    # Attempts ---------------------------------------------------------------------------------------------------------

    def _attempt(self, name: str, *, guarded: bool = True, expect: int = 0, **request: Any) -> Path:
        """Its log, which is that of all attempts with this name. Raises if it did not end as expected."""
        run, log, output = (self._folder / f"{name}{ending}" for ending in ("", ".log", ".txt"))
        request |= {"kind": self._name, "log": str(log), "output": str(output)}
        if guarded:
            request["run"] = str(run)
        status = self._forker.ask(request)
        said = output.read_text() if output.exists() else ""
        if status == expect:
            return log
        if status in _REFUSALS:
            if name != "alone" and log.exists():
                self._never_wrong(log)
            raise _Refused(said.strip().splitlines()[-2 if "hint:" in said else -1])
        if status == -signal.SIGALRM:
            raise _Wrong("hangs")
        raise _Wrong(f"ended with {status} instead of {expect}: {said.strip().splitlines()[-1] if said else ''}")

    def _logged(self, log: Path) -> list[Line]:
        return [json.loads(line) for line in log.read_text().splitlines()]


def _shown(line: Line) -> str:
    if "weights" in line:
        return "other weights at the end"
    shown = f"{line['ids']} ({line['values'][:4]})"
    return f"step {line['step']}, batch {line['batch']}, epoch {line.get('epoch', 'uncounted')}: {shown}"
