"""Does it help? A small GPT on real text, every measure against every trouble, over many seeds.

python scripts/bench_stability.py --seeds 10      # at most three hours on two idle cores
python scripts/bench_stability.py --quick         # five minutes: one seed, fewer measures
python scripts/bench_stability.py --docs          # the table of docs/stability.md, of the results that lie beside it

Each run is one of `stability.arms` that meets one of `stability.troubles`, with the same budget of data. All runs are
forked from one process. A result is a line of RESULTS as soon as it is there, so the same command goes on where the
last one was stopped. Needs matplotlib for --plot.
"""

import argparse
import os
import sys
from pathlib import Path

from stability.fleet import Clock, cases, read_results, run_all
from stability.plot import plot
from stability.table import as_json, as_text

KEPT = Path(__file__).with_name("stability") / "results.jsonl"
"""The results that docs/stability.md shows."""
PAGE = Path(__file__).parents[1] / "docs" / "stability.md"
BEGIN, END = "<!-- table:begin -->\n", "\n<!-- table:end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer measures")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these measures and troubles only")
    parser.add_argument("--results", type=Path, default=Path("stability.jsonl"), help="where the results are kept")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: one per core)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw every curve")
    parser.add_argument("--json", action="store_true", help="the table for programs")
    parser.add_argument("--show", action="store_true", help="run nothing; show what there is")
    parser.add_argument("--docs", action="store_true", help="run nothing; write the table of docs/stability.md anew")
    args = parser.parse_args()
    if args.docs:
        before, after = PAGE.read_text().split(BEGIN)[0], PAGE.read_text().split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}{as_text(read_results(KEPT))}{END}{after}")
        return 0

    chosen = cases(1 if args.quick else args.seeds, quick=args.quick, only=args.only)
    done = {(result.seed, result.trouble, result.arm) for result in read_results(args.results)}
    todo = [] if args.show else [case for case in chosen if case not in done]
    lost = run_all(todo, args.results, args.jobs, Clock(len(todo)).tell)
    for line in lost:
        print(f"no result of {line}", file=sys.stderr)
    results = [
        result for result in read_results(args.results) if (result.seed, result.trouble, result.arm) in {*chosen}
    ]
    print(as_json(results) if args.json else as_text(results))
    if args.plot is not None:
        plot(results, args.plot)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
