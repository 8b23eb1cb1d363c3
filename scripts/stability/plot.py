"""Every curve: a row for each trouble, a panel for each measure, a line for each seed."""

from collections.abc import Sequence
from pathlib import Path

from stability.arms import ARMS
from stability.job import RunResult
from stability.troubles import TROUBLES

HIGHEST = 6.0  # nats: what is worse than guessing is drawn there


def plot(results: Sequence[RunResult], path: Path) -> None:
    """Draw the held-out loss over the updates made. Raises SystemExit where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    troubles = [name for name in TROUBLES if any(result.trouble == name for result in results)]
    arms = [name for name in ARMS if any(result.arm == name for result in results)]
    figure = Figure(figsize=(1.9 * len(arms), 1.6 * len(troubles)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(troubles), len(arms), sharex=True, sharey=True, squeeze=False)
    for row, trouble in zip(panels, troubles, strict=True):
        for panel, arm in zip(row, arms, strict=True):
            for result in results:
                if (result.trouble, result.arm) == (trouble, arm):
                    made = [at for at, _ in result.curve]
                    losses = [HIGHEST if loss is None else min(loss, HIGHEST) for _, loss in result.curve]
                    panel.plot(made, losses, linewidth=0.7, color="C0" if result.end == "done" else "C3")
            panel.tick_params(labelsize=6)
        row[0].set_ylabel(trouble, fontsize=8)
    for panel, arm in zip(panels[0], arms, strict=True):
        panel.set_title(arm, fontsize=8)
        panel.set_ylim(2.0, HIGHEST)
    figure.savefig(path, dpi=110)
