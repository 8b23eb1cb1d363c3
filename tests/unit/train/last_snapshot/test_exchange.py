"""Hosts agree by a real store, each with a thread in place of its ranks."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed
from test_agreement import AT_END, END, MANIFEST, offer

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.errors import UsageError
from rollback.rundir.paths import shard_name
from rollback.train.last_snapshot import exchange as exchange_module
from rollback.train.last_snapshot import hosts as hosts_module
from rollback.train.last_snapshot.agreement import ROUNDS, Commitment, HostOffer, commitment_of, plan_of
from rollback.train.last_snapshot.device import NoAnswer
from rollback.train.last_snapshot.exchange import Exchange
from rollback.train.last_snapshot.hosts import Hosts, HostsOfJob, HostStore
from rollback.train.last_snapshot.peers import HostMarks
from rollback.train.last_snapshot.proof import NextRound, NotProved, StoreGone
from rollback.train.last_snapshot.writers import JudgedAhead, MarksWriter, SharedPart, SharedTensor, StateWriter

LIMIT = 30.0
distributed: Any = torch.distributed


@pytest.fixture
def store() -> Any:
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def unrung(store: Any) -> tuple[Hosts, Hosts]:
    """Two hosts that have not heard of it."""
    job = HostsOfJob(place=("127.0.0.1", store.port), keys="keys", hosts=(0, 2), own=0, ranks=(0, 1), attempt=1)
    return Hosts(job), Hosts(job.model_copy(update={"own": 2, "ranks": (2, 3)}))


@pytest.fixture
def both(unrung: tuple[Hosts, Hosts]) -> tuple[Hosts, Hosts]:
    """Both have heard of it: each waits for the other, however long a name server lets it wait for its connection."""
    unrung[0].connect().set({"here/0": b"1", "here/2": b"1"})
    return unrung


class Shards:
    """In place of a host's shards."""

    def __init__(self, *ranks: int, fault: str | None = None) -> None:
        self.ranks, self.fault, self.done, self.step = ranks, fault, list[str](), END.step
        self.common_local: Mapping[str, Any] = {}
        self.texts: Mapping[str, str] = {}
        self.lines: tuple[str, ...] = ()

    stores: tuple[int, ...] = ()
    shared: SharedPart | None = None
    small = b"\0\xff"

    def write_part(self, slot: int, stores: Sequence[int]) -> dict[int, ShardRecord]:
        self.stores = (*stores,)
        self.done.append(f"written in {slot}{' with the sentinel' * (self.shared is not None)}")
        if self.fault is not None:
            raise NotProved(self.fault)
        return {rank: ShardRecord(file=shard_name(rank), size=8, hash="0" * 32) for rank in self.ranks}

    def commit_part(self, slot: int, manifest: Manifest) -> None:
        assert len(manifest.shards) == 4
        self.done.append(f"committed {manifest.name}")

    def discard_part(self, slot: int) -> None:
        self.done.append("discarded")

    def shared_part(self, sentinel: Mapping[str, Any]) -> SharedPart:
        item = SharedTensor(name="small", dtype="U8", shape=(len(self.small),), data=self.small)
        return SharedPart(tree=json.dumps(sentinel), tensors=(item,))

    def metrics(self, judged_ahead: JudgedAhead | None) -> tuple[str, ...]:
        return ("a line",)

    def manifest(self, seq: int) -> Manifest:
        return MANIFEST.model_copy(update={"step": self.step, "seq": seq})


def of(hosts: Hosts, **changes: Any) -> HostOffer:
    return offer(ranks=(hosts.own, hosts.own + 1), **changes)


def by_marks(hosts: Hosts, *ends: StepEnd) -> HostOffer:
    return of(hosts, ends=tuple(AT_END.model_copy(update={"end": end, "digest": None}) for end in ends))


def judge_ahead(sent: Sequence[bytes]) -> JudgedAhead:
    return JudgedAhead({"sent": len(sent)}, None)


