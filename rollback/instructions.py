"""The supervisor's instructions to torchrun's process: its command line, and a JSON text in the environment.

Every restart waits for the imports of that process (`rollback.agent`), so this module imports next to nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODULE = "rollback.agent.entry"
"""What runs in torchrun's process."""
LOGS_SPECS = "rollback-streams"
"""The value of --logs-specs that means `rollback.agent.streams`."""
MEETING_MODULE = "rollback.agent.meeting"
"""What runs beside a supervisor whose hosts meet at an endpoint."""
HOST_PROXY = "rollback/train/last_snapshot/host_proxy.py"
"""What torchrun's process runs where no rank of this host is left to take part in a last snapshot of several hosts."""
ADOPTING = "rollback/trainers/adopt/rank_main.py"
"""What runs the script in the ranks, under `--adopt`."""
FORK_SERVER = "fork server"
"""What `ps -o comm` shows of the process that forks ranks."""

_ROOT = str(Path(__file__).parents[1])
_BEGIN = (
    "import sys; sys.path[0] or sys.path.pop(0); ROOT in sys.path or sys.path.append(ROOT); "
    "from importlib import import_module; import_module(sys.argv.pop(1)).main()"
)


def program(module: str) -> Sequence[str]:
    """The words that run one of our modules as `python -m` would, but for the working directory: there -m looks for
    each module first, and a `types.py` or `profile.py` of the user's is not meant. (Python has -P for that since 3.11.)
    """
    return [sys.executable, "-c", _BEGIN.replace("ROOT", repr(_ROOT)), module]


def path_of(script: str) -> str:
    """Where a script of ours is, as ADOPTING: a process that starts it need not import it."""
    return f"{_ROOT}/{script}"


@dataclass(frozen=True)
class Instructions:
    supervisor: int
    """The supervisor's pid."""
    refusal: str
    """The file for a report about wrong flags."""
    failures: str
    """The file for a report about failed ranks."""
    guard: str
    """The file that exists once a rank has a guard."""
    run_id: str
    """Names the launch, over all its attempts."""
    restarts: int
    """Number of starts before this one."""
    grace: float
    """Seconds that ranks have to stop when they are told to."""


@dataclass(frozen=True)
class MeetingPoint:
    """Where the hosts of a job meet: torch's c10d store at the endpoint of the rendezvous."""

    host: str
    port: int
    is_host: bool | None
    """Whether this host has the store; None: it has if the endpoint is one of its own addresses."""
    keys: str
    """What the names of this job's keys begin with."""
    descriptor: int = -1
    """The socket of the supervisor."""
