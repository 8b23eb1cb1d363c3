"""torchrun's connection to the store of its rendezvous: who waits for it learns of that, and does not wait for ever.

torch says nothing while it waits. A program at that port which takes connections and never answers holds it for ever:
its timeout is not one for the answer.
"""

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

_WORTH_A_WORD = 10.0
_BEHIND_TORCH = 30.0  # seconds that torch has, behind its own timeout, to say more than we can
_MODULES = ("c10d_rendezvous_backend", "static_tcp_rendezvous")
_PARAMETERS = ("host_name", "port", "world_size", "is_master", "timeout")
_CHECK = "see which process has that port there (ss -ltnp), and name another one where it is no torchrun of this job"


def watch_connections(give_up: Callable[[str], object]) -> None:
    """From now on: a connection that takes long is told on stderr, one that fails with its place and what to check.

    give_up: called with the reason in words, from another thread, where torch does not come back.
    """
    for name in _MODULES:
        module: Any = importlib.import_module(f"torch.distributed.elastic.rendezvous.{name}")
        module.TCPStore = functools.partial(_connected, module.TCPStore, give_up)


def _connected(make: Callable[..., Any], give_up: Callable[[str], object], *given: Any, **named: Any) -> Any:
    """The store. Raises as `make`."""
    meant = dict(zip(_PARAMETERS, given, strict=False)) | named
    place, seconds = f"{meant['host_name']}:{meant['port']}", meant["timeout"].total_seconds()
    through = threading.Event()

    def watch() -> None:
        if through.wait(min(_WORTH_A_WORD, seconds)):
            return
        waits = f"torchrun waits for the store of the rendezvous at {place}, for {seconds:.0f} s at most"
        print(f"rollback: {waits}. Node 0 must run there, and be reached from here; else {_CHECK}", file=sys.stderr)
        if not through.wait(seconds + _BEHIND_TORCH - min(_WORTH_A_WORD, seconds)):
            give_up(f"no answer from the store of the rendezvous at {place} in {seconds:.0f} s: {_CHECK}")

    with contextlib.suppress(RuntimeError):  # the system has no thread: then it is not told
        threading.Thread(target=watch, name="rollback-store", daemon=True).start()
    try:
        return make(*given, **named)
    except (ValueError, RuntimeError, TimeoutError) as error:  # those that torchrun tells apart: the type stays
        raise type(error)(f"the store of the rendezvous at {place}: {error}; {_CHECK}") from error
    finally:
        through.set()
