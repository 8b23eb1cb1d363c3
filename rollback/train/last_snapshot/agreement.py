"""What the hosts of a job tell each other about a last snapshot, and what they conclude. Pure.

A host is named by its first rank. One rank of each host speaks for it. The first host with a rank that stands decides.

| told           | by               | content                                                        |
|----------------|------------------|----------------------------------------------------------------|
| `HostOffer`    | every host       | the steps' ends that it can keep, and what has to fit together |
| `JointPlan`    | who decides      | what all are to write, or why nothing is kept                  |
| `HostShards`   | every host       | its shards are whole, or why not                               |
| `Commitment`   | who made the plan | the manifest, or why there is none, or that they agree anew   |

Then each host commits in its own slot, and tells. A checkpoint that only some of them have means nothing to a reader.
If a host has gone on behind the plan, all of it is told once more, in a further *round*.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import BaseModel

from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.rundir.paths import shard_name
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.last_snapshot.writers import SharedPart

FIRST = 0
"""The host of rank 0. Rank 0's shard has what is small and the same on all ranks, and its journal is the run's."""

ROUNDS = 8
"""How often the hosts agree at most. Behind a rank's death each host goes on once at most, and most do at once; but a
snapshot may also be asked of ranks that train on."""


class EndOffer(BaseModel, frozen=True, ser_json_bytes="base64", val_json_bytes="base64"):
    """A step's end of which all ranks of a host have left marks."""

    end: StepEnd
    buffers: str
    """A digest of the names of the buffers that its ranks have."""
    sent: tuple[bytes, ...]
    """What each of its ranks that came to that end has told the others of the step."""
    early: bool
    """Whether an early mark stands for that of a rank that does not come there."""
    early_refuted: str | None
    """Why early marks may not be relied on, as seen in the ranks of this host; None: they may."""
    digest: int | None
    """Of the parameters; None: no rank that speaks here stands at that end, so there are marks alone."""


class HostOffer(BaseModel, frozen=True):
    """What a host can keep. It offers anew if it comes to another step's end before there is a plan."""

    ranks: tuple[int, ...]
    ends: tuple[EndOffer, ...]
    slots: tuple[int, ...]
    """The slots that it can write."""
    next_seq: int
    gone: tuple[int, ...]
    """Its ranks that are gone."""

    @property
    def stands(self) -> bool:
        """Whether a rank stands at one of these ends. Else there are marks alone."""
        return any(each.digest is not None for each in self.ends)

    def at(self, end: StepEnd) -> EndOffer:
        return next(offer for offer in self.ends if offer.end == end)


class JointPlan(BaseModel, frozen=True, ser_json_bytes="base64", val_json_bytes="base64"):
    """What all hosts are to keep. why_not: why nothing; then the rest says nothing."""

    decider: int
    """The host that has made it, and commits it."""
    why_not: str | None = None
    end: StepEnd | None = None
    digest: int = 0
    stores: tuple[int, ...] = ()
    """The ranks whose shards have, between them, what is the same on all."""
    slot: int = 0
    seq: int = 0
    gone: tuple[int, ...] = ()
    sent: tuple[bytes, ...] = ()
    """What all ranks that came to that end have told the others of the step."""
    manifest: Manifest | None = None
    """Without its shards."""
    common_local: dict[str, Any] = {}
    texts: dict[str, str] = {}
    """For hosts that have marks alone."""
    shared: SharedPart | None = None
    """For rank 0's host, if that has marks alone."""
    metrics: tuple[str, ...] = ()
    """For the same: the newest lines of the metrics."""

    @property
    def at(self) -> StepEnd:
        """The end, where there is one."""
        assert self.end is not None
        return self.end


class HostShards(BaseModel, frozen=True):
    """The shards of a host's ranks, by rank. why_not: why they are not whole. anew: because the host has gone on."""

    shards: dict[int, ShardRecord] = {}
    why_not: str | None = None
    anew: bool = False


class Commitment(BaseModel, frozen=True):
    """The manifest that every host commits. why_not: why there is none. anew: a further round begins."""

    manifest: Manifest | None = None
    why_not: str | None = None
    anew: bool = False


def decider(offer_of: Callable[[int], HostOffer | None], hosts: Collection[int]) -> int | None:
    """The host that decides, or may do so once it has made an offer: the first one that has not said that no rank of it
    stands. None: all have said so. offer_of: gives a host's offer, if it has made one."""
    return next((host for host in sorted(hosts) if (offer := offer_of(host)) is None or offer.stands), None)


