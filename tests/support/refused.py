"""What scripts are refused that a job under tests/e2e/jobs makes, one for each case, and what they are told."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from job_results import LAUNCH
from trainer_job import LIMIT, MODULES
from warm_server import ENV_MODULES, run_warm

from rollback.errors import ExitCode


def environment() -> dict[str, str]:
    """As it is now: a fixture may have put a library into it."""
    return {**os.environ, ENV_MODULES: MODULES}


def answers_of(script: Path, cases: Iterable[str]) -> dict[str, Any]:
    """What each case was answered: `exit_code`, `message`, and `left`, the files that are there afterwards."""
    done = run_warm(
        [sys.executable, str(script), *cases], timeout=LIMIT, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line.removeprefix("CASE ")) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    return {answer["name"]: answer for answer in lines}


def require_refused(answer: dict[str, Any], met: str, instead: str) -> None:
    """met: is in the message. instead: is in what it says is to be done."""
    assert answer["exit_code"] == ExitCode.USAGE, answer
    message, _, hint = answer["message"].partition("\n  hint: ")
    assert met in message
    assert instead in hint


def require_one_message(script: Path, case: str, folder: Path, ranks: int = 1) -> str:
    """The case under `rollback launch`. Returns what is printed."""
    done = run_warm(
        [*LAUNCH, "--nproc", str(ranks), "--run", "run", str(script), case], cwd=folder, env=environment(),
        timeout=LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert done.stdout.count("rollback: error:") == 1, done.stdout
    assert "Traceback" not in done.stdout
    assert not (folder / "run").exists()
    return str(done.stdout)
