"""A command that is forked warm is to a test what one would be that was started from nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_server import WarmPopen, run_warm

TELLS = """
import json, os, signal, sys
print(sys.stdin.read(), file=sys.stderr)
handlers = {number.name: str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
files = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
leads = os.getsid(0) == os.getpid()
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("SAID"), leads, __name__, handlers, files]))
sys.exit(3)
"""


@pytest.mark.parametrize("session", [False, True])
def test_it_sees_what_it_would_see(tmp_path: Path, session: bool) -> None:
    command = [sys.executable, "-c", TELLS, "--flag", os.fsdecode(b"caf\xe9")]
    how: dict[str, Any] = {
        "cwd": tmp_path, "env": {**os.environ, "SAID": "so"}, "start_new_session": session, "text": True,
        "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
    }  # fmt: skip
    ends = []
    for popen in (subprocess.Popen[str], WarmPopen[str]):
        with popen(command, **how) as process:
            output, errors = process.communicate("what it reads", timeout=60)
            ends.append((json.loads(output), errors, process.returncode))
    assert ends[0] == ends[1]
    assert ends[1][2] == 3


def test_how_it_ended_is_known_when_it_has() -> None:
    with WarmPopen[str]([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL
    with pytest.raises(subprocess.CalledProcessError):
        run_warm([sys.executable, "-c", "raise ValueError"], check=True, capture_output=True)


def test_what_it_starts_has_torch_imported_as_well() -> None:
    code = "import sys; print('torch' in sys.modules)"
    asks = f"""
import subprocess, sys
from warm import WarmPython
print(WarmPython([sys.executable, "-c", {code!r}]).wait())
"""
    assert run_warm([sys.executable, "-c", asks], capture_output=True, check=True).stdout.split() == ["True", "0"]
