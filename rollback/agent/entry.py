"""What runs in torchrun's process: torchrun as it is, and around it the things that it does not do.

`python -m rollback.agent.entry ARGS` is `python -m torch.distributed.run ARGS`, except that

- it ends when its supervisor does. torchrun has its own session, so nothing else would tell it;
- it leaves stopping and restarting to its supervisor, and tells the ranks how often they were restarted;
- what is wrong with its flags it says in a line, to the supervisor;
- it has its ranks forked from a process that has imported torch, and may have waited with that done for its turn;
- it writes down which ranks failed and how. torchrun exits with 1 whatever happened and tells the rest in prose;
- it knows a value for `--logs-specs` that sends the output of the ranks to the supervisor.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rollback.agent.fork_server import (
    ForkServer,
    ForkServerGone,
    import_ahead,
    name_this_process,
    settle_objects,
    start_ranks_from,
)
from rollback.agent.last_snapshot import Starter, start_anew, wait_for_last_snapshot
from rollback.errors import UsageError
from rollback.instructions import ENV_PRELOAD, ENV_STANDBY, ENV_TORCHRUN, LOGS_SPECS, Instructions
from rollback.system.durable import write_file

_PR_SET_PDEATHSIG = 1
# Seconds that ranks have to end because another one has failed. Under a guard they have nothing to save that the next
# attempt could use, so they get less than torchrun's 30.
_PATIENCE_UNDER_A_GUARD = 5


class WrongUse(Exception):
    """torchrun does not take its flags."""


def end_with(supervisor: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent, the supervisor, dies.

    Not SIGKILL: on SIGTERM torchrun ends its ranks, also those that hold no guard and would stay behind.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the line above
        sys.exit(1)


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
    return arguments


def check_configuration() -> None:
    """What torchrun makes of its flags is refused by WrongUse where it cannot be."""
    launcher: Any = importlib.import_module("torch.distributed.run")
    make = launcher.config_from_args

    def checked(arguments: Any) -> Any:
        try:
            made = make(arguments)
        except Exception as error:
            raise WrongUse(str(error) or f"{type(error).__name__} while its flags were read") from error
        if made[0].nproc_per_node < 1:
            raise WrongUse(f"argument --nproc-per-node: {made[0].nproc_per_node} ranks cannot be started")
        if made[0].monitor_interval <= 0:
            raise WrongUse(f"argument --monitor-interval: {made[0].monitor_interval} is not a positive time")
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


class LogsSpecsFinder(DistributionFinder):
    """Offers our logs specs where torchrun looks for them, among the entry points of installed distributions.

    An entry point in our own metadata would do the same where rollback is installed, but not where it runs from a
    source tree, and an outdated installation would fail every job.
    """

    def find_spec(self, *_: object) -> None:
        """No module is found here."""

    def find_distributions(self, context: object = None) -> Iterator[Distribution]:
        yield _LogsSpecsDistribution()


class _LogsSpecsDistribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": "Metadata-Version: 2.1\nName: rollback-logs-specs\nVersion: 0\n",
            "entry_points.txt": f"[torchrun.logs_specs]\n{LOGS_SPECS} = rollback.agent.streams:RankStreams\n",
        }.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(path)


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


def describe(error: BaseException, sent: Mapping[int, int] | None = None) -> dict[str, Any]:
    """The account of what torchrun raised: its text, and the ranks that failed by themselves, first one first.

    A ChildFailedError carries `failures`, a ProcessFailure for each rank. Ranks that torchrun itself ended are in it
    too. sent: the last signal that torchrun sent, by pid.
    """
    failures = getattr(error, "failures", {})
    order = sorted(failures, key=lambda rank: _precedence(failures[rank]))
    return {
        "error": f"{type(error).__name__}: {error}".splitlines()[0],
        "failures": [
            {
                "rank": rank,
                "pid": failures[rank].pid,
                "exitcode": failures[rank].exitcode,
                "message": _message(failures[rank].error_file_data.get("message")),
                "ended": failures[rank].exitcode == -(sent or {}).get(failures[rank].pid, 0) != 0,
                "at": failures[rank].timestamp,
            }
            for rank in order
        ],
    }


def _precedence(failure: Any) -> tuple[bool, int, bool]:
    """Sort key: ranks that torchrun ended come last; in the same second, a rank that a signal ended comes before those
    that exited by themselves, since peers of a dead rank raise at once."""
    return failure.exitcode == -signal.SIGTERM, failure.timestamp, failure.exitcode >= 0


def _message(recorded: object) -> str | None:
    """What a rank wrote into its error file: a text, or an object with one; nothing for most scripts."""
    if isinstance(recorded, dict):
        recorded = recorded.get("message")
    return recorded if isinstance(recorded, str) and recorded != "<NONE>" else None


def wait_for_order(descriptor: int) -> None:
    """Import what will be needed, then wait until the supervisor wants an attempt from this process; take its
    arguments, environment and streams from the order. Ends with the supervisor.

    The imports have a thread of their own, of low priority: that of a thread cannot be raised again, and the
    main thread has work to do later. When they are done the supervisor is told so.
    """
    end_with(os.getppid())
    orders = socket.socket(fileno=descriptor)

    def import_at_leisure() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        import_ahead()
        importlib.import_module("torch.distributed.run")
        settle_objects()

    thread = threading.Thread(target=import_at_leisure)
    thread.start()
    thread.join()
    name_this_process("standby")
    orders.send(b"ready")
    body, streams, _, _ = socket.recv_fds(orders, 1 << 20, 2)
    if not body:
        os._exit(0)
    order = json.loads(body)
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[1:] = order["arguments"]
    orders.close()
    name_this_process("torchrun")


def end_what_is_left() -> None:
    """SIGTERM to every child. torchrun forgets a rank that it was starting when a signal ended it."""
    for listed in Path("/proc/self/task").glob("*/children"):
        try:
            children = listed.read_text().split()
        except OSError:
            continue  # that thread has ended
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGTERM)


def _leave_at_once(status: int) -> NoReturn:
    """End without taking the interpreter down piece by piece: the next attempt waits for it."""
    end_what_is_left()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _tell_supervisor(path: str, told: Mapping[str, Any]) -> None:
    """In a file of its temporary directory, which is made anew where somebody has emptied /tmp since the start. Where
    that fails, the supervisor knows how this process ended, and no more."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            Path(path).parent.mkdir(0o700)
        write_file(Path(path), json.dumps(told).encode(), durable=False)


