"""What one host tells the others, and hears from them, until all have kept one last snapshot, or none has.

`agreement` has what is said and what follows from it; this is the order in which it is said, in the store (`hosts`).
A round begins with `agree` and ends with `keep`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel

from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import Manifest
from rollback.train.last_snapshot.agreement import (
    FIRST,
    ROUNDS,
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
from rollback.train.last_snapshot.hosts import YES, Hosts
from rollback.train.last_snapshot.peers import HostMarks
from rollback.train.last_snapshot.proof import NextRound, NotProved
from rollback.train.last_snapshot.writers import SLOTS, JudgedAhead, MarksWriter, StateWriter

_ANSWER = 2.0  # seconds in which a host must have heard of it, and in which one that is behind may come further
_OFFER = 4.0  # in which it must have offered a step that fits, if a rank of it has none to offer
_MARGIN = 2.0  # that the other hosts have to hear in time that nothing comes of it
_Told = TypeVar("_Told", bound=BaseModel)


class Exchange:
    """One host's part in a last snapshot that all keep together. The rank that has its host's lock makes it.

    judge_ahead: as for `LastSnapshot`. seconds: for all of it. Making it raises StoreGone, as all methods do.
    """

    def __init__(self, hosts: Hosts, judge_ahead: Callable[[Sequence[bytes]], JudgedAhead], seconds: float) -> None:
        self._hosts, self._judge_ahead = hosts, judge_ahead
        self._store = hosts.connect()
        self._met = time.monotonic()  # a name server that does not answer has cost seconds until now
        self._deadline = self._met + seconds
        self._own, self._decides = hosts.own, False
        self.judged_ahead: JudgedAhead | None = None
        """On the host that decides, if its shards were written here."""
        self._begin_round(1)

    def _begin_round(self, number: int) -> None:
        self._number, self._round = number, self._store.of_round(number)
        self._began = time.monotonic()

    @property
    def late(self) -> bool:
        """Whether this host's ranks have had the time to come to the end of the step that they are in."""
        return time.monotonic() > self._met + _ANSWER

    def agree(
        self, offer: HostOffer, late: bool, stands: Callable[[], bool], writers: Mapping[StepEnd, StateWriter]
    ) -> JointPlan:
        """Tell what this host can keep, and wait for the plan. late: whether it was when it made the offer. stands:
        whether it still can. writers: at the ends at which it stands.

        Raises NotProved, and NextRound when it comes to be late: there may be more to offer then.
        """
        while (over := self._read("commitment", Commitment)) is not None and over.anew:
            self._begin_round(self._number + 1)
        self._tell(f"offer/{self._own}", offer)
        while (plan := self._read("plan", JointPlan)) is None:
            if not stands():
                self._round.take_back(f"offer/{self._own}")
                raise NotProved(f"this host was in the update behind step {offer.ends[0].end.step}")
            decides = decider(lambda host: self._read(f"offer/{host}", HostOffer), self._hosts.hosts)
            if self.late and not (late or decides == self._own):
                raise NextRound("there is no plan yet")
            if decides == self._own:
                self._decide(stands, writers)
            else:
                self._require_somebody_decides(decides)
            time.sleep(self._hosts.pace)
        if plan.why_not is not None:
            raise NotProved(plan.why_not)
        if plan.slot not in SLOTS:
            raise NotProved(f"slot {plan.slot} is not for last snapshots")
        self._decides = plan.decider == self._own
        own = next((each for each in offer.ends if each.end == plan.end), None)
        stores = bool({*offer.ranks} & {*plan.stores})
        as_planned = own is not None and own.digest == (plan.digest if stores else None)
        if not as_planned and self._read(f"shards/{self._own}", HostShards) is None:
            why = f"no rank of it stands any more where one stood when the hosts agreed on step {plan.at.step}"
            self._tell(f"shards/{self._own}", HostShards(why_not=why, anew=True))
        return plan

    def _decide(self, stands: Callable[[], bool], writers: Mapping[StepEnd, StateWriter]) -> None:
        offers = self._read_all("offer", HostOffer)
        if (end := common_end(offers, self._hosts.hosts)) is None:
            waits = self._may_still_offer(offers)
        else:
            stood = offers[self._own].at(end).digest is not None
            patience = _ANSWER if stood else _OFFER  # who is late may offer more
            waits = somebody_is_ahead(offers, end) and time.monotonic() < self._began + patience
        if waits:
            return
        try:
            plan = plan_of(offers, self._hosts.hosts, self._refusals())
            judged_ahead, writer = self._judge_ahead(plan.sent), writers[plan.at]
            told: dict[str, object] = {"manifest": writer.manifest(plan.seq)}
            if any(offer.at(plan.at).digest is None for offer in offers.values()):
                told |= {"common_local": writer.common_local, "texts": writer.texts}
            if offers[FIRST].at(plan.at).digest is None:
                told |= {"shared": writer.shared_part(judged_ahead.sentinel), "metrics": writer.metrics(judged_ahead)}
            plan = plan.model_copy(update=told)
        except Exception as error:  # noqa: BLE001 - it is told to all, who would wait, and comes back to this host as well
            if not stands():
                return
            plan = JointPlan(decider=self._own, why_not=str(error) or type(error).__name__)
        self._tell_once("plan", plan)

    def _may_still_offer(self, offers: Mapping[int, HostOffer]) -> bool:
        """Whether something that fits may still be offered by a host."""
        waited, missing = time.monotonic() - self._began, {*self._hosts.hosts} - offers.keys()
        if waited < _OFFER:
            return waited < _ANSWER or all(map(self._is_here, missing))
        at_it = all(map(self._is_here, missing)) and not missing & self._refusals().keys()
        return bool(missing) and at_it and time.monotonic() < self._deadline - _MARGIN

    def _require_somebody_decides(self, host: int | None) -> None:
        """host: who does, see `decider`."""
        waited, why = time.monotonic() - self._began, None
        if host is None:
            if waited > _OFFER:
                raise NotProved("no rank stands at the end of a step on any host")
            return
        silent = time.monotonic() > self._deadline or (waited > _ANSWER and not self._is_here(host))
        if waited > _OFFER and self._round.get(f"offer/{host}") is None:
            why = self._refusals().get(host)
        if silent or why is not None:
            self._round.take_back(f"offer/{self._own}")  # who comes later would wait for this host to decide
            raise NotProved(f"{why or 'no rank has answered'} (on the host of rank {host})")

    def _is_here(self, host: int) -> bool:
        return self._store.get(f"here/{host}") is not None

    def _refusals(self) -> dict[int, str]:
        told = {host: self._store.get(f"refusal/{host}") for host in self._hosts.hosts}
        return {host: why.decode() for host, why in told.items() if why is not None}

    def keep(self, plan: JointPlan, writer: MarksWriter, stands: Callable[[], bool]) -> Manifest:
        """Write this host's shards, and commit them when those of all hosts are whole. writer: at the plan's end.
        stands: as for `agree`.

        Whatever happens at whatever moment: a host commits only what all hosts have written, and what only some have
        committed means nothing to the next start. Raises NotProved, and NextRound where another round may do.
        """
        told = self._read(f"shards/{self._own}", HostShards)  # by a rank that is gone
        if told is None:
            told = self._write_shards(plan, writer, stands)
        try:
            commitment = self._await_commitment(plan)
            if commitment.manifest is None:
                raise (NextRound if commitment.anew else NotProved)(commitment.why_not)
            require_as_planned(commitment.manifest, plan, told.shards)
            writer.commit_part(plan.slot, commitment.manifest)
        except BaseException:
            writer.discard_part(plan.slot)
            raise
        self._await_done(plan, writer)
        return commitment.manifest

    def _write_shards(self, plan: JointPlan, writer: MarksWriter, stands: Callable[[], bool]) -> HostShards:
        try:
            if self._decides:
                self.judged_ahead = self._judge_ahead(plan.sent)
            if self.judged_ahead is not None and self._own == FIRST:
                writer.shared = writer.shared_part(self.judged_ahead.sentinel)
            told = HostShards(shards=writer.write_part(plan.slot, plan.stores))
        except Exception as error:  # noqa: BLE001 - it is told to all, and comes back to this host as well
            told = HostShards(why_not=str(error) or type(error).__name__, anew=not stands())
        self._tell(f"shards/{self._own}", told)
        return told

    def _await_commitment(self, plan: JointPlan) -> Commitment:
        while (commitment := self._read("commitment", Commitment)) is None:
            now = time.monotonic()
            if now > self._deadline:
                raise NotProved(f"the host of rank {plan.decider} has not told in time that all shards are whole")
            if self._decides:
                told = self._read_all("shards", HostShards)
                failed = any(shards.why_not is not None for shards in told.values())
                if failed or len(told) == len(self._hosts.hosts) or now > self._deadline - _MARGIN:
                    assert plan.manifest is not None
                    commitment = commitment_of(plan.manifest, told, self._hosts.hosts)
                    anew = commitment.anew and self._number < ROUNDS and now < self._deadline - _MARGIN
                    self._tell_once("commitment", commitment.model_copy(update={"anew": anew}))
                    continue
            time.sleep(self._hosts.pace)
        return commitment

    def _await_done(self, plan: JointPlan, writer: MarksWriter) -> None:
        """Raises NotProved. The host that decides takes its part back then; the others leave theirs to the next start,
        which looks whether all have it."""
        self._round.set({f"committed/{self._own}": YES})
        while self._round.get("done") is None:
            if self._decides and all(self._round.get(f"committed/{host}") for host in self._hosts.hosts):
                self._round.set({"done": YES})
            elif time.monotonic() <= self._deadline:
                time.sleep(self._hosts.pace)
            elif self._decides:
                writer.discard_part(plan.slot)
                raise NotProved("not all hosts have told in time that they have kept it")
            else:
                raise NotProved("it is not known whether all hosts have kept it")

    def _tell(self, name: str, told: BaseModel) -> None:
        self._round.set({name: told.model_dump_json().encode()})

    def _tell_once(self, name: str, told: BaseModel) -> None:
        """What all go by. Whoever decided here before may have told it in the moment in which it died."""
        self._round.set_once(name, told.model_dump_json().encode())

    def _read(self, name: str, kind: type[_Told]) -> _Told | None:
        body = self._round.get(name)
        return kind.model_validate_json(body) if body is not None else None

    def _read_all(self, name: str, kind: type[_Told]) -> dict[int, _Told]:
        found = {host: self._read(f"{name}/{host}", kind) for host in self._hosts.hosts}
        return {host: told for host, told in found.items() if told is not None}


