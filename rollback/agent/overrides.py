"""What torchrun does in another way in our process: its flags, stopping, restarting, patience, logs.

Most of these put something in the place of a private name of torchrun, for the whole process.
"""

import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from rollback.agent.last_snapshot import Starter, wait_for_last_snapshot
from rollback.instructions import LOGS_SPECS, Instructions

# Seconds that ranks have to end because another one has failed. Under a guard they have nothing to save that the next
# attempt could use, so they get less than torchrun's 30.
_PATIENCE_UNDER_A_GUARD = 5


class WrongUse(Exception):
    """torchrun does not take its flags."""


def leave_stopping_to(supervisor: int) -> list[int]:
    """torchrun takes no stop signal while its supervisor lives; it notes them in the list that is returned.

    A scheduler may signal every process of a job step. torchrun would end its ranks within seconds, while the
    supervisor has told them to save; and of SIGUSR1 and SIGUSR2 it would die, and so would ranks that have no guard
    yet, which inherit that these are ignored.
    """
    # The kernel's SIGTERM comes twice where the supervisor has threads: first when the one that forked this process is
    # gone, while the parent is still the supervisor's pid. A signal noted then was no request to stop.
    noted: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    end = api._terminate_process_handler

    def heed(number: int, frame: FrameType | None) -> None:
        if os.getppid() != supervisor:
            noted.clear()
            end(number, frame)
        noted.append(number)

    api._terminate_process_handler = heed
    signal.signal(signal.SIGTERM, heed)  # also where --signals-to-handle does not name it, and until torchrun does
    return noted


def leave_patience_to(instructions: Instructions, stopping: Sequence[int], start: Starter, *, given: bool) -> None:
    """How long ranks have to end when one of them has failed. start: a script. given: the user says so.

    stopping: not empty once they were told to stop. Then the first one to end is no reason to signal the others again:
    they get SIGCONT, which does nothing, and the time that they were told.
    """
    context: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api").PContext
    close = context.close

    def patiently(self: Any, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        if os.path.exists(instructions.guard):
            wait_for_last_snapshot(timeout, start)
            timeout = timeout if given else min(timeout, _PATIENCE_UNDER_A_GUARD)
        elif stopping:
            death_sig, timeout = signal.SIGCONT, max(timeout, instructions.grace)
        close(self, death_sig, timeout)

    context.close = patiently


def leave_restarting_to_supervisor(restarts: int) -> list[bool]:
    """The ranks learn of `restarts` that were before, and torchrun adds none. The list is empty until ranks start."""
    agent: Any = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent").LocalElasticAgent
    start = agent._start_workers
    started: list[bool] = []

    def counted(self: Any, group: Any) -> Any:
        started.append(True)
        self._remaining_restarts = group.spec.max_restarts - restarts
        workers = start(self, group)
        self._remaining_restarts = 0
        return workers

    agent._start_workers = counted
    return started


def read_arguments(words: Sequence[str], run_id: str) -> Any:
    """torchrun's flags as its own parser reads them. Raises WrongUse."""
    launcher: Any = importlib.import_module("torch.distributed.run")

    def refuse(message: str) -> NoReturn:
        raise WrongUse(message)

    parser = launcher.get_args_parser()
    parser.error = refuse
    arguments = parser.parse_args(words)
    handlers: Any = importlib.import_module("torch.distributed.elastic.events.handlers")
    try:
        handlers.get_logging_handler(arguments.event_log_handler)
    except KeyError as error:
        raise WrongUse(f"argument --event-log-handler: there is no handler {error}") from error
    if arguments.standalone:  # as torchrun does it, but under one name over all attempts
        arguments.standalone = False
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = "c10d", "localhost:0", run_id
        if arguments.local_addr is None and not _is_known(socket.getfqdn()):
            arguments.local_addr = "localhost"  # ranks that are to meet at an unknown name would wait for ever
        _meet_at_once()
    return arguments


def _meet_at_once() -> None:
    """Without the up to 0.3 s by which torchrun keeps nodes apart that come to a rendezvous for the first time. Each of
    our attempts does, and there is no other node."""
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    delay = importlib.import_module("torch.distributed.elastic.rendezvous.utils")._delay

    def delay_of_one_node(seconds: float | tuple[float, float]) -> None:
        if not isinstance(seconds, tuple):  # its pace while it waits
            delay(seconds)

    rendezvous._delay = delay_of_one_node


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def check_configuration() -> None:
    """What torchrun makes of its flags is refused by WrongUse where it cannot be; `RankStreams` are there by a name.

    An entry point in our own metadata would name them where rollback is installed, but not where it runs from a source
    tree, and an outdated installation would fail every job.
    """
    launcher: Any = importlib.import_module("torch.distributed.run")
    make = launcher.config_from_args

    def checked(arguments: Any) -> Any:
        if is_ours := arguments.logs_specs == LOGS_SPECS:
            arguments.logs_specs = None
        try:
            made = make(arguments)
        except Exception as error:
            raise WrongUse(str(error) or f"{type(error).__name__} while its flags were read") from error
        if made[0].nproc_per_node < 1:
            raise WrongUse(f"argument --nproc-per-node: {made[0].nproc_per_node} ranks cannot be started")
        if not 0 < (interval := made[0].monitor_interval) <= threading.TIMEOUT_MAX:  # also where it is NaN
            raise WrongUse(f"argument --monitor-interval: {interval} is not a positive time that can be waited for")
        if is_ours:
            streams: Any = importlib.import_module("rollback.agent.streams")
            made[0].logs_specs = streams.RankStreams(log_dir=arguments.log_dir)
        return made

    launcher.config_from_args = checked


def method_name(depth: int = 2) -> str:
    """The name of the function so many calls above, as the rendezvous of torchrun asks for it."""
    try:
        return sys._getframe(depth).f_code.co_name
    except ValueError:
        return "no_method_name"


def name_methods_quickly() -> None:
    """torchrun's rendezvous names its running method, for a log that nobody reads, by `inspect.stack`, which goes
    through all modules that are loaded: with torch, a second before the ranks start and half a second after they fail.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    if hasattr(rendezvous, "get_method_name"):
        rendezvous.get_method_name = method_name


def note_whom_torchrun_ends() -> dict[int, int]:
    """From now on: the last signal that torchrun sent to each rank's process, by pid."""
    handler = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler").SubprocessHandler
    sent: dict[int, int] = {}
    close = handler.close

    def noted(self: Any, death_sig: signal.Signals | None = None) -> None:
        sent[self.proc.pid] = death_sig or signal.SIGTERM
        close(self, death_sig)

    handler.close = noted
    return sent
