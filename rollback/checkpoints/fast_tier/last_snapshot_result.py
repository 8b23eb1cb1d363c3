"""What each rank made of the last snapshot, for the supervisor and the next start. A supervisor makes one of
those of its host, and the leader one of those of all hosts.

They lie beside the end marks (`end_marks`), and the next attempt removes them.
"""

import json
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths
from rollback.checkpoints.format.manifest import Manifest
from rollback.facts.checkpoints import LastSnapshotMade
from rollback.facts.fact import escape_surrogates
from rollback.facts.training import Tier
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import sound_model
from rollback.wording import gone_in_words

_LIMIT = 4 << 20


class LastSnapshotResult(BaseModel, frozen=True):
    """What a rank, or the ranks of one host or of all hosts, made of the last snapshot of an attempt."""

    attempt: int
    rank: int
    """The rank that tells."""
    reason: str
    """Why there was one to make."""
    checkpoint: str | None = None
    """The checkpoint; None: none was made."""
    step: int | None = None
    tier: str = "fast"
    seconds: float = 0.0
    why_not: str | None = None
    metrics: tuple[str, ...] = ()
    """Of one rank: the newest lines of the metrics, which rank 0 may not have written any more."""
    furthest: int | None = None
    """Of a host or of all: the furthest step that a rank has come to the end of."""

    def kept(
        self, seconds: float, manifest: Manifest, metrics: Iterable[str], gone: Sequence[int] = (), tier: Tier = "fast"
    ) -> "LastSnapshotResult":
        """The same with this checkpoint. gone: the ranks that are, as all hosts know of them."""
        told = {"checkpoint": manifest.name, "step": manifest.step, "tier": tier, "metrics": tuple(metrics)}
        reason = gone_in_words(gone) if gone else self.reason
        return self.model_copy(update={**told, "seconds": round(seconds, 4), "reason": reason})

    def as_fact(
        self, kept: int | None = None, reached: int | None = None, *, host_lost: bool = False
    ) -> LastSnapshotMade:
        """kept: the step of the newest checkpoint. reached: the furthest step of the attempt by its other traces; its
        end is not marked where an epoch ends with it. host_lost: that checkpoint may lack the part that was there."""
        furthest = max((step for step in (self.furthest, reached) if step is not None), default=None)
        if host_lost and self.checkpoint is None:
            kept = None
        lost = max(0, furthest - kept) if furthest is not None and kept is not None else None
        return LastSnapshotMade(
            reason=self.reason, checkpoint=self.checkpoint, step=self.step, rank=self.rank, seconds=self.seconds,
            why_not=self.why_not, steps_lost=lost,
        )  # fmt: skip


def merged_results(hosts: Iterable[LastSnapshotResult | None]) -> LastSnapshotResult | None:
    """One result of those of all hosts: a checkpoint that one of them tells of is on all. Else the first says why."""
    told = sorted((host for host in hosts if host is not None), key=lambda host: host.checkpoint is None)
    ends = [host.furthest for host in told if host.furthest is not None]
    return told[0].model_copy(update={"furthest": max(ends, default=None)}) if told else None


def write_result(paths: EndMarkPaths, result: LastSnapshotResult) -> None:
    """Raises OSError."""
    told = escape_surrogates(result.model_dump(mode="json"))  # a path in it may be no UTF-8
    write_file(paths.result(result.rank), json.dumps(told).encode(), durable=False)


def read_results(paths: EndMarkPaths, attempt: int | None = None) -> list[LastSnapshotResult]:
    """What the ranks made of the last snapshot of an attempt (default: of the newest), by rank."""
    found = [sound_model(path, LastSnapshotResult, _LIMIT) for path in sorted(paths.root.glob("account-*"))]
    return [result for result in found if result is not None and attempt in (None, result.attempt)]


def forget_results(paths: EndMarkPaths, attempt: int) -> None:
    """Remove those of an attempt of this number. Raises OSError."""
    for result in read_results(paths, attempt):
        files.unlink(paths.result(result.rank))
