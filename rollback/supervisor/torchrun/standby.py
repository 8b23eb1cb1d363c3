"""The torchrun process of the next attempt. It is started ahead, imports what it and its ranks need, and waits.

It needs memory (a few hundred MiB, which its ranks share later) and, once in each attempt, a few seconds of processor
time at low priority. It holds no port, no device and no lock, and does not touch the run directory. It ends with the
supervisor, when the other end of its socket is closed.
"""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence

import psutil

from rollback.environment import ENV_STANDBY
from rollback.instructions import MODULE, program

_LAUNCHER = program(MODULE)


class Standby:
    """At most one waiting process, on this host."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._identity: psutil.Process | None = None  # made once: that needs a descriptor, which may lack later

    @property
    def waiting(self) -> list[psutil.Process]:
        if self._process is None or self._identity is None or self._process.poll() is not None:
            return []
        return [self._identity]

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start the process; none waits. environment: the present attempt's; `take` gives the final one."""
        self.drop()
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    _LAUNCHER, env={**environment, ENV_STANDBY: str(theirs.fileno())}, pass_fds=[theirs.fileno()],
                    start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            self._identity = psutil.Process(self._process.pid)
        except OSError:  # no memory, processes or descriptors left: the next attempt starts without
            self.drop()

    def take(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> subprocess.Popen[bytes] | None:
        """Run `command` in the waiting process, as `processes.start` would. None: no process is ready.

        A process that still imports is ended: at its low priority it may need longer than a new process.
        """
        process, connection = self._process, self._socket
        if not self.waiting or process is None or connection is None or list(command[: len(_LAUNCHER)]) != _LAUNCHER:
            return None
        ready = b""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            ready = connection.recv(16, socket.MSG_DONTWAIT)
        if not ready:
            self.drop()
            return None
        arguments = list(command[len(_LAUNCHER) :])
        try:
            order = {"arguments": arguments, "environment": dict(environment), "folder": os.getcwd()}
            streams = [1 if stdout is None else stdout, 2 if stderr is None else stderr]
            socket.send_fds(connection, [json.dumps(order).encode()], streams)
        except OSError:
            self.drop()
            return None
        connection.close()
        self._process = self._socket = self._identity = None
        return process

    def drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = self._identity = None