def speak(
    hosts: Hosts,
    shards: Shards,
    told: HostOffer | None = None,
    *,
    stands: Callable[[], bool] = lambda: True,
    judge: Callable[[Sequence[bytes]], JudgedAhead] = judge_ahead,
    seconds: float = LIMIT,
    at: StepEnd | tuple[StepEnd, ...] = END,
) -> Manifest | str:
    """What a host keeps, or why nothing. at: where it stands."""
    try:
        exchange = Exchange(hosts, judge, seconds)
        writer = cast(StateWriter, shards)
        writers = dict.fromkeys([at] if isinstance(at, StepEnd) else at, writer)
        while True:
            try:
                plan = exchange.agree(told or of(hosts), exchange.late, stands, writers)
                if plan.at not in writers:
                    shards.shared, shards.lines, shards.texts = plan.shared, plan.metrics, plan.texts
                return exchange.keep(plan, writer, stands)
            except NextRound:
                if not stands():
                    raise
    except NotProved as error:
        return str(error)


def speak_both(
    both: tuple[Hosts, Hosts],
    first: Shards,
    other: Shards,
    told: tuple[HostOffer | None, HostOffer | None] = (None, None),
    **of_first: Any,
) -> list[Manifest | str]:
    with ThreadPoolExecutor() as threads:
        jobs = (
            threads.submit(speak, both[0], first, told[0], **of_first), threads.submit(speak, both[1], other, told[1])
        )  # fmt: skip
        return [job.result(LIMIT) for job in jobs]


def test_both_keep_what_both_have(both: tuple[Hosts, Hosts]) -> None:
    first, other = Shards(0, 1), Shards(2, 3)
    one, two = speak_both(both, first, other)
    assert isinstance(one, Manifest)
    assert one == two
    assert first.done == ["written in 90 with the sentinel", f"committed {one.name}"]
    assert other.done == ["written in 90", f"committed {one.name}"]


@pytest.mark.parametrize(("stands", "size"), [(0, 2), (1, 2), (1, 9 << 20)], ids=["first", "other", "other, much"])
def test_of_two_hosts_the_one_with_a_rank_that_stands_decides(
    both: tuple[Hosts, Hosts], stands: int, size: int
) -> None:
    """What is small and the same on all is in the shard of rank 0, whoever is left. It may be more than the store
    takes at once: an average of the weights that a script keeps as an object of its own."""
    shards = Shards(0, 1), Shards(2, 3)
    shards[stands].texts = {"log": "what all ranks have logged"}
    for own in shards:
        own.small = os.urandom(size)
    told = [by_marks(host, END) for host in both]
    told[stands] = of(both[stands])
    with ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(speak, host, own, offer, at=END if number == stands else ())
            for number, (host, own, offer) in enumerate(zip(both, shards, told, strict=True))
        ]
        one, two = (job.result(LIMIT) for job in jobs)
    assert isinstance(one, Manifest), one
    assert one == two
    assert [own.done[0] for own in shards] == ["written in 90 with the sentinel", "written in 90"]
    as_judged = shards[stands].shared_part(judge_ahead([b"", b""]).sentinel)
    assert shards[0].shared == as_judged, "bit for bit"
    assert shards[0].lines == (("a line",) if stands == 1 else ())
    assert shards[0].texts == shards[1].texts != {}


