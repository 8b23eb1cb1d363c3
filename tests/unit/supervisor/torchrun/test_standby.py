"""The process of the next attempt, where it cannot be used."""

import os
import socket
import subprocess

import pytest

from rollback.instructions import MODULE, program
from rollback.supervisor.torchrun.standby import Standby


def test_where_the_working_directory_is_gone_another_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong then, that one says: whoever asks here has a run to end well."""

    def gone() -> str:
        raise FileNotFoundError

    standby = Standby()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    standby._process, standby._socket = process, _ = subprocess.Popen(["sleep", "60"]), ours
    with theirs:
        theirs.send(b"ready")
        monkeypatch.setattr(os, "getcwd", gone)
        assert standby.take([*program(MODULE), "train.py"], {}, None, None) is None
    assert standby.waiting == []
    assert process.poll() is not None, "it has ended"
