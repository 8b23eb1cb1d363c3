#!/usr/bin/env python3
"""Score the sentinel and other libraries' rules on labelled loss traces.

    python scripts/bench_sentinel.py [TRACES...] [--seed N] [--misses] [--only NAME] [--families] [--behind HINT]

TRACES are directories with `labels.json` and `data/NAME.npz` (step, loss, gn), as `made_traces.py` writes them; without
one, traces are made from formulas and a seed. Prints a Markdown table. With `--families`, the rows are the fields that
the traces come from and not the detectors. With `--behind`, a hint stands 20 observations before each divergence.
A divergence is hit by a call within 200 observations of its onset (from 10 before it where the
onset was seen, not known); `late` ones after more than 10 observations are hits, but not quick ones. Calls in healthy
steps less than 50 observations apart count as one. Slow ramps are not in the delays. Labels other than those scored
(grey, silent, amp) are left out of everything.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from detectors import PEERS, Detector
from formula_traces import formula_traces
from rollback.config import Sensitivity
from rollback.sentinel import PRESETS, Hint, Kind, Observation, Sentinel
from traces import Trace, load_traces

REACH = 200
QUICK = 10
EARLY_IF_SEEN = 10
ONE_CALL = 50
BEHIND = 20


@dataclass
class Score:
    """Counts over the traces of one source."""

    sudden: list[int | None] = field(default_factory=list)
    """Delay of each sudden divergence in observations, None if missed."""
    slow: list[int | None] = field(default_factory=list)
    by_trace: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    nonfinite: list[bool] = field(default_factory=list)
    blips: list[bool] = field(default_factory=list)
    shifts: list[bool] = field(default_factory=list)
    healthy: int = 0
    false: int = 0
    remarks: list[str] = field(default_factory=list)

    def add(self, trace: Trace, calls: list[int]) -> None:
        """Score the calls (ascending indices) on one trace."""
        labelled = np.zeros(len(trace.loss), bool)
        for first, end, kind in trace.labels:
            early = EARLY_IF_SEEN if trace.onset_seen and kind == "divergence" else 0
            labelled[max(0, first - early) : end] = True
            inside = [call for call in calls if first - early <= call < end]
            if kind == "divergence":
                within = [call - first for call in calls if -early <= call - first < REACH]
                (self.slow if trace.slow else self.sudden).append(within[0] if within else None)
                self.by_trace[trace.name].append(bool(within))
                if not within or within[0] > QUICK:
                    self.remarks.append(f"{trace.name} at {first}: {f'late, {within[0]}' if within else 'missed'}")
            elif kind == "nonfinite":
                self.nonfinite.append(first in calls)
            elif kind in ("blip", "shift", "bump"):
                (self.blips if kind == "blip" else self.shifts).append(bool(inside))
                if inside:
                    self.remarks.append(f"{trace.name} at {first}: {kind} called")
        self.healthy += int((~labelled).sum())
        last = -ONE_CALL
        for call in calls:
            if not labelled[call]:
                if call - last >= ONE_CALL:
                    self.false += 1
                    self.remarks.append(f"{trace.name} at {call}: false call")
                last = call

    def cells(self) -> list[str]:
        """The row of the table."""
        every = self.sudden + self.slow
        delays = sorted(delay for delay in self.sudden if delay is not None)
        traces = [sum(hits) / len(hits) for hits in self.by_trace.values()]
        return [
            _share(self.nonfinite),
            _share([delay is not None and delay <= QUICK for delay in self.sudden]),
            _share([delay is not None for delay in every]),
            f"{100 * statistics.fmean(traces):.0f}" if traces else "-",
            _share([delay is not None for delay in self.slow]),
            f"{delays[len(delays) // 2]} / {delays[round(0.95 * (len(delays) - 1))]}" if delays else "-",
            f"{1e5 * self.false / self.healthy:.1f}" if self.healthy else "-",
            _share(self.blips),
            _share(self.shifts),
        ]


COLUMNS = ["non-finite", "sudden, quick", "all", "all, by trace", "slow", "delay", "false", "blips", "shifts, bumps"]
Judge = Callable[[Trace], list[int]]


def sentinel(sensitivity: Sensitivity, with_hints: bool) -> Judge:
    """Our own detector; a stretch of non-finite steps is one call."""

    def judge(trace: Trace) -> list[int]:
        watcher, calls, was = Sentinel(sensitivity), [], Kind.HEALTHY
        norms = [None] * len(trace.loss) if trace.norm is None else trace.norm.tolist()
        for i, (step, loss) in enumerate(zip(trace.step.tolist(), trace.loss.tolist(), strict=True)):
            hints = trace.hints.get(i, Hint.NONE) if with_hints else Hint.NONE
            kind = watcher.update(Observation(step, loss, norms[i], hints)).kind
            if kind is Kind.SPIKE or (kind is Kind.NONFINITE and was is not Kind.NONFINITE):
                calls.append(i)
            was = kind
        return calls

    return judge


def peer(detector: Detector) -> Judge:
    """Another library's rule."""
    return lambda trace: detector(trace.loss.tolist(), None if trace.norm is None else trace.norm.tolist())


