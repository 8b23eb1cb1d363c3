"""What is in a run directory's files is bounded and checked: a sentence and an exit code, in little memory."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Commands, Outcome

from recorded_run import eventful_run
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths
from rollback.supervisor.torchrun.processes import dead_ranks, leftovers, living_ranks

MEGABYTES = 300


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    paths = eventful_run(tmp_path / "run", monkeypatch).paths
    paths.lock.touch()
    paths.requests.mkdir()
    name = "c000003-s00000060"
    for folder in (paths.checkpoint(name), paths.incident(1), paths.failures(2), paths.stacks(2), paths.nodes):
        folder.mkdir(parents=True)
    paths.ranks.mkdir()
    return paths


def require_calm(commands: Commands, paths: RunPaths, command: str) -> Outcome:
    """`command` about the run says what it has to say."""
    words = command.split()
    of_a_group = 2 if words[0] == "ring" else 1
    outcome = commands.run(*words[:of_a_group], paths.root, *words[of_a_group:])
    told = command, outcome.code, outcome.rss, outcome.output[-1500:]
    assert 0 <= outcome.code < 100, told
    assert "Traceback" not in outcome.output, told
    assert outcome.rss < MEGABYTES, told
    return outcome


FILES = {
    "run.json": (lambda paths: paths.identity, ("ring list",)),
    "holder.json": (lambda paths: paths.holder, ("status",)),
    "train.jsonl": (lambda paths: paths.train_journal, ("audit",)),
    "supervisor.jsonl": (lambda paths: paths.supervisor_journal, ("why",)),
    "metrics": (lambda paths: paths.metrics, ("status", "report -o /dev/null")),
    "skips": (lambda paths: paths.skip_record(0), ("audit --verify",)),
    "heartbeat": (lambda paths: paths.heartbeat(0), ("status",)),
    "failure": (lambda paths: paths.failure(2, 0), ("why",)),
    "processes": (lambda paths: paths.processes(2), ("why",)),
    "evidence": (lambda paths: paths.evidence(1, 0), ("audit",)),
    "manifest": (lambda paths: paths.checkpoint("c000003-s00000060") / "manifest.json", ("ring verify",)),
    "request": (lambda paths: paths.request("000000-5d0c6f1a"), ("status",)),
    "fast tier": (lambda paths: paths.fast_pointer, ("ring list",)),
}
"""Where each file is, and commands that read it."""

CONTENTS = {
    "deep": b"[" * 60_000,
    "deep and whole": b'{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}\n",
    "lists": b"[" + b"[]," * ((15 << 20) // 3) + b"[]]\n",
    "zeros": b"\0" * (20 << 20),
}


def replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.covering
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", FILES)
def test_no_content_of_a_file_is_a_traceback_or_eats_the_memory(
    commands: Commands, paths: RunPaths, file: str, content: str
) -> None:
    place, readers = FILES[file]
    replace(place(paths), CONTENTS[content])
    for command in readers:
        require_calm(commands, paths, command)


@pytest.mark.parametrize("file", ["metrics", "train.jsonl", "supervisor.jsonl", "skips", "run.json", "heartbeat"])
def test_a_sparse_file_of_five_gibibytes_is_not_read_into_memory(
    commands: Commands, paths: RunPaths, file: str
) -> None:
    place, readers = FILES[file]
    with open(place(paths), "ab") as sparse:
        sparse.truncate(5 << 30)
    for command in readers:
        require_calm(commands, paths, command)


@pytest.mark.parametrize("pid", [-5, 0, 1 << 40, 1 << 70])
def test_a_number_that_is_no_pid_is_nobody(paths: RunPaths, pid: int) -> None:
    paths.heartbeat(0).write_bytes(heartbeat(pid=pid))
    assert living_ranks(read_heartbeats(paths.ranks), paths) == {}
    assert dead_ranks(read_heartbeats(paths.ranks)) == [0]
    assert leftovers(paths) == []


def heartbeat(**changes: Any) -> bytes:
    beat = {
        "pid": os.getpid(), "host": os.uname().nodename, "attempt": 2, "step": 60, "batch": 120, "doing": "training",
        "monotonic": 1.0, "start": "1@boot",
    }  # fmt: skip
    return json.dumps({**beat, **changes}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": -5}, {"monotonic": float("nan")}, {"looked": float("inf")}, {"step": -(1 << 70)}, {"attempt": 10**400},
    ],
    ids=str,
)  # fmt: skip
def test_a_heartbeat_that_cannot_be_is_no_heartbeat(
    commands: Commands, paths: RunPaths, changes: dict[str, Any]
) -> None:
    paths.heartbeat(0).write_bytes(heartbeat(**changes))
    require_calm(commands, paths, "status --json")