def keep_together(
    exchange: Exchange,
    tier: SlotPaths,
    ranks: Sequence[int],
    gone: Sequence[int],
    ends: Callable[[bool], Mapping[StepEnd, HostMarks]],
    *,
    writers: Mapping[StepEnd, StateWriter] = MappingProxyType({}),
    digest: int | None = None,
    next_seq: int = 0,
    stands: Callable[[], bool] = lambda: True,
) -> tuple[Manifest, tuple[str, ...], tuple[int, ...]]:
    """Agree on a step's end with the other hosts, and keep this host's part of it. Returns the newest lines of the
    metrics, too, and the ranks of all hosts that are gone.

    ranks, gone: of this host. ends: of which all of them have left marks, given whether it is late. The rest is of
    those at which the rank that calls stands: what writes their shards, the digest of the parameters, and whether it
    still stands there. At the other ends another host has the parameters. Raises NotProved.
    """
    while True:
        if not (marks_of := ends(late := exchange.late)):
            raise NotProved("its ranks have not come to the end of one step any more")
        by_marks = {end: MarksWriter(tier, marks.bodies, {}, {}) for end, marks in marks_of.items()}
        every: dict[StepEnd, MarksWriter] = {**by_marks, **writers}
        offers = [
            EndOffer(
                end=end, buffers=every[end].buffers, sent=tuple(marks.sent), early=marks.early,
                early_refuted=marks.early_refuted, digest=digest if end in writers else None,
            )
            for end, marks in marks_of.items()
        ]  # fmt: skip
        slots = (next(iter(writers.values()), None) or every[max(every)]).free_slots()  # who stands writes most
        offer = HostOffer(
            ranks=tuple(ranks), ends=tuple(offers), slots=tuple(slots), next_seq=next_seq, gone=tuple(gone)
        )
        try:
            plan = exchange.agree(offer, late, stands, writers)
            writer: MarksWriter | None = (own := writers.get(plan.at))
            if writer is None:
                writer = by_marks.get(plan.at) or by_marks[max(by_marks)]  # another end where all of it is written
                writer.common_local, writer.texts, writer.shared = plan.common_local, plan.texts, plan.shared
            manifest = exchange.keep(plan, writer, stands)
            return manifest, plan.metrics if own is None else own.metrics(exchange.judged_ahead), plan.gone
        except NextRound:
            if not stands():
                raise
