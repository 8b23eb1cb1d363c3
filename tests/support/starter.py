"""Starts Pythons that have torch imported already, one at a time, for as long as requests come: see `forker.serve`.

Request: `arguments` (what would stand behind `python`), `cwd`, `environment`, `output` (of stdout and stderr).
"""

import os
import signal
import subprocess
from typing import Any

from forker import serve
from warm import become

LIMIT = 120  # seconds


def start(request: dict[str, Any]) -> int:
    signal.alarm(LIMIT)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    environment = {**os.environ, **request["environment"]}
    return become(request["arguments"], environment, request["cwd"], True, output, subprocess.STDOUT)


if __name__ == "__main__":
    serve(start)
