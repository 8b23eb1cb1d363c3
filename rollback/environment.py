"""The environment between our processes: each variable that one of them sets and another one reads, and what both must
spell alike.

torchrun's process reads it before it has imported anything, so this module imports next to nothing.
"""

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

# From the supervisor to the ranks.
ENV_RUN = "ROLLBACK_RUN"
ENV_ATTEMPT = "ROLLBACK_ATTEMPT"
ENV_SETTINGS = "ROLLBACK_SETTINGS"
ENV_SUPERVISOR = "ROLLBACK_SUPERVISOR"
ENV_HEARTBEATS = "ROLLBACK_HEARTBEATS"
ENV_REFUSAL = "ROLLBACK_REFUSAL"
ENV_NO_RUN = "ROLLBACK_NO_RUN"
"""The reason why there is no run directory for a guard: a refusal as JSON."""
ENV_HOST = "ROLLBACK_HOST"
"""The host's name when the supervisor started. The host keeps this name when it is renamed later."""
ENV_APART = "ROLLBACK_APART"
"""Set where every host has a run directory of its own."""

# From the supervisor to other processes of its own.
ENV_TORCHRUN = "ROLLBACK_TORCHRUN"
"""`Instructions` as JSON, for torchrun's process and not for the ranks."""
ENV_PRELOAD, ENV_STANDBY = "ROLLBACK_PRELOAD", "ROLLBACK_STANDBY"
"""Set where ranks are to be forked (`rollback.agent.fork_server`), and where torchrun's process is to wait for an order
at a descriptor (`rollback.supervisor.torchrun.standby`)."""
ENV_MEETING = "ROLLBACK_MEETING"
"""`MeetingPoint` as JSON, for what reaches the store of hosts that meet at an endpoint."""

# From the operator: what `fast_tier: auto` stands for on this machine.
ENV_FAST_TIER = "ROLLBACK_FAST_TIER"

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""On this signal a rank writes down its stacks. Scripts and schedulers use the named signals; the C library and
debuggers use the first real-time signals."""
_PARTS = " parts"  # then a variable says how many further ones have its text
_PART = 30_000  # characters in each; UTF-8 has up to four bytes for one


def host_name() -> str:
    """The name of this host for its ranks."""
    return os.environ.get(ENV_HOST) or socket.gethostname()


def guard_mark(refusal: str | os.PathLike[str]) -> Path:
    """The file that says that the script has a guard. refusal: where rank 0 writes a refusal."""
    return Path(refusal).with_name("guard")


def as_variables(name: str, text: str) -> dict[str, str]:
    """What hands a text down as the variable `name`. A long one, as a skip list is that `--skips-of` makes, has several
    variables: Linux starts no program with one of 128 KiB."""
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
    if len(parts) <= 1:
        return {name: text}
    return {name: f"{len(parts)}{_PARTS}", **{f"{name}_{number}": part for number, part in enumerate(parts)}}


def text_in(environment: Mapping[str, str], name: str) -> str:
    """The text that was handed down as `name`; empty: none was."""
    given = environment.get(name, "")
    count = given.removesuffix(_PARTS)
    if count == given or not count.isdecimal():
        return given
    return "".join(environment.get(f"{name}_{number}", "") for number in range(int(count)))