def cost(trace: Trace) -> float:
    """Median microseconds of one update."""
    watcher, times = Sentinel(), []
    norms = [None] * len(trace.loss) if trace.norm is None else trace.norm.tolist()
    for step, (loss, norm) in enumerate(zip(trace.loss.tolist(), norms, strict=True)):
        observation = Observation(step, loss, norm)
        began = time.perf_counter_ns()
        watcher.update(observation)
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1000


def _share(hits: list[bool]) -> str:
    return f"{100 * sum(hits) / len(hits):.0f}" if hits else "-"


def behind(trace: Trace, hint: Hint) -> Trace:
    """The trace with a hint 20 observations before each divergence."""
    onsets = [first for first, _, kind in trace.labels if kind == "divergence" and first >= BEHIND]
    return replace(trace, hints=trace.hints | dict.fromkeys((onset - BEHIND for onset in onsets), hint))


def print_table(first: str, rows: dict[str, tuple[Judge, list[Trace]]], misses: bool) -> None:
    """A row of scores for each name."""
    print(f"\n| {first} | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name, (judge, traces) in rows.items():
        score = Score()
        for trace in traces:
            score.add(trace, judge(trace))
        print(f"| {name} | " + " | ".join(score.cells()) + " |", flush=True)
        if misses:
            for remark in score.remarks:
                print(f"    {remark}", file=sys.stderr)


def main() -> None:
    """Score all detectors on all traces and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="directories of labelled traces (default: from formulas)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the formulas")
    parser.add_argument("--only", default="", help="only the detectors whose name contains this")
    parser.add_argument("--misses", action="store_true", help="list what each detector missed or called wrongly")
    parser.add_argument("--families", action="store_true", help="the sentinel with hints, a row for each family")
    parser.add_argument("--behind", metavar="HINT", choices=[hint.name for hint in Hint], help="such as LR_CHANGED")
    options = parser.parse_args()
    traces = [trace for directory in options.traces for trace in load_traces(directory)]
    traces = traces or formula_traces(options.seed)
    if options.behind:
        traces = [behind(trace, Hint[options.behind]) for trace in traces]
    judges: dict[str, Judge] = {name: peer(rule) for name, rule in PEERS.items()}
    for sensitivity in PRESETS:
        judges[f"sentinel, {sensitivity}"] = sentinel(sensitivity, with_hints=False)
    judges["sentinel, normal, with hints"] = sentinel("normal", with_hints=True)
    for source in sorted({trace.source for trace in traces}, reverse=True):
        chosen = [trace for trace in traces if trace.source == source]
        print(f"\n{source}: {len(chosen)} traces, {sum(len(trace.loss) for trace in chosen)} observations")
        if options.families:
            grouped: dict[str, list[Trace]] = defaultdict(list)
            for trace in chosen:
                grouped[trace.family].append(trace)
            judge = sentinel("normal", with_hints=True)
            print_table("family", {name: (judge, group) for name, group in grouped.items()}, options.misses)
        else:
            named = {name: (judge, chosen) for name, judge in judges.items() if options.only in name}
            print_table("detector", named, options.misses)
    longest = max(traces, key=lambda trace: len(trace.loss))
    print(f"\nOne update of the sentinel: {cost(longest):.1f} microseconds (median)")


if __name__ == "__main__":
    main()
