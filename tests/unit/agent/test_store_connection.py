"""torchrun's connection to the store of its rendezvous, where something else has that port."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as dynamic
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

from rollback.agent import meeting, store_connection
from rollback.agent.entry import describe
from rollback.agent.store_connection import watch_connections
from rollback.instructions import MeetingPoint


@pytest.fixture(autouse=True)
def _as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody is patient."""
    for module in (dynamic, static):
        monkeypatch.setattr(module, "TCPStore", module.TCPStore)
    monkeypatch.setattr(store_connection, "_WORTH_A_WORD", 0.0)
    monkeypatch.setattr(store_connection, "_BEHIND_TORCH", 0.0)


@contextlib.contextmanager
def mute() -> Iterator[tuple[int, list[socket.socket]]]:
    """A port at which connections are taken, and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = [server]

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        threading.Thread(target=take, daemon=True).start()
        yield server.getsockname()[1], taken


def end(taken: list[socket.socket]) -> None:
    """Where no test runs, the process ends."""
    for each in taken:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def test_what_takes_connections_and_says_nothing_is_told_and_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    with mute() as (port, taken):
        reasons: list[str] = []

        def give_up(reason: str) -> None:
            reasons.append(reason)
            end(taken)

        watch_connections(give_up)
        rendezvous = static.StaticTCPRendezvous("127.0.0.1", port, 1, 2, "run", timeout=1)
        with pytest.raises(DistNetworkError, match=f"the store of the rendezvous at 127.0.0.1:{port}: "):
            rendezvous.next_rendezvous()
    (reason,) = reasons
    assert reason.startswith(f"no answer from the store of the rendezvous at 127.0.0.1:{port} in 1 s: see which ")
    told = capfd.readouterr().err
    assert f"rollback: torchrun waits for the store of the rendezvous at 127.0.0.1:{port}, for 1 s at most" in told
    assert "ss -ltnp" in told


def test_why_the_store_cannot_be_had_is_what_torchrun_fails_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> TCPStore:
        raise DistNetworkError("Ping failed, invalid value returned from server")

    monkeypatch.setattr(dynamic, "TCPStore", refuse)
    watch_connections(lambda reason: None)
    with pytest.raises(RendezvousConnectionError) as raised:
        dynamic.create_backend(RendezvousParameters("c10d", "127.0.0.1:5", "run", 1, 1))
    told = describe(raised.value)["error"]
    assert told.startswith("DistNetworkError: the store of the rendezvous at 127.0.0.1:5: Ping failed, invalid value")
    assert told.endswith(store_connection._CHECK)


def test_a_supervisor_is_told_that_what_is_at_its_endpoint_is_mute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_MUTE", 0.1)
    monkeypatch.setattr(meeting, "_CONNECT", timedelta(seconds=1))
    monkeypatch.setattr(meeting.os, "_exit", lambda status: None)
    with mute() as (port, taken):
        told: list[str] = []

        def tell(gone: str) -> None:
            told.append(gone)
            end(taken)

        point = MeetingPoint("127.0.0.1", port, False, "run")
        with pytest.raises(DistNetworkError):
            meeting.meet(point, SimpleNamespace(tell=tell))  # type: ignore[arg-type]
    assert told == ["what listens there does not answer as torch's store does; ss -ltnp there shows what it is"]


def test_a_store_that_is_had_at_once_is_the_one_that_torch_makes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_connection, "_WORTH_A_WORD", 60.0)
    reasons: list[str] = []
    watch_connections(reasons.append)
    store = dynamic.TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, timeout=timedelta(seconds=60))
    assert isinstance(store, TCPStore)
    assert (reasons, capfd.readouterr().err) == ([], "")
