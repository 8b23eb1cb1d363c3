"""`python on_host.py NETWORK HOSTS RESOLVER ...`: what Python would do with the rest, as the first process of a host.

The host's network is there already (see `hosts`); its processes, its mounts and its name begin here. As a program that
`warm_server` has forked it has imported torch before: a host costs no more than any other process.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import warm

_NEW_MOUNTS, _NEW_NAMES, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000  # CLONE_NEW...
_PR_SET_PDEATHSIG = 1
SETUP = """set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind "$3" /etc/resolv.conf
"""


def main(name: str, hosts: str, resolver: str, *arguments: str) -> int:
    """The exit status of the host's first process. What a signal ended ends this one by the same signal."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(call: str, *given: int) -> None:
        if getattr(libc, call)(*given) != 0:
            raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")

    network = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    enter("setns", network, _NEW_NETWORK)
    enter("unshare", _NEW_MOUNTS | _NEW_NAMES | _NEW_PROCESSES)
    if (first := os.fork()) == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # and with the first process of a host the kernel ends all others
        subprocess.run(["sh", "-c", SETUP, "sh", name, hosts, resolver], check=True)
        warm.come_to_a_host(Path(os.environ["TESTS_REGISTER"]))
        os._exit(warm.run(list(arguments)))
    if (status := os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])) < 0:
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
