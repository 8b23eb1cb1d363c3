"""Mutation testing of what decides: `scripts/mutants`.

A mutant is the source of a module with one small change: a comparison turned, a number one off, a statement dropped.
The unit tests of that module run against it, and at least one of them should fail. What survives is either a promise
that no test makes, or dead code, or a change that changes nothing. The last kind is argued in
`equivalent_mutants.txt`, by function and by the text of the line, so that lines may move.

Nothing is written: pytest collects the tests of a module once, and each mutant is a fork of that process in which the
code of the functions that stand has been replaced by the mutant's, whoever has imported them. So a mutant costs what
those tests cost that it takes to kill it. Fields of a class are not mutated, nor what a test's subprocesses import.
Of libraries that do the same, cosmic-ray changes the working tree and starts a Python for each mutant, which here costs
twenty times as much, and mutmut leaves out what is decorated, among it every property; neither drops statements.
"""

import argparse
import itertools
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutant_trials import try_mutants
from mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
ARGUED = Path(__file__).with_name("equivalent_mutants.txt")
BAR = 0.95  # share that has to be killed
COUNT = 300

MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "policy": (("policy.py", "data_stream.py"), ("policy",)),
    "cases": (("train/incidents/cases.py",), ("train/incidents/cases",)),
    "suspects": (("suspects.py",), ("suspects",)),
    "catalogue": (
        ("train/catalogue/catalogue.py", "checkpoints/resume.py"),
        ("train/catalogue/catalogue", "checkpoints/resume", "checkpoints/retention"),
    ),
    "retention": (("checkpoints/retention.py",), ("checkpoints/retention",)),
    "journal": (
        ("rundir/journal/journal.py", "facts/history.py"),
        ("rundir/journal/journal", "rundir/journal/journal_index", "rundir/journal/folded_journal", "facts/history"),
    ),
    "agreement": (("train/last_snapshot/agreement.py",), ("train/last_snapshot/agreement",)),
    "claim": (("supervisor/claim.py", "rundir/lock.py"), ("supervisor/claim", "rundir/lock")),
    "slots": (("checkpoints/fast_tier/slots.py",), ("checkpoints/fast_tier/slots", "checkpoints/tiers")),
    "tiers": (
        (
            "checkpoints/tiers.py",
            "checkpoints/fast_tier/record_marks.py",
            "train/snapshots/tier_choice.py",
            "checkpoints/fast_tier/sizing.py",
        ),
        ("checkpoints/tiers", "train/snapshots/tier_choice", "checkpoints/fast_tier/sizing"),
    ),
    "diagnosis": (
        ("supervisor/diagnosis/first_cause.py", "supervisor/diagnosis/blamed_data.py"),
        ("supervisor/diagnosis/first_cause", "supervisor/diagnosis/blamed_data"),
    ),
    "budget": (("supervisor/budget.py",), ("supervisor/supervisor_decisions",)),
    "start": (("train/start/start_record.py",), ("train/start/start_record",)),
    "skips": (("train/data/skips.py",), ("train/data/skips",)),
    "beat": (("train/comm/beat.py",), ("train/comm/pulse",)),
}
"""What decides: modules of the package, and the files of tests/unit that say what it promises."""


def all_mutants(only: Sequence[str] = ()) -> list[Mutant]:
    """Of the modules named, or of all."""
    return [
        mutant
        for module, (paths, _) in MODULES.items()
        if not only or module in only
        for path in paths
        for mutant in mutants_of(module, path, (ROOT / "rollback" / path).read_bytes())
    ]


def argued() -> dict[tuple[str, str, str], str]:
    """Why a mutant that no test can tell from the original changes nothing, by its key.

    A paragraph for each, as survivors are printed: where, what stands, what would; then the argument.
    """
    found = {}
    for paragraph in re.split(r"\n\s*\n", ARGUED.read_text()):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip() and not line.startswith("#")]
        if lines:
            where, before, after, *why = lines
            assert before.startswith("- "), f"{ARGUED.name}: no change below {where!r}"
            assert after.startswith("+ "), f"{ARGUED.name}: no change below {where!r}"
            assert why, f"{ARGUED.name}: no argument for {after!r}"
            found[re.sub(r":\d+", "", where), before[2:], after[2:]] = " ".join(why)
    return found


def tests_of(module: str) -> list[str]:
    named = [ROOT / "tests" / "unit" / name for name in MODULES[module][1]]
    return [str(path.with_name(f"test_{path.name}.py")) for path in named]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[*MODULES], default=[], help="this module (repeatable)")
    parser.add_argument("--count", type=int, default=COUNT, help=f"mutants, 0 for all (default: {COUNT})")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among them (default: 0)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time (default: cores)")
    parser.add_argument("--list", action="store_true", help="list modules, tests and numbers of mutants, and try none")
    arguments = parser.parse_args()
    mutants = all_mutants(arguments.only)
    if arguments.list:
        for module, (paths, _) in MODULES.items():
            count = sum(mutant.module == module for mutant in mutants)
            print(f"{module:10} {count:4} mutants of {', '.join(paths)}: {', '.join(tests_of(module))}")
        return 0
    reasons = argued()
    known = [mutant for mutant in mutants if mutant.key in reasons]
    if not arguments.only:
        for key in reasons.keys() - {mutant.key for mutant in known}:
            print(f"argued in {ARGUED.name}, and there is no such mutant: {' | '.join(key)}", flush=True)
    mutants = [mutant for mutant in mutants if mutant.key not in reasons]
    if 0 < arguments.count < len(mutants):
        chosen = random.Random(arguments.seed).sample(range(len(mutants)), arguments.count)
        mutants = [mutants[place] for place in sorted(chosen)]
    os.chdir(ROOT)
    began = time.monotonic()
    survived: list[Mutant] = []
    output = sys.stdout
    tally: Counter[tuple[str, str]] = Counter()

    def tell(mutant: Mutant, ended: str) -> None:
        tally[mutant.module, ended] += 1
        if ended == "survived":
            survived.append(mutant)
            print(f"survived: {mutant}", file=output, flush=True)
        if tally.total() % 50 == 0:
            print(f"{tally.total()} of {len(mutants)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    for module, own in itertools.groupby(mutants, lambda mutant: mutant.module):
        try_mutants(list(own), tests_of(module), arguments.jobs, tell)
    for module in MODULES:
        counts = {kind: tally[module, kind] for kind in ("killed", "too long", "survived")}
        if any(counts.values()):
            print(f"{module:10} " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    share = 1 - len(survived) / max(1, len(mutants))
    print(
        f"{len(mutants)} mutants, {len(mutants) - len(survived)} killed ({share:.1%}), {len(survived)} survived; "
        f"{len(known)} more change nothing, as {ARGUED.name} argues; {time.monotonic() - began:.0f} s"
    )
    return int(share < BAR)


if __name__ == "__main__":
    sys.exit(main())
