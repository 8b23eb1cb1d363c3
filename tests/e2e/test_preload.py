"""Ranks that are forked from a process with torch in it see what ranks see that are started from nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launching import launching

from rollback.facts.training import AttemptStarted

MIRROR = Path(__file__).parent / "jobs" / "mirror.py"

# What each test is about is started as users do, and the rest, which has torch to import as well, is forked.
COLD = """
import subprocess
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
import warm
from rollback import cli
from rollback.supervisor.torchrun import host, processes, standby

{}
cli.main()
"""
TORCHRUN = "host.start = processes.start"
STANDBY = "standby.subprocess = subprocess"
RANKS = "subprocess_handler.Popen, warm._start_warm_from_here = subprocess.Popen, lambda: None"


def seen(folder: Path, cold: str, *flags: str) -> tuple[list[dict[str, Any]], list[Any], str]:
    """What the ranks saw, what they drew without a seed, and what was printed."""
    folder.mkdir()
    with launching(folder, with_torchrun=True, script=MIRROR) as job:
        job.program = ["-c", COLD.format(cold)]
        code, output = job.finish(f"{folder} --planned", "--restart-budget", "0", *flags, ranks=2)
    assert code == 1, output
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    draws = [value for rank in told for value in rank["draws"]]
    views = [json.loads(json.dumps(rank["seen"]).replace(str(folder), "FOLDER")) for rank in told]
    return views, draws, output


def test_a_forked_rank_is_like_one_that_was_started_from_nothing(tmp_path: Path) -> None:
    forked, draws, output = seen(tmp_path / "forked", TORCHRUN)
    started, _, _ = seen(tmp_path / "started", RANKS, "--no-preload")
    assert forked == started
    assert all(rank["same parent"] for rank in forked), "it was taken for another's child"
    assert len(set(draws)) == len(draws), "ranks that nobody seeded draw alike"
    assert "ValueError: --planned" in output
    assert "fork_server" not in output, "the traceback shows frames that are not the script's"


def test_the_next_attempt_runs_in_the_process_that_was_kept_ready(tmp_path: Path) -> None:
    with launching(tmp_path, with_torchrun=True) as job:
        job.program = ["-c", COLD.format(STANDBY)]
        code, output = job.finish("train_until_the_next_one_waits")
        assert code == 0, output
        first, second = job.facts(AttemptStarted)
        assert second.pid == int((tmp_path / "waits").read_text())
        assert first.pid != second.pid


NO_STANDBY = """
import os

if "ROLLBACK_STANDBY" in os.environ:
    with open(os.environ["NOTES"] + "/standbys", "a") as file:
        file.write("one ")
    os._exit(1)
"""


@pytest.mark.soak
def test_a_process_for_the_next_attempt_that_ends_is_not_started_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ended it, want of memory or an import that fails, would end the next one, beside a run of weeks."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_STANDBY)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
    with launching(tmp_path, with_torchrun=True, cold=True) as job:
        code, output = job.finish("train_behind_the_end_of_the_next_one")
        assert code == 0, output
        assert (tmp_path / "standbys").read_text() == "one "


HELPED = """
import atexit, multiprocessing, os
from pathlib import Path

reader, writer = os.pipe()

def help():
    os.read(reader, 1)
    Path("helped").touch()

multiprocessing.Process(target=help).start()
atexit.register(os.write, writer, b"x")  # before Python joins the process
"""
WITH_A_HOOK = """
import sys

def hook(*raised):
    raise ValueError("of the hook")

sys.excepthook = hook
raise RuntimeError("of the script")
"""


def test_python_waits_for_the_processes_of_a_forked_rank_when_its_script_has_ended(tmp_path: Path) -> None:
    (script := tmp_path / "helped.py").write_text(HELPED)
    with launching(tmp_path, with_torchrun=True, script=script) as job:
        code, output = job.finish("")
    assert code == 0, output
    assert (tmp_path / "helped").exists(), "it was ended before it had done its work"


def test_an_exception_hook_that_raises_in_a_forked_rank_is_not_taken_for_a_wrong_flag(tmp_path: Path) -> None:
    (script := tmp_path / "hooked.py").write_text(WITH_A_HOOK)
    with launching(tmp_path, with_torchrun=True, script=script) as job:
        code, output = job.finish("")
    assert code == 1, output
    assert "torchrun does not take its flags" not in output
    assert "of the script" in output
