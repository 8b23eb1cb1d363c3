"""Asking a run to rewind, to skip or to stop.

A request that cannot be carried out is refused here, before anything is written, as far as the record tells: the ranks
decide in the end, since a running job may have moved on since. Raises UsageError for what makes no sense now,
NoUsableCheckpoint where there is nothing to go back to, and RunDirectoryError.
"""

import getpass
import os
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from rollback.errors import ExitCode, NoUsableCheckpoint, RunDirectoryError, UsageError, may_pass
from rollback.facts.training import Answered, RequestKind, Window
from rollback.inspect.document import Document
from rollback.inspect.record.reading import require_run_directory
from rollback.inspect.ring.checkpoints import has_memory_elsewhere, read_held
from rollback.inspect.status.report import RunStatus
from rollback.inspect.status.status import read_status
from rollback.rundir import requests
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.lock import launch_of
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Request
from rollback.system import files

_POLL = 0.1
_LOOK_FOR_LIFE = 1.0
_LIVE = ("running", "starting", "unknown")


ReplyState = Literal["carried_out", "refused", "open"]


class Reply(Document):
    """Schema of `rollback rewind|skip|stop --json`, version 1."""

    request: str = Field(description="its name in the run's journal")
    order: RequestKind
    state: ReplyState = Field(description="open: handed in, and not answered when this was printed")
    text: str
    waited: bool

    @property
    def exit_code(self) -> ExitCode:
        in_order = self.state == "carried_out" or (self.state == "open" and not self.waited)
        return ExitCode.DONE if in_order else ExitCode.FAILED


@dataclass(frozen=True)
class PreparedRequest:
    """A request that makes sense now, and is not handed in yet. live: whether there seems to be a job that will see it.
    notice: what will come of it, to be said first."""

    paths: RunPaths
    request: Request
    live: bool
    notice: str | None

    def hand_in(self) -> "SubmittedRequest":
        """Raises RunDirectoryError."""
        return SubmittedRequest(self.paths, requests.submit(self.paths, self.request), self.request, self.live)


@dataclass(frozen=True)
class SubmittedRequest:
    """A request that has been handed in. live: as it was prepared."""

    paths: RunPaths
    name: str
    request: Request
    live: bool


def default_who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def rewind_request(run: Path, to: int, skip: Window | None, who: str, why: str) -> PreparedRequest:
    """A request to go back to the newest checkpoint at or before step `to`."""
    paths, status = _standing(run)
    if status.step is not None and to > status.step:
        raise UsageError(
            f"{run} cannot go back to step {to}: it is at step {status.step}",
            hint="`rollback ring list` shows the steps that it can go back to",
        )
    held = read_held(run)
    usable = [entry for entry in held if entry.step <= to]
    elsewhere = status.state in _LIVE and has_memory_elsewhere(paths)
    if not usable and elsewhere:
        notice = f"no checkpoint at or before step {to} can be seen from this host; the ranks know those in memory too"
        return _prepared(paths, status, notice, order="rewind", to=to, skip=skip, who=who, why=why)
    if not usable:
        oldest = f"the oldest one is of step {held[0].step}" if held else "it has none"
        raise NoUsableCheckpoint(
            f"{run} has no checkpoint at or before step {to}: {oldest}",
            hint="`rollback ring list` shows what there is",
        )
    target = usable[-1]
    if skip is not None and target.batch is not None and skip.last < target.batch:
        raise UsageError(
            f"{skip.in_words()} cannot be skipped from there: {target.checkpoint} (step {target.step}) begins "
            f"with batch {target.batch}",
            hint="rewind to an earlier step",
        )
    notice = f"the newest checkpoint at or before step {to} is {target.checkpoint}, of step {target.step}"
    if target.status != "good":
        notice += "; it is only a candidate: it has not survived probation"
    if elsewhere:
        notice += "; the job's host may have a newer one in memory"
    name = target.checkpoint
    return _prepared(paths, status, notice, order="rewind", to=to, checkpoint=name, skip=skip, who=who, why=why)


def skip_request(run: Path, skip: Window, who: str, why: str) -> PreparedRequest:
    paths, status = _standing(run)
    held = read_held(run)
    # A job that is not running goes on from its newest checkpoint.
    position = status.batch if status.state in _LIVE else held[-1].batch if held else 0
    if position is not None and skip.last < position:
        raise UsageError(
            f"{skip.in_words()} cannot be skipped any more: the run is at batch {position}",
            hint=f"rewind to a step at or before batch {skip.first}, and skip from there: rollback rewind "
            f"{shlex.quote(str(run))} --to STEP --skip {skip}",
        )
    notice = None
    if position is not None and skip.first < position:
        late = Window(first=skip.first, last=position - 1)
        notice = f"{late.in_words()} cannot be skipped any more; the others will be passed over"
    return _prepared(paths, status, notice, order="skip", skip=skip, who=who, why=why)


def samples_request(run: Path, samples: Sequence[int], release: bool, who: str, why: str) -> PreparedRequest:
    """A request to leave data set samples out from now on, or to take them in again."""
    paths, status = _standing(run)
    order = "release" if release else "quarantine"
    return _prepared(paths, status, None, order=order, samples=tuple(samples), who=who, why=why)


