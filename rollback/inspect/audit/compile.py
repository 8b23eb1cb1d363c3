"""Compiles the report of a run from what its directory holds. Pure."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rollback.facts import training as facts
from rollback.facts.ending import SCRIPT_LEFT
from rollback.facts.history import Case, History
from rollback.facts.supervisor import ABOUT_NODES
from rollback.inspect.audit import report
from rollback.inspect.audit.contents import RunContents
from rollback.inspect.audit.incidents import put_together
from rollback.inspect.audit.passings import Passing, counts, passings
from rollback.inspect.audit.quarantine import sample_entries
from rollback.inspect.audit.requests import request_entries
from rollback.inspect.document import Point, fields_of
from rollback.inspect.record.cost import Costs, is_reach_known, reckon, rounded
from rollback.inspect.record.ending import (
    NO_END,
    confirmed,
    ended_together,
    ending_of,
    lacks_its_end,
    script_left,
)
from rollback.inspect.record.last_judged import last_judged
from rollback.inspect.record.reading import REMARKS, by_attempt
from rollback.rundir.journal.journal import last_fact, of_kind, of_kinds
from rollback.rundir.paths import CheckpointName
from rollback.rundir.skip_records import SkippedBatch
from rollback.system.collector import no_collection


@no_collection()
def compile_audit(contents: RunContents) -> report.AuditReport:
    """The report of a run."""
    records, told = contents.records, of_kinds(contents.records, facts.RARE_KINDS)
    history = contents.history
    costs = reckon(records, history.reached, contents.progress)
    notices = [*contents.notices, *costs.notices]
    passed = _passed_over(contents, told)
    last_passed = passings(told, sorted({line.batch for lines in contents.skipped.values() for line in lines}))
    skipped = _skipped(contents, history, last_passed, notices)
    incidents = _incidents(contents, told, history, costs, passed)
    orphaned = contents.abandoned and lacks_its_end(told)
    attempts = _attempts(records, costs, contents.locked, orphaned)
    begun = next(reversed(of_kinds(told, {facts.Attached, facts.Restored})), None)
    return report.AuditReport(
        run=_run(contents),
        totals=_totals(contents, told, costs, incidents, attempts, skipped, passed, last_passed, notices),
        incidents=incidents,
        skipped=skipped,
        user_windows=[
            report.UserWindow.of(fact, span=_span(fact.window, passed), at=record.at)
            for record, fact in of_kind(told, facts.SkipAdded)
        ],
        samples=sample_entries(history),
        noticed=[report.NoticedEntry.of(fact, at=record.at) for record, fact in of_kind(told, facts.Noticed)],
        probes=_probes(told),
        scaler_skipped=[Point.of(fact) for _, fact in of_kind(told, facts.ScalerSkipped)],
        phases=[report.PhaseEntry.of(fact, at=record.at) for record, fact in of_kind(told, facts.PhaseAnnounced)],
        requests=request_entries(told, contents.handed_in),
        attempts=attempts,
        checkpoints=_checkpoints(records, history),
        advice=[_message(record, fact.code, fact.text) for record, fact in of_kind(told, facts.Advice)],
        troubles=[
            *(_message(record, fact.doing, fact.error) for record, fact in of_kind(told, facts.Trouble)),
            *(_message(record, "filling the durable ring", f.error) for record, f in of_kind(told, facts.DrainFailed)),
        ],
        last_judged=last_judged(contents.last_metrics, begun, history.timeline),
        ending=confirmed(
            ending_of(told),
            locked=contents.locked,
            reached=attempts[-1].reached if attempts else None,
            orphaned=orphaned,
        ),
        notices=notices,
    )


def _probes(records: Sequence[facts.JournalEntry]) -> list[report.ProbeEntry]:
    entries = []
    for record in of_kinds(records, {facts.Probed, facts.NotProbed}):
        match record.fact:
            case facts.Probed() as fact:
                entries.append(report.ProbeEntry.of(fact, at=record.at))
            case facts.NotProbed() as fact:
                told = {"finding": None, "explanation": f"the model could not be asked: {fact.reason}"}
                entries.append(report.ProbeEntry.of(fact, at=record.at, **told))
    return entries


def _message(record: facts.JournalEntry, subject: str, text: str) -> report.Message:
    return report.Message(at=record.at, attempt=record.attempt, subject=subject, text=text)


def _run(contents: RunContents) -> report.Run:
    identity = contents.identity
    return report.Run(
        directory=contents.directory,
        **fields_of(identity, "run_id", "created"),
        world_size=identity.job.world_size if identity else None,
        data=identity.job.data if identity else {},
    )


def _passed_over(contents: RunContents, told: Sequence[facts.JournalEntry]) -> list[facts.Window]:
    """The skipped batches: by the journal, and by skip records of ranks whose line a crash prevented."""
    windows = [fact.window for _, fact in of_kind(told, facts.PassedOver)]
    seen = {skipped.batch for rank in contents.skipped.values() for skipped in rank}
    return facts.Window.merged([*windows, *(facts.Window(first=batch, last=batch) for batch in sorted(seen))])


def _span(window: facts.Window, passed: Sequence[facts.Window]) -> report.Span:
    """passed: in order, none of which overlap."""
    own = passed[
        bisect_left(passed, window.first, key=lambda other: other.last) : bisect_right(
            passed, window.last, key=lambda other: other.first
        )
    ]
    return report.Span(
        first=window.first,
        last=window.last,
        batches=len(window),
        passed_over=sum(min(window.last, other.last) - max(window.first, other.first) + 1 for other in own),
    )


def _skipped(
    contents: RunContents, history: History, last_passed: Mapping[int, Passing], notices: list[str]
) -> list[report.SkippedBatchEntry]:
    windows = [(case.incident.incident, window) for case in history.cases for window in facts.Window.merged(case.skips)]
    by_batch: dict[int, dict[int, SkippedBatch]] = {}
    for rank, lines in contents.skipped.items():
        for line in lines:
            if not counts(last_passed, line.batch, rank):
                continue
            before = by_batch.setdefault(line.batch, {}).get(rank)
            alike = line.batch not in last_passed or last_passed[line.batch].alike
            if before is not None and before.indices != line.indices and alike:
                notices.append(
                    f"rank {rank} recorded batch {line.batch} twice, with different indices; the later counts"
                )
            by_batch[line.batch][rank] = line
    entries = []
    order, owners = sorted(by_batch), defaultdict(list)
    given, blamed = (
        facts.Window.merged(added.window for added in history.added if added.by_supervisor is by_supervisor)
        for by_supervisor in (False, True)
    )
    for incident, window in windows:
        for batch in order[bisect_left(order, window.first) : bisect_right(order, window.last)]:
            owners[batch].append(incident)
    for batch in order:
        ranks = by_batch[batch]
        any_rank = next(iter(ranks.values()))
        entry = report.SkippedBatchEntry(
            batch=batch, epoch=any_rank.epoch, offset=any_rank.offset, incidents=owners[batch],
            indices={rank: line.indices for rank, line in sorted(ranks.items())},
            by_user=facts.Window.holding(given, batch) is not None,
            by_supervisor=facts.Window.holding(blamed, batch) is not None,
        )  # fmt: skip
        entries.append(entry)
    return entries


def _incidents(
    contents: RunContents,
    told: Sequence[facts.JournalEntry],
    history: History,
    costs: Costs,
    passed: list[facts.Window],
) -> list[report.IncidentEntry]:
    world_size = contents.identity.job.world_size if contents.identity else None
    seen = {fact.incident: record for record, fact in of_kind(told, facts.Incident)}
    restored = {fact.incident: record for record, fact in of_kind(told, facts.Restored)}
    entries = []
    for place, case in enumerate(history.cases):
        before = history.cases[place - 1] if place else None
        after = history.cases[place + 1] if place + 1 < len(history.cases) else None
        fact, plan, number = case.incident, case.plan, case.incident.incident
        price = costs.restores.get(number)
        entries.append(
            report.IncidentEntry.of(
                fact,
                **fields_of(seen[number], "at", "attempt"),
                **fields_of(plan, "action", "reason", "lower_rate"),
                recent=list(fact.window),
                onset=Point(step=fact.onset_step, batch=fact.onset_batch),
                detection=Point(step=fact.detection_step, batch=fact.detection_batch),
                escalation=plan.escalation if plan else 0,
                planned_checkpoint=plan.checkpoint if plan else None,
                skip=_span(plan.skip, passed) if plan and plan.skip else None,
                screen=_span(plan.screen, facts.Window.merged(case.skips)) if plan and plan.screen else None,
                restored=report.RestoredCheckpoint.of(case.restored, at=restored[number].at) if case.restored else None,
                repeats=before.incident.incident if before and _is_repeat(case, before) else None,
                repeated_by=after.incident.incident if after and _is_repeat(after, case) else None,
                outcome=case.outcome.outcome if case.outcome else "open",
                outcome_step=case.outcome.step if case.outcome else None,
                steps_lost=price.steps if price else None,
                seconds_lost=rounded(price.seconds) if price else None,
                evidence=put_together(contents.evidence.get(number, {}), world_size),
            )
        )
    return entries


def _is_repeat(case: Case, before: Case) -> bool:
    concluded = before.outcome is not None and before.outcome.outcome == "repeated"
    return concluded or (case.plan is not None and case.plan.escalation > 0)


_FATES = frozenset({facts.Committed, facts.Evicted, facts.CheckpointLost, facts.Quarantined, facts.Dropped})


def _checkpoints(records: Sequence[facts.JournalEntry], history: History) -> list[report.CheckpointEntry]:
    entries: dict[str, report.CheckpointEntry] = {}
    for record in of_kinds(records, _FATES):
        match record.fact:
            case facts.Committed() as fact:
                status: report.CheckpointOutcome = "good" if fact.checkpoint in history.good else "candidate"
                status = "discarded" if fact.checkpoint in history.discarded else status
                entries[fact.checkpoint] = report.CheckpointEntry(
                    fact.checkpoint, fact.step, fact.batch, record.at, status, None, fact.bytes, fact.seconds, fact.tier
                )
            case (facts.Evicted() | facts.CheckpointLost()) as fact if (
                fact.tier == "fast" and (known := entries.get(fact.checkpoint)) and known.tier == "durable"
            ):
                pass  # the ring still has it
            case facts.Evicted() | facts.CheckpointLost() | facts.Quarantined() | facts.Dropped() as fact:
                known = entries.get(fact.checkpoint)
                if known is None:
                    name = CheckpointName.parse(fact.checkpoint)
                    known = entries[fact.checkpoint] = report.CheckpointEntry(
                        fact.checkpoint, name.step if name else None, None, record.at, "evicted", None, None, None, None
                    )
                known.status = "lost" if fact.kind == "checkpoint_lost" else fact.kind
                known.reason = fact.reason
    return list(entries.values())


def _attempts(
    records: Sequence[facts.JournalEntry], costs: Costs, locked: bool, orphaned: bool
) -> list[report.AttemptEntry]:
    """locked, orphaned: as for `confirmed`, of the last attempt."""
    began = {record.attempt: record.at for record in reversed(records)}
    own, last = by_attempt(of_kinds(records, _OF_ATTEMPTS)), max(began, default=0)
    return [
        _attempt(number, at, own.get(number, []), costs, last=last, locked=locked, orphaned=orphaned)
        for number, at in sorted(began.items())
    ]


_OF_ATTEMPTS = frozenset({
    facts.AttemptStarted, facts.Attached, facts.AttemptEnded, facts.RestartScheduled, facts.Finished,
    facts.FinalStateLost, facts.ScriptLeft, facts.Stopped, facts.LastSnapshotMade, facts.RunEnded, facts.Signalled,
    *ABOUT_NODES, *REMARKS,
})  # fmt: skip


def _attempt(
    number: int, began: str, records: list[facts.JournalEntry], costs: Costs, *, last: int, locked: bool, orphaned: bool
) -> report.AttemptEntry:
    is_last = number == last
    started, attached = last_fact(records, facts.AttemptStarted), last_fact(records, facts.Attached)
    ended, restart = last_fact(records, facts.AttemptEnded), last_fact(records, facts.RestartScheduled)
    kept, run_ended = last_fact(records, facts.LastSnapshotMade), last_fact(records, facts.RunEnded)
    together = ended_together(records)
    told = ended.cause if ended else run_ended.reason if run_ended else None  # it could not be found out how it ended
    well = ended is not None and ended.status == 0
    refused = well and not attached and run_ended is not None and run_ended.exit_code
    stopped = together.reason if isinstance(together, facts.Stopped) else None
    orphan = started and not ended and (orphaned or not is_last)
    complete = together if isinstance(together, facts.Finished | facts.FinalStateLost) else None
    was_last = not ended and not (locked and is_last)  # else another pass over the data may have followed
    trained = complete and (well or (was_last and costs.reached.get(number, 0) <= complete.step))
    ends: list[tuple[object, report.AttemptEnd, str | None]] = [
        (orphan and stopped == "preempted", "stopped", NO_END),
        (stopped or refused or (ended and ended.why == "told_to_stop"), "stopped", told),
        (script_left(records), "left", SCRIPT_LEFT),
        (trained, "finished", complete.account if isinstance(complete, facts.FinalStateLost) else told),
        (well and not attached, "finished", told),
        (is_last and not (ended or run_ended), "running_or_unknown", None),
        (True, "died", told),
    ]
    how, cause = next((how, cause) for holds, how, cause in ends if holds)
    end = ended or (together if how in ("stopped", "left", "finished") else run_ended)
    price = costs.deaths.get(number)
    return report.AttemptEntry(
        attempt=number,
        supervised=started is not None or (attached is not None and attached.supervised),
        started=began,
        **fields_of(started or attached, "host", "pid"),
        changed=list(started.changed) if started else [],
        **fields_of(attached, "checkpoint", "init", "sharding"),
        begins=Point.of(attached) if attached else None,
        reached=costs.reached.get(number),
        at_least=not (how == "finished" or is_reach_known(records)),
        ended=how,
        ended_at=next((record.at for record in records if record.fact is end), None),
        status=ended.status if ended else None,
        cause=cause,
        last_snapshot=kept.in_words() if kept else None,
        nodes=[r.fact.in_words() for r in records if isinstance(r.fact, ABOUT_NODES)],
        remarks=[r.fact.in_words() for r in records if isinstance(r.fact, REMARKS)],
        signals=[fact.signal for _, fact in of_kind(records, facts.Signalled)],
        restart_delay=restart.delay if restart else None,
        restart_reason=restart.reason if restart else None,
        restart_budget_left=restart.budget_left if restart else None,
        steps_lost=price.steps if price else None,
        seconds_lost=rounded(price.seconds) if price else None,
    )


def _totals(
    contents: RunContents,
    told: Sequence[facts.JournalEntry],
    costs: Costs,
    incidents: list[report.IncidentEntry],
    attempts: list[report.AttemptEntry],
    skipped: list[report.SkippedBatchEntry],
    passed: list[facts.Window],
    last_passed: Mapping[int, Passing],
    notices: list[str],
) -> report.Totals:
    batches = sum(map(len, passed))
    if len(skipped) < batches and not contents.skipped_left_out:
        notices.append(f"{batches - len(skipped)} of {batches} batches passed over left no record of what they held")
    asked = [entry for entry in incidents if entry.verdict == "requested"]
    steps = costs.reached[max(costs.reached)] if costs.reached else 0
    lost = sum(price.steps or 0 for price in costs.prices)
    seconds_lost = sum(price.seconds or 0.0 for price in costs.prices)
    idle = seconds_lost + costs.seconds_hung + costs.seconds_down
    return report.Totals(
        incidents=len(incidents),
        incidents_asked=len(asked),
        explosions=dict(Counter(e.evidence.explosion for e in incidents if e.evidence and e.evidence.explosion)),
        rollbacks=sum(entry.restored is not None for entry in incidents),
        rewinds_asked=sum(entry.restored is not None for entry in asked),
        noticed=len(of_kind(told, facts.Noticed)),
        scaler_skips=len(of_kind(told, facts.ScalerSkipped)),
        attempts=len(attempts),
        skipped_batches=batches,
        skipped_samples=_samples(contents, skipped, last_passed) if len(skipped) == batches else None,
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


def _samples(
    contents: RunContents, skipped: list[report.SkippedBatchEntry], last_passed: Mapping[int, Passing]
) -> int | None:
    present = contents.identity.job.world_size if contents.identity else 0
    total = 0
    for entry in skipped:
        ranks = last_passed[entry.batch].ranks if entry.batch in last_passed else present
        if len(entry.indices) < ranks or any(indices is None for indices in entry.indices.values()):
            return None
        total += sum(len(indices) for indices in entry.indices.values() if indices is not None)
    return total
