"""The attack in small: what seeds name, that a handful of cases holds, and that what does not hold is told."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import attack
import pytest
from attack import HARMS, KINDS, TARGETS, Case, Violation, ask, draw, our_traceback
from storm import MOMENTS, VICTIMS
from warm_server import run_warm


def test_cases_are_a_pure_function_of_their_seed_and_cover_everything() -> None:
    cases = [draw(seed) for seed in range(3000)]
    assert cases[:50] == [draw(seed) for seed in range(50)]
    acts = [act for case in cases for act in case.acts]
    assert Counter(act.kind for act in acts).keys() == KINDS.keys()
    kills = {(act.what, act.how) for act in acts if act.kind == "kill"}
    assert kills == {(victim, moment) for victim in VICTIMS for moment in MOMENTS}
    damages = [act for act in acts if act.kind.startswith("damage")]
    assert ({act.what for act in damages}, {act.how for act in damages}) == (TARGETS.keys(), HARMS.keys())
    assert all(Case.from_json(case.to_json()) == case for case in cases[:50])


def test_a_traceback_counts_where_it_ends_in_the_package() -> None:
    text = (
        'rank 0: Traceback (most recent call last):\n  File "{}", line 3, in f\n    raise E\nE: what\n\nrollback: more'
    )
    assert our_traceback(text.format("/home/train.py")) is None
    assert our_traceback(text.format(f"{attack.PACKAGE}/train/guard.py")) is not None
    assert our_traceback("rollback: all is well") is None


def test_a_command_that_takes_too_much_memory_or_ends_in_another_way_than_documented_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(["status", str(tmp_path / "nothing")], tmp_path)
    monkeypatch.setattr(attack, "MEMORY", 1 << 20)
    with pytest.raises(Violation, match="MiB of memory"):
        ask(["status", str(tmp_path / "nothing")], tmp_path)
    monkeypatch.setattr(attack, "ExitCode", [attack.ExitCode.DONE])
    with pytest.raises(Violation, match="exit code 2"):
        ask(["status", "--no-such-flag"], tmp_path)


def storm(tmp_path: Path, *options: str, limit: float) -> str:
    """In a process of its own: what trains is forked from it, and autograd does not survive a fork."""
    command = [sys.executable, attack.__file__, *options, "--folder", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = run_warm(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
    assert done.returncode == 0, done.stdout
    assert not any(tmp_path.iterdir())
    return done.stdout


def test_a_few_attacks_are_survived_or_refused(tmp_path: Path) -> None:
    assert "1 cases in" in storm(tmp_path, "--seeds", "0:1", limit=900)


@pytest.mark.soak
def test_500_attacks_are_survived_or_refused(tmp_path: Path) -> None:
    """As long as it takes; `scripts/attack` goes on from there."""
    assert "500 cases in" in storm(tmp_path, "--seeds", "0:500", limit=6 * 3600)
