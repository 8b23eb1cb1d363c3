"""torchrun's command line as a table, so that reading it costs no import of torch.

Each row is one flag of `torch.distributed.run`; a test compares the table with torchrun's own parser. For a flag that
is not in the table, `rollback.cli.options.spelling` asks the parser of the installed torchrun. A flag of the table that
the installed torchrun does not have, torchrun refuses.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollback.errors import UsageError


@dataclass(frozen=True)
class Flag:
    name: str
    metavar: str | None
    """None: a switch, which takes no value."""
    help: str
    short: str | None = None
    has_variable: bool = True
    """Whether torchrun reads an environment variable where the flag is not given."""

    @property
    def option(self) -> str:
        return f"--{self.name}"

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
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
    Flag("max-restarts", "N", "restarts of a script without a guard (default: 0); with one, as --restart-budget"),
    Flag("monitor-interval", "SECONDS", "how often torchrun looks at its ranks"),
    Flag("start-method", "METHOD", "how functions are started: spawn, fork or forkserver"),
    Flag("shutdown-timeout", "SECONDS", "time between SIGTERM and SIGKILL when a rank has failed (30; with a guard 5)"),
    Flag("signals-to-handle", "SIGNAL,...", "further signals that are taken as a request to stop"),
    Flag("log-dir", "DIR", "where the output of the ranks is logged"),
    Flag("redirects", "SPEC", "log output of the ranks instead of showing it", short="r"),
    Flag("tee", "SPEC", "log output of the ranks and show it", short="t"),
    Flag("log-line-prefix-template", "TEXT", "what each line that --tee shows begins with (torch 2.15 and later)"),
    Flag("local-ranks-filter", "N,...", "show the output of these local ranks only"),
    Flag("duplicate-stdout-filters", "TEXT,...", "copy matching lines of stdout to another file"),
    Flag("duplicate-stderr-filters", "TEXT,...", "copy matching lines of stderr to another file"),
    Flag("logs-specs", "NAME", "entry point that decides on logs", has_variable=False),
    Flag("event-log-handler", "NAME", "handler of torchrun's own events"),
    Flag(
        "numa-binding",
        "MODE",
        "bind ranks to CPUs near their GPU: node, socket, exclusive or core-complex",
        has_variable=False,
    ),
    Flag("virtual-local-rank", None, "LOCAL_RANK is 0 on every rank, each sees its own device only"),
)

STATIC_PORT, C10D_PORT = 29500, 29400
"""torchrun's own."""
_ENDPOINT = "write HOST:PORT, and an IPv6 address in brackets: --rdzv-endpoint [fd00::7]:29500"
# Flags that define a rendezvous. Without any of them torchrun chooses a free port.
RENDEZVOUS = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port")


def read_flags(given: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, str | bool]:
    """torchrun's flags by name: from the command line, else from their environment variables, as torchrun reads them.

    given: values by parameter. Switches that are off are left out. Raises UsageError where the variable of a switch is
    not a number.
    """
    found: dict[str, str | bool] = {}
    for flag in FLAGS:
        value = given.get(flag.parameter)
        if value in (None, False) and flag.has_variable:
            value = _from_variable(flag, environment)
        if isinstance(value, str) or value is True:
            found[flag.name] = value
    return found


def _from_variable(flag: Flag, environment: Mapping[str, str]) -> str | bool | None:
    text = environment.get(flag.variable)
    if text is None or flag.metavar is not None:
        return text
    try:
        return bool(int(text))
    except ValueError as error:
        raise UsageError(
            f"{flag.variable}={text}: torchrun reads a number here",
            hint=f"1 stands for {flag.option}, 0 for its absence",
        ) from error


def in_full(name: str) -> str:
    """The full name of an abbreviated flag, without dashes; `name` itself where it is no abbreviation.

    Raises UsageError where it could be several flags.
    """
    matches = [flag.name for flag in FLAGS if flag.name.startswith(name)]
    if name in matches or not matches:
        return name
    if len(matches) > 1:
        raise UsageError(f"--{name} is ambiguous: it could be {', '.join(f'--{match}' for match in matches)}")
    return matches[0]


def names_a_rendezvous(flags: Mapping[str, str | bool]) -> bool:
    """Whether flags (by name) define a rendezvous or many nodes."""
    return flags.get("nnodes", "1") not in ("1", "1:1") or any(flags.get(name) for name in RENDEZVOUS)


def endpoint_of(flags: Mapping[str, str | bool]) -> tuple[str, int] | None:
    """Host and port of torch's own store, as torchrun reads them from flags (by name); None: they name no such store.

    Raises UsageError where torchrun would refuse them in each attempt, or wait for a host that nobody has named.
    """
    backend = str(flags.get("rdzv-backend", "static"))
    given = str(flags.get("rdzv-endpoint", "")).strip()
    if backend in ("static", "c10d") and _is_ipv6(given):
        host, _, port = given.rpartition(":")
        raise UsageError(
            f"the rendezvous endpoint {given!r} is an IPv6 address, and torchrun would read host {host!r}, port {port}",
            hint=f"{_ENDPOINT}; for all of it as the address: [{given}]:{C10D_PORT}",
        )
    if backend == "static" and not given and "master-addr" in flags:
        given = f"{flags['master-addr']}:{flags.get('master-port', STATIC_PORT)}"
    if backend not in ("static", "c10d") or not given or flags.get("standalone"):
        return None
    in_brackets = given[0] == "[" and given[-1] == "]"
    host, colon, port = (given, "", "") if in_brackets else given.rpartition(":")
    if not colon and backend == "static":
        raise UsageError(f"the rendezvous endpoint {given!r} names no port", hint=_ENDPOINT)
    if not colon:
        host, port = given, str(C10D_PORT)
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) >= 1 << 16:
        raise UsageError(f"the rendezvous endpoint {given!r}: {port!r} is no port from 0 to 65535", hint=_ENDPOINT)
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not re.fullmatch(r"[\w.:-]+", bare) or (":" in bare and not _is_ipv6(bare)):
        raise UsageError(f"the rendezvous endpoint {given!r}: {host!r} is no host", hint=_ENDPOINT)
    return bare, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