def _refuse(instructions: Instructions, reason: str) -> NoReturn:
    error = UsageError(
        f"torchrun does not take its flags: {' '.join(reason.split())}",
        hint="rollback launch --help and torchrun --help list them; nothing was started",
    )
    _tell_supervisor(instructions.refusal, error.fields)
    _leave_at_once(2)


def main() -> None:
    waits_at = os.environ.pop(ENV_STANDBY, None)
    if waits_at is not None:
        wait_for_order(int(waits_at))
    instructions = Instructions(**json.loads(os.environ.pop(ENV_TORCHRUN)))
    end_with(instructions.supervisor)
    stopping = leave_stopping_to(instructions.supervisor)
    preload = os.environ.pop(ENV_PRELOAD, None)
    patience_is_given = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in os.environ
    try:
        arguments = read_arguments(sys.argv[1:], instructions.run_id)
    except (WrongUse, ValueError, AssertionError) as error:
        _refuse(instructions, str(error) or f"{type(error).__name__} while its flags were read")
    server = None
    if preload:
        # torchrun copies the error of its first failed rank there; without, it complains that there is no such
        # place. Where it finds one of an earlier attempt, it complains of that, at length.
        first = Path(f"{instructions.failures}.first")
        first.unlink(missing_ok=True)
        os.environ.setdefault("TORCHELASTIC_ERROR_FILE", str(first))
        import_ahead()
        # Before anything starts a thread, what is ignored ignored. A rank leaves through this line when its script has
        # ended, and Python then waits for its children: no handler that is torchrun's may stand around it.
        server = ForkServer()
    _run(arguments, instructions, stopping, server, patience_is_given)


def _run(
    arguments: Any, instructions: Instructions, stopping: list[int], server: ForkServer | None, patience_is_given: bool
) -> None:
    """torchrun, from its flags to its end. server: what forks its ranks; None: it starts them anew."""
    started: list[bool] = []
    sent: dict[int, int] = {}
    start: Starter = start_anew
    try:
        if server is not None:
            start_ranks_from(server)
            start = server.start_script
        sys.meta_path.append(LogsSpecsFinder())
        name_methods_quickly()
        patience_is_given |= getattr(arguments, "shutdown_timeout", None) is not None
        leave_patience_to(instructions, stopping, start, given=patience_is_given)
        started, sent = leave_restarting_to_supervisor(instructions.restarts), note_whom_torchrun_ends()
        check_configuration()
        launcher: Any = importlib.import_module("torch.distributed.run")
        launcher.record(launcher.run)(arguments)
    except WrongUse as error:
        _refuse(instructions, str(error))
    except Exception as error:
        if not started and isinstance(error, ValueError | AssertionError):
            _refuse(instructions, str(error) or f"{type(error).__name__} before any rank was started")
        told = describe(error, sent)
        _tell_supervisor(instructions.failures, told)
        if not told["failures"] and not isinstance(error, ForkServerGone):
            raise
        _leave_at_once(1)  # the supervisor says in a line what a traceback says in forty
    finally:
        end_what_is_left()


if __name__ == "__main__":
    main()
