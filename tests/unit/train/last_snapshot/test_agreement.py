"""What follows from what the hosts tell each other for a last snapshot."""

from collections.abc import Mapping
from typing import Any

import pytest

from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.rundir.paths import shard_name
from rollback.train.last_snapshot.agreement import (
    Commitment,
    EndOffer,
    HostOffer,
    HostShards,
    JointPlan,
    commitment_of,
    common_end,
    decider,
    plan_of,
    require_as_planned,
    somebody_is_ahead,
)
from rollback.train.last_snapshot.proof import NotProved

END = StepEnd(1, 0, 8, 8, 0, 0)
LATER = END._replace(epoch=1)
AT_END = EndOffer(end=END, buffers="b", sent=(b"\0\xff",), early=False, early_refuted=None, digest=7)
BEFORE = AT_END.model_copy(update={"end": END._replace(step=7)})
OFFER = HostOffer(ranks=(0, 1), ends=(AT_END,), slots=(90, 91), next_seq=3, gone=())
HOSTS = (0, 2)


def offer(**changes: Any) -> HostOffer:
    """changes: of the host's offer, or of what it offers of the step's end."""
    of_end = {name: changes.pop(name) for name in [*changes] if name in EndOffer.model_fields}
    ends = changes.pop("ends", (AT_END.model_copy(update=of_end),))
    return OFFER.model_copy(update={"ends": ends, **changes})


def at(*ends: StepEnd) -> HostOffer:
    return offer(ends=tuple(AT_END.model_copy(update={"end": end}) for end in ends))


def test_an_offer_goes_through_json_as_it_is() -> None:
    assert HostOffer.model_validate_json(OFFER.model_dump_json()) == OFFER


@pytest.mark.parametrize(
    ("offers", "common"),
    [
        ({0: OFFER}, None),
        ({0: OFFER, 2: OFFER}, END),
        ({0: OFFER, 2: at(END._replace(step=7))}, None),
        ({0: OFFER, 2: at(END._replace(returns=1))}, None),
        ({0: at(LATER, END), 2: OFFER}, END),
        ({0: at(LATER, END), 2: at(END, LATER)}, LATER),
        ({0: at(LATER), 2: at()}, None),
    ],
)
def test_the_newest_end_that_all_hosts_offer_is_the_common_one(
    offers: Mapping[int, HostOffer], common: StepEnd | None
) -> None:
    assert common_end(offers, HOSTS) == common


def test_an_end_at_which_rank_0_s_host_stands_comes_before_a_newer_one_by_marks_alone() -> None:
    """Ranks that hang in a step have told of its end early, on all hosts."""
    early = AT_END.model_copy(update={"end": END._replace(step=9), "digest": None, "early": True, "sent": ()})
    both = {host: offer(ends=(early, AT_END)) for host in HOSTS}
    assert common_end(both, HOSTS) == END
    assert not somebody_is_ahead(both, END)
    assert common_end({host: offer(ends=(early,)) for host in HOSTS}, HOSTS) == early.end
    there = {**both, 2: offer(ends=(early.model_copy(update={"sent": (b"1",)}), AT_END))}
    assert somebody_is_ahead(there, END)


def test_the_plan_has_what_suits_all_hosts() -> None:
    offers = {0: offer(gone=(1,), slots=(90, 91)), 2: offer(ranks=(2, 3), next_seq=5, slots=(91,), gone=(3,))}
    assert plan_of(offers, HOSTS, {}) == JointPlan(
        decider=0, end=END, digest=7, slot=91, seq=5, gone=(1, 3), stores=(0, 1, 2, 3), sent=(b"\0\xff",) * 2
    )


def test_of_the_slots_that_are_free_everywhere_all_take_the_first() -> None:
    assert plan_of({0: offer(slots=(91, 90)), 2: offer(slots=(90, 91))}, HOSTS, {}).slot == 90


def test_a_host_without_anybody_who_has_the_parameters_stores_none() -> None:
    plan = plan_of({0: OFFER, 2: offer(ranks=(2, 3), digest=None, gone=(2, 3))}, HOSTS, {})
    assert (plan.decider, plan.stores, plan.digest) == (0, (0, 1), 7)
    plan = plan_of({0: offer(digest=None, gone=(0, 1)), 2: offer(ranks=(2, 3))}, HOSTS, {})
    assert (plan.decider, plan.stores, plan.digest) == (2, (2, 3), 7)


def test_the_first_host_of_which_it_is_not_known_that_nobody_stands_there_decides() -> None:
    marks = offer(digest=None)
    assert decider({}.get, HOSTS) == decider({0: OFFER}.get, HOSTS) == decider({2: OFFER}.get, HOSTS) == 0
    assert decider({0: marks}.get, HOSTS) == decider({0: marks, 2: OFFER}.get, HOSTS) == 2
    assert decider({0: marks, 2: marks}.get, HOSTS) is None


REFUTED = "behind the backward of step 8 rank 3 changed what only it knows"


