"""The documented uses of torchrun, each under torchrun and under rollback launch, side by side.

Compared are exit status, what the ranks print, the files that they log to, and what each rank sees at each start:
arguments, working directory, sys.path, signals, and its whole environment (without ROLLBACK_* and GLIBC_TUNABLES, and
with ports, paths and random ids replaced by what they stand for). A difference that is meant has its reason here; exits
with 1 where there is another one, or where a difference that is meant has gone. docs/torchrun.md goes through the flags
one by one.

    python scripts/compare_torchrun.py [--only TEXT] [--jobs 2] [--keep DIR]
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = [sys.executable, "-m", "rollback", "launch"]
LIMIT = 240.0

# What the ranks run. Its first argument says what it does; it notes what it sees, once for each start.
PROBE = """
import json, os, signal, sys, time

def note(signals):
    seen = {"argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0], "environment": dict(os.environ),
            "signals": signals, "name": __name__, "python": sys.executable}
    start = f'{os.environ["TORCHELASTIC_RESTART_COUNT"]}-{os.environ["RANK"]}'
    path = os.path.join(os.environ["SEEN"], start + ".json")
    with open(path + ".new", "w") as file:
        json.dump(seen, file)
    os.replace(path + ".new", path)

rank, restarts = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"out of rank {rank}", flush=True)
print(f"err of rank {rank}", file=sys.stderr, flush=True)
note([])
what = sys.argv[1] if len(sys.argv) > 1 else ""

def begun():
    return sum(name.startswith(f"{restarts}-") and name.endswith(".json") for name in os.listdir(os.environ["SEEN"]))

while what and begun() < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)  # a rank that fails at once would end its peers before they have begun
if what == "exit-7" and rank == "0":
    sys.exit(7)
if what == "raise" and rank == "0":
    raise ValueError("as asked")
if what == "kill" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "twice" and restarts < 2:
    sys.exit(1)
if what == "wait":
    def stop(number, frame):
        note([signal.Signals(number).name])
        time.sleep(3)  # longer than two seconds: time to save
        note([signal.Signals(number).name, "saved"])
        sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, stop)
    print("ready", flush=True)
    time.sleep(100)
