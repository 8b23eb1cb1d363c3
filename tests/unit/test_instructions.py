"""How our own modules are started as programs."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollback import __version__
from rollback.drill import trials
from rollback.instructions import program


@pytest.mark.parametrize("words", [program("rollback.__main__"), [sys.executable, *trials._PROGRAM]], ids=["", "drill"])
def test_a_file_in_the_working_directory_stands_for_no_module_of_ours(tmp_path: Path, words: Sequence[str]) -> None:
    for name in ("types", "rollback", "typer", "importlib"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user')")
    words = [*words, "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"rollback {__version__}\n"), done.stderr
