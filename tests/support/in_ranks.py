"""A script on two ranks of one job, without torchrun: what each of them printed last."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from warm_server import WarmPopen

_PATIENCE = 60.0  # seconds


def in_two_ranks(script: str, *arguments: object, cwd: Path | None = None) -> list[Any]:
    """By rank, the JSON value in the last line of its output. Each must end with status 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        WarmPopen[str](
            [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, cwd=cwd,
            env={**environment, "RANK": str(rank)},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    told = [rank.communicate(timeout=_PATIENCE)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(lines[-1]) for lines in told]  # gloo of torch 2.10 writes to stdout, too
