"""Compiles the report of a run from what its directory holds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

from rollback.facts.history import Case, History, fold, merge_windows
from rollback.facts.training import (
    Advice,
    Attached,
    AttemptEnded,
    AttemptStarted,
    CheckpointLost,
    Committed,
    DrainFailed,
    Dropped,
    Evicted,
    Fact,
    Finished,
    Incident,
    JournalEntry,
    LastSnapshotMade,
    Noticed,
    PassedOver,
    PhaseAnnounced,
    Quarantined,
    RestartScheduled,
    Restored,
    ScalerSkipped,
    Signalled,
    SkipAdded,
    Stopped,
    Trouble,
    Window,
)
from rollback.inspect.audit.cost import Costs, reckon, rounded
from rollback.inspect.audit.ending import confirmed, ending_of
from rollback.inspect.audit.incidents import put_together
from rollback.inspect.audit.metrics import last_judged
from rollback.inspect.audit.quarantine import sample_entries
from rollback.inspect.audit.reading import Material, by_attempt
from rollback.inspect.audit.report import (
    AttemptEntry,
    AuditReport,
    CheckpointEntry,
    IncidentEntry,
    Message,
    NoticedEntry,
    PhaseEntry,
    Point,
    RestoredCheckpoint,
    Run,
    SkippedBatchEntry,
    Span,
    Totals,
    UserWindow,
)
from rollback.inspect.audit.requests import request_entries
from rollback.rundir.journal import of_kind
from rollback.rundir.paths import CheckpointName
from rollback.rundir.records import SkippedBatch

_F = TypeVar("_F", bound=Fact)
_AS_JOURNALLED = {"timeline", "verdict", "cause", "rule", "value", "threshold", "explanation"}  # of an incident


def compile_ledger(material: Material) -> AuditReport:
    """The report of a run. Raises JournalDamaged where facts contradict each other."""
    records = material.records
    history = fold(records)
    costs = reckon(records, material.progress)
    notices = list(material.notices)
    passed = _passed_over(material)
    skipped = _skipped(material, history, notices)
    incidents = _incidents(material, history, costs, passed)
    attempts = _attempts(records, costs, material.held)
    begun = next((record for record in reversed(records) if isinstance(record.fact, Attached | Restored)), None)
    return AuditReport(
        run=_run(material),
        totals=_totals(material, costs, incidents, attempts, skipped, passed, notices),
        incidents=incidents,
        skipped=skipped,
        user_windows=[
            UserWindow(span=_span(fact.window, passed), who=fact.who, why=fact.why, at=record.at)
            for record, fact in of_kind(records, SkipAdded)
        ],
        samples=sample_entries(history),
        noticed=[NoticedEntry(at=r.at, **fact.model_dump(exclude={"kind"})) for r, fact in of_kind(records, Noticed)],
        scaler_skipped=[Point(step=fact.step, batch=fact.batch) for _, fact in of_kind(records, ScalerSkipped)],
        phases=[
            PhaseEntry(at=r.at, **fact.model_dump(exclude={"kind"})) for r, fact in of_kind(records, PhaseAnnounced)
        ],
        requests=request_entries(records),
        attempts=attempts,
        checkpoints=_checkpoints(records, history),
        advice=[_message(record, fact.code, fact.text) for record, fact in of_kind(records, Advice)],
        troubles=[
            *(_message(record, fact.doing, fact.error) for record, fact in of_kind(records, Trouble)),
            *(_message(record, "filling the durable ring", f.error) for record, f in of_kind(records, DrainFailed)),
        ],
        last_judged=last_judged(material.last_metrics, begun, history.timeline),
        ending=confirmed(ending_of(records), held=material.held, reached=attempts[-1].reached if attempts else None),
        notices=notices,
    )


def _message(record: JournalEntry, subject: str, text: str) -> Message:
    return Message(at=record.at, attempt=record.attempt, subject=subject, text=text)


def _run(material: Material) -> Run:
    identity = material.identity
    return Run(
        directory=material.directory,
        run_id=identity.run_id if identity else None,
        created=identity.created if identity else None,
        world_size=identity.job.world_size if identity else None,
        data=identity.job.data if identity else {},
    )


def _passed_over(material: Material) -> list[Window]:
    """The skipped batches: by the journal, and by skip records of ranks whose line a crash prevented."""
    told = [fact.window for _, fact in of_kind(material.records, PassedOver)]
    seen = {skipped.batch for rank in material.skipped.values() for skipped in rank}
    return merge_windows([*told, *(Window(first=batch, last=batch) for batch in sorted(seen))])


def _span(window: Window, passed: Iterable[Window]) -> Span:
    common = (min(window.last, other.last) - max(window.first, other.first) + 1 for other in passed)
    return Span(
        first=window.first,
        last=window.last,
        batches=window.last - window.first + 1,
        passed_over=sum(max(0, batches) for batches in common),
    )


def _skipped(material: Material, history: History, notices: list[str]) -> list[SkippedBatchEntry]:
    windows = [(case.incident.incident, window) for case in history.cases for window in merge_windows(case.skips)]
    by_batch: dict[int, dict[int, SkippedBatch]] = {}
    for rank, lines in material.skipped.items():
        for line in lines:
            before = by_batch.setdefault(line.batch, {}).get(rank)
            if before is not None and before.indices != line.indices:
                notices.append(
                    f"rank {rank} recorded batch {line.batch} twice, with different indices; the later counts"
                )
            by_batch[line.batch][rank] = line
    entries = []
    for batch, ranks in sorted(by_batch.items()):
        any_rank = next(iter(ranks.values()))
        entries.append(
            SkippedBatchEntry(
                batch=batch,
                epoch=any_rank.epoch,
                offset=any_rank.offset,
                indices={rank: line.indices for rank, line in sorted(ranks.items())},
                incidents=[incident for incident, window in windows if batch in window],
                by_user=any(batch in added.window for added in history.added if not added.by_supervisor),
                by_supervisor=any(batch in added.window for added in history.added if added.by_supervisor),
            )
        )
    return entries


def _incidents(material: Material, history: History, costs: Costs, passed: list[Window]) -> list[IncidentEntry]:
    records, world_size = material.records, material.identity.job.world_size if material.identity else None
    seen = {fact.incident: record for record, fact in of_kind(records, Incident)}
    restored = {fact.incident: record for record, fact in of_kind(records, Restored)}
    entries = []
    for place, case in enumerate(history.cases):
        before = history.cases[place - 1] if place else None
        after = history.cases[place + 1] if place + 1 < len(history.cases) else None
        fact, plan, number = case.incident, case.plan, case.incident.incident
        price = costs.restores.get(number)
        entries.append(
            IncidentEntry(
                incident=number,
                at=seen[number].at,
                attempt=seen[number].attempt,
                **fact.model_dump(include=_AS_JOURNALLED),
                recent=list(fact.window),
                ranks=list(fact.ranks),
                onset=Point(step=fact.onset_step, batch=fact.onset_batch),
                detection=Point(step=fact.detection_step, batch=fact.detection_batch),
                action=plan.action if plan else None,
                escalation=plan.escalation if plan else 0,
                reason=plan.reason if plan else None,
                planned_checkpoint=plan.checkpoint if plan else None,
                skip=_span(plan.skip, passed) if plan and plan.skip else None,
                screen=_span(plan.screen, merge_windows(case.skips)) if plan and plan.screen else None,
                lower_rate=plan.lower_rate if plan else None,
                restored=_restoration(case.restored, restored[number].at) if case.restored else None,
                repeats=before.incident.incident if before and _is_repeat(case, before) else None,
                repeated_by=after.incident.incident if after and _is_repeat(after, case) else None,
                outcome=case.outcome.outcome if case.outcome else "open",
                outcome_step=case.outcome.step if case.outcome else None,
                steps_lost=price.steps if price else None,
                seconds_lost=rounded(price.seconds) if price else None,
                evidence=put_together(material.evidence.get(number, {}), world_size),
            )
        )
    return entries


def _is_repeat(case: Case, before: Case) -> bool:
    """Whether an incident repeats the one before it."""
    concluded = before.outcome is not None and before.outcome.outcome == "repeated"
    return concluded or (case.plan is not None and case.plan.escalation > 0)


def _restoration(fact: Restored, at: str) -> RestoredCheckpoint:
    return RestoredCheckpoint(**fact.model_dump(include={*RestoredCheckpoint.model_fields} - {"at"}), at=at)


def _checkpoints(records: Sequence[JournalEntry], history: History) -> list[CheckpointEntry]:
    entries: dict[str, dict[str, Any]] = {}
    for record in records:
        match record.fact:
            case Committed() as fact:
                status = "good" if fact.checkpoint in history.good else "candidate"
                status = "discarded" if fact.checkpoint in history.discarded else status
                entries[fact.checkpoint] = {
                    **fact.model_dump(exclude={"kind", "timeline"}), "at": record.at, "status": status, "reason": None
                }  # fmt: skip
            case (Evicted() | CheckpointLost()) as fact if (
                fact.tier == "fast" and entries.get(fact.checkpoint, {}).get("tier") == "durable"
            ):
                pass  # the ring still has it
            case Evicted() | CheckpointLost() | Quarantined() | Dropped() as fact:
                name = CheckpointName.parse(fact.checkpoint)
                known = entries.setdefault(
                    fact.checkpoint,
                    {
                        "checkpoint": fact.checkpoint, "step": name.step if name else None, "batch": None,
                        "at": record.at, "bytes": None, "seconds": None, "tier": None,
                    },
                )  # fmt: skip
                known.update(status="lost" if isinstance(fact, CheckpointLost) else fact.kind, reason=fact.reason)
            case _:
                pass
    return [CheckpointEntry(**entry) for entry in entries.values()]


def _attempts(records: Sequence[JournalEntry], costs: Costs, held: bool) -> list[AttemptEntry]:
    attempts = by_attempt(records)
    last = max(attempts, default=0)
    return [
        _attempt(number, own, costs, is_last=number == last, held=held and number == last)
        for number, own in sorted(attempts.items())
    ]


def _attempt(number: int, records: list[JournalEntry], costs: Costs, *, is_last: bool, held: bool) -> AttemptEntry:
    started = _last(records, AttemptStarted)
    attached = _last(records, Attached)
    ended = _last(records, AttemptEnded)
    restart = _last(records, RestartScheduled)
    finished, stopped = _last(records, Finished), _last(records, Stopped)
    how: Literal["finished", "stopped", "died", "running_or_unknown"] = "died"
    if stopped:
        how = "stopped"
    elif (ended and ended[1].status == 0 and (finished or not attached)) or (
        finished and not ended and not held and costs.reached.get(number, 0) <= finished[1].step
    ):
        how = "finished"
    elif is_last and not ended:
        how = "running_or_unknown"
    end = ended or finished or stopped
    # A rank that raised has recorded its step, and its peers cannot have done another one without it.
    told = how in ("finished", "stopped") or (ended is not None and ended[1].fingerprint is not None)
    who = started or attached
    price = costs.deaths.get(number)
    return AttemptEntry(
        attempt=number,
        supervised=started is not None or (attached is not None and attached[1].supervised),
        started=records[0].at,
        host=who[1].host if who else None,
        pid=who[1].pid if who else None,
        changed=list(started[1].changed) if started else [],
        checkpoint=attached[1].checkpoint if attached else None,
        init=attached[1].init if attached else None,
        sharding=attached[1].sharding if attached else None,
        begins=Point(step=attached[1].step, batch=attached[1].batch) if attached else None,
        reached=costs.reached.get(number),
        at_least=not told,
        ended=how,
        ended_at=end[0].at if end else None,
        status=ended[1].status if ended else None,
        cause=ended[1].cause if ended else None,
        last_snapshot=last[1].in_words() if (last := _last(records, LastSnapshotMade)) else None,
        signals=[fact.signal for _, fact in of_kind(records, Signalled)],
        restart_delay=restart[1].delay if restart else None,
        restart_reason=restart[1].reason if restart else None,
        restart_budget_left=restart[1].budget_left if restart else None,
        steps_lost=price.steps if price else None,
        seconds_lost=rounded(price.seconds) if price else None,
    )


def _last(records: Iterable[JournalEntry], kind: type[_F]) -> tuple[JournalEntry, _F] | None:
    return next(reversed(of_kind(records, kind)), None)


def _totals(
    material: Material,
    costs: Costs,
    incidents: list[IncidentEntry],
    attempts: list[AttemptEntry],
    skipped: list[SkippedBatchEntry],
    passed: list[Window],
    notices: list[str],
) -> Totals:
    batches = sum(window.last - window.first + 1 for window in passed)
    if len(skipped) < batches:
        notices.append(f"{batches - len(skipped)} of {batches} batches passed over left no record of what they held")
    steps = costs.reached[max(costs.reached)] if costs.reached else 0
    lost = sum(price.steps or 0 for price in costs.prices)
    seconds_lost = sum(price.seconds or 0.0 for price in costs.prices)
    idle = seconds_lost + costs.seconds_hung + costs.seconds_down
    return Totals(
        incidents=len(incidents),
        explosions=dict(Counter(e.evidence.explosion for e in incidents if e.evidence and e.evidence.explosion)),
        rollbacks=sum(entry.restored is not None for entry in incidents),
        noticed=len(of_kind(material.records, Noticed)),
        scaler_skips=len(of_kind(material.records, ScalerSkipped)),
        attempts=len(attempts),
        skipped_batches=batches,
        skipped_samples=_samples(material, skipped) if len(skipped) == batches else None,
        steps=steps,
        steps_at_least=bool(attempts) and attempts[-1].at_least,
        steps_lost=lost,
        steps_lost_at_least=any(entry.at_least and entry.steps_lost is not None for entry in attempts[:-1]),
        goodput=round(max(0.0, 1 - idle / costs.seconds), 6) if costs.seconds and steps + lost else None,
        seconds=rounded(costs.seconds),
        seconds_lost=round(seconds_lost, 3),
        seconds_hung=round(costs.seconds_hung, 3),
        seconds_down=round(costs.seconds_down, 3),
    )


def _samples(material: Material, skipped: list[SkippedBatchEntry]) -> int | None:
    ranks = material.identity.job.world_size if material.identity else 0
    total = 0
    for entry in skipped:
        if len(entry.indices) < ranks or any(indices is None for indices in entry.indices.values()):
            return None
        total += sum(len(indices) for indices in entry.indices.values() if indices is not None)
    return total