def common_end(offers: Mapping[int, HostOffer], hosts: Collection[int]) -> StepEnd | None:
    """The newest step's end that all hosts offer, of those at which a rank of the host that decides stands, if there is
    one. None: it is worth waiting, a host may come to one in a moment."""
    if offers.keys() != {*hosts}:
        return None
    common = set.intersection(*({each.end for each in offer.ends} for offer in offers.values()))
    decides = decider(offers.get, hosts)
    return max(
        common, key=lambda end: (decides is not None and offers[decides].at(end).digest is not None, end), default=None
    )


def somebody_is_ahead(offers: Mapping[int, HostOffer], end: StepEnd) -> bool:
    """Whether a rank of some host has come to the end of a later step: all have been given its sums, and may come."""
    return any(each.end.step > end.step and each.sent for offer in offers.values() for each in offer.ends)


def plan_of(offers: Mapping[int, HostOffer], hosts: Collection[int], refusals: Mapping[int, str]) -> JointPlan:
    """What is kept by these offers. refusals: why a host has offered nothing. Raises NotProved."""
    for host in sorted({*hosts} - offers.keys()):
        raise NotProved(f"{refusals.get(host, 'no rank has answered')} (on the host of rank {host})")
    if (end := common_end(offers, hosts)) is None:
        newest = {host: max(each.end.step for each in offer.ends) for host, offer in sorted(offers.items())}
        stand = ", ".join(f"that of rank {host} at step {step}" for host, step in newest.items())
        raise NotProved(f"the hosts do not stand at the same step: {stand}")
    there = {host: offer.at(end) for host, offer in sorted(offers.items())}
    if (decides := decider(offers.get, hosts)) is None:
        raise NotProved("no rank stands at the end of a step on any host")
    first = there[decides]
    if first.digest is None:
        raise NotProved(f"no rank stands at that step on the host of rank {decides}, which decides")
    for host, at_end in there.items():
        if at_end.digest not in (None, first.digest):
            raise NotProved(f"the parameters on the host of rank {host} are others, though they are replicas")
    if len({offer.buffers for offer in there.values()}) > 1:
        raise NotProved("the ranks have not the same buffers")
    if any(offer.early for offer in there.values()):
        for why in (offer.early_refuted for offer in there.values() if offer.early_refuted is not None):
            raise NotProved(why)
    free = set.intersection(*({*offer.slots} for offer in offers.values()))
    if not free:
        raise NotProved("there is no slot that is free on every host, or no memory for one")
    return JointPlan(
        decider=decides, end=end, digest=first.digest, slot=min(free),
        seq=max(offer.next_seq for offer in offers.values()),
        stores=tuple(sorted(rank for host in there if there[host].digest is not None for rank in offers[host].ranks)),
        gone=tuple(sorted(rank for offer in offers.values() for rank in offer.gone)),
        sent=tuple(sent for offer in there.values() for sent in offer.sent),
    )  # fmt: skip


def commitment_of(manifest: Manifest, told: Mapping[int, HostShards], hosts: Collection[int]) -> Commitment:
    """What follows from what the hosts have told of their shards. manifest: without shards."""
    faults = [(shards.anew, host, shards.why_not) for host, shards in told.items() if shards.why_not is not None]
    for anew, host, why in sorted(faults):  # what another round would not mend comes first
        return Commitment(why_not=f"the host of rank {host}: {why}", anew=anew)
    for host in sorted({*hosts} - told.keys()):
        return Commitment(why_not=f"the host of rank {host} has not told in time whether its shards are whole")
    records = {rank: record for shards in told.values() for rank, record in shards.shards.items()}
    if sorted(records) != [*range(manifest.world_size)]:
        return Commitment(why_not="the hosts have not told of every rank's shard")
    return Commitment(manifest=manifest.model_copy(update={"shards": tuple(records[rank] for rank in sorted(records))}))


def require_as_planned(manifest: Manifest, plan: JointPlan, own: Mapping[int, ShardRecord]) -> None:
    """Before a host commits it, and seals it. own: the shards that were written here. Raises NotProved."""
    told = manifest.attempt, manifest.step, manifest.batch, manifest.timeline, manifest.seq
    end = plan.at
    if told != (end.attempt, end.step, end.batch, end.timeline, plan.seq):
        raise NotProved("the manifest is of another step than the plan")
    if [shard.file for shard in manifest.shards] != [*map(shard_name, range(manifest.world_size))]:
        raise NotProved("the manifest has not a shard of each rank")
    if any(manifest.shards[rank] != record for rank, record in own.items()):
        raise NotProved("the manifest has other shards than those that were written here")
