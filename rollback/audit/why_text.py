"""The account of why an attempt ended, on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rollback.audit.terminal import quoted
from rollback.audit.text import print_rows
from rollback.audit.why import Account, ProcessStacks
from rollback.rundir.failures import FailureRecord

_TRACEBACK_LINES = 30
_OTHER_TRACEBACK_LINES = 1
_FRAMES = 8
_OTHER_FRAMES = 3
_EARLIER = 5

_IN_WORDS = {
    "stopped": "a rank was stopped",
    "hang": "hang",
    "hardware": "hardware error",
    "oom_kill": "killed: the kernel was out of memory",
    "signal": "killed by a signal",
    "out_of_memory": "out of memory",
    "exception": "exception",
    "exit": "exit without a word",
    "aborted": "abort in native code",
    "timeout": "torch.distributed waited too long",
    "lost_peer": "lost connection between ranks",
    "launcher": "torchrun itself",
    "told_to_stop": "ended on request",
}
_STATES = {"T": "stopped", "t": "stopped", "D": "uninterruptible", "Z": "ended", "R": "running", "S": "waiting"}


def print_account(console: Console, account: Account) -> None:
    """Print an account; words from the run are shown and not obeyed."""
    print_rows(console, list(_head(account)), indent=0)
    first = next((item for item in account.failures if item.rank == account.rank), None)
    for record in account.failures:
        _print_failure(console, record, whole=record is first or account.rank is None)
    if account.processes:
        console.print(Text("\nstacks, most recent call first", style="bold"))
        for process in account.processes:
            _print_stacks(console, process, frames=_FRAMES if process.rank == account.rank else _OTHER_FRAMES)


def _head(account: Account) -> Iterator[tuple[str, str | Text]]:
    yield "run", quoted(f"{account.directory}, now: {account.state}")
    if account.attempt is None:
        yield "why", "no attempt of this run has failed"
        return
    yield "attempt", quoted(f"{account.attempt}, from {account.began or 'unknown'} to {account.ended or 'unknown'}")
    if account.cause is None:
        yield "why", "it has not failed"
    else:
        yield "why", quoted(account.cause, style="bold red")
    if account.why is not None:
        yield "class", _IN_WORDS[account.why]
    yield from _ranks(account)
    if account.signals:
        yield "signals", quoted(", ".join(account.signals))
    if account.blamed is not None:
        again = " and ".join(map(str, account.blamed.attempts))
        skipped = f"batches {account.blamed.window} will be skipped"
        yield "blamed", f"batch {account.blamed.batch}, the same exception in attempts {again}: {skipped}"
    if account.decision is not None:
        yield "then", quoted(account.decision)
    for number in sorted(account.earlier, reverse=True)[:_EARLIER]:
        yield f"attempt {number}", quoted(account.earlier[number])
    if len(account.earlier) > _EARLIER:
        yield "", f"and {len(account.earlier) - _EARLIER} more that failed: `rollback audit` has all attempts"


def _ranks(account: Account) -> Iterator[tuple[str, str | Text]]:
    """With which rank it began, what followed, and where each stood."""
    if account.rank is not None:
        batch = "" if account.batch is None else f", with batch {account.batch} in hand"
        yield "rank", f"{account.rank}{batch}"
    if account.followed:
        yield "followed", f"ranks {', '.join(map(str, account.followed))} failed because of it"
    if account.hung is not None:
        hung = account.hung
        yield "hang", quoted(f"nothing moved for {hung.silent:.0f} s, {hung.limit:.0f} s were allowed; {hung.reason}")
    for stood in account.ranks:
        begun = "" if stood.collectives is None else f", {stood.collectives} collectives begun"
        yield f"rank {stood.rank}", quoted(f"last seen {stood.doing} at step {stood.step}, batch {stood.batch}{begun}")


def _print_failure(console: Console, record: FailureRecord, *, whole: bool) -> None:
    title = f"\nrank {record.rank} at {record.at}, {record.doing} batch {record.batch}, step {record.step}"
    console.print(Text(title, style="bold"))
    lines = record.traceback.rstrip().splitlines() or [f"{record.error}: {record.message}"]
    limit = _TRACEBACK_LINES if whole else _OTHER_TRACEBACK_LINES
    shown = lines if len(lines) <= limit else lines[-limit:]
    if len(shown) < len(lines) and whole:
        console.print(f"  ... {len(lines) - len(shown)} lines before: --json has them")
    console.print(Padding(quoted("\n".join(shown)), (0, 0, 0, 2)))


def _print_stacks(console: Console, process: ProcessStacks, *, frames: int) -> None:
    who = f"rank {process.rank}" if process.is_rank else f"  below rank {process.rank}"
    state = _STATES.get(process.state or "", "state unknown")
    waits = f" in {process.waits_in}" if process.waits_in else ""
    console.print(quoted(f"{who}, pid {process.pid} ({process.command}): {state}{waits}"))
    if process.stacks is None:
        console.print(Padding(quoted(f"no stacks: {process.why_none}"), (0, 0, 0, 4)))
        return
    lines = _signalled_thread(process.stacks)
    more = [f"... {len(lines) - frames} more frames"] if len(lines) > frames else []
    console.print(Padding(quoted("\n".join([*lines[:frames], *more])), (0, 0, 0, 4)))


def _signalled_thread(stacks: str) -> list[str]:
    """The frames of the thread that took the signal, which is the main one; of the last one where none is marked."""
    threads: list[tuple[str, list[str]]] = []
    for line in stacks.splitlines():
        if line.startswith(("Current thread", "Thread")):
            threads.append((line, []))
        elif threads and line.strip():
            threads[-1][1].append(line.strip())
    marked = [frames for title, frames in threads if title.startswith("Current")]
    return (marked or [frames for _, frames in threads] or [[]])[-1]
