"""Which process is which: by its pid and the kernel's own count of ticks at which it began."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from open_files import no_descriptor_free

from rollback.system import processes
from rollback.system.processes import is_running, name_process, runs, start_of, state_of, ticks_computed

ME = os.getpid()


def test_a_process_is_itself_for_as_long_as_it_lives() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = name_process(child.pid)
    assert is_running(name)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(child.pid) == "Z"
    assert not is_running(name), "it has ended, though nobody has asked how"
    child.wait()
    assert not is_running(name)
    assert (start_of(child.pid), state_of(child.pid), ticks_computed(child.pid)) == (None, None, None)
    with pytest.raises(ProcessLookupError):
        name_process(child.pid)


def test_the_same_pid_with_another_start_or_after_another_boot_is_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = start_of(ME)
    assert start is not None
    assert runs(ME, start)
    ticks, boot = start.split("@")
    assert not runs(ME, f"{int(ticks) + 1}@{boot}")
    monkeypatch.setattr(processes, "_boot", lambda: "another")
    assert not runs(ME, start)


@pytest.mark.parametrize("name", ["", ":", "1", "ME", "ME:", "-ME:1@x", "many:1@x", "ME:1700000000.25"])
def test_what_names_nobody_is_not_running(name: str) -> None:
    assert not is_running(name.replace("ME", str(ME)))


def test_the_start_is_the_kernel_s_own_number_whatever_the_process_is_called() -> None:
    odd = "sleep) R 1 1 (x"
    child = subprocess.Popen([sys.executable, "-c", f"open('/proc/self/comm','w').write({odd!r}); print(); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        raw = Path(f"/proc/{child.pid}/stat").read_text()
        assert "R 1 1" in raw
        assert (start_of(child.pid) or "").partition("@")[0] == raw.rpartition(")")[2].split()[19]
    finally:
        child.kill()
        child.wait()


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_gone() -> None:
    """As in a job that has used its descriptors up: its ranks must not end because of that."""
    name = name_process(os.getpid())
    with no_descriptor_free():
        running = is_running(name)
    assert running
