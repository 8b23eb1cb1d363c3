"""The process of the next attempt, where it cannot be used."""

import errno
import os
import socket
import subprocess
from types import ModuleType

import psutil
import pytest
from open_files import no_descriptor_free

from rollback.instructions import MODULE, program
from rollback.supervisor.torchrun.standby import Standby


@pytest.mark.parametrize(("module", "name"), [(socket, "socketpair"), (subprocess, "Popen")])
def test_where_it_cannot_be_started_the_next_attempt_starts_without(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module, name, refused)
    standby = Standby()
    standby.prepare({})
    assert standby.waiting == []
    assert standby.take([*program(MODULE), "train.py"], {}, None, None) is None


def test_where_the_working_directory_is_gone_another_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong then, that one says: whoever asks here has a run to end well."""

    def gone() -> str:
        raise FileNotFoundError

    standby = Standby()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(["sleep", "60"])
    standby._process, standby._socket, standby._identity = process, ours, psutil.Process(process.pid)
    with theirs:
        theirs.send(b"ready")
        with no_descriptor_free():
            assert standby.waiting == [standby._identity], "to know it takes no descriptor"
        monkeypatch.setattr(os, "getcwd", gone)
        assert standby.take([*program(MODULE), "train.py"], {}, None, None) is None
    assert standby.waiting == []
    assert process.poll() is not None, "it has ended"
