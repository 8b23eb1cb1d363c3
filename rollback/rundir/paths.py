"""Every file name in a run directory is defined here and nowhere else."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FORMAT = 4
"""What is written."""
FORMATS = (2, 3, 4)
"""What is read: in 3 there are no frozen weights, in 2 no sharded tensors either."""
READS = f"formats {', '.join(map(str, FORMATS[:-1]))} and {FORMAT}"

_CHECKPOINT_NAME = re.compile(r"c(\d{6,12})-s(\d{8,15})")


class CheckpointName(str):
    """The name of a checkpoint wherever it lies, with what it says: `c<seq>-s<step>`.

    Made of any text, since a record may hold any; of what is no such name `seq` and `step` are 0. See `parse`.
    """

    seq: int
    step: int

    def __new__(cls, text: str) -> CheckpointName:
        name, match = super().__new__(cls, text), _CHECKPOINT_NAME.fullmatch(text)
        name.seq, name.step = (int(match[1]), int(match[2])) if match else (0, 0)
        return name

    @classmethod
    def of(cls, seq: int, step: int) -> CheckpointName:
        return cls(f"c{seq:06d}-s{step:08d}")

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """None for text that is no checkpoint's name: a file beside checkpoints, an operator's word."""
        return cls(text) if _CHECKPOINT_NAME.fullmatch(text) else None

    @property
    def order(self) -> tuple[int, int]:
        """By which names are sorted, oldest first: as text they are not, once there are a million."""
        return self.seq, self.step


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


MANIFEST = "manifest.json"
WRITING = ".writing-"  # begins the name of a checkpoint in the making


class _Below:
    """A path of a run directory that needs nothing but its root."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, run: RunPaths, kind: type[RunPaths]) -> Path:
        return run.root.joinpath(*self._parts)


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run directory. The constructor touches nothing on disk."""

    root: Path
    """The run directory with all links resolved: below it no link is followed (see `files`)."""

    identity = _Below("run.json")
    lock = _Below("lock")
    holder = _Below("holder.json")
    train_journal = _Below("journal", "train.jsonl")
    supervisor_journal = _Below("journal", "supervisor.jsonl")
    metrics = _Below("metrics", "train.jsonl")
    ranks = _Below("ranks")
    logs = _Below("logs")
    skips = _Below("skips")
    ring = _Below("ring")
    quarantine = _Below("quarantine")
    frozen = _Below("frozen")
    fast_pointer = _Below("fast-tier.json")
    nodes = _Below("nodes")
    orders = _Below("nodes", "orders.json")
    wanted = _Below("nodes", "wanted.json")
    pins = _Below("pins")
    requests = _Below("requests")
    incidents = _Below("incidents")
    saved_files = _Below("saved-files.jsonl")
    record_elsewhere = _Below("record-elsewhere.json")

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):  # the working directory is gone
            real = os.path.realpath(self.root)
            if real != os.path.abspath(self.root):
                object.__setattr__(self, "root", Path(real))

    def heartbeat(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05d}.json"

    def draws(self, rank: int) -> Path:
        return self.root / "draws" / f"rank-{rank:05d}.bin"

    def failures(self, attempt: int) -> Path:
        return self.root / "failures" / f"attempt-{attempt:04d}"

    def failure(self, attempt: int, rank: int) -> Path:
        return self.failures(attempt) / f"rank-{rank:05d}.json"

    def stacks(self, attempt: int) -> Path:
        return self.root / "stacks" / f"attempt-{attempt:04d}"

    def rank_stacks(self, attempt: int, rank: int) -> Path:
        return self.stacks(attempt) / f"rank-{rank:05d}.txt"

    def processes(self, attempt: int, node: str | None = None) -> Path:
        """node: the name of the node, in a job on many nodes."""
        return self.stacks(attempt) / ("processes.json" if node is None else f"processes-{node}.json")

    def all_processes(self, attempt: int) -> list[Path]:
        """The existing files of all nodes."""
        return sorted(self.stacks(attempt).glob("processes*.json"))

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt:04d}"

    def rank_log(self, attempt: int, rank: int, stream: Literal["out", "err"]) -> Path:
        return self.attempt_logs(attempt) / f"rank-{rank:05d}.{stream}"

    def torchrun_log(self, attempt: int, stream: Literal["out", "err"]) -> Path:
        return self.attempt_logs(attempt) / f"torchrun.{stream}"

    def skip_record(self, rank: int) -> Path:
        return self.skips / f"rank-{rank:05d}.jsonl"

    def checkpoint(self, name: str) -> Path:
        return self.ring / name

    def writing(self, name: str) -> Path:
        return self.ring / f"{WRITING}{name}"

    def draining(self, name: str) -> Path:
        return self.ring / f".draining-{name}"

    def evicting(self, name: str) -> Path:
        return self.ring / f".evicting-{name}"

    def node(self, name: str) -> Path:
        """Report of a node; `name` begins with `node-`."""
        return self.nodes / f"{name}.json"

    def part(self, host: str) -> Path:
        return self.nodes / f"part-{host}.json"

    def node_lock(self, name: str) -> Path:
        return self.nodes / f"{name}.lock"

    def pin(self, name: str) -> Path:
        return self.pins / name

    def request(self, name: str) -> Path:
        return self.requests / f"{name}.json"

    def incident(self, number: int) -> Path:
        return self.incidents / f"{number:04d}"

    def evidence(self, incident: int, rank: int) -> Path:
        return self.incident(incident) / f"rank-{rank:05d}.json"

    def incident_batch(self, incident: int, rank: int) -> Path:
        return self.incident(incident) / shard_name(rank)
