"""A replay as a picture: loss, gradient norm, what was called, what was left alone, what would have been skipped."""

import io
import math
from pathlib import Path

from rollback.backtest.replay import Replay
from rollback.errors import UsageError
from rollback.terminal.extras import require_extra
from rollback.terminal.files import replacing

_FARTHEST = 1e150
"""Values are drawn as no further from zero than this: what matplotlib reckons with them is then no further than floats
go."""


def draw(replay: Replay, target: Path) -> None:
    """Write the picture; its format is what the name's ending says.

    Raises UsageError where matplotlib cannot be imported, and as `replacing`.
    """
    for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        require_extra(module, "pictures are drawn with matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_norm = any(observation.grad_norm is not None for observation in replay.observations)
    figure = Figure(figsize=(11, 6.5 if has_norm else 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if has_norm else 1, 1, sharex=True, squeeze=False)[:, 0]
    steps = [observation.step for observation in replay.observations]
    _curve(axes[0], steps, [observation.loss for observation in replay.observations], replay.columns.loss)
    if has_norm:
        norms = [observation.grad_norm for observation in replay.observations]
        _curve(axes[1], steps, norms, replay.columns.grad_norm or "grad_norm")
    for axis in axes:
        for blip in replay.blips:
            axis.axvspan(blip.first_step, blip.last_step, color="tab:green", alpha=0.25, lw=0)
        for verdict, planned in zip(replay.calls, replay.plan, strict=True):
            if planned.skip is not None:
                axis.axvspan(planned.skip.first, planned.skip.last, color="tab:red", alpha=0.12, lw=0)
            axis.axvline(verdict.step, color="tab:red", lw=1)
    title = f"{replay.path.name}: {len(replay.calls)} calls (red), {len(replay.blips)} left alone (green)"
    axes[0].set_title(title, parse_math=False)  # the file's name is no formula, whatever stands between two `$`
    axes[-1].set_xlabel("step")
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=120, format=target.suffix.removeprefix(".") or None)
    except ValueError as error:
        raise UsageError(f"{target} cannot be drawn: {error}", hint="end the name in .png, .svg or .pdf") from error
    with replacing(target) as path:
        path.write_bytes(drawn.getvalue())


def _curve(axis, steps: list[int], values: list[float | None], label: str) -> None:  # type: ignore[no-untyped-def]
    finite = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    numbers = [math.copysign(min(abs(value), _FARTHEST), value) for value in finite]
    axis.plot(steps, numbers, lw=0.7, color="tab:blue")
    positive = sorted(number for number in numbers if number > 0)
    whole = len(positive) == sum(not math.isnan(number) for number in numbers)
    if whole and positive and positive[-1] > 30 * positive[0]:
        axis.set_yscale("log")
    axis.set_ylabel(label, parse_math=False)
