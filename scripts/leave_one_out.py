#!/usr/bin/env python3
"""Choose the sentinel's thresholds on all families of traces but one, and score them on that one; for each family.

    python scripts/leave_one_out.py TRACES... [--vary NAME,...]

TRACES are directories as `made_traces.py` writes them. The thresholds of the preset `normal` that decide most are
varied, each by itself. What is chosen is the value with the least cost on the other families: the share of divergences
missed, of blips and of shifts called, and false calls per 10,000 healthy steps, added up. Among equal ones the preset's
own value is taken. Prints a Markdown table: a family that a threshold rests on alone would score worse in its row than
with the preset, whose scores are in brackets.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bench_sentinel import Score, sentinel
from rollback.sentinel import PRESETS
from rollback.sentinel.presets import Preset
from traces import Trace, load_traces

NORMAL = PRESETS["normal"]
VARIED: dict[str, tuple[Any, ...]] = {
    "patience": (4,),
    "alone": (5.0, 7.0),
    "supported": (2.2, 3.5),
    "drift": (2.0, 3.2),
    "faded": (0.5, 0.8),
}
"""Values that stand beside the preset's own."""
COLUMNS = ["sudden, quick", "all", "slow", "false", "blips", "shifts, bumps"]
_CELLS = [1, 2, 4, 6, 7, 8]

Families = dict[str, list[Trace]]


def scorer(families: Families) -> Callable[[str, Preset], Score]:
    """The score of a family with a preset. Computed once for each pair."""

    @cache
    def score(family: str, preset: Preset) -> Score:
        PRESETS["normal"] = preset
        judge, found = sentinel("normal", with_hints=True), Score()
        for trace in families[family]:
            found.add(trace, judge(trace))
        return found

    return score


def cost(scores: list[Score]) -> float:
    """What `scores` cost together: see the module."""
    missed = [delay is None for score in scores for delay in score.sudden + score.slow]
    wrong = [[called for score in scores for called in getattr(score, name)] for name in ("blips", "shifts")]
    shares = [sum(each) / len(each) for each in (missed, *wrong) if each]
    return float(sum(shares) + 1e4 * sum(score.false for score in scores) / sum(score.healthy for score in scores))


def chosen(others: list[str], score: Callable[[str, Preset], Score], vary: Iterable[str] = VARIED) -> Preset:
    """The preset with each threshold of `vary` as it is best on `others`."""

    def costs(preset: Preset) -> float:
        return cost([score(family, preset) for family in others])

    best = NORMAL
    for name in vary:
        tried = min((replace(NORMAL, **{name: value}) for value in VARIED[name]), key=costs)
        if costs(tried) < costs(NORMAL):
            best = replace(best, **{name: getattr(tried, name)})
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="directories of labelled traces")
    parser.add_argument("--vary", default=",".join(VARIED), help="thresholds, separated by commas (default: all)")
    options = parser.parse_args()
    families: Families = defaultdict(list)
    for directory in options.traces:
        for trace in load_traces(directory):
            families[trace.family].append(trace)
    score = scorer(families)
    print("| family left out | chosen on the others | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for family in families:
        preset = chosen([other for other in families if other != family], score, options.vary.split(","))
        values = {name: getattr(preset, name) for name in VARIED}
        differs = [f"{name} {value:g}" for name, value in values.items() if value != getattr(NORMAL, name)]
        rows = [score(family, preset).cells(), score(family, NORMAL).cells()]
        cells = [f"{mine} ({own})" for mine, own in zip(*([row[i] for i in _CELLS] for row in rows), strict=True)]
        print(f"| {family} | {', '.join(differs) or 'as the preset'} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
