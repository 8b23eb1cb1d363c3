"""Every file name in a run directory is defined here and nowhere else."""

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rollback.system import files

FORMAT, FORMAT_OF_PACKS = 4, 5
"""What is written: the second where a checkpoint has packs, which no older version reads."""
FORMATS = (2, 3, FORMAT, FORMAT_OF_PACKS)
"""What is read: in 3 there are no frozen weights, in 2 no sharded tensors either."""
READS = f"formats {', '.join(map(str, FORMATS[:-1]))} and {FORMATS[-1]}"

MOST_FILES = 1024
"""Of a checkpoint in the run directory, its manifest included: each costs a shared disk a create and a sync."""

_CHECKPOINT_NAME = re.compile(r"c(\d{6,12})-s(\d{8,15})")


class CheckpointName(str):
    """The name of a checkpoint wherever it lies, with what it says: `c<seq>-s<step>`.

    Made of any text, since a record may hold any; of what is no such name `seq` and `step` are 0. See `parse`.
    """

    seq: int
    step: int

    def __new__(cls, text: str) -> "CheckpointName":
        name, match = super().__new__(cls, text), _CHECKPOINT_NAME.fullmatch(text)
        name.seq, name.step = (int(match[1]), int(match[2])) if match else (0, 0)
        return name

    @classmethod
    def of(cls, seq: int, step: int) -> "CheckpointName":
        return cls(f"c{seq:06d}-s{step:08d}")

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """None for text that is no checkpoint's name: a file beside checkpoints, an operator's word."""
        return cls(text) if _CHECKPOINT_NAME.fullmatch(text) else None

    @classmethod
    def sorted(cls, texts: Iterable[str]) -> "list[CheckpointName]":
        """Those of these texts that are names of checkpoints, oldest first."""
        return sorted(filter(None, map(cls.parse, texts)), key=lambda name: name.sort_key)

    @property
    def sort_key(self) -> tuple[int, int]:
        """By which names are sorted, oldest first: as text they are not, once there are a million."""
        return self.seq, self.step


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def has_packs(ranks: int) -> bool:
    """Whether a checkpoint of so many ranks has packs in place of a file for each shard."""
    return ranks >= MOST_FILES


def format_for(ranks: int) -> int:
    """The format of a checkpoint of so many ranks, and of a run that may have one."""
    return FORMAT_OF_PACKS if has_packs(ranks) else FORMAT


def pack_name(ranks: Collection[int]) -> str:
    """ranks: with a shard in it. The last one is named too: hosts share out a checkpoint otherwise in another try."""
    return f"pack-{min(ranks):05d}-{max(ranks):05d}.shards"


MANIFEST = "manifest.json"
WRITING = ".writing-"  # begins the name of a checkpoint in the making


class Below:
    """A path below the `root` of its owner."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __get__(self, owner: Any, kind: type) -> Path:
        path: Path = owner.root / self.pattern
        return path


class NamedBelow:
    """The same with names or numbers in it: a function of these."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __get__(self, owner: Any, kind: type) -> Callable[..., Path]:
        return lambda *given: owner.root / self.pattern.format(*given)


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run directory. The constructor touches nothing on disk."""

    root: Path
    """The run directory with all links resolved: below it no link is followed (see `files`)."""

    identity = Below("run.json")
    lock = Below("lock")
    holder = Below("holder.json")
    train_journal = Below("journal/train.jsonl")
    supervisor_journal = Below("journal/supervisor.jsonl")
    metrics = Below("metrics/train.jsonl")
    ranks = Below("ranks")
    logs = Below("logs")
    skips = Below("skips")
    ring = Below("ring")
    quarantine = Below("quarantine")
    frozen = Below("frozen")
    fast_pointer = Below("fast-tier.json")
    nodes = Below("nodes")
    orders = Below("nodes/orders.json")
    wanted = Below("nodes/wanted.json")
    pins = Below("pins")
    requests = Below("requests")
    incidents = Below("incidents")
    record_location = Below("record-elsewhere.json")

    heartbeat = NamedBelow("ranks/rank-{:05d}.json")
    draws = NamedBelow("draws/rank-{:05d}.bin")
    failures = NamedBelow("failures/attempt-{:04d}")
    failure = NamedBelow("failures/attempt-{:04d}/rank-{:05d}.json")
    stacks = NamedBelow("stacks/attempt-{:04d}")
    rank_stacks = NamedBelow("stacks/attempt-{:04d}/rank-{:05d}.txt")
    attempt_logs = NamedBelow("logs/attempt-{:04d}")
    rank_log = NamedBelow("logs/attempt-{:04d}/rank-{:05d}.{}")
    torchrun_log = NamedBelow("logs/attempt-{:04d}/torchrun.{}")
    skip_record = NamedBelow("skips/rank-{:05d}.jsonl")
    checkpoint = NamedBelow("ring/{}")
    writing = NamedBelow(f"ring/{WRITING}{{}}-{{:04d}}")  # with the attempt that made it: see `ring`
    draining = NamedBelow("ring/.draining-{}")
    evicting = NamedBelow("ring/.evicting-{}")
    node = NamedBelow("nodes/{}.json")  # a node's name begins with `node-`
    part = NamedBelow("nodes/part-{}.json")
    node_lock = NamedBelow("nodes/{}.lock")
    pin = NamedBelow("pins/{}")
    request = NamedBelow("requests/{}.json")
    incident = NamedBelow("incidents/{:04d}")
    evidence = NamedBelow("incidents/{:04d}/rank-{:05d}.json")
    incident_batch = NamedBelow("incidents/{:04d}/rank-{:05d}.safetensors")

    @property
    def own_names(self) -> set[str]:
        """The names of all that may lie in a run directory."""
        below = [value for value in vars(RunPaths).values() if isinstance(value, Below | NamedBelow)]
        return {Path(path.pattern).parts[0] for path in below} | {path.name for path in self.all_saved_files()}

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):  # the working directory is gone
            real = os.path.realpath(self.root)
            if real != os.path.abspath(self.root):
                object.__setattr__(self, "root", Path(real))
        files.know_run_directory(self.root)

    @cached_property
    def address(self) -> str:
        """The root as an absolute path, as it was when it was first asked for: the working directory may be removed
        while a launch runs. Raises FileNotFoundError where that has happened before."""
        return str(self.root.absolute())

    def place_of_ring(self, recorded: str) -> str:
        """The place of a durable ring: a URL, or the run directory's own ring, also if the directory was moved."""
        return recorded if "://" in recorded else os.path.join(self.address, self.ring.name)

    def saved_files(self, rank: int) -> Path:
        return self.root / (f"saved-files-{rank:05d}.jsonl" if rank else "saved-files.jsonl")

    def all_saved_files(self) -> list[Path]:
        """The existing files of all ranks, that of rank 0 last."""
        return sorted(self.root.glob("saved-files*.jsonl"))

    def processes(self, attempt: int, node: str | None = None) -> Path:
        """node: the name of the node, in a job on many nodes."""
        return self.stacks(attempt) / ("processes.json" if node is None else f"processes-{node}.json")

    def all_processes(self, attempt: int) -> list[Path]:
        """The existing files of all nodes."""
        return sorted(self.stacks(attempt).glob("processes*.json"))
