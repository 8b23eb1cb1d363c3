"""The scripts of docs/tutorial.md run as they stand and train alike."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()


def script(name: str) -> str:
    match = re.search(rf"<!-- {re.escape(name)} -->\n```python\n(.*?)```\n<!-- end -->", PAGE, re.DOTALL)
    assert match, f"the tutorial has no {name}"
    return match[1]


def printed_by(path: Path) -> list[str]:
    environment = {**os.environ, "MAX_ITERS": "101", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, path.name], cwd=path.parent, env=environment, check=True, capture_output=True, text=True
    )
    return [line for line in result.stdout.splitlines() if line.startswith("iter ")]


def test_the_tutorial_s_scripts_print_the_same_numbers(tmp_path: Path) -> None:
    before = script("before.py")
    definitions = before[: before.index("torch.manual_seed(1337 + rank)")]
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "after.py").write_text(definitions + script("after.py"))
    lines = printed_by(tmp_path / "before.py")
    assert [line.partition(":")[0] for line in lines] == ["iter 0", "iter 50", "iter 100"]
    assert printed_by(tmp_path / "after.py") == lines
