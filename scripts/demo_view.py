"""What a person sees of the demo: one panel for the run in progress, or plain lines where there is no terminal."""

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

LEVELS = " ▁▂▃▄▅▆▇█"
CHART_HEIGHT = 4
LOG2_RANGE = (1.0, 3.5)  # the chart's axis: losses from 2 to 11.3, the same for all runs
RATE_SECONDS = 5.0
LIVE_EVENTS = 6  # while a run is on, the panel must fit into a small terminal


@dataclass
class Progress:
    """A run as far as it is known: losses by step, marks on the chart, what happened."""

    name: str
    about: str
    steps: int
    losses: dict[int, float] = field(default_factory=dict)
    marks: dict[int, str] = field(default_factory=dict)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    validation: float | None = None
    seconds: float | None = None
    _began: float = field(default_factory=time.monotonic)
    _recent: deque[float] = field(default_factory=deque)

    @property
    def step(self) -> int:
        """Steps done."""
        return max(self.losses, default=-1) + 1

    def update(self, step: int, loss: float) -> None:
        """Step `step` has been done. If it had been done before a rewind, that and what followed is forgotten."""
        for later in range(step, self.step):
            self.losses.pop(later, None)
        self.losses[step] = loss
        self._recent.append(time.monotonic())

    def tell(self, text: str, style: str = "", mark: str = "", step: int | None = None) -> None:
        """Something happened; `mark` is put under the chart at `step`, or where the run is."""
        self.events.append((self.elapsed(), style, text))
        if mark:
            self.marks[self.step if step is None else step] = mark

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self.seconds = time.monotonic() - self._began

    def elapsed(self) -> float:
        return self.seconds if self.seconds is not None else time.monotonic() - self._began

    def rate(self) -> float:
        """Steps a second, of late."""
        now = time.monotonic()
        while self._recent and self._recent[0] < now - RATE_SECONDS:
            self._recent.popleft()
        return len(self._recent) / RATE_SECONDS


class View(AbstractContextManager["View"]):
    """Shows one run after the other. `show` is to be called a few times a second."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._pictures = console.is_terminal and console.encoding.lower().startswith("utf")
        self._live: Live | None = None
        self._told = 0
        self._milestone = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Show how the run stands; with its `seconds` set, for the last time."""
        if self._pictures:
            self._show_panel(progress)
        else:
            self._show_lines(progress)
        if progress.seconds is not None:
            self._told = self._milestone = 0

    def _show_panel(self, progress: Progress) -> None:
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(panel(progress, min(self.console.width, 110)), refresh=True)
        if progress.seconds is not None:
            self._live.stop()
            self._live = None

    def _show_lines(self, progress: Progress) -> None:
        for seconds, _, text in progress.events[self._told :]:
            self._print(f"{progress.name} {clock(seconds)}  {text}")
        self._told = len(progress.events)
        if progress.seconds is not None or progress.step >= self._milestone + 50:
            self._milestone = progress.step - progress.step % 50
            self._print(f"{progress.name}       {standing(progress)}")

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def panel(progress: Progress, width: int) -> Panel:
    """The run as one panel: where it stands, its loss as a chart, what happened."""
    inner = width - 4
    body: list[RenderableType] = [Text(standing(progress), justify="right"), *chart(progress, inner)]
    shown = progress.events if progress.seconds is not None else progress.events[-LIVE_EVENTS:]
    for seconds, style, text in shown:
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(style="dim", no_wrap=True)
        line.add_column()
        line.add_row(clock(seconds), Text(text, style=style))
        body.append(line)
    border = "dim" if progress.seconds is not None else "cyan"
    return Panel(
        Group(*body),
        title=Text.assemble((progress.name, "bold"), f" · {progress.about}"),
        title_align="left",
        border_style=border,
        width=width,
    )


def chart(progress: Progress, width: int) -> list[Text]:
    """The loss over the steps on a logarithmic axis, a row of marks under it. A column of NaN is a red cross."""
    columns = [_column(progress, column, width) for column in range(width)]
    rows = []
    for row in reversed(range(CHART_HEIGHT)):
        text = Text()
        for value in columns:
            if value is not None and math.isnan(value):
                text.append("×" if row == 0 else " ", style="red")
            else:
                text.append(_block(value, row), style="cyan")
        rows.append(text)
    signs = [" "] * width
    for step, mark in progress.marks.items():
        signs[min(width - 1, step * width // progress.steps)] = mark
    rows.append(Text("".join(signs), style="yellow"))
    return rows


def _column(progress: Progress, column: int, width: int) -> float | None:
    """The mean loss of the steps that share a column; NaN if one of them is not finite, None where none is known."""
    first = column * progress.steps // width
    last = max(first + 1, (column + 1) * progress.steps // width)
    losses = [progress.losses[step] for step in range(first, last) if step in progress.losses]
    if not losses:
        return None
    return sum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def _block(value: float | None, row: int) -> str:
    if value is None:
        return " "
    low, high = LOG2_RANGE
    share = min(1.0, max(0.0, (math.log2(max(value, 1e-9)) - low) / (high - low)))
    eighths = max(1, round(share * CHART_HEIGHT * 8))
    return LEVELS[min(8, max(0, eighths - 8 * row))]


def standing(progress: Progress) -> str:
    """Where the run stands, in a line."""
    if progress.validation is not None:
        return f"{progress.steps} steps in {clock(progress.elapsed())} · validation loss {progress.validation:.4f}"
    if not progress.losses:
        return f"starting · {clock(progress.elapsed())}"
    loss = progress.losses[progress.step - 1]
    return (
        f"step {progress.step}/{progress.steps} · loss {loss:.3f} · {progress.rate():.1f} steps/s"
        f" · {clock(progress.elapsed())}"
    )


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def table(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> Table:
    """A small table; the first column names the rows, the second is a number."""
    made = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for index, head in enumerate(heads):
        made.add_column(head, justify="right" if index == 1 else "left", no_wrap=index < 2)
    for row in rows:
        made.add_row(*map(Text, row))
    return made
