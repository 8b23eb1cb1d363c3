"""`python apart.py mounts|name COMMAND ...`: what Python would do with the rest, in a namespace of its own for mounts
or for the host's name, behind that shell command.

As a program that `warm_server` has forked it has imported torch before; what `unshare` starts would import it anew.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import warm

APART = [sys.executable, __file__]
_NEW = {"mounts": 0x20000, "name": 0x4000000}  # CLONE_NEW...


def main(kind: str, command: str, *arguments: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW[kind]) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    if kind == "mounts":
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["sh", "-c", command], check=True)
    warm.come_to_a_host(Path(os.environ["TESTS_REGISTER"]))
    return warm.run(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
