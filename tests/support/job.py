"""Toy jobs one after another as a training script, under python, torchrun or rollback launch: `job.py SCENARIOS`.

SCENARIOS is a JSON file with a list of scenarios, each with `name`, `toy` and optionally `run` (default: the
supervisor's; null: without a guard), `skips_of` (a run whose skip list is given from the start), `signal` (`[rank,
batch, number]`: that rank sends itself a signal there; `[rank, batch, number, attempt]`: in that attempt of a
supervised run), `full_disk` (`[rank, batch]`: from there on that rank can write no shard), `flip` (`[rank, batch]`:
there a bit of a weight of that rank changes), `ask` (`[batch, request]`, or several in a row: rank 0 hands in that
request there, see asking.py), `unreadable` (`[rank, checkpoint, times]`: so often that rank fails to read it when it
is restored, see unreadable.py), `dies_in_restore` (`[rank, before | after]`: in the first attempt that rank is killed
before or after it reads a state that is restored), `dies_stopping` (rank: in the first attempt it is killed when the
ranks have agreed to stop, and are about to save), `shell` (`[rank, batch, command]`, or several in a row: that rank
runs the command there, in the first attempt), `ends` (`[rank, batch, how]`: there that rank ends or hangs in one of the
ways of `end`, in the first attempt), `faulty_host` (`[host, batch]`: the rank that runs on that host is killed there,
in every attempt), `otherwise` (`[rank, settings, max_steps]`: that rank trains by these
besides), `holds` (`[batch, file]`, or several in a row: all ranks wait there until the file exists), `lags`
(`[rank, batch]`: there that rank begins its update only when another rank has died and this has been noticed),
`lags_behind` (`[batch, folder, method, ...]`, a method of each host: there its ranks, but for one that `ends`, begin
their update only when who speaks for it has done that in `Exchange`; and who speaks goes on when its
own rank has begun; "": they never do),
`evaluates` (`[rank, n, seconds]`: so long behind its n-th evaluation that rank is killed, with 0 where it begins, in
the first attempt), `slow` (seconds that each batch takes at least), `late_gpu` (true: the CPU counts as a GPU, see
late_gpu.py). Each rank writes `<name>-<rank>.json` beside it:
`portrait`, or else `exit` or `error`. Consumed samples are logged to `<name>-<rank>.log`, over all attempts.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
from asking import asking, hand_in
from eating import eat
from late_gpu import use_late_gpu
from scenarios import perform_all
from toy import Hook, Loop, Toy, told_from_the_start, train
from unreadable import unreadable

import rollback
from rollback.errors import RollbackError
from rollback.train.ending import TrainingEnd
from rollback.train.last_snapshot import early
from rollback.train.last_snapshot.exchange import Exchange
from rollback.train.restore import restore
from rollback.train.sharded import detached
from rollback.train.snapshots import pipeline


def perform(scenario: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    toy = Toy.from_json(scenario["toy"])
    if scenario.get("otherwise", [None])[0] == rank:
        toy = toy.with_settings(**scenario["otherwise"][1]).but(max_steps=scenario["otherwise"][2])
    if scenario.get("skips_of"):
        toy = told_from_the_start(toy, Path(scenario["skips_of"]))
    run = scenario.get("run", os.environ.get("ROLLBACK_RUN"))
    write = vars(pipeline)["write_direct"]
    reader, *what = scenario.get("unreadable", [None])
    if scenario.get("late_gpu"):
        use_late_gpu()
    if scenario.get("dies_in_restore", [None])[0] == rank and os.environ.get("ROLLBACK_ATTEMPT") == "1":
        vars(restore)["_load"] = partial(die, vars(restore)["_load"], scenario["dies_in_restore"][1])
    if scenario.get("dies_stopping") == rank and os.environ.get("ROLLBACK_ATTEMPT") == "1":
        TrainingEnd.stop = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    if scenario.get("evaluates", [None])[0] == rank and os.environ.get("ROLLBACK_ATTEMPT") == "1":
        evaluating = partialmethod(evaluate, Loop.evaluate, itertools.count(1), *scenario["evaluates"][1:])
        Loop.evaluate = evaluating  # type: ignore[method-assign, assignment]
    ranks, method, *moment = scenario.get("dies_keeping", [[], ""])
    if rank in ranks and os.environ.get("ROLLBACK_ATTEMPT") == "1":
        setattr(Exchange, method, partialmethod(die_once, getattr(Exchange, method), *moment))
    try:
        log = folder / f"{scenario['name']}-{rank}.log"
        with unreadable(*what) if reader == rank else contextlib.nullcontext():
            return {"portrait": train(toy, Path(run) if run else None, hook=hook(scenario, toy, rank), log=log)}
    except SystemExit as end:
        return {"exit": end.code}
    except RollbackError as error:
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        vars(pipeline)["write_direct"] = write


def hook(scenario: dict[str, Any], toy: Toy, rank: int) -> Hook:
    def at_batch(guard: rollback.Guard | None, position: int) -> None:
        if guard is not None:
            guard._loop.last_snapshot._device.await_gradients()  # what becomes of a rank here, its GPU has come so far
        if scenario.get("signal", [])[:2] == [rank, position]:
            number, *attempt = scenario["signal"][2:]
            if not attempt or attempt == [int(os.environ["ROLLBACK_ATTEMPT"])]:
                os.kill(os.getpid(), number)
        if scenario.get("full_disk") == [rank, position]:
            vars(pipeline)["write_direct"] = refuse
        if scenario.get("faulty_host") == [socket.gethostname(), position]:
            os.kill(os.getpid(), signal.SIGKILL)
        for batch, file in zip(*[iter(scenario.get("holds", []))] * 2, strict=True):
            while position == batch and not os.path.exists(file):
                time.sleep(0.02)
        time.sleep(scenario.get("slow", 0.0))
        if scenario.get("ends", [])[:2] == [rank, position] and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
            end(guard, scenario["ends"][2], toy.device)
        elif scenario.get("lags_behind", [])[:1] == [position] and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
            lag_behind(guard, *scenario["lags_behind"][1:])
        if scenario.get("lags") == [rank, position] and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
            assert guard is not None
            lag(guard, lambda: guard._loop.last_snapshot._done)
        for who, batch, command in zip(*[iter(scenario.get("shell", []))] * 3, strict=True):
            if (who, batch) == (rank, position) and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
                subprocess.run(["sh", "-c", command], check=True)
        if scenario.get("flip") == [rank, position] and guard is not None:
            weight = detached(next(guard._loop.state.model.parameters()))
            weight.view(torch.int32)[0, 0] ^= 1
        for ask in asked:
            ask(guard, position)

    asked = [
        asking(batch, partial(hand_in, Path(scenario["run"]), **request))
        for batch, request in zip(scenario.get("ask", [])[::2], scenario.get("ask", [])[1::2], strict=True)
        if rank == 0
    ]
    return at_batch


def die(load: Any, moment: str, *given: Any) -> None:
    if moment == "after":
        load(*given)
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(exchange: Exchange, really: Any, moment: str, once: str, *given: Any) -> Any:
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return really(exchange, *given)
    return die(really, moment, exchange, *given)


def evaluate(loop: Loop, really: Any, count: Iterator[int], at: int, seconds: float) -> None:
    ends = next(count) == at
    if seconds or not ends:
        really(loop)  # needs all ranks: buffers are broadcast in it
    if ends:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)


def end(guard: rollback.Guard | None, how: str, device: str) -> None:
    """kill, stop, raise, leave (by os._exit), eat (all memory of its cgroup), sleep, hold (the interpreter's lock in
    a deadlock); assertion, memory: it breaks an assertion of the device's, or asks it for too much. Each of them also
    `in its update`."""
    if how.endswith(within := " in its update"):
        assert guard is not None
        vars(early)["_LATITUDE"] = 60_000_000_000  # a busy machine may keep it from this for longer than usual
        guard._loop.state.optimizer.register_step_pre_hook(lambda *_: end(guard, how.removesuffix(within), device))
        return
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ArithmeticError("this rank raises")
        case "leave":
            os._exit(3)
        case "eat":
            eat()
        case "sleep":
            threading.Event().wait()
        case "hold":
            mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
            lock(mutex), lock(mutex)  # no signal wakes it, as that for the stacks would wake a sleep
        case "assertion":
            torch.arange(4, device=device)[torch.tensor([9], device=device)].tolist()
        case "memory":
            torch.empty(1 << 50, dtype=torch.uint8, device=device)


def lag(guard: rollback.Guard, until: Callable[[], bool]) -> None:
    """Begin the next update only then."""

    def wait(*_: object) -> None:
        while not until():
            time.sleep(0.001)

    optimizer = guard._loop.state.optimizer
    others = [*optimizer._optimizer_step_pre_hooks.items()]
    optimizer._optimizer_step_pre_hooks.clear()
    optimizer.register_step_pre_hook(wait)
    optimizer._optimizer_step_pre_hooks.update(others)


def lag_behind(guard: rollback.Guard | None, folder: str, *methods: str) -> None:
    assert guard is not None
    hosts = guard._loop.last_snapshot._members.hosts
    assert hosts is not None
    method, spoken = methods[hosts.hosts.index(hosts.own)], Path(folder, f"spoken-{hosts.own}")
    last = guard._loop.last_snapshot
    lag(guard, spoken.exists)
    if method:
        moving = partialmethod(speak_then_move, getattr(Exchange, method), last, last._standing.changes, spoken)
        setattr(Exchange, method, moving)


def speak_then_move(exchange: Exchange, really: Any, last: Any, changes: int, spoken: Path, *given: Any) -> Any:
    told = really(exchange, *given)
    spoken.touch()
    while last._standing.changes == changes:
        time.sleep(0.001)
    return told


def refuse(*_: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    perform_all(perform)