@pytest.mark.parametrize(
    ("offers", "refusals", "why"),
    [
        ({0: OFFER}, {}, "no rank has answered (on the host of rank 2)"),
        ({0: OFFER}, {2: "it was in its update"}, "it was in its update (on the host of rank 2)"),
        (
            {0: offer(ends=(AT_END, BEFORE)), 2: offer(end=END._replace(step=9))},
            {},
            "the hosts do not stand at the same step: that of rank 0 at step 8, that of rank 2 at step 9",
        ),
        (
            {0: OFFER, 2: offer(digest=8)},
            {},
            "the parameters on the host of rank 2 are others, though they are replicas",
        ),
        ({0: offer(digest=None), 2: offer(digest=None)}, {}, "no rank stands at the end of a step on any host"),
        (
            {0: offer(ends=(AT_END.model_copy(update={"digest": None}), BEFORE)), 2: OFFER},
            {},
            "no rank stands at that step on the host of rank 0, which decides",
        ),
        ({0: OFFER, 2: offer(buffers="c")}, {}, "the ranks have not the same buffers"),
        ({0: offer(early=True), 2: offer(early_refuted=REFUTED)}, {}, REFUTED),
        ({0: offer(early=True, early_refuted=REFUTED), 2: OFFER}, {}, REFUTED),
        ({0: offer(slots=(90,)), 2: offer(slots=(91,))}, {}, "there is no slot that is free on every host"),
        ({0: OFFER, 2: offer(slots=())}, {}, "there is no slot that is free on every host"),
    ],
)
def test_nothing_is_planned_that_is_not_the_state_of_all_ranks_at_one_moment(
    offers: Mapping[int, HostOffer], refusals: Mapping[int, str], why: str
) -> None:
    with pytest.raises(NotProved) as error:
        plan_of(offers, HOSTS, refusals)
    assert why in str(error.value)


def test_where_no_early_mark_is_used_it_does_not_matter_that_none_could_be() -> None:
    assert plan_of({0: offer(early_refuted=REFUTED), 2: offer(early_refuted=REFUTED)}, HOSTS, {}).end == END


MANIFEST = Manifest(
    name="c000003-s00000008", seq=3, step=8, batch=8, epoch=0, timeline=0, attempt=1, created="", world_size=4,
    shards=(),
)  # fmt: skip


def shards(*ranks: int) -> HostShards:
    return HostShards(shards={rank: ShardRecord(file=shard_name(rank), size=8, hash="0" * 32) for rank in ranks})


def test_the_manifest_has_the_shards_of_all_ranks_in_their_order() -> None:
    commitment = commitment_of(MANIFEST, {0: shards(3, 0), 1: shards(2, 1)}, (0, 1))
    assert commitment.manifest is not None
    assert [shard.file for shard in commitment.manifest.shards] == [*map(shard_name, range(4))]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({0: shards(0, 1)}, "the host of rank 2 has not told in time whether its shards are whole"),
        ({0: shards(0, 1), 2: HostShards(why_not="the disk is full")}, "the host of rank 2: the disk is full"),
        ({0: shards(0, 1), 2: shards(2)}, "the hosts have not told of every rank's shard"),
        ({0: HostShards(why_not="moved", anew=True), 2: HostShards(why_not="full")}, "the host of rank 2: full"),
        ({2: HostShards(why_not="the disk is full")}, "the host of rank 2: the disk is full"),
    ],
)
def test_nothing_is_committed_where_a_shard_is_not_known_to_be_whole(told: Mapping[int, HostShards], why: str) -> None:
    assert commitment_of(MANIFEST, told, HOSTS) == Commitment(why_not=why)


def test_a_host_that_has_gone_on_has_all_agree_anew_whatever_the_others_have_told_by_then() -> None:
    moved = {2: HostShards(why_not="it has gone on", anew=True)}
    for told in (moved, {0: shards(0, 1), **moved}):
        assert commitment_of(MANIFEST, told, HOSTS) == Commitment(
            why_not="the host of rank 2: it has gone on", anew=True
        )


WHOLE = MANIFEST.model_copy(update={"shards": tuple(shards(0, 1, 2, 3).shards.values())})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"batch": 9}, "of another step"),
        ({"seq": 4}, "of another step"),
        ({"shards": WHOLE.shards[:3]}, "not a shard of each rank"),
        ({"shards": (WHOLE.shards[0], *WHOLE.shards[:3])}, "not a shard of each rank"),
        ({"shards": (*WHOLE.shards[:3], WHOLE.shards[3].model_copy(update={"size": 9}))}, "written here"),
    ],
)
def test_a_host_commits_what_it_has_agreed_to_and_written(changes: dict[str, Any], why: str | None) -> None:
    plan, manifest = JointPlan(decider=0, end=END, seq=3), WHOLE.model_copy(update=changes)
    if why is None:
        require_as_planned(manifest, plan, shards(2, 3).shards)
        return
    with pytest.raises(NotProved, match=why):
        require_as_planned(manifest, plan, shards(2, 3).shards)
