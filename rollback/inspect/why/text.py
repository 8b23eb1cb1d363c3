"""Shows why an attempt ended: first the cause, then what followed and what the supervisor did."""

import re
from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rollback.inspect.why.stacks import groups, ranges
from rollback.inspect.why.why import AttemptReport
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
    "left": "the script left its loop",
}
_MARKERS = re.compile(r"[ ~^]+")  # what Python draws below a line of code


def print_attempt_report(console: Console, report: AttemptReport) -> None:
    """Print a report. Control characters from the run are escaped."""
    print_rows(console, list(_head(report)), indent=0)
    # What a rank raises after its hang was called is a consequence of the kill.
    causes = {report.rank} if report.hung is None else {report.rank} & set(report.hung.raised)
    own = [item for item in report.failures if item.rank in causes or (report.rank is None and not report.hung)]
    peers = [item for item in report.failures if item not in own]
    for record in own[:_PEERS]:
        _print_failure(console, record)
    if report.last_words is not None:
        console.print(quoted(f"\nthe end of {report.last_words.path}", style="bold"))
        _print_lines(console, report.last_words.text.rstrip().splitlines()[-_LAST_WORDS:])
    if report.processes:
        console.print(Text("\nstacks, most recent call first", style="bold"))
        for group in groups(report.processes, report.rank):
            console.print(quoted(group.title))
            _print_lines(console, group.lines, indent=4)
    if peers:
        console.print(Text("\nwhat followed", style="bold"))
        for record in peers[:_PEERS]:
            _print_lines(console, [f"rank {record.rank}: {_last_line(record)}"])
    if len(own) + len(peers) > _PEERS:
        console.print("  --json has the exceptions of all ranks")


def _head(report: AttemptReport) -> Iterator[tuple[str, str | Text]]:
    yield "why", _why(report)
    if report.why is not None:
        yield "class", _IN_WORDS[report.why]
    yield from _ranks(report)
    if report.signals:
        yield "signals", quoted(", ".join(report.signals))
    if report.blamed is not None:
        again = " and ".join(map(str, report.blamed.attempts))
        yield "blamed", f"batch {report.blamed.batch}, the same exception in attempts {again}: {report.blamed.answer}"
    yield from [("state", quoted(report.last_snapshot))] if report.last_snapshot else []
    yield from [("lost", quoted(report.death.in_words()))] if report.death else []
    if report.decision is not None:
        yield "then", quoted(report.decision)
    elif report.state == "died" or (report.state == "ended" and report.cause is not None):
        yield "then", "the same command goes on, or says why it cannot"
    yield from (("node", quoted(text)) for text in report.nodes)
    said = report.death and report.death.why_not_kept
    yield from (("also", quoted(text)) for text in report.remarks if text != said)
    if report.attempt is not None:
        yield "attempt", quoted(f"{report.attempt}, from {report.began or 'unknown'} to {report.ended or 'unknown'}")
    for number in sorted(report.earlier, reverse=True)[:_EARLIER]:
        yield f"attempt {number}", quoted(report.earlier[number])
    if len(report.earlier) > _EARLIER:
        yield "", f"and {len(report.earlier) - _EARLIER} more that failed: `rollback audit` has all attempts"
    yield "run", quoted(f"{report.directory}, now: {report.state}")


def _why(report: AttemptReport) -> Text:
    if report.cause is not None:
        return quoted(report.cause, style="bold red")
    if report.attempt is not None:
        return Text("it has not failed")
    if report.state == "unknown":
        return Text("no failure is on record; whether the run goes on, on another host, cannot be seen from here")
    if report.state == "died":
        return Text("it is gone without a word: killed from outside, out of memory, or its machine went down")
    return Text("no attempt of this run has failed")


def _ranks(report: AttemptReport) -> Iterator[tuple[str, str | Text]]:
    """The rank with which it began, its host, what followed, and the position of each rank."""
    if report.rank is not None:
        yield "rank", quoted(str(report.rank) + (f", on host {report.host}" if report.host else ""))
    if report.step is not None:
        batch = "" if report.batch is None else f", with batch {report.batch} in hand"
        yield "step", f"{report.step}{batch}"
    if report.followed:
        plural = "s" if len(report.followed) > 1 else ""
        yield "followed", f"rank{plural} {ranges(report.followed)} failed because of it"
    if report.hung is not None:
        yield "hang", f"nothing moved for {report.hung.silent:.0f} s, {report.hung.limit:.0f} s were allowed"
    for stood in report.ranks[:_PEERS]:
        begun = "" if stood.collectives is None else f", {stood.collectives} collectives begun"
        yield f"rank {stood.rank}", quoted(f"last seen {stood.doing} at step {stood.step}, batch {stood.batch}{begun}")
    if len(report.ranks) > _PEERS:
        yield "", f"and {len(report.ranks) - _PEERS} more: --json has where each rank stood"


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
