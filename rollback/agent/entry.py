"""What runs in torchrun's process: torchrun as it is, and around it the things that it does not do.

`main` is that of `torch.distributed.run`, except that

- it ends when its supervisor does. torchrun has its own session, so nothing else would tell it;
- it leaves stopping and restarting to its supervisor, and tells the ranks how often they were restarted;
- what is wrong with its flags it says in a line, to the supervisor;
- it has its ranks forked from a process that has imported torch, and may have waited with that done for its turn;
- it writes down which ranks failed and how. torchrun exits with 1 whatever happened and tells the rest in prose;
- it says what it waits for where the store of the rendezvous does not answer, and does not wait for ever;
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rollback.agent.fork_server import (
    ForkServer,
    import_ahead,
    name_this_process,
    settle_objects,
    start_ranks_from,
)
from rollback.agent.last_snapshot import Starter, start_anew
from rollback.agent.overrides import (
    WrongUse,
    check_configuration,
    leave_patience_to,
    leave_restarting_to_supervisor,
    leave_stopping_to,
    name_methods_quickly,
    note_whom_torchrun_ends,
    read_arguments,
)
from rollback.agent.shortage import RankNotForked, is_of_shortage
from rollback.agent.store_connection import watch_connections
from rollback.environment import ENV_PRELOAD, ENV_STANDBY, ENV_TORCHRUN
from rollback.errors import UsageError, encodable
from rollback.instructions import Instructions
from rollback.system.durable import write_file

_PR_SET_PDEATHSIG = 1
_MESSAGES = 128 << 10  # characters of what all ranks raised: the account goes to other hosts in a record of 1 MiB


def end_with(supervisor: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent, the supervisor, dies.

    Not SIGKILL: on SIGTERM torchrun ends its ranks, also those that hold no guard and would stay behind.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the line above
        sys.exit(1)


def describe(error: BaseException, sent: Mapping[int, int] | None = None) -> dict[str, Any]:
    """The account of what torchrun raised: its text, whether the system refused a process or a thread to it or a rank,
    and the ranks that failed by themselves, first one first.

    A ChildFailedError carries `failures`, a ProcessFailure for each rank. Ranks that torchrun itself ended are in it
    too. sent: the last signal that torchrun sent, by pid.
    """
    failures = getattr(error, "failures", {})
    order = sorted(failures, key=lambda rank: _precedence(failures[rank]))
    told = {rank: _told(failures[rank].error_file_data.get("message")) for rank in order}
    if error.__cause__ is not None and "See inner exception for details" in str(error):
        error = error.__cause__
    return {
        "error": encodable(f"{type(error).__name__}: {error}".splitlines()[0]),
        "shortage": is_of_shortage(error) or any(each.get("shortage") is True for each in told.values()),
        "failures": [
            {
                "rank": rank,
                "pid": failures[rank].pid,
                "exitcode": failures[rank].exitcode,
                "message": _message(told[rank], _MESSAGES // len(order)),
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


def _told(recorded: object) -> dict[str, Any]:
    """What a rank wrote into its error file: an object with a text, or a text alone; nothing for most scripts."""
    return recorded if isinstance(recorded, dict) else {"message": recorded}


def _message(told: Mapping[str, Any], most: int) -> str | None:
    text = told.get("message")
    if not isinstance(text, str) or text == "<NONE>":
        return None
    return encodable(text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}")


def _wait_for_order(descriptor: int) -> None:
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


def _end_what_is_left() -> None:
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
    _end_what_is_left()
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


def _give_up(instructions: Instructions, reason: str) -> NoReturn:
    """From a thread, where torchrun's own does not come back."""
    _tell_supervisor(instructions.failures, {"error": reason, "shortage": False, "failures": []})
    _leave_at_once(1)


def _refuse(instructions: Instructions, reason: str) -> NoReturn:
    error = UsageError(
        f"torchrun does not take its flags: {' '.join(reason.split())}",
        hint="rollback launch --help and torchrun --help list them; nothing was started",
        refuses="job",  # torchrun does not take them without protection either
    )
    _tell_supervisor(instructions.refusal, error.fields)
    _leave_at_once(2)


def main() -> None:
    waits_at = os.environ.pop(ENV_STANDBY, None)
    if waits_at is not None:
        _wait_for_order(int(waits_at))
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
        try:
            server = ForkServer()
        except RankNotForked as error:
            _tell_supervisor(instructions.failures, describe(error))
            _leave_at_once(1)
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
        name_methods_quickly()
        patience_is_given |= getattr(arguments, "shutdown_timeout", None) is not None
        leave_patience_to(instructions, stopping, start, given=patience_is_given)
        started, sent = leave_restarting_to_supervisor(instructions.restarts), note_whom_torchrun_ends()
        check_configuration()
        watch_connections(lambda reason: _give_up(instructions, reason))
        launcher: Any = importlib.import_module("torch.distributed.run")
        launcher.record(launcher.run)(arguments)
    except WrongUse as error:
        _refuse(instructions, str(error))
    except Exception as error:
        if not started and isinstance(error, ValueError | AssertionError):
            _refuse(instructions, str(error) or f"{type(error).__name__} before any rank was started")
        told = describe(error, sent)
        _tell_supervisor(instructions.failures, told)
        if not told["failures"] and not isinstance(error, RankNotForked):
            raise
        _leave_at_once(1)  # the supervisor says in a line what a traceback says in forty
    finally:
        _end_what_is_left()
