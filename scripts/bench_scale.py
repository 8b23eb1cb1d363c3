#!/usr/bin/env python3
"""What rollback costs against the number of ranks, from 8 to 100,000, and the length of a run. Ranks are simulated.

    python scripts/bench_scale.py [--quick] [--json FILE] [--plot FILE] [--run DIR]

- A beat: time of one rank for sending and reading the pulse of a step, and of one with reports about a snapshot.
- Shared operations: files that all supervisors and ranks visit in a second in a run directory that they share, with
  eight ranks on a host. Their own modules run, on a clock that jumps; visits are counted where files are opened.
- Files of a checkpoint: in a run directory that all hosts share, and at a URL where each host has a disk of its own.
- Long runs: time and memory of a start, and of the commands that read a run, from their start to their end, each in a
  process of its own, on a made run (`made_run.py`): 10 million steps, 10,000 incidents, 16,384 ranks. --run keeps it in
  DIR, or uses what is there. --only-run measures nothing else.

Times are processor time, so that a busy machine disturbs less. --quick: a hundredth of the run, fewer ranks.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash

from made_run import MadeRun

RANKS = [8, 64, 512, 1024, 4096, 16_384, 100_000]
PER_HOST = 8
_SECONDS = 60  # of the clock that jumps
_BEATS = 200
_TARGETS = {"beat_ms": {16_384: 0.1, 100_000: 1.0}, "shared_operations": {16_384: 1000.0}}
_MOST_FILES = 1024  # of a checkpoint, for any number of ranks
_COMMANDS = ("status", "status --json", "why", "audit", "audit --json", "report")
_SECONDS_OF_RUN = {"start": 10.0, **dict.fromkeys(_COMMANDS, 5.0)}
_MEGABYTES_OF_RUN = dict.fromkeys(_COMMANDS, 1000)
_TIMES = 3  # of which the best counts: a busy machine only ever takes longer


def beat(ranks: int) -> dict[str, float]:
    """Milliseconds of processor time of one rank for a beat, without and with shard reports."""
    import torch

    from rollback.train.comm.beat import SHARD_REPORT, Signs
    from rollback.train.comm.pulse import Pulse
    from rollback.train.comm.ranks import Ranks

    torch.set_num_threads(1)
    alone = Ranks()
    alone.world_size = ranks
    pulse = Pulse(alone, torch.device("cpu"))
    loss, norm = torch.tensor(2.5), torch.tensor(1.0)
    found = {}
    for name, signs in (("beat_ms", Signs()), ("reports_ms", Signs(shard_report=(1,) * SHARD_REPORT))):
        took = []
        for _ in range(_BEATS if name == "beat_ms" else 10):
            began = time.process_time()
            pulse.send(loss, norm, signs)
            pulse.read()
            took.append(time.process_time() - began)
        found[name] = round(1000 * sorted(took)[len(took) // 2], 4)
    return found


def shared_operations(ranks: int) -> dict[str, float]:
    """Files that all hosts together visit in a second, by reason."""
    from rollback.rundir import host_records
    from rollback.rundir.paths import RunPaths
    from rollback.supervisor.nodes.meeting import ORDERS, REPORTS, SharedMeeting
    from rollback.supervisor.nodes.protocol import LeaderOrders, NodeReport
    from rollback.train.process.heartbeat import seconds_between_files

    hosts = max(1, ranks // PER_HOST)
    if hosts == 1:
        return {"shared_operations": round(2 * ranks / seconds_between_files(ranks), 1)}
    visits, now, really = [0], [0.0], (host_records.read_in_place, time)

    def read(path: Path) -> bytes:
        visits[0] += 1
        return really[0](path)

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        paths.nodes.mkdir()
        for number in range(hosts):
            told = NodeReport(node=f"node-{number}", launch=f"h{number}:1", host=f"h{number}", pid=1)
            _show(paths.node(f"node-{number}"), told.model_dump_json().encode())
        _show(paths.orders, LeaderOrders(leader="h0:1", host="h0", pid=1).model_dump_json().encode())
        host_records.read_in_place, host_records.time = read, Clock  # type: ignore[assignment,attr-defined]
        try:
            counts = []
            for pattern in (REPORTS, ORDERS):
                transport = SharedMeeting(paths, hosts).transport
                visits[0], began = 0, now[0]
                while now[0] < began + _SECONDS:
                    transport.read(pattern)
                    now[0] += 0.1
                counts.append(visits[0] / _SECONDS)
        finally:
            host_records.read_in_place, host_records.time = really  # type: ignore[attr-defined]
        meeting = SharedMeeting(paths, hosts)
    parts = {
        "leader": counts[0],
        "followers": counts[1] * (hosts - 1),
        "signs": hosts / meeting.transport.every,
        "locks": hosts / meeting._lock_every,
        "helpers": hosts / (0.2 + 3 * meeting.transport.pace),  # each reads which checkpoint is wanted
        "heartbeats": 2 * ranks / seconds_between_files(ranks),  # a file, and its rename
    }
    return {"shared_operations": round(sum(parts.values()), 1), **{k: round(v, 1) for k, v in parts.items()}}


def files_of_a_checkpoint(ranks: int) -> dict[str, float]:
    """By the manifests that would be written."""
    from rollback.checkpoints.format.manifest import Manifest, ShardRecord
    from rollback.rundir.paths import CheckpointName, shard_name

    shards = tuple(ShardRecord(file=shard_name(rank), size=1 << 20, hash="0" * 32) for rank in range(ranks))
    manifest = Manifest(
        name=CheckpointName.of(0, 0), seq=0, step=0, batch=0, epoch=0, timeline=0, attempt=1, created="",
        world_size=ranks, shards=shards,
    )  # fmt: skip
    hosts = [range(first, min(first + PER_HOST, ranks)) for first in range(0, ranks, PER_HOST)]
    return {"files": len(manifest.packed().files) + 1, "objects": len(manifest.packed(hosts).files) + 1}


def _show(path: Path, body: bytes) -> None:
    path.write_bytes(body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")


def _start(root: Path) -> None:
    """What supervisor and rank 0 read, and what rank 0 sends to the others."""
    from rollback.config import Settings
    from rollback.facts.history import history_as_json
    from rollback.rundir.identity import read_identity
    from rollback.rundir.paths import RunPaths
    from rollback.supervisor.claim import read_past
    from rollback.train.comm.ranks import Ranks
    from rollback.train.comm.recorder import Recorder
    from rollback.train.start.found_run import read_run

    paths = RunPaths(root)
    read_past(paths, read_past(paths))  # before it takes the lock, and with it
    identity = read_identity(paths)
    assert identity is not None
    with ExitStack() as held:
        found = read_run(paths, identity.job, Ranks(), Settings(accept_structural=True), held)
        json.dumps({"history": history_as_json.dump_json(found.history).decode()}).encode()  # for the other ranks
        Recorder(paths, found.attempt, is_rank_0=True, journal=found.journal).close()


def _index(root: Path) -> None:
    """What the writers of a run of that length have left by now."""
    from rollback.rundir.journal.folded_journal import fold_journal
    from rollback.rundir.journal.journal import Journal
    from rollback.rundir.metrics.column_file import ColumnWriter
    from rollback.rundir.paths import RunPaths

    paths = RunPaths(root)
    columns = ColumnWriter(paths.metrics)
    columns.catch_up(1 << 40)
    columns.close()
    for path in (paths.train_journal, paths.supervisor_journal):
        past = fold_journal(path, to_keep=path == paths.train_journal)
        Journal(path, 1, past.reading).close()
        past.keep()


def _measured(act: Callable[[Path], None], root: Path, into: Any) -> None:
    import rollback.train.start.found_run  # noqa: F401  (its import is no part of what is measured)

    began, wall = time.process_time(), time.monotonic()
    act(root)
    into.send(
        {
            "seconds": round(time.process_time() - began, 2),
            "wall": round(time.monotonic() - wall, 2),
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
    )


def apart(act: Callable[[Path], None], root: Path) -> dict[str, float]:
    """Seconds and memory of an act in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measured, args=(act, root, theirs))
    process.start()
    theirs.close()
    found: dict[str, float] = ours.recv()
    process.join()
    return found


