"""The panel: a status and two curves as one picture for a terminal. Pure."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollback.inspect.status.report import Durable, RunStatus, Work
from rollback.inspect.status.text import STATE_STYLES
from rollback.rundir.metrics.metric_lines import Metric
from rollback.terminal.curve import Curve, draw, extent
from rollback.terminal.messages import printable
from rollback.terminal.quantities import duration, number
from rollback.wording import counted

_VERDICTS = {"healthy": "green", "watch": "yellow", "spike": "red", "nonfinite": "red"}
_LABEL, _VALUE, _BOUND = 10, 10, 8  # columns: of a row's name, of its value, of a curve's bounds
_WIDEST, _WIDE = 100, 64
_LONGEST = 240  # characters of words that are not ours


@dataclass
class Curves:
    loss: Curve = field(default_factory=Curve)
    grad_norm: Curve = field(default_factory=Curve)

    def add(self, metric: Metric) -> None:
        for curve, value in ((self.loss, metric.loss), (self.grad_norm, metric.grad_norm)):
            if value is not None:
                curve.add(metric.step, value)


def panel(status: RunStatus | None, curves: Curves, width: int, seconds: float | None) -> Panel:
    """The panel of a run. status: None before there is a record. width: columns. seconds: since the first fact."""
    width = min(width, _WIDEST)
    inner = max(10, width - 4)
    if status is None:
        nothing = Text("starting; nothing is on record yet", style="dim")
        return Panel(nothing, title="rollback", title_align="left", border_style="dim", width=width)
    over = status.state in ("ended", "died")
    return Panel(
        Group(_measures(status, curves, inner), Text(), _standing(status, inner)),
        title=_title(status, inner),
        title_align="left",
        subtitle=_subtitle(status, seconds, inner),
        subtitle_align="right",
        border_style="dim" if over else "blue",
        width=width,
    )


def _title(status: RunStatus, inner: int) -> Text:
    name = printable(Path(status.directory).resolve().name)
    title = Text.assemble((_cut(name, inner - 20), "bold"), " · ")
    return title.append(status.state, style=STATE_STYLES[status.state])


def _subtitle(status: RunStatus, seconds: float | None, inner: int) -> Text:
    parts = [f"attempt {status.attempt}"] if status.attempt else []
    if status.world_size and inner >= _WIDE - 4:
        parts.append(counted(status.world_size, "rank"))
    if seconds is not None:
        parts.append(duration(seconds) if seconds >= 120 else f"{seconds:.0f} s")
    return Text(" · ".join(parts), style="dim")


def _measures(status: RunStatus, curves: Curves, inner: int) -> Table:
    """Step, rate, loss and gradient norm, with their curves."""
    grid = _grid()
    grid.add_column(no_wrap=True, width=_VALUE)
    wide = inner >= _WIDE - 4
    grid.add_column(no_wrap=True)
    rate = "" if status.steps_per_second is None else _rate(status.steps_per_second)
    step = "-" if status.step is None else f"{status.step:,}"
    grid.add_row("step", Text(step, style="bold"), Text(rate))
    room = max(4, inner - _LABEL - _VALUE - 2 - (1 + _BOUND if wide else 0))
    verdict = Text(printable(status.verdict or ""), style=_VERDICTS.get(status.verdict or "", ""))
    for label, value, note, curve in (
        ("loss", status.loss, verdict, curves.loss),
        ("grad norm", status.grad_norm, Text(), curves.grad_norm),
    ):
        style = "bold" if value is None or math.isfinite(value) else "bold red"
        shown = Text("-" if value is None else number(value), style=style)
        grid.add_row(label, Group(shown, note), _curve(curve, room, wide))
    return grid


def _curve(curve: Curve, room: int, wide: bool) -> Table:
    """Two rows of a curve, and beside it its highest and lowest value."""
    columns = curve.columns(2 * room)
    # Where a run began is far above where it is: most of the height belongs to what came later.
    bounds = extent(columns[len(columns) // 4 :]) or extent(columns)
    top, bottom = draw(columns, bounds, 2)
    grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True, width=room)
    ends = [Text(f"{end:.3g}", style="dim") for end in reversed(bounds)] if bounds else [Text(), Text()]
    if wide:
        grid.add_column(no_wrap=True, justify="right", width=_BOUND)
    for row, end in zip((top, bottom), ends, strict=True):
        grid.add_row(row, *([end] if wide else []))
    return grid


def _standing(status: RunStatus, inner: int) -> Table:
    """Checkpoints, incidents, and what is being done now."""
    grid = _grid()
    grid.add_column(overflow="fold")
    grid.add_row("last good", _last_good(status))
    if status.ring:
        grid.add_row("ring", _ring(status))
    if status.durable:
        grid.add_row("durable", _durable(status.durable))
    grid.add_row("incidents", _incidents(status))
    for text in status.requests[-2:]:
        grid.add_row("asked for", Text(_cut(printable(text), _LONGEST), style="yellow"))
    grid.add_row("now", _now(status, inner - _LABEL - 2))
    for code, text in list(status.advice.items())[-1:]:
        grid.add_row("advice", Text(_cut(printable(f"{code}: {text}"), _LONGEST), style="yellow"))
    return grid


def _last_good(status: RunStatus) -> Text:
    if status.last_good is None:
        return Text("none yet", style="yellow")
    age = status.last_good_age
    ago = "" if age is None else " · this step" if age == 0 else f" · {age:,} step{'s' if age != 1 else ''} ago"
    return Text(f"step {status.last_good.step:,}{ago}")


def _ring(status: RunStatus) -> Text:
    """A dot for each checkpoint, oldest first, and how many lie in which tier."""
    text = Text()
    shown = status.ring[-12:]
    for held in shown:
        text.append("●" if held.good else "○", style="green" if held.good else "yellow")
    good = sum(held.good for held in status.ring)
    candidates = len(status.ring) - good
    # None good here is no news where a URL has them: those that are good and not here are not counted.
    parts = [f"{number} {what}" for number, what in ((good, "good"), (candidates, "on probation")) if number]
    text.append(f" {', '.join(parts)}")
    for tier in ("fast", "durable"):
        if count := sum(tier in held.tiers for held in status.ring):
            text.append(f" · {count} {tier}", style="dim")
    return text


def _durable(durable: Durable) -> Text:
    """What the durable ring has, or why it gets nothing."""
    if durable.trouble is not None:
        return Text(_cut(printable(f"nothing can be copied: {durable.trouble}"), _LONGEST), style="red")
    place = "" if durable.place is None else f" · {durable.place}"
    return Text(_cut(printable(f"step {durable.step or 0:,}{place}"), _LONGEST))


def _incidents(status: RunStatus) -> Text:
    if not (status.incidents or status.skipped_batches):
        return Text("none", style="dim")
    parts, restores = [f"{status.incidents - status.incidents_asked:,}"], status.rollbacks - status.rewinds_asked
    if restores:
        parts.append(f"{restores:,} restore{'s' if restores != 1 else ''}")
    if status.rewinds_asked:
        parts.append(f"{status.rewinds_asked:,} rewind{'s' if status.rewinds_asked != 1 else ''} asked for")
    if status.skipped_batches:
        parts.append(f"{status.skipped_batches:,} batch{'es' if status.skipped_batches != 1 else ''} skipped")
    return Text(" · ".join(parts))


def _now(status: RunStatus, room: int) -> RenderableType:
    if status.ending is not None and status.state != "running":
        how = status.ending.how.replace("_", " ")
        if status.durable is not None and status.holder is not None and status.holder.alive == "yes":
            return Text(f"{how}; draining the newest checkpoints to the durable ring", style="yellow")
        style = "green" if status.ending.well else "yellow"
        return Text(_cut(printable(f"{how}: {status.ending.account}"), _LONGEST), style=style)
    if status.state == "died":
        return Text("no process of it is left; the same command goes on from the newest checkpoint", style="red")
    if status.pending:
        return Text(printable(f"rewinding: {status.pending}"), style="yellow")
    if status.work is not None:
        return _working(status.work, room)
    doing = status.doing or ("starting" if status.state == "starting" else status.state)
    return Text(_cut(printable(doing), _LONGEST))


def _working(work: Work, room: int) -> RenderableType:
    """What takes a while, with how far it is: a bar where there is room for one."""
    if work.unit == "bytes":
        amount = f"{work.done / 2**20:,.0f} of {work.total / 2**20:,.0f} MiB"
    elif work.unit == "seconds":
        amount = f"{max(0.0, work.total - work.done):.0f} s left"
    else:
        amount = f"{work.done:,.0f} of {work.total:,.0f} steps"
    space = room - len(work.what) - len(amount) - 4
    if space < 8:
        return Text(f"{work.what}: {amount}")
    grid = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(
        total=work.total, completed=work.done, width=min(space, 24), complete_style="blue", finished_style="blue"
    )
    grid.add_row(work.what, bar, Text(amount, style="dim"))
    return grid


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=_LABEL)
    return grid


def _rate(per_second: float) -> str:
    return f"{per_second:.3g} steps/s" if per_second >= 1 else f"{1 / per_second:.3g} s/step" if per_second else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= max(4, width) else text[: max(4, width) - 1] + "…"
