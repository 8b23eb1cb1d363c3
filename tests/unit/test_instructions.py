"""How our own modules are started as programs."""

import subprocess
from pathlib import Path

import pytest

from rollback import __version__
from rollback.instructions import program


@pytest.mark.parametrize("name", ["types", "rollback", "typer", "importlib"])
def test_a_file_in_the_working_directory_stands_for_no_module_of_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    words = [*program("rollback.__main__"), "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"rollback {__version__}\n"), done.stderr