def command(words: str, root: Path, output: Path) -> dict[str, float]:
    """Seconds and memory of a command, as a user calls it."""
    name, *options = words.split()
    options += ["-o", str(output)] if name == "report" else []
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "rollback", name, str(root), *options], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"rollback {words} {root} failed")
    return {
        "seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "wall": round(time.monotonic() - began, 2),
        "megabytes": usage.ru_maxrss >> 10,
    }


def long_run(root: Path, size: MadeRun) -> dict[str, dict[str, float]]:
    if not root.exists():
        size.write(root)
    found = {"first start, without an index": apart(_start, root)} if not _has_index(root) else {}
    apart(_index, root)
    found["start"] = apart(_start, root)
    with tempfile.TemporaryDirectory() as folder:
        for words in _COMMANDS:
            tries = [command(words, root, Path(folder) / "report.html") for _ in range(_TIMES)]
            found[words] = min(tries, key=lambda each: each["seconds"])
    return found


def _has_index(root: Path) -> bool:
    return (root / "journal" / "train.index").exists()


def plot(table: dict[int, dict[str, float]], path: Path) -> None:
    """Both curves with logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rollback", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, names, label in (
        (axes[0], ("beat_ms", "reports_ms"), "ms of one rank for a beat"),
        (axes[1], ("shared_operations",), "files visited in a second, in all"),
    ):
        for name, words in zip(names, ("each step", "steps that commit a snapshot"), strict=False):
            axis.loglog(list(table), [row[name] for row in table.values()], marker="o", label=words)
        axis.set_xlabel("ranks")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run and few ranks: shows that the script works")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="draw them to this file (SVG)")
    parser.add_argument("--only-run", action="store_true", help="measure the long run, and nothing else")
    parser.add_argument("--run", type=Path, help="keep the made run here, or use the one that is here")
    asked = parser.parse_args()
    numbers = [] if asked.only_run else [8, 64, 1024] if asked.quick else RANKS
    table = {ranks: {**beat(ranks), **shared_operations(ranks), **files_of_a_checkpoint(ranks)} for ranks in numbers}
    columns = "| ranks | beat | with reports | shared operations a second | files of a checkpoint | objects at a URL |"
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"\n{columns}\n|---|---|---|---|---|---|" if table else "", flush=True)
    missed = False
    for ranks, row in table.items():
        print(
            f"| {ranks:,} | {row['beat_ms']:.3f} ms | {row['reports_ms']:.3f} ms | {row['shared_operations']:,.0f} "
            f"| {row['files']:,} | {row['objects']:,} |"
        )
        missed |= row["files"] > _MOST_FILES
        for name, targets in _TARGETS.items():
            missed |= row[name] > targets.get(ranks, float("inf"))
    size = MadeRun(100_000, 100, 1024) if asked.quick else MadeRun(10_000_000, 10_000, 16_384)
    folder = Path(tempfile.mkdtemp()) if asked.run is None else asked.run
    try:
        runs = long_run(folder / "run" if asked.run is None else folder, size)
    finally:
        if asked.run is None:
            shutil.rmtree(folder)
    print("\n| long run | processor time | wall clock | memory |\n|---|---|---|---|")
    for name, found in runs.items():
        print(f"| {name} | {found['seconds']:.1f} s | {found['wall']:.1f} s | {found['megabytes']:,} MB |")
        missed |= found["seconds"] > _SECONDS_OF_RUN.get(name, float("inf"))
        missed |= found["megabytes"] > _MEGABYTES_OF_RUN.get(name, float("inf"))
    if asked.json:
        asked.json.write_text(json.dumps({"ranks": table, "run": runs, "load": os.getloadavg()[0]}, indent=1))
    if asked.plot:
        plot(table, asked.plot)
    if missed and not asked.quick:
        raise SystemExit("a target is missed")


if __name__ == "__main__":
    main()
