"""torchrun's command line as a table, so that reading it costs no import of torch.

Each row is one flag of `torch.distributed.run`; a test compares the table with torchrun's own parser. Flags that a
newer torchrun adds are one row each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A flag of torchrun. `metavar` is None for a switch, which takes no value."""

    name: str
    metavar: str | None
    help: str
    short: str | None = None

    @property
    def option(self) -> str:
        return f"--{self.name}"

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that torchrun takes the value from where the flag is not given."""
        return f"PET_{self.parameter.upper()}"


FLAGS: tuple[Flag, ...] = (
    Flag("nproc-per-node", "N", "ranks on each node: a number, auto, gpu or cpu"),
    Flag("nnodes", "N", "number of nodes, or MIN:MAX"),
    Flag("standalone", None, "one node, meeting on a free port; the default here unless a rendezvous is given"),
    Flag("rdzv-backend", "NAME", "rendezvous backend"),
    Flag("rdzv-endpoint", "HOST:PORT", "rendezvous endpoint"),
    Flag("rdzv-id", "ID", "name of the group at the rendezvous"),
    Flag("rdzv-conf", "K=V,...", "further configuration of the rendezvous"),
    Flag("node-rank", "N", "rank of this node (static rendezvous)"),
    Flag("master-addr", "ADDRESS", "address of node 0 (static rendezvous)"),
    Flag("master-port", "PORT", "port on node 0 (static rendezvous)"),
    Flag("local-addr", "ADDRESS", "address of this node"),
    Flag("module", None, "SCRIPT is a module, as with python -m", short="m"),
    Flag("no-python", None, "SCRIPT is a program that is not run by python"),
    Flag("run-path", None, "run SCRIPT by runpy in the process that torchrun spawns"),
    Flag("role", "NAME", "role of the ranks, for logs"),
    Flag("max-restarts", "N", "taken as --restart-budget: torchrun itself restarts nothing here"),
    Flag("monitor-interval", "SECONDS", "how often torchrun looks at its ranks"),
    Flag("start-method", "METHOD", "how functions are started: spawn, fork or forkserver"),
    Flag("shutdown-timeout", "SECONDS", "time between SIGTERM and SIGKILL when torchrun ends its ranks (5 here)"),
    Flag("signals-to-handle", "SIGNAL,...", "signals on which torchrun ends its ranks"),
    Flag("log-dir", "DIR", "where the output of the ranks is logged"),
    Flag("redirects", "SPEC", "log output of the ranks instead of showing it", short="r"),
    Flag("tee", "SPEC", "log output of the ranks and show it", short="t"),
    Flag("local-ranks-filter", "N,...", "show the output of these local ranks only"),
    Flag("duplicate-stdout-filters", "TEXT,...", "copy matching lines of stdout to another file"),
    Flag("duplicate-stderr-filters", "TEXT,...", "copy matching lines of stderr to another file"),
    Flag("logs-specs", "NAME", "entry point that decides on logs"),
    Flag("event-log-handler", "NAME", "handler of torchrun's own events"),
    Flag("numa-binding", "MODE", "bind ranks to CPUs near their GPU: node, socket, exclusive or core-complex"),
    Flag("virtual-local-rank", None, "LOCAL_RANK is 0 on every rank, each sees its own device only"),
)

# A flag that says where the ranks meet; torchrun is told to choose a free port where none of them is given.
RENDEZVOUS = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port")


def names_a_rendezvous(given: Mapping[str, str | bool], environment: Mapping[str, str]) -> bool:
    """Whether flags (by name) or torchrun's environment variables say where the ranks meet, or speak of many nodes."""
    many_nodes = value_of("nnodes", given, environment) not in (None, "1", "1:1")
    return many_nodes or any(value_of(name, given, environment) for name in RENDEZVOUS)


def value_of(name: str, given: Mapping[str, str | bool], environment: Mapping[str, str]) -> str | bool | None:
    """A flag's value as torchrun will see it: from the flags, or from its environment variable."""
    flag = next(flag for flag in FLAGS if flag.name == name)
    return given.get(name) or environment.get(flag.variable)
