"""The table: what became of the runs of each measure under each trouble."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from stability.arms import ARMS
from stability.job import RunResult
from stability.troubles import STEPS, TROUBLES

LOST = 0.25  # nats above the undisturbed run of its seed: ten times the spread over seeds, or what half the run learns
TARGET = 0.05  # nats above the median undisturbed run: where "steps to a loss" are counted to


@dataclass(frozen=True)
class Line:
    """What became of an arm's runs under a trouble. Numbers are medians over seeds, unless they say otherwise."""

    trouble: str
    arm: str
    runs: int
    exploded: int
    """Runs that were stopped, or whose model is worse than the undisturbed one of their seed by `LOST` or more."""
    stopped: int
    """Of these, the runs that were stopped."""
    loss: float | None
    """Held-out loss at the end; None: there is none."""
    worst: float | None
    """Of the highest loss; None: a run has none."""
    to_target: float | None
    """Updates made until the held-out loss is within `TARGET` of the undisturbed run's last; None: never."""
    samples_lost: float | None
    """Per cent of the data that the final model has not learnt from; None: stopped."""
    time_lost: float | None
    """Per cent of the updates that were made and do not count; None: stopped."""
    seconds: float
    """Processor time of a run."""
    incidents: float


def lines(results: Sequence[RunResult]) -> list[Line]:
    """In the order of troubles and arms; only what has a result, and an undisturbed run of its seed."""
    undisturbed = {
        (result.seed, result.trouble == "shift"): result.loss
        for result in results
        if result.arm == "nothing" and result.trouble in ("none", "shift") and result.loss is not None
    }
    found = []
    for trouble in TROUBLES:
        domain = trouble == "shift"
        known = [loss for (_, shifted), loss in undisturbed.items() if shifted == domain]
        for arm in ARMS:
            mine = [
                result for result in results
                if (result.trouble, result.arm) == (trouble, arm) and (result.seed, domain) in undisturbed
            ]  # fmt: skip
            if mine and known:
                found.append(_line(mine, undisturbed, median(known) + TARGET))
    return found


def _line(mine: list[RunResult], undisturbed: dict[tuple[int, bool], float], target: float) -> Line:
    first = mine[0]
    losses = [math.inf if result.loss is None else result.loss for result in mine]
    kept = [result for result in mine if result.end == "done"]
    exploded = [
        loss - undisturbed[result.seed, result.trouble == "shift"] >= LOST
        for result, loss in zip(mine, losses, strict=True)
    ]
    return Line(
        trouble=first.trouble, arm=first.arm, runs=len(mine), exploded=sum(exploded), stopped=len(mine) - len(kept),
        loss=_finite(median(losses)), worst=_finite(max(losses)),
        to_target=_finite(median(_steps_to(result, target) for result in mine)),
        samples_lost=median(100 * (1 - result.kept / STEPS) for result in kept) if kept else None,
        time_lost=median(100 * (result.made / result.kept - 1) for result in kept if result.kept) if kept else None,
        seconds=median(result.seconds for result in mine), incidents=median(result.incidents for result in mine),
    )  # fmt: skip


def _steps_to(result: RunResult, target: float) -> float:
    return next((made for made, loss in result.curve if loss is not None and loss <= target), math.inf)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_json(results: Sequence[RunResult]) -> str:
    seeds = sorted({result.seed for result in results})
    return json.dumps({"schema": 1, "seeds": seeds, "steps": STEPS, "lines": [asdict(line) for line in lines(results)]})


def as_text(results: Sequence[RunResult]) -> str:
    """Markdown: a table for each trouble."""
    made = lines(results)
    parts = []
    for name, trouble in TROUBLES.items():
        mine = [line for line in made if line.trouble == name]
        if mine:
            parts.append(f"**{name}**: {trouble.words}\n\n" + "\n".join(_table(mine)))
    return "\n\n".join(parts)


def _table(mine: Iterable[Line]) -> list[str]:
    rows = [
        "| measure | exploded | loss | worst | steps to target | samples lost | time lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in mine:
        exploded = f"{line.exploded} of {line.runs}" + (f" ({line.stopped} stopped)" if line.stopped else "")
        cells = (
            line.arm, exploded, _number(line.loss, ".3f"), _number(line.worst, ".3f"), _number(line.to_target, ".0f"),
            _number(line.samples_lost, ".1f", " %"), _number(line.time_lost, ".1f", " %"),
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