def stop_request(run: Path, who: str, why: str) -> PreparedRequest:
    paths, status = _standing(run)
    if status.state not in _LIVE:
        raise UsageError(f"{run} is not running, so there is nothing to stop", hint="`rollback status` shows more")
    return _prepared(paths, status, None, order="stop", who=who, why=why, launch=launch_of(paths))


def wait_for_answer(asked: SubmittedRequest, seconds: float) -> Reply:
    """Wait until the ranks have answered, `seconds` have passed, or nobody is left who could answer.

    What a disk refuses meanwhile is looked at again. Raises RunDirectoryError where the record is damaged.
    """
    now, journal = time.monotonic(), asked.paths.train_journal
    until, look_at, size, gone = now + seconds, now + _LOOK_FOR_LIFE, -1, 0
    while True:
        late = f"not carried out within {seconds:g} s"
        try:
            if (present := files.size_of(journal)) != size:
                if (answer := _answer(asked)) is not None:
                    _wait_for_end(asked, until)
                    return _reply(asked, "carried_out" if answer.carried_out else "refused", answer.text)
                size = present
            if time.monotonic() >= look_at:
                # Twice in a row: between two attempts there is a moment without ranks.
                gone = 0 if read_status(asked.paths.root).state in _LIVE else gone + 1
                look_at = time.monotonic() + _LOOK_FOR_LIFE
        except RunDirectoryError as error:
            if not may_pass(error):
                raise
            late = f"whether it was carried out within {seconds:g} s cannot be seen: {error.message}"
        if gone == 2 and asked.request.order == "stop":
            return _reply(asked, "carried_out", "the job has ended, and no rank was there to answer")
        if gone == 2:
            return _reply(asked, "open", f"the job is gone; {_later(asked)}")
        if time.monotonic() >= until:
            return _reply(asked, "open", f"{late}; {_still(asked)}")
        time.sleep(_POLL)


def without_waiting(asked: SubmittedRequest) -> Reply:
    """What there is to say of a request that nobody waits for."""
    text = "handed in; the ranks take it up at the end of a step" if asked.live else _later(asked)
    return _reply(asked, "open", text, waited=False)


def _later(asked: SubmittedRequest) -> str:
    if asked.request.order == "stop":
        return "a later start is not stopped by it"
    return "it will be carried out when the run is started again, before its first batch"


def _still(asked: SubmittedRequest) -> str:
    if asked.request.order == "stop":  # of a copied directory nobody may ever look
        return f"the ranks of this launch stop if they see it yet; {_later(asked)}"
    return "it stays on record until it is carried out"


def _wait_for_end(asked: SubmittedRequest, until: float) -> None:
    """A job that has stopped needs a moment to leave the run directory to the next one."""
    while asked.request.order == "stop" and launch_of(asked.paths) == asked.request.launch and time.monotonic() < until:
        time.sleep(_POLL)


def _answer(asked: SubmittedRequest) -> Answered | None:
    return fold_journal(asked.paths.train_journal).history.answers.get(asked.name)


def _reply(asked: SubmittedRequest, state: ReplyState, text: str, *, waited: bool = True) -> Reply:
    return Reply(request=asked.name, order=asked.request.order, state=state, text=text, waited=waited)


def _standing(run: Path) -> tuple[RunPaths, RunStatus]:
    """Raises UsageError where there is nothing to ask, or nobody will ever look."""
    paths = require_run_directory(run)
    status = read_status(run)
    if status.run_id is None and status.state in _LIVE:
        raise UsageError(f"{run} has not begun yet: its ranks have not attached", hint="wait until they have")
    if status.run_id is None and (status.ring or paths.train_journal.exists()):
        raise RunDirectoryError(
            f"{run} has a record of a run but no run.json, so it cannot be told whose it is",
            hint="restore run.json from a copy; without it no start goes on from there",
        )
    if status.run_id is None:
        raise UsageError(
            f"{run} has never begun: its ranks did not attach, and none of them runs",
            hint="see what ended it (`rollback why`), start it, and ask again once it trains; `rollback launch --skip` "
            "passes over batches from the start",
        )
    ending = status.ending
    unsupervised = ending is not None and ending.exit_code is None
    if status.state not in _LIVE and ending and ending.how == "finished" and (unsupervised or ending.exit_code == 0):
        raise UsageError(
            f"{run} has ended: training is finished" + (f" at step {ending.step}" if ending.step is not None else ""),
            hint="there is nothing to order: start it with more steps or epochs, or start a new run, with --skips-of "
            "to pass over what was passed over in this one",
        )
    return paths, status


def _prepared(
    paths: RunPaths, status: RunStatus, notice: str | None, *, who: str, why: str, **order: object
) -> PreparedRequest:
    try:
        request = Request.model_validate({**order, "who": who, "why": why, "at": requests.now()})
    except ValidationError as error:
        first = error.errors()[0]
        where = f"--{'-'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise UsageError(f"{where}{first['msg'].removeprefix('Value error, ')}") from error
    return PreparedRequest(paths, request, status.state in _LIVE, notice)