def test_where_no_rank_stands_on_any_host_nothing_is_kept(
    both: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_OFFER", 0.05)
    with ThreadPoolExecutor() as threads:
        jobs = [threads.submit(speak, host, Shards(), by_marks(host, END), at=()) for host in both]
        assert {job.result(LIMIT) for job in jobs} == {"no rank stands at the end of a step on any host"}


@pytest.mark.parametrize("kind", [NotProved, UsageError, NoAnswer])
def test_a_step_that_was_not_healthy_or_could_not_be_judged_is_kept_by_nobody(
    both: tuple[Hosts, Hosts], kind: type[Exception]
) -> None:
    """Whatever it fails of where it is decided, the others learn of it and do not wait."""

    def judge(sent: Sequence[bytes]) -> JudgedAhead:
        assert len(sent) == 2
        raise kind("the last step was not healthy")

    first, other = Shards(0, 1), Shards(2, 3)
    assert speak_both(both, first, other, judge=judge) == ["the last step was not healthy"] * 2
    assert first.done == other.done == []


LATER = END._replace(step=END.step + 1)


class Moving(Shards):
    """In place of the shards of a host that goes on while they are written."""

    moved = False

    def write_part(self, *given: Any) -> dict[int, ShardRecord]:
        self.moved = True
        raise NotProved("it was changed while it was read")


@pytest.mark.parametrize("moving", [0, 1])
def test_where_a_host_goes_on_behind_the_plan_all_agree_anew(both: tuple[Hosts, Hosts], moving: int) -> None:
    moves, stays = Moving(2 * moving, 2 * moving + 1), Shards(2 - 2 * moving, 3 - 2 * moving)
    moves.step = stays.step = LATER.step
    ends = of(both[1 - moving], ends=(AT_END.model_copy(update={"end": LATER}), AT_END))

    def move() -> Manifest | str:
        assert "changed while it was read" in str(speak(both[moving], moves, stands=lambda: not moves.moved))
        there = Shards(*moves.ranks)
        there.step = LATER.step
        return speak(both[moving], there, of(both[moving], end=LATER), at=LATER)

    with ThreadPoolExecutor() as threads:
        jobs = threads.submit(move), threads.submit(speak, both[1 - moving], stays, ends, at=(END, LATER))
        one, other = (job.result(LIMIT) for job in jobs)
    assert isinstance(one, Manifest), one
    assert one == other
    written = stays.done[0]
    assert stays.done == [written, "discarded", written, f"committed {one.name}"]


@pytest.mark.parametrize("moving", [0, 1])
def test_hosts_that_never_stop_going_on_agree_a_bounded_number_of_times(both: tuple[Hosts, Hosts], moving: int) -> None:
    moves, stays = Moving(2 * moving, 2 * moving + 1), Shards(2 - 2 * moving, 3 - 2 * moving)

    def move() -> Manifest | str:
        for _ in range(ROUNDS + 1):
            moves.moved = False
            why = speak(both[moving], moves, stands=lambda: not moves.moved)
        return why

    with ThreadPoolExecutor() as threads:
        jobs = threads.submit(move), threads.submit(speak, both[1 - moving], stays)
        found = [job.result(LIMIT) for job in jobs]
    assert found == [f"the host of rank {both[moving].own}: it was changed while it was read"] * 2
    assert [done for done in stays.done if "written" not in done] == ["discarded"] * ROUNDS


@pytest.mark.parametrize("gone", [0, 1])
def test_whoever_speaks_next_for_a_host_and_stands_elsewhere_has_all_agree_anew(
    both: tuple[Hosts, Hosts], gone: int
) -> None:
    """The first one is gone before it has written anything."""
    ends = of(both[1 - gone], ends=(AT_END.model_copy(update={"end": LATER}), AT_END))
    first, other = Shards(2 * gone, 2 * gone + 1), Shards(2 - 2 * gone, 3 - 2 * gone)
    first.step = other.step = LATER.step
    with ThreadPoolExecutor() as threads:
        job = threads.submit(speak, both[1 - gone], other, ends, at=(END, LATER))
        exchange = Exchange(both[gone], judge_ahead, LIMIT)
        exchange.agree(of(both[gone]), True, lambda: True, {END: cast(StateWriter, first)})
        while not other.done and not job.done():
            pass  # else it might agree anew before it has written anything, and have nothing to discard
        kept = speak(both[gone], first, of(both[gone], end=LATER), at=LATER)
        assert kept == job.result(LIMIT)
    assert isinstance(kept, Manifest), kept
    assert other.done[1:] == ["discarded", other.done[0], f"committed {kept.name}"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_host_that_cannot_write_leaves_nothing_on_either_at_once(both: tuple[Hosts, Hosts], failing: int) -> None:
    shards = [Shards(0, 1), Shards(2, 3)]
    shards[failing].fault = "it was changed while it was read"
    found = speak_both(both, *shards)
    assert "it was changed while it was read" in str(found[0])
    assert "it was changed while it was read" in str(found[1])
    done = shards[1 - failing].done
    assert done == [] or done[1:] == ["discarded"]
    assert "committed" not in str([each.done for each in shards])


def test_a_host_that_comes_to_the_step_of_the_other_offers_it_then(both: tuple[Hosts, Hosts]) -> None:
    begins, looking = threading.Event(), both[0].connect().of_round(1)

    def behind() -> Manifest | str:
        early = of(both[1], end=END._replace(step=7))
        moved = speak(both[1], Shards(2, 3), early, stands=lambda: not begins.is_set())
        assert "in the update behind step 7" in str(moved)
        return speak(both[1], Shards(2, 3))

    with ThreadPoolExecutor() as threads:
        jobs = threads.submit(behind), threads.submit(speak, both[0], Shards(0, 1))
        while looking.get("offer/2") is None or looking.get("offer/0") is None:
            pass
        begins.set()
        one, other = (job.result(LIMIT) for job in jobs)
    assert isinstance(one, Manifest)
    assert one == other


def test_a_host_that_is_behind_the_marks_of_another_one_has_time_to_come_there(both: tuple[Hosts, Hosts]) -> None:
    """The rank that is gone had been a step further: its sums are there, so the others will be there in a moment."""
    begins, looking = threading.Event(), both[0].connect().of_round(1)
    before = of(both[0], end=END._replace(step=7))
    marks = by_marks(both[1], END, before.ends[0].end)

    def behind() -> Manifest | str:
        moved = speak(both[0], Shards(0, 1), before, stands=lambda: not begins.is_set())
        assert "in the update behind step 7" in str(moved)
        return speak(both[0], Shards(0, 1))

    with ThreadPoolExecutor() as threads:
        jobs = threads.submit(behind), threads.submit(speak, both[1], Shards(2, 3), marks)
        while looking.get("offer/2") is None or looking.get("offer/0") is None:
            pass
        begins.set()
        one, other = (job.result(LIMIT) for job in jobs)
    assert isinstance(one, Manifest)
    assert one == other


def test_a_host_that_does_not_come_further_is_kept_where_it_stands(
    both: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_ANSWER", 0.05)
    before = of(both[0], end=END._replace(step=7))
    marks = by_marks(both[1], END, before.ends[0].end)
    first = Shards(0, 1)
    first.step = 7
    one, other = speak_both(both, first, Shards(2, 3), told=(before, marks), at=before.ends[0].end)
    assert isinstance(one, Manifest), one
    assert one == other


def test_a_host_that_is_a_step_ahead_has_the_marks_of_the_step_before(
    both: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of a step may have come to the ranks of one host alone. The other one has the parameters from before."""
    monkeypatch.setattr(exchange_module, "_ANSWER", 0.05)
    before = of(both[0], end=END._replace(step=7))
    ahead = of(both[1], ends=(*of(both[1]).ends, *by_marks(both[1], before.ends[0].end).ends))
    first, other = Shards(0, 1), Shards(2, 3)
    first.step = 7
    one, two = speak_both(both, first, other, told=(before, ahead), at=before.ends[0].end)
    assert isinstance(one, Manifest), one
    assert (one, first.stores, other.stores) == (two, (0, 1), (0, 1))


def test_whoever_speaks_next_for_a_host_writes_nothing_again(both: tuple[Hosts, Hosts]) -> None:
    """The first one is gone behind its shards; its slot may be taken already."""
    gone, first, other = Shards(0, 1), Shards(0, 1), Shards(2, 3)
    with ThreadPoolExecutor() as threads:
        job = threads.submit(speak, both[1], other)
        exchange = Exchange(both[0], judge_ahead, LIMIT)
        exchange._write_shards(
            exchange.agree(of(both[0]), True, lambda: True, {END: cast(StateWriter, gone)}),
            cast(MarksWriter, gone),
            bool,
        )
        kept = speak(both[0], first, of(both[0], slots=(91,)))
        assert kept == job.result(LIMIT)
    assert isinstance(kept, Manifest)
    assert (gone.done, first.done) == (["written in 90 with the sentinel"], [f"committed {kept.name}"])


def test_a_plan_that_was_told_in_the_moment_of_a_death_is_the_plan(both: tuple[Hosts, Hosts]) -> None:
    """Who decided is gone. What it told arrives when its successor has found no plan, and makes another one."""
    first, other = Shards(0, 1), Shards(2, 3)
    there = plan_of({0: of(both[0], slots=(91,)), 2: of(both[1])}, (0, 2), {})
    before = there.model_copy(update={"manifest": first.manifest(there.seq)})

    def judge(sent: Sequence[bytes]) -> JudgedAhead:
        if not first.done and not arrived:
            arrived.append(True)
            both[0].connect().of_round(1).set({"plan": before.model_dump_json().encode()})
        return judge_ahead(sent)

    arrived: list[bool] = []
    one, two = speak_both(both, first, other, judge=judge)
    assert isinstance(one, Manifest), one
    assert one == two
    assert (first.done[0], other.done[0]) == ("written in 91 with the sentinel", "written in 91")


def test_a_commitment_that_was_told_in_the_moment_of_a_death_is_the_commitment(
    both: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above; its successor would commit what the other hosts have thrown away by then."""
    first, other, arrived = Shards(0, 1), Shards(2, 3), list[bool]()

    def commitment(*given: Any) -> Commitment:
        if not arrived:
            arrived.append(True)
            both[0].connect().of_round(1).set({"commitment": Commitment(anew=True).model_dump_json().encode()})
        return commitment_of(*given)

    monkeypatch.setattr(exchange_module, "commitment_of", commitment)
    one, two = speak_both(both, first, other)
    assert isinstance(one, Manifest), one
    assert one == two
    for shards in (first, other):
        assert shards.done == [shards.done[0], "discarded", shards.done[0], f"committed {one.name}"]


def test_a_host_that_comes_to_be_late_while_it_makes_its_offer_makes_another_one(
    both: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_ANSWER", 0.0)
    exchange = Exchange(both[1], judge_ahead, LIMIT)
    with pytest.raises(NextRound):
        exchange.agree(of(both[1]), False, lambda: True, {})


@pytest.mark.parametrize("speaks", [0, 1])
def test_a_host_that_has_not_heard_of_it_is_not_waited_for(
    unrung: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch, speaks: int
) -> None:
    monkeypatch.setattr(exchange_module, "_ANSWER", 0.05)
    monkeypatch.setattr(exchange_module, "_OFFER", LIMIT)
    silent, began = unrung[1 - speaks].own, time.monotonic()
    assert speak(unrung[speaks], Shards()) == f"no rank has answered (on the host of rank {silent})"
    assert time.monotonic() - began < LIMIT / 2


@pytest.mark.parametrize("speaks", [0, 1])
def test_a_host_that_has_nothing_to_offer_says_why(
    both: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch, speaks: int
) -> None:
    monkeypatch.setattr(exchange_module, "_OFFER", 0.05)
    other = both[1 - speaks]
    other.refuse("it was in its update")
    assert speak(both[speaks], Shards()) == f"it was in its update (on the host of rank {other.own})"


def test_a_host_that_has_given_up_is_not_waited_for_by_one_that_comes_later(
    unrung: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had made its offer, and the one that comes later, whose ranks are gone, cannot decide."""
    for name, seconds in {"_ANSWER": 0.05, "_OFFER": 0.1}.items():
        monkeypatch.setattr(exchange_module, name, seconds)
    late, other = unrung
    other.ring()
    other.refuse(why := str(speak(other, Shards())))
    began = time.monotonic()
    assert speak(late, Shards(), by_marks(late, END), at=()) == f"{why} (on the host of rank {other.own})"
    assert time.monotonic() - began < LIMIT / 2


@pytest.mark.parametrize("speaks", [0, 1])
def test_a_host_that_is_at_it_is_waited_for_until_the_time_is_over(
    both: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch, speaks: int
) -> None:
    for name, seconds in {"_ANSWER": 0.01, "_OFFER": 0.02, "_MARGIN": 0.01}.items():
        monkeypatch.setattr(exchange_module, name, seconds)
    other = both[1 - speaks]
    assert speak(both[speaks], Shards(), seconds=0.3) == f"no rank has answered (on the host of rank {other.own})"


def test_what_only_the_deciding_host_has_committed_is_taken_back(both: tuple[Hosts, Hosts]) -> None:
    first, other = (Exchange(hosts, judge_ahead, LIMIT) for hosts in both)

    class Last(Shards):
        """The time is over when they are committed."""

        def commit_part(self, slot: int, manifest: Manifest) -> None:
            super().commit_part(slot, manifest)
            first._deadline = time.monotonic()

    shards, gone = Last(0, 1), Shards(2, 3)

    def keep() -> Manifest:
        plan = first.agree(of(both[0]), True, lambda: True, {END: cast(StateWriter, shards)})
        return first.keep(plan, cast(MarksWriter, shards), lambda: True)

    with ThreadPoolExecutor() as threads:
        job = threads.submit(keep)
        other._write_shards(other.agree(of(both[1]), True, lambda: True, {}), cast(MarksWriter, gone), bool)
        with pytest.raises(NotProved, match="not all hosts have told in time that they have kept it"):
            job.result(LIMIT)
    assert shards.done[1:] == [f"committed {MANIFEST.name}", "discarded"]


def test_a_bell_reaches_all_other_hosts_and_none_but_once(unrung: tuple[Hosts, Hosts]) -> None:
    rung = [threading.Event(), threading.Event()]
    for hosts, event in zip(unrung, rung, strict=True):
        hosts.wait_for_bell(event.set, lambda text: None)
    unrung[1].ring()
    assert rung[0].wait(LIMIT)
    store = unrung[0].connect()
    assert (store.get("here/0"), store.get("here/2")) == (b"1", b"1")
    for hosts in unrung:
        assert hosts._bell is not None
        hosts._bell.join(LIMIT)
        assert not hosts._bell.is_alive()
    assert not rung[1].is_set()


def test_a_rank_that_leaves_no_marks_any_more_is_told_to_the_host_of_rank_0_and_the_bell_still_rings(
    both: tuple[Hosts, Hosts],
) -> None:
    told: list[str] = []
    heard, rung = threading.Event(), threading.Event()
    both[0].wait_for_bell(rung.set, lambda text: (told.append(text), heard.set())[0])
    both[1].tell_stopped("rank 2: its buffers have grown")
    assert heard.wait(LIMIT)
    both[1].ring()
    assert rung.wait(LIMIT)
    assert told == ["rank 2: its buffers have grown"]


def test_a_host_that_ends_as_it_should_ends_its_thread(both: tuple[Hosts, Hosts]) -> None:
    both[1].wait_for_bell(lambda: pytest.fail("nobody has rung"), lambda text: None)
    both[1].close()
    assert both[1]._bell is not None
    assert not both[1]._bell.is_alive()


def test_a_store_that_is_gone_is_told_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(
        StoreGone, match=f"the store at 127.0.0.1:{port}, by which the hosts agree, cannot be reached: "
    ):
        HostStore(("127.0.0.1", port), "keys")
    assert capfd.readouterr() == ("", "")


def test_a_store_that_goes_while_it_is_connected_to_keeps_nobody_for_as_long_as_torch_would_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own client tries for twice its limit. A host that comes that late finds its place taken."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def goes() -> None:
        listener.accept()[0].close()
        listener.close()

    threading.Thread(target=goes, daemon=True).start()
    monkeypatch.setattr(hosts_module, "_CONNECT", 4.0)
    began = time.monotonic()
    with pytest.raises(StoreGone, match="refused"):
        HostStore(("127.0.0.1", port), "keys")
    assert time.monotonic() - began < hosts_module._CONNECT
    for thread in threading.enumerate():  # torch's complaint would come in another test's output
        if thread.name == "rollback-connect":
            thread.join(LIMIT)


def test_a_bell_that_another_host_rings_has_a_reason_in_words() -> None:
    assert end_marks.REASONS[end_marks.RANK_ENDS_ELSEWHERE] == "a rank of another host is about to end"


def test_an_offer_that_is_taken_back_while_another_host_looks_at_it_keeps_nobody_waiting(
    both: tuple[Hosts, Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (hosts.connect() for hosts in both)
    second.set({"offer/2": b"{}"})

    class LooksWhileItGoes:
        """The first host's connection: the offer goes when it has found that there is one."""

        def check(self, keys: list[str]) -> bool:
            found: bool = store.check(keys)
            second.take_back("offer/2")
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    store = first._store
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(first, "_store", LooksWhileItGoes())
    assert first.get("offer/2") is None
    assert second.get("offer/2") is None


def test_a_plan_for_an_end_that_only_others_have_leaves_what_writes_the_own_one_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next plan may be for that one. Without what is the same on all ranks nobody could read its shards."""
    of_marks = SimpleNamespace(buffers="", free_slots=list)
    own = SimpleNamespace(
        buffers="", free_slots=list, common_local={"counters": 7}, texts={"draws": "x"}, shared="shared",
        metrics=lambda judged_ahead: ("its lines",),
    )  # fmt: skip
    plans = [SimpleNamespace(at=at, common_local={}, texts={}, shared=None, gone=(1,)) for at in (LATER, END)]
    written: list[Any] = []

    def keep(plan: Any, writer: Any, stands: Any) -> str:
        written.append(writer)
        if len(written) == 1:
            raise NextRound("a host stands elsewhere")
        return "kept"

    monkeypatch.setattr(exchange_module, "MarksWriter", lambda *given: of_marks)
    exchange = cast(
        Exchange, SimpleNamespace(late=False, judged_ahead=None, agree=lambda *given: plans.pop(0), keep=keep)
    )
    marks = {END: HostMarks([], {}, early=False, early_refuted=None)}
    writers = cast(Mapping[StepEnd, StateWriter], {END: own})
    kept = exchange_module.keep_together(exchange, cast(SlotPaths, None), [0], [1], lambda late: marks, writers=writers)
    assert (kept, written) == (("kept", ("its lines",), (1,)), [of_marks, own])
    assert (own.common_local, own.texts, own.shared) == ({"counters": 7}, {"draws": "x"}, "shared")
