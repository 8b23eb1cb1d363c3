"""Shows why an attempt ended: first the cause, then what followed and what the supervisor did."""

import re
from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rollback.inspect.why.stacks import groups, ranges
from rollback.inspect.why.why import AttemptAccount
from rollback.rundir.failures import FailureRecord
from rollback.terminal.escape import quoted
from rollback.terminal.rows import print_rows

_TRACEBACK_LINES = 30
_LAST_WORDS = 20
_PEERS = 4
_EARLIER = 5

_IN_WORDS = {
    "stopped": "a rank was stopped",
    "hang": "hang",
    "hardware": "hardware error",
    "oom_kill": "killed: the kernel was out of memory",
    "signal": "killed by a signal",
    "out_of_memory": "out of memory",
    "disk": "a disk that takes no more",
    "exception": "exception",
    "exit": "exit without a word",
    "aborted": "abort in native code",
    "timeout": "torch.distributed waited too long",
    "lost_peer": "lost connection between ranks",
    "node_lost": "a node was lost",
    "launcher": "torchrun itself",
    "told_to_stop": "ended on request",
}
_MARKERS = re.compile(r"[ ~^]+")  # what Python draws below a line of code


def print_account(console: Console, account: AttemptAccount) -> None:
    """Print an account. Control characters from the run are escaped."""
    print_rows(console, list(_head(account)), indent=0)
    # What a rank raises after its hang was called is a consequence of the kill.
    causes = {account.rank} if account.hung is None else {account.rank} & set(account.hung.raised)
    own = [item for item in account.failures if item.rank in causes or (account.rank is None and not account.hung)]
    peers = [item for item in account.failures if item not in own]
    for record in own[:_PEERS]:
        _print_failure(console, record)
    if account.last_words is not None:
        console.print(quoted(f"\nthe end of {account.last_words.path}", style="bold"))
        _print_lines(console, account.last_words.text.rstrip().splitlines()[-_LAST_WORDS:])
    if account.processes:
        console.print(Text("\nstacks, most recent call first", style="bold"))
        for group in groups(account.processes, account.rank):
            console.print(quoted(group.title))
            _print_lines(console, group.lines, indent=4)
    if peers:
        console.print(Text("\nwhat followed", style="bold"))
        for record in peers[:_PEERS]:
            _print_lines(console, [f"rank {record.rank}: {_last_line(record)}"])
    if len(own) + len(peers) > _PEERS:
        console.print("  --json has the exceptions of all ranks")


def _head(account: AttemptAccount) -> Iterator[tuple[str, str | Text]]:
    yield "why", _why(account)
    if account.why is not None:
        yield "class", _IN_WORDS[account.why]
    yield from _ranks(account)
    if account.signals:
        yield "signals", quoted(", ".join(account.signals))
    if account.blamed is not None:
        again = " and ".join(map(str, account.blamed.attempts))
        yield "blamed", f"batch {account.blamed.batch}, the same exception in attempts {again}: {account.blamed.answer}"
    yield from [("state", quoted(account.last_snapshot))] if account.last_snapshot else []
    yield from [("lost", quoted(account.death.in_words()))] if account.death else []
    if account.decision is not None:
        yield "then", quoted(account.decision)
    elif account.state == "died" or (account.state == "ended" and account.cause is not None):
        yield "then", "the same command goes on, or says why it cannot"
    yield from (("node", quoted(text)) for text in account.nodes)
    said = account.death and account.death.why_not_kept
    yield from (("also", quoted(text)) for text in account.remarks if text != said)
    if account.attempt is not None:
        yield "attempt", quoted(f"{account.attempt}, from {account.began or 'unknown'} to {account.ended or 'unknown'}")
    for number in sorted(account.earlier, reverse=True)[:_EARLIER]:
        yield f"attempt {number}", quoted(account.earlier[number])
    if len(account.earlier) > _EARLIER:
        yield "", f"and {len(account.earlier) - _EARLIER} more that failed: `rollback audit` has all attempts"
    yield "run", quoted(f"{account.directory}, now: {account.state}")


def _why(account: AttemptAccount) -> Text:
    if account.cause is not None:
        return quoted(account.cause, style="bold red")
    if account.attempt is not None:
        return Text("it has not failed")
    if account.state == "unknown":
        return Text("no failure is on record; whether the run goes on, on another host, cannot be seen from here")
    if account.state == "died":
        return Text("it is gone without a word: killed from outside, out of memory, or its machine went down")
    return Text("no attempt of this run has failed")


def _ranks(account: AttemptAccount) -> Iterator[tuple[str, str | Text]]:
    """The rank with which it began, its host, what followed, and the position of each rank."""
    if account.rank is not None:
        yield "rank", quoted(str(account.rank) + (f", on host {account.host}" if account.host else ""))
    if account.step is not None:
        batch = "" if account.batch is None else f", with batch {account.batch} in hand"
        yield "step", f"{account.step}{batch}"
    if account.followed:
        plural = "s" if len(account.followed) > 1 else ""
        yield "followed", f"rank{plural} {ranges(account.followed)} failed because of it"
    if account.hung is not None:
        yield "hang", f"nothing moved for {account.hung.silent:.0f} s, {account.hung.limit:.0f} s were allowed"
    for stood in account.ranks[:_PEERS]:
        begun = "" if stood.collectives is None else f", {stood.collectives} collectives begun"
        yield f"rank {stood.rank}", quoted(f"last seen {stood.doing} at step {stood.step}, batch {stood.batch}{begun}")
    if len(account.ranks) > _PEERS:
        yield "", f"and {len(account.ranks) - _PEERS} more: --json has where each rank stood"


def _print_failure(console: Console, record: FailureRecord) -> None:
    title = f"\nrank {record.rank} at {record.at}, {record.doing} batch {record.batch}, step {record.step}"
    console.print(Text(title, style="bold"))
    lines = record.traceback.rstrip().splitlines() or [f"{record.error}: {record.message}"]
    # The worker's traceback comes after the traceback of the rank, which only waited.
    begin = next((place for place, line in enumerate(lines) if line.startswith("Original Traceback")), 0)
    shown = [line for line in lines[begin:] if not _MARKERS.fullmatch(line)][-_TRACEBACK_LINES:]
    _print_lines(console, shown)
    if begin or len(shown) == _TRACEBACK_LINES:
        console.print("  (shortened: --json has all of it)")


def _print_lines(console: Console, lines: list[str] | tuple[str, ...], indent: int = 2) -> None:
    console.print(Padding(quoted("\n".join(lines)), (0, 0, 0, indent)))


def _last_line(record: FailureRecord) -> str:
    return next(iter(f"{record.error}: {record.message}".splitlines()), record.error)
