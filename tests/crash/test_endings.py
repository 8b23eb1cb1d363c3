"""Every launch ends, also on a machine that has too much to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_fifty_launches_beside_eight_busy_processes_all_end_by_themselves() -> None:
    script = Path(__file__).with_name("endings.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
