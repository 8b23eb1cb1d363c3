"""The status as text for people."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from rollback.inspect.status.report import Durable, RunStatus
from rollback.terminal.escape import quoted
from rollback.terminal.quantities import at_least, duration, number, restores_in_words, steps_or_unknown
from rollback.terminal.rows import print_rows
from rollback.wording import counted

STATE_STYLES = {"running": "green", "starting": "yellow", "ended": "default", "died": "red", "unknown": "yellow"}


def print_status(console: Console, status: RunStatus) -> None:
    print_rows(console, list(_status_rows(status)), indent=0)


def _status_rows(status: RunStatus) -> Iterator[tuple[str, str | Text]]:
    yield "run", quoted(status.directory)
    state = Text(status.state, style=STATE_STYLES[status.state])
    if status.doing:
        state.append_text(quoted(f": {status.doing}"))
    if status.attempt:
        state.append(f", attempt {status.attempt}")
    yield "state", state
    yield from [("waiting", quoted(f"for the next attempt: {status.waiting}"))] if status.waiting else []
    yield from [("began with", quoted(status.init.in_words()))] if status.init else []
    if status.holder:
        who = status.holder
        yield "held by", quoted(f"{who.role}, pid {who.pid} on {who.host} since {who.since} (alive: {who.alive})")
    if status.ranks and status.state != "ended":
        alive = sum(entry.alive == "yes" for entry in status.ranks)
        oldest = max((entry.age for entry in status.ranks if entry.age is not None), default=None)
        age = "" if oldest is None else f", oldest heartbeat {duration(oldest)} ago"
        yield "ranks", f"{alive} of {status.world_size or len(status.ranks)} seen alive{age}"
    waiting = status.spare_nodes if status.state != "ended" else None
    yield from [("spares", quoted(waiting))] if waiting else []
    if status.step is not None:
        rate = "" if status.steps_per_second is None else f", {status.steps_per_second:.3g} steps/s"
        yield "step", f"{at_least(str(status.step), status.state == 'died')}, batch {status.batch}{rate}"
    if (judged := status.last_judged) is not None:
        loss = judged.in_words(last=status.state == "died")
        yield "loss", quoted(f"{loss}, gradient norm {number(judged.grad_norm)}, {judged.verdict}")
    if status.last_good and status.last_good_checkpoint:
        yield "last good", quoted(f"{status.last_good_checkpoint}, {steps_or_unknown(status.last_good_age)} ago")
    else:
        yield "last good", "no good checkpoint yet"
    if status.candidates:
        yield "candidates", quoted(" ".join(status.candidates))
    if status.durable:
        yield "durable", _durable(status.durable)
    skipped = counted(status.skipped_batches, "batch", "batches")
    restores = restores_in_words(status.rollbacks, status.rewinds_asked)
    yield "incidents", f"{status.incidents - status.incidents_asked}, {restores}, {skipped} skipped"
    yield from [("kept", quoted(status.last_snapshot))] if status.last_snapshot else []
    yield from [("lost", quoted(status.death.in_words()))] if status.death else []
    yield from _open_rows(status)
    for code, text in status.advice.items():
        yield "advice", quoted(f"{code}: {text}")
    if status.ending:
        yield "ended", quoted(status.ending.in_words())


def _durable(ring: Durable) -> Text:
    text = quoted(f"{ring.checkpoint} at {ring.place}" if ring.checkpoint else "nothing was copied yet")
    if not ring.is_there:
        text.append_text(quoted("; it is not there: a start goes on from what is left, if anything is", style="red"))
    return text.append_text(quoted(f"; not since: {ring.trouble}", style="yellow")) if ring.trouble else text


def _open_rows(status: RunStatus) -> Iterator[tuple[str, str | Text]]:
    """The rows about open work: a pending plan, open requests."""
    if status.pending:
        yield "pending", quoted(status.pending, style="yellow")
    for text in status.requests:
        yield "asked for", quoted(text, style="yellow")
