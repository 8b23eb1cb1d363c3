"""Attempts of a toy job as processes of their own, cheaply: imports torch once and forks for each attempt.

Reads requests from stdin, a JSON object a line, and answers each on stdout with how the attempt ended. It never trains
itself: autograd does not survive a fork.

Request: `toy`, `run`; optional `log` (consumed samples, over all attempts), `portrait` (where to write it), `output`
(stdout and stderr of the attempt), `kill_after` (seconds until SIGKILL), `die` (`[before | after, kind of fact, n]`:
end at once around the n-th such fact), `signal` (`[batch, number, seconds]`: send itself a signal at that batch, or so
many seconds later), `told_in` (`[evaluation | save, n, number]`: send itself a signal in the n-th of them), `raise_at`
(a batch), `ask` (`[batch, request]`: hand in that request there, see asking.py).
Answer: `status`, the exit code or minus the signal.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from asking import asking, hand_in
from toy import Loop, Toy, train

from rollback.facts.training import Fact
from rollback.train.comm.recorder import Recorder
from rollback.train.snapshots import pipeline

DIED = 99


def serve(attempt: Callable[[dict[str, Any]], int]) -> None:
    """Answer requests for as long as there are any. `attempt` gives the exit code of the forked process it runs in."""
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(attempt(request))
        if (delay := request.get("kill_after")) is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def warm_up() -> None:
    """The first update of a process imports for two seconds what is imported here once."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def attempt(request: dict[str, Any]) -> int:
    output = os.open(request.get("output") or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if "die" in request:
        die(*request["die"])
    if "told_in" in request:
        be_told_in(*request["told_in"])
    try:
        log = Path(request["log"]) if request.get("log") else None
        portrait = train(Toy.from_json(request["toy"]), Path(request["run"]), hook=hook(request), log=log)
        if request.get("portrait"):
            Path(request["portrait"]).write_text(json.dumps(portrait))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except Exception:  # noqa: BLE001 - the forked child must not run on in its parent's loop
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stderr.flush()
    return 0


def die(when: str, kind: str, count: int) -> None:
    """End the process without a word around the `count`-th fact of a kind."""
    original, seen = Recorder.note, []

    def note(self: Recorder, fact: Fact, notice: str | None = None) -> None:
        seen.extend([fact] * (fact.kind == kind))
        at_it = fact.kind == kind and len(seen) == count
        if at_it and when == "before":
            os._exit(DIED)
        original(self, fact, notice)
        if at_it:
            os._exit(DIED)

    Recorder.note = note  # type: ignore[method-assign]


def be_told_in(what: str, count: int, number: int) -> None:
    """Send this process a signal in the midst of the `count`-th evaluation, or while that shard is written."""
    owner, name = {"evaluation": (Loop, "evaluate"), "save": (pipeline, "write_direct")}[what]
    original, seen = getattr(owner, name), itertools.count(1)

    def in_the_midst(*arguments: Any, **more: Any) -> Any:
        if next(seen) == count:
            os.kill(os.getpid(), number)
        return original(*arguments, **more)

    setattr(owner, name, in_the_midst)


def hook(request: dict[str, Any]) -> Any:
    if "ask" in request:
        batch, asked = request["ask"]
        return asking(batch, lambda: hand_in(Path(request["run"]), **asked))
    batch, number, seconds = (*request.get("signal", (None, None)), 0.0)[:3]

    def at_batch(_guard: object, position: int) -> None:
        if position == batch and seconds:
            threading.Timer(seconds, os.kill, [os.getpid(), number]).start()
        elif position == batch:
            os.kill(os.getpid(), number)
        if position == request.get("raise_at"):
            raise RuntimeError(f"a crash at random, at {time.monotonic()}")

    return at_batch


if __name__ == "__main__":
    serve(attempt)
