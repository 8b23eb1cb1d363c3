"""The soak in small: a handful of kills, and that a seed names the same kills each time."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import soak
from soak import MOMENTS, VICTIMS, plan


def test_kills_are_a_pure_function_of_seed_and_run_and_cover_everything() -> None:
    kills = list(itertools.islice(plan(7, 3), 400))
    assert kills == list(itertools.islice(plan(7, 3), 400))
    assert kills[:20] != list(itertools.islice(plan(7, 4), 20))
    drawn = Counter((kill.victim, kill.moment) for kill in kills)
    assert drawn.keys() == set(itertools.product(VICTIMS, MOMENTS))


def test_a_few_random_kills_are_survived(tmp_path: Path) -> None:
    """In a process of its own: what trains is forked from it, and autograd does not survive a fork."""
    options = ["--kills", "4", "--minutes", "2", "--seed", "5", "--folder", str(tmp_path)]
    command = [sys.executable, soak.__file__, *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "seed 5: 4 kills survived in 1 runs" in done.stdout, done.stdout
    assert not any(tmp_path.iterdir())