"""

WRONG_USE = "exit 2 and one line; torchrun: 1 and a traceback"
EARLIER = "exit 2 before anything is started; torchrun starts ranks that cannot begin"
OWN_FOLDERS = "each start is a torchrun of its own, with a log folder of its own"


@dataclass(frozen=True)
class Use:
    """A command line. nodes: further words for each of several nodes. send: a signal, once all ranks are ready.

    PORT and HERE in words stand for a free port and for the folder. at_once: so many launches side by side in one
    folder. differs: why the two differ, where that is meant.
    """

    name: str
    words: str
    environment: dict[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ("",)
    send: signal.Signals | None = None
    ranks: int = 1
    at_once: int = 1
    differs: str = ""


QUICK = "--rdzv-conf=last_call_timeout=2"
C10D = "--rdzv-backend=c10d --rdzv-endpoint=localhost:PORT"
JOB = f"--max-restarts=3 --rdzv-id=job {C10D}"
USES = [
    Use("nothing but the script", "probe.py"),
    Use("single node, many ranks", "--standalone --nnodes=1 --nproc-per-node=2 probe.py --lr 0.1"),
    Use("stacked", "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 --nproc-per-node=2 probe.py"),
    Use("fault tolerant, well", f"--nnodes=1 --nproc-per-node=2 {JOB} probe.py"),
    Use("fault tolerant, third start", f"--nnodes=1 --nproc-per-node=2 {JOB} probe.py twice"),
    Use("fault tolerant, never well", "--nproc-per-node=2 --max-restarts=1 probe.py exit-7"),
    Use("elastic 1:4, one node", f"--nnodes=1:4 --nproc-per-node=2 {JOB} {QUICK} probe.py"),
    Use("elastic 1:2, two nodes", f"--nnodes=1:2 --rdzv-id=job {C10D} {QUICK} probe.py", nodes=("", "")),
    Use("two nodes, c10d", f"--nnodes=2 --rdzv-id=job {C10D} probe.py", nodes=("--node-rank=0", "--node-rank=1")),
    Use("two nodes, static", "--nnodes=2 --master-addr=127.0.0.1 --master-port=PORT probe.py",
        nodes=("--node-rank=0", "--node-rank=1")),
    Use("one node, static port", "--nproc-per-node=2 --master-port=PORT probe.py"),
    Use("PET_NNODES=1:2", f"{C10D} {QUICK} probe.py", {"PET_NNODES": "1:2"}),
    Use("PET_NPROC_PER_NODE=2", "probe.py", {"PET_NPROC_PER_NODE": "2"}),
    Use("flag over variable", "--nproc-per-node=1 probe.py", {"PET_NPROC_PER_NODE": "2"}),
    Use("PET_MAX_RESTARTS=1", "probe.py exit-7", {"PET_MAX_RESTARTS": "1"}),
    Use("PET_STANDALONE=1", "probe.py", {"PET_STANDALONE": "1"}),
    Use("PET_RDZV_*", "probe.py",
        {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0", "PET_RDZV_ID": "job"}),
    Use("PET_MASTER_PORT", "probe.py", {"PET_MASTER_PORT": "PORT"}),
    Use("PET_ROLE", "probe.py", {"PET_ROLE": "trainer"}),
    Use("PET_MODULE=1", "package.probe x", {"PET_MODULE": "1"}),
    Use("PET_MODULE=0", "probe.py x", {"PET_MODULE": "0"}),
    Use("PET_MODULE=yes", "package.probe", {"PET_MODULE": "yes"}, differs=WRONG_USE),
    Use("PET_NO_PYTHON=1", "./program x", {"PET_NO_PYTHON": "1"}),
    Use("PET_RUN_PATH=1", "HERE/probe.py x", {"PET_RUN_PATH": "1"}),
    Use("PET_TEE and PET_LOG_DIR", "probe.py", {"PET_TEE": "3", "PET_LOG_DIR": "logs"}),
    Use("PET_LOGS_SPECS is not read", "probe.py", {"PET_LOGS_SPECS": "nix"}),
    Use("a prefix of lines", "-t 3 probe.py", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}> "}),
    Use("PYTHON_EXEC", "probe.py", {"PYTHON_EXEC": "HERE/other-python"}),
    Use("OMP_NUM_THREADS", "--nproc-per-node=2 probe.py", {"OMP_NUM_THREADS": "3"}),
    Use("number of processors", "--nproc-per-node=cpu probe.py"),
    Use("auto", "--nproc-per-node=auto probe.py"),
    Use("--nproc-per", "--nproc-per=2 probe.py"),
    Use("--nproc_per_node", "--nproc_per_node 2 probe.py"),
    Use("--standal, --max_r", "--standal --max_r 2 probe.py"),
    Use("--t", "--t 1 probe.py"),
    Use("module", "--module package.probe --lr 0.1"),
    Use("-m", "-m package.probe"),
    Use("a package", "-m package"),
    Use("a program", "--no-python ./program x"),
    Use("run_path", "--run-path HERE/probe.py x"),
    Use("a folder", "folder x"),
    Use("a zip file", "archive.zip x"),
    Use("arguments of all kinds", "probe.py x --standalone -m --nproc=9 -- a=b"),
    Use("macros in arguments", "--nproc-per-node=2 probe.py x --device=${local_rank}"),
    Use("a rank fails", "--nproc-per-node=2 probe.py exit-7"),
    Use("a rank raises", "probe.py raise"),
    Use("a rank is killed", "--nproc-per-node=2 probe.py kill"),
    Use("--role", "--role=trainer probe.py"),
    Use("--rdzv-id", "--rdzv-id=job probe.py"),
    Use("--local-addr", f"--local-addr=127.0.0.1 {C10D} probe.py"),
    Use("--monitor-interval", "--monitor-interval=1 probe.py"),
    Use("--start-method", "--start-method=fork probe.py"),
    Use("--virtual-local-rank", "--virtual-local-rank --nproc-per-node=2 probe.py"),
    Use("--event-log-handler", "--event-log-handler=console probe.py"),
    Use("--numa-binding", "--numa-binding=node probe.py"),
    Use("--log-dir and -r", "--nproc-per-node=2 --log-dir=logs -r 3 probe.py"),
    Use("-r for each rank", "--nproc-per-node=2 --log-dir=logs -r 0:1,1:2 probe.py"),
    Use("--log-dir and -t", "--nproc-per-node=2 --log-dir=logs -t 3 probe.py"),
    Use("--log-dir over restarts", "--log-dir=logs -r 3 --max-restarts=1 probe.py exit-7", differs=OWN_FOLDERS),
    Use("--local-ranks-filter", "--nproc-per-node=2 --local-ranks-filter=1 -t 3 probe.py"),
    Use("--duplicate-stdout-filters", "--nproc-per=2 --log-dir=logs -r 3 --duplicate-stdout-filters=out,x probe.py"),
    Use("SIGTERM", "--nproc-per-node=2 probe.py wait", send=signal.SIGTERM, ranks=2),
    Use("SIGINT", "--nproc-per-node=2 probe.py wait", send=signal.SIGINT, ranks=2),
    Use("SIGHUP", "probe.py wait", send=signal.SIGHUP),
    Use("SIGQUIT", "probe.py wait", send=signal.SIGQUIT),
    Use("--signals-to-handle", "--signals-to-handle=SIGUSR1 probe.py wait", send=signal.SIGUSR1),
    Use("--shutdown-timeout", "--shutdown-timeout=1 probe.py wait", send=signal.SIGTERM,
        differs="--grace is what ranks have when they are told to stop; the timeout is for peers of a failed rank"),
    Use("two at once in one folder", "--nproc-per-node=1 probe.py", at_once=2),
    Use("help", "--help"),
    Use("an unknown flag", "--no-such-flag probe.py"),
    Use("no script", "--nproc-per-node=2"),
    Use("an ambiguous flag", "--log=x probe.py"),
    Use("a number that is none", "--max-restarts=soon probe.py"),
    Use("a start method that is none", "--start-method=magic probe.py"),
    Use("a number of ranks that is none", "--nproc-per-node=foo probe.py", differs=WRONG_USE),
    Use("no ranks", "--nproc-per-node=0 probe.py", differs=WRONG_USE),
    Use("a range that is none", "--nnodes=3:1 probe.py", differs=WRONG_USE),
    Use("gpu without one", "--nproc-per-node=gpu probe.py", differs=WRONG_USE),
    Use("--no-python --module", "--no-python --module package.probe", differs=WRONG_USE),
    Use("redirects that are none", "--redirects=foo probe.py", differs=WRONG_USE),
    Use("a tee that is none", "--tee=0:9 probe.py", differs=WRONG_USE),
    Use("log specs that are none", "--logs-specs=nix probe.py", differs=WRONG_USE),
    Use("an event handler that is none", "--event-log-handler=nix probe.py", differs=WRONG_USE),
    Use("a rendezvous that is none", "--rdzv-backend=nix probe.py", differs=WRONG_USE),
    Use("a script that is not there", "nowhere.py", differs=EARLIER),
    Use("a module that is not there", "-m nowhere", differs=EARLIER),
    Use("a program that is not there", "--no-python nowhere", differs=EARLIER),
]  # fmt: skip


def fill(folder: Path) -> None:
    """What the command lines name."""
    (folder / "seen").mkdir(parents=True)
    (folder / "probe.py").write_text(PROBE)
    for package in ("package", "folder"):
        (folder / package).mkdir()
        (folder / package / "__main__.py").write_text(PROBE)
    (folder / "package/__init__.py").touch()
    (folder / "package/probe.py").write_text(PROBE)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    for name, text in {
        "program": f'#!/bin/sh\nexec {sys.executable} probe.py "$@"\n',
        "other-python": f'#!/bin/sh\nOTHER_PYTHON=1 exec {sys.executable} "$@"\n',
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def run(use: Use, launcher: list[str], folder: Path) -> dict[str, Any]:
    """What comes of a use under a launcher."""
    fill(folder)
    port = str(free_port())
    stands_for = {"PORT": port, "HERE": str(folder)}

    def spelled(text: str) -> str:
        for name, value in stands_for.items():
            text = text.replace(name, value)
        return text

    own = {name: spelled(value) for name, value in use.environment.items()}
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "COLUMNS")}
    processes = []
    for number, more in enumerate(use.nodes * use.at_once):
        seen = folder / "seen" / (str(number) if use.at_once > 1 else "")
        seen.mkdir(exist_ok=True)
        processes.append(
            subprocess.Popen(
                [*launcher, *spelled(f"{more} {use.words}").split()], cwd=folder, text=True,
                env={**inherited, **own, "SEEN": str(seen), "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    if use.send is not None:
        processes[0].send_signal(use.send) if wait_for_ranks(folder, use.ranks, processes[0]) else None
    printed = [ended(process) for process in processes]
    starts = {
        str(path.relative_to(folder / "seen")): json.loads(path.read_text())
        for path in sorted(folder.glob("seen/**/*.json"))
    }
    return {
        "exit": [process.returncode for process in processes],
        "starts": {name: settled(start, str(folder), port) for name, start in starts.items()},
        "one id": len({start["environment"]["TORCHELASTIC_RUN_ID"] for start in starts.values()}),
        "printed": printed_by_ranks("".join(out + err for out, err in printed)),
        "tracebacks": sum("Traceback" in err for _, err in printed) if any(p.returncode == 2 for p in processes) else 0,
        "logs": sorted(logged(folder / "logs")),
        "log folders": len(list(folder.glob("logs/*"))),
        "left": sorted(path.name for path in folder.glob("runs")),
    }


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a launcher has printed. One that does not end is killed: its exit status then says so."""
    try:
        return process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def wait_for_ranks(folder: Path, ranks: int, process: subprocess.Popen[str]) -> bool:
    """Whether all ranks have come as far as handling signals; each says so on the launcher's stdout."""
    ready = 0
    while ready < ranks and process.poll() is None:
        assert process.stdout is not None
        ready += "ready" in process.stdout.readline()
    return ready == ranks


