"""What the supervisor tells torchrun's process: names in its environment, on its command line, and its instructions.

Every restart waits for the imports of that process (`rollback.agent`), so this imports next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

MODULE = "rollback.agent.entry"
"""What runs in torchrun's process."""
ENV_TORCHRUN = "ROLLBACK_TORCHRUN"
"""`Instructions` as JSON, for this process and not for the ranks."""
ENV_PRELOAD, ENV_SPARE = "ROLLBACK_PRELOAD", "ROLLBACK_SPARE"
"""Set where ranks are to be forked (`rollback.agent.fork_server`), and where this process is to wait for an order at a
descriptor (`rollback.supervisor.standby`)."""
LOGS_SPECS = "rollback-streams"
"""The value of --logs-specs that means `rollback.agent.streams`."""
FORK_SERVER = "fork server"
"""What `ps -o comm` shows of the process that forks ranks."""


@dataclass(frozen=True)
class Instructions:
    """What this process is told by its supervisor.

    supervisor: its pid. refusal, failures: files for word of wrong flags and of failed ranks. guard: the file that is
    there once a rank has a guard. run_id: names the launch, over all its attempts. restarts: how many were before.
    grace: seconds that ranks have to stop when told to.
    """

    supervisor: int
    refusal: str
    failures: str
    guard: str
    run_id: str
    restarts: int
    grace: float
