"""Hosts of one machine: namespaces for network, processes, host name and mounts, joined by a virtual cable.

What makes a host one is that it can be lost: `Host.lose` ends every process on it in the same moment, and with them
goes its /dev/shm, which is a tmpfs of its own. Needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
from warm_server import WarmPopen

CABLE = "cable"  # the interface, on each host
ON_HOST = Path(__file__).parent / "on_host.py"


def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "mount", "hostname") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (Debian: iproute2, util-linux, mount, hostname)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return f"no namespaces here: {tried.stderr.decode().strip()}" if tried.returncode else None


class Host:
    """A host with an address of its own. One program runs on it at a time, as its first process."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.all_hosts: tuple[Host, ...] = (self,)
        self._process: subprocess.Popen[str] | None = None

    def start(self, arguments: list[str], environment: dict[str, str], folder: Path, output: IO[str]) -> None:
        """Start what Python does with these arguments."""
        # Without names, every connection waits for a name server that cannot be reached from here.
        names, resolver = folder / "hosts", folder / "resolv.conf"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.all_hosts))
        resolver.write_text("")
        register = folder / f"register-{self.name}"  # each host counts its own pids
        register.mkdir(exist_ok=True)
        self._process = WarmPopen(
            [sys.executable, str(ON_HOST), self.name, str(names), str(resolver), *arguments], cwd=folder,
            env={**os.environ, "TESTS_REGISTER": str(register), **environment}, text=True, stdout=output, stderr=output,
        )  # fmt: skip

    def wait(self, timeout: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def memory(self) -> Path:
        """Its /dev/shm, as seen from here, while a program runs on it."""
        return Path(f"/proc/{self._program.pid}/root/dev/shm")

    @property
    def _program(self) -> psutil.Process:
        assert self._process is not None
        (program,) = psutil.Process(self._process.pid).children()
        return program

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the program."""
        self._program.send_signal(number)

    def tell_all(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the processes of that name on this host (as `ps -o comm` shows it)."""
        for process in self._program.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == name:
                    process.send_signal(number)

    def lose(self) -> None:
        """End all that runs on it, without a word. Nothing does any more on return."""
        if not self.running:
            return
        assert self._process is not None
        started = psutil.Process(self._process.pid)
        for process in started.children() or [started]:
            process.kill()
        self._process.wait()  # it waits for the host's first process, which the kernel lets go when all others are gone


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    tag = f"rb{os.getpid() % 100000}"
    hosts = (Host(f"{tag}a", "10.77.0.1"), Host(f"{tag}b", "10.77.0.2"))
    for host in hosts:
        host.all_hosts = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        one, other = hosts
        _ip("-n", one.name, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", other.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
            _ip("-n", host.name, "link", "set", CABLE, "up")
        yield hosts
    finally:
        for host in hosts:
            host.lose()
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


@contextmanager
def hosts_on_a_switch(count: int) -> Iterator[tuple[Host, ...]]:
    """So many hosts on one network, which this machine is on too: at the address that ends in 254."""
    tag, net = f"rb{os.getpid() % 100000}", f"10.77.{os.getpid() % 250}"
    switch = f"{tag}s"
    hosts = tuple(Host(f"{tag}{chr(97 + number)}", f"{net}.{number + 1}") for number in range(count))
    try:
        _ip("link", "add", switch, "type", "bridge")
        _ip("address", "add", f"{net}.254/24", "dev", switch)
        _ip("link", "set", switch, "up")
        for number, host in enumerate(hosts):
            host.all_hosts = hosts
            port = f"{tag}p{number}"
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("link", "add", port, "type", "veth", "peer", "name", CABLE, "netns", host.name)
            _ip("link", "set", port, "master", switch, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
            _ip("-n", host.name, "link", "set", CABLE, "up")
        yield hosts
    finally:
        for number, host in enumerate(hosts):
            host.lose()
            # A namespace is gone some time after it was deleted, and what is in it only then.
            subprocess.run(["ip", "link", "delete", f"{tag}p{number}"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", switch], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
