"""`rollback status --watch`: a run seen from another terminal, until it ends or the person has seen enough."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console

from rollback.inspect.status.report import RunStatus
from rollback.live.fact_lines import line_of
from rollback.live.view import EVERY, View
from rollback.terminal.canvas import Canvas, cursor_at_suspension
from rollback.terminal.escape import quoted
from rollback.terminal.quantities import duration, number
from rollback.wording import counted

_LINE_EVERY = 10.0  # seconds between two lines, where there is no panel
_OVER = ("ended", "died")
_TIME = slice(11, 19)  # of day, in a journal's line


def watch_panel(root: Path, console: Console) -> RunStatus | None:
    """The panel, until the run has ended, or until `q` or Ctrl-C. Returns the last status.

    Raises as `read_status` where the first look fails; what goes wrong later may pass."""
    view, canvas = View(root), Canvas(console)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        stack.enter_context(cursor_at_suspension(console))
        pressed = stack.enter_context(_keys())
        canvas.start()
        stack.callback(canvas.stop)
        while True:
            for line in _look(view):
                canvas.print(quoted(line, style="dim"))
            canvas.draw(view.panel(console.width))
            if _is_over(view) or pressed(EVERY) in ("q", "Q"):
                break
    return view.status


def watch_lines(root: Path, out: TextIO) -> RunStatus | None:
    """As `watch_panel` in plain lines: one every few seconds, and one for each thing that happens."""
    view, due, said = View(root), time.monotonic(), ""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            lines = _look(view)
            over = _is_over(view)
            if view.status is not None and (over or time.monotonic() >= due):
                due, line = time.monotonic() + _LINE_EVERY, standing(view.status)
                lines, said = (lines if line == said else [*lines, line]), line
            for line in lines:
                print(quoted(line).plain, file=out, flush=True)
            if over:
                break
            time.sleep(EVERY)
    return view.status


def standing(status: RunStatus) -> str:
    """Where a run stands, in a line."""
    parts = [status.state + (f" ({status.doing})" if status.doing else "")]
    if status.step is not None:
        parts.append(f"step {status.step}")
    if status.steps_per_second is not None:
        parts.append(f"{status.steps_per_second:.3g} steps/s")
    if status.verdict is not None:
        parts.append(f"loss {number(status.loss)}, gradient norm {number(status.grad_norm)}, {status.verdict}")
    if status.last_good is not None:
        parts.append(f"last good at step {status.last_good.step}")
    asked = f", {counted(status.rewinds_asked, 'rewind')} asked for" if status.rewinds_asked else ""
    troubles = counted(status.incidents - status.incidents_asked, "incident")
    skipped = counted(status.skipped_batches, "batch", "batches")
    parts.append(f"{troubles}{asked}, {skipped} skipped")
    if status.work is not None:
        left = f"{duration(status.work.total - status.work.done)} left" if status.work.unit == "seconds" else (
            f"{status.work.done / status.work.total:.0%}"
        )  # fmt: skip
        parts.append(f"{status.work.what}: {left}")
    return " · ".join(parts)


def _look(view: View) -> list[str]:
    """Look again. Returns what has happened since, a line for each; and why it cannot be told, when that begins."""
    before = view.fault
    if view.refresh() is None and view.fault is not None:
        raise view.fault
    if view.fault is not None and before is None:
        return [f"what is shown is as it was last: {view.fault.message}"]
    return [f"{record.at[_TIME]}  {line}" for record in view.news if (line := line_of(record)) is not None]


def _is_over(view: View) -> bool:
    """Whether nothing more will come. A run whose supervisor is alive may start another attempt."""
    status = view.status
    return status is not None and status.state in _OVER and not (status.holder and status.holder.alive == "yes")


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys without a line's end: a function that waits some seconds for one, and returns an empty text for none."""
    if not sys.stdin or not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 64).decode(errors="replace")[:1] if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
