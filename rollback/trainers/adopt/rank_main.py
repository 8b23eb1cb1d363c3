"""Runs in the rank in place of the user's script: `python -u rank_main.py MODE train.py ARGUMENTS` runs train.py,
watched.

MODE: `notice` or `strict`, as for `--adopt`; it decides only about what comes to light late in a run.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(__file__).parents[3])  # beside this file there are modules that scripts do not mean
    from rollback.agent.fork_server import run_script
    from rollback.trainers.adopt.adoption import Adoption
    from rollback.trainers.adopt.hooks import watch

    _, mode, *given = sys.argv
    adoption = Adoption(strict=mode == "strict")
    watch(adoption)
    run_script(given, adoption.read_script, adoption.end)