def printed_by_ranks(text: str) -> dict[str, int]:
    """How often each line of a rank was printed."""
    return dict(sorted(Counter(re.findall(r"(?:\S+ ?)?(?:out|err) of rank \d", text)).items()))


def logged(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size and path.name != "error.json":
            name = re.sub(r"[0-9a-f-]{36}_\w+|none_\w+|job_\w+", "ID", str(path.relative_to(folder)))
            yield f"{name}: {sorted(path.read_text().splitlines())}"


def settled(start: dict[str, Any], folder: str, port: str) -> dict[str, Any]:
    """What a rank saw, without what is another each time."""
    environment = start["environment"]
    for name in [name for name in environment if name.startswith("ROLLBACK_") or name in ("GLIBC_TUNABLES", "SEEN")]:
        del environment[name]
    environment["MASTER_PORT"] = "PORT" if environment["MASTER_PORT"] == port else "free"
    environment["TORCHELASTIC_RUN_ID"] = re.sub(r"[0-9a-f-]{36}", "UUID", environment["TORCHELASTIC_RUN_ID"])
    environment["TORCHELASTIC_ERROR_FILE"] = "set" if environment.get("TORCHELASTIC_ERROR_FILE") else "unset"
    return dict(json.loads(json.dumps(start).replace(folder, "HERE").replace(port, "PORT")))


def differences(theirs: Any, ours: Any, place: str = "") -> list[str]:
    """Where two accounts differ, in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found = []
        for name in sorted({*theirs, *ours}):
            found += differences(theirs.get(name), ours.get(name), f"{place} {name}".strip())
        return found
    return [] if theirs == ours else [f"{place}: {theirs!r} | {ours!r}"]


def compare(use: Use, base: Path) -> list[str]:
    folders = {name: base / re.sub(r"\W+", "-", use.name) / name for name in ("torchrun", "launch")}
    found = differences(run(use, TORCHRUN, folders["torchrun"]), run(use, LAUNCH, folders["launch"]))
    print(f"{use.name}: {found[0][:100] if found else 'same'}", file=sys.stderr, flush=True)
    return found


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description="torchrun and rollback launch side by side.")
    parser.add_argument("--only", default="", help="uses whose name or words contain this text")
    parser.add_argument("--jobs", type=int, default=2, help="uses at a time (default: 2)")
    parser.add_argument("--keep", type=Path, help="keep the folders of all runs below this new directory")
    given = parser.parse_args()
    uses = [use for use in USES if given.only in f"{use.name} {use.words}"]
    base = given.keep or Path(tempfile.mkdtemp(prefix="compare-torchrun-"))
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # ignored in a shell's background, or under nohup
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    began = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(lambda use: compare(use, base), uses))
    if given.keep is None:
        shutil.rmtree(base)
    table = Table("use", "command line", "under rollback launch")
    unmeant = 0
    for use, differing in zip(uses, found, strict=True):
        variables = " ".join(f"{name}={value}" for name, value in use.environment.items())
        line = f"{variables} {use.words}".strip() + (f"; {use.send.name}" if use.send else "")
        if bool(differing) == bool(use.differs):
            verdict = f"different: {use.differs}" if differing else "same"
        else:
            unmeant += 1
            verdict = (
                "DIFFERENT\n" + "\n".join(differing[:6]) if differing else f"SAME, against what is meant: {use.differs}"
            )
        table.add_row(use.name, line, verdict)
    Console(width=150, highlight=False, markup=False).print(table)
    meant = sum(bool(differing) and bool(use.differs) for use, differing in zip(uses, found, strict=True))
    print(
        f"{len(uses)} uses: {len(uses) - meant - unmeant} the same, {meant} different as meant, {unmeant} otherwise; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if unmeant else 0


if __name__ == "__main__":
    sys.exit(main())
