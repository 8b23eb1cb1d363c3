"""The report as text for people."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollback.facts.fact import by_whom
from rollback.inspect.audit import report
from rollback.inspect.audit.quarantine import sample_in_words
from rollback.inspect.audit.requests import asked_in_words, fate_in_words
from rollback.terminal.escape import quoted
from rollback.terminal.quantities import at_least, duration, number, or_unknown, restores_in_words, steps_or_unknown
from rollback.terminal.rows import print_rows
from rollback.wording import counted, first_few

SHOWN_BATCHES = 12
_LATEST = 200  # incidents, attempts and so on, unless all are asked for: nobody reads more
_SHOWN_VALUES = 12  # of the window before an incident
_SHOWN_FILES = 4
_SHOWN_WITNESSES = 16  # ranks on which an incident was seen
_SHOWN_RANKS = 4  # of a batch, unless all are asked for
_SHOWN_INDICES = 6  # of a batch on a rank, unless all are asked for

OUTCOMES = {
    "recovered": ("recovered", "green"),
    "repeated": ("came back", "yellow"),
    "not_reproduced": ("did not come back on replay: a transient fault is likely, but not proven", "green"),
    "structural": ("structural: the run was stopped", "red"),
    "no_checkpoint": ("no good checkpoint from before it was left: the run was stopped", "red"),
    "observed": ("observed only; nothing was done", "cyan"),
    "carried_out": ("carried out as asked", "green"),
    "open": ("open", "yellow"),
}
_PUT_ASIDE = ("dropped", "lost", "quarantined")
_EXPLODING = {"nonfinite": "not finite", "overflow": "with an overflowing norm", "large": "large (above 100)"}
VERDICTS = {
    "spike": "spiked", "nonfinite": "is not finite", "damaged": "rose on what the model knew",
    "requested": "asked to go back",
}  # fmt: skip


def print_audit(console: Console, audit: report.AuditReport, *, everything: bool = False) -> None:
    """Print a report. everything: all of long lists, not only the first or last few."""
    _print_head(console, audit)
    stories = audit.stories()
    shown = stories if everything else stories[-_LATEST:]
    if len(shown) < len(stories):
        earlier = sum(map(len, stories[:-_LATEST]))
        console.print(f"\n{earlier} earlier incidents: --all or --json shows them")
    for story in shown:
        console.print()
        for place, entry in enumerate(story):
            _print_incident(console, entry, continued=place > 0)
    if audit.skipped:
        _section(console, "skipped batches, with the data set indices that each rank would have read")
        _print_skipped(console, audit.skipped, everything)
    section = partial(_print_section, console, everything=everything)
    windows = [(w.span, f"{_span_in_words(w.span)} by {by_whom(w.who, w.why)}") for w in audit.user_windows]
    section("skip windows that no incident gave", [(str(span.first), text) for span, text in windows])
    samples = [(str(entry.sample), sample_in_words(entry)) for entry in audit.samples]
    section("data set samples that are suspected or left out", samples)
    _print_left_alone(console, audit)
    phases = [(f"step {p.step}", p.phase or "(no name on record)") for p in audit.phases]
    section("phases that the script announced", phases)
    requests = [(entry.request.partition("-")[0], _request(entry)) for entry in audit.requests]
    section("what operators asked for", requests)
    section("attempts", [(str(e.attempt), _attempt(e)) for e in audit.attempts], always=True)
    taken = sum(entry.status != "dropped" for entry in audit.checkpoints)
    put_aside = list(_put_aside(audit.checkpoints, everything))
    section(f"checkpoints: {taken} taken", put_aside, always=True)
    section("advice", [(m.subject, m.text) for m in audit.advice])
    section(
        "troubles of rollback itself, which training went on without", [(m.subject, m.text) for m in audit.troubles]
    )


def _print_head(console: Console, audit: report.AuditReport) -> None:
    run, totals = audit.run, audit.totals
    rows: list[tuple[str, str | Text]] = [("run", quoted(run.directory))]
    if run.run_id:
        ranks = f"{run.world_size} rank{'s' if run.world_size != 1 else ''}"
        rows.append(("id", quoted(f"{run.run_id}, created {run.created}, {ranks}")))
    samples = "" if totals.skipped_samples is None else f" ({counted(totals.skipped_samples, 'sample')})"
    restores = restores_in_words(totals.rollbacks, totals.rewinds_asked)
    rows.append(("incidents", f"{totals.incidents - totals.incidents_asked}, answered by {restores}"))
    rows.append(("skipped", f"{counted(totals.skipped_batches, 'batch', 'batches')}{samples}"))
    undone = at_least(str(totals.steps_lost), totals.steps_lost_at_least)
    rows.append(("steps", f"{at_least(str(totals.steps), totals.steps_at_least)} count, {undone} were undone"))
    if (judged := audit.last_judged) is not None:
        rows.append(("loss", judged.in_words(last=audit.ending is None)))
    rows.append(("time", _time_in_words(totals)))
    if audit.ending:
        rows.append(("ended", quoted(audit.ending.in_words())))
    else:
        rows.append(("ended", "no end on record: it is running, or died without a word (see rollback status)"))
    print_rows(console, rows, indent=0)


def _time_in_words(totals: report.Totals) -> str:
    spent = [f"{duration(totals.seconds)} on record", f"{duration(totals.seconds_lost)} undone"]
    spent += [f"{duration(totals.seconds_hung)} hung"] if totals.seconds_hung else []
    spent += [f"{duration(totals.seconds_down)} down between attempts"] if totals.seconds_down else []
    at_most = "at most " if totals.steps_lost_at_least else ""
    share = "" if totals.goodput is None else f"; goodput {at_most}{totals.goodput:.1%}"
    return ", ".join(spent) + share


def _print_incident(console: Console, entry: report.IncidentEntry, *, continued: bool) -> None:
    title = Text("  └ " if continued else "")
    title.append(f"incident {entry.incident}", style="bold")
    title.append(", the same trouble again" if continued else "")
    title.append(": ")
    title.append_text(quoted(f"{entry.cause} {VERDICTS[entry.verdict]}", style="bold"))
    console.print(title)
    rows = [(label, quoted(words)) for label, words in incident_rows(entry)]
    outcome = Text(outcome_in_words(entry), style=OUTCOMES[entry.outcome][1])
    print_rows(console, [*rows, ("outcome", outcome)], indent=4 if continued else 2)


def incident_rows(entry: report.IncidentEntry) -> Iterator[tuple[str, str]]:
    """What is known of an incident besides its outcome: labels and words."""
    if entry.verdict == "requested":
        yield "because", entry.explanation
        yield "asked at", f"step {entry.detection.step}, batch {entry.detection.batch}"
        yield from _answer_rows(entry)
        return
    yield "onset", f"step {entry.onset.step}, batch {entry.onset.batch}"
    late = entry.detection.step - entry.onset.step
    steps_on = f" ({counted(late, 'step')} on)" if late else ""
    yield "detected", f"step {entry.detection.step}, batch {entry.detection.batch}{steps_on}"
    threshold = "" if entry.threshold is None else f", threshold {number(entry.threshold)}"
    yield "rule", f"{entry.rule}: value {number(entry.value)}{threshold}"
    yield "because", entry.explanation
    if entry.recent:
        values = " ".join(number(value) for value in entry.recent[-_SHOWN_VALUES:])
        yield "before it", f"{'... ' if len(entry.recent) > _SHOWN_VALUES else ''}{values}"
    if entry.ranks:
        yield "ranks", first_few([*map(str, entry.ranks)], _SHOWN_WITNESSES)
    if entry.evidence:
        yield from _evidence_rows(entry.evidence)
    yield from _answer_rows(entry)


def _answer_rows(entry: report.IncidentEntry) -> Iterator[tuple[str, str]]:
    yield "answer", _answer_in_words(entry)
    if entry.reason:
        yield "reason", entry.reason
    if entry.restored:
        yield "lost", f"{steps_or_unknown(entry.steps_lost)}, {duration(entry.seconds_lost)}"


def outcome_in_words(entry: report.IncidentEntry) -> str:
    words, _ = OUTCOMES[entry.outcome]
    again = f" as incident {entry.repeated_by}" if entry.repeated_by is not None else ""
    at = f" (step {entry.outcome_step})" if entry.outcome_step is not None else ""
    return words + again + at


def _evidence_rows(evidence: report.EvidenceEntry) -> Iterator[tuple[str, str]]:
    yield "where", evidence.began
    counts = [f"{count} {_EXPLODING[kind]}" for kind, count in evidence.exploding.items() if count]
    if evidence.vanishing:
        counts.append(f"{evidence.vanishing} vanishing (below 1e-8)")
    if evidence.leading:
        leading = ", ".join(f"{tensor.name} {number(tensor.norm)}" for tensor in evidence.leading)
        yield "gradients", f"{'; '.join(counts) + '; ' if counts else ''}leading: {leading}"
    if kept := [batch.file for batch in evidence.batches if batch.file]:
        yield "batch", f"step {evidence.batches[0].step}, kept in {first_few(kept, _SHOWN_FILES)}"
    if missing := [f"rank {batch.rank}: {why}" for batch in evidence.batches for why in batch.left_out]:
        yield "not kept", missing[0] + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")


def _answer_in_words(entry: report.IncidentEntry) -> str:
    if entry.action is None:
        return "none on record: a crash came before the plan"
    if entry.action == "stop":
        return "stop the run"
    skip = f", skip {_span_in_words(entry.skip)}" if entry.skip else ""
    if (screen := entry.screen) is not None:
        skip = f", screen {screen.in_words()} ({screen.passed_over} of {screen.batches} were skipped)"
    if entry.lower_rate is not None:
        skip += f", learning rate times {entry.lower_rate[0]:g} for {entry.lower_rate[1]} steps"
    if entry.action == "observe":
        return f"none; it would have been: restore {entry.planned_checkpoint or 'nothing'}{skip}"
    verb = "replay" if entry.action == "retry" else "roll back"
    if entry.restored is None:
        return f"{verb} to {entry.planned_checkpoint}{skip}: planned, not carried out yet"
    done = entry.restored
    route = "in process" if done.route == "in_process" else "by relaunch"
    nth = f" (escalation {entry.escalation})" if entry.escalation else ""
    return f"{verb} to {done.checkpoint}, step {done.step}, batch {done.batch}, {route}{skip}{nth}"


def _span_in_words(span: report.Span) -> str:
    """A skip window, with how much of it is done."""
    done = f"{'all ' * (span.batches > 1)}passed over"
    rest = done if span.passed_over == span.batches else f"{span.passed_over} passed over so far"
    return f"{span.in_words()} ({f'{span.batches} batches, ' * (span.batches > 1)}{rest})"


def _print_skipped(console: Console, skipped: Sequence[report.SkippedBatchEntry], everything: bool) -> None:
    """A line for each rank: a column for each would fit for a few ranks only."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for heading in ("batch", "epoch", "offset"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("indices", overflow="fold")
    shown = skipped if everything else skipped[:SHOWN_BATCHES]
    for entry in shown:
        whose = [*(f"incident {i}" for i in entry.incidents), *(["user"] if entry.by_user else [])]
        why = ", ".join([*whose, *(["supervisor"] if entry.by_supervisor else [])])
        ranks = sorted(entry.indices)
        cells = [str(entry.batch), str(entry.epoch), str(entry.offset), why]
        for rank in ranks if everything else ranks[:_SHOWN_RANKS]:
            table.add_row(*cells, str(rank), indices_in_words(entry.indices[rank], everything))
            cells = [""] * len(cells)
        if not everything and len(ranks) > _SHOWN_RANKS:
            table.add_row(*cells, "", f"and {len(ranks) - _SHOWN_RANKS} more ranks")
    console.print(Padding(table, (0, 0, 0, 2)))
    if len(shown) < len(skipped):
        console.print(f"  and {len(skipped) - len(shown)} more (to {skipped[-1].batch}): --all or --json shows them")


def indices_in_words(indices: list[int] | None, everything: bool) -> str:
    """Evenly spaced indices as a range, as from a sampler that does not shuffle; others one by one."""
    if indices is None:
        return "-"
    strides = {after - before for before, after in itertools.pairwise(indices)}
    if len(indices) > 2 and len(strides) == 1 and not everything:
        (stride,) = strides
        return f"{indices[0]}..{indices[-1]}" + (f" by {stride}" if stride != 1 else "")
    shown = indices if everything else indices[:_SHOWN_INDICES]
    return " ".join(map(str, shown)) + (f" +{len(indices) - len(shown)}" if len(shown) < len(indices) else "")


def _print_left_alone(console: Console, audit: report.AuditReport) -> None:
    if audit.noticed:
        _section(console, "seen and left alone")
        for entry in audit.noticed:
            steps = f"step {entry.first_step}" + (f"-{entry.last_step}" if entry.last_step > entry.first_step else "")
            text = (
                f"{steps}: {entry.rule}, peak {number(entry.peak)}, threshold {number(entry.threshold)}: {entry.fate}"
            )
            console.print(Padding(quoted(text), (0, 0, 0, 2)))
    if audit.probes:
        _section(console, "what the model was asked, where the loss was up")
        for probe in audit.probes:
            console.print(Padding(quoted(f"step {probe.step}: {probe.explanation}"), (0, 0, 0, 2)))
    if audit.scaler_skipped:
        steps = ", ".join(str(point.step) for point in audit.scaler_skipped[-_SHOWN_VALUES:])
        earlier = "... " if len(audit.scaler_skipped) > _SHOWN_VALUES else ""
        _section(console, f"updates that the gradient scaler dropped: {len(audit.scaler_skipped)}")
        console.print(f"  at steps {earlier}{steps}")


def _request(entry: report.RequestEntry) -> str:
    who = f", by {entry.who}" if entry.who else ""
    why = f": {entry.why}" if entry.why else ""
    return f"{asked_in_words(entry)}{who}{why}; {fate_in_words(entry)}"


def _attempt(entry: report.AttemptEntry) -> str:
    parts = []
    if entry.begins is None:
        parts.append("the ranks never agreed where to begin")
    else:
        reached = at_least(or_unknown(entry.reached), entry.at_least and entry.reached is not None)
        source = f"from {entry.checkpoint}, " if entry.checkpoint else ""
        source = f"with {entry.init.in_words()}, " if entry.init else source
        parts.append(f"{source}step {entry.begins.step} to {reached}")
    if entry.sharding:
        parts.append(entry.sharding.in_words())
    if entry.changed:
        parts.append(f"other than at the last start: {'; '.join(entry.changed)}")
    parts.append(entry.ended.replace("_", " ") + (f": {entry.cause}" if entry.cause else ""))
    if entry.last_snapshot:
        parts.append(entry.last_snapshot)
    parts += [*entry.nodes, *entry.remarks]
    if entry.signals:
        parts.append(f"signals {', '.join(entry.signals)}")
    if entry.steps_lost:
        lost = at_least(counted(entry.steps_lost, "step"), entry.at_least)
        parts.append(f"lost {lost}, {duration(entry.seconds_lost)}")
    if entry.restart_delay is not None:
        left = f"{entry.restart_budget_left} restarts left"
        parts.append(f"restarted after {duration(entry.restart_delay)} ({entry.restart_reason}; {left})")
    return "; ".join(parts)


def _put_aside(checkpoints: Iterable[report.CheckpointEntry], everything: bool) -> Iterator[tuple[str, str]]:
    """The checkpoints that are none, or no longer. Those in a row with one fate for one reason, as of a full disk, are
    one line, unless everything is to be shown."""

    def fate(entry: report.CheckpointEntry) -> tuple[str, str]:
        return entry.status, (entry.reason or "").replace(entry.checkpoint, "")  # paths have its name in them

    for (status, _), alike in itertools.groupby(checkpoints, fate):
        if status not in _PUT_ASIDE:
            continue
        first, *others = alike
        if everything or not others:
            yield from ((entry.checkpoint, f"{status}: {entry.reason}") for entry in (first, *others))
        else:
            last = others[-1]
            yield first.checkpoint, f"to {last.checkpoint}: {len(others) + 1} {status}, the last one: {last.reason}"


def _print_section(
    console: Console, title: str, rows: Sequence[tuple[str, str]], *, everything: bool, always: bool = False
) -> None:
    """Print labels and text from the record below a title. always: print the title also where there are none."""
    shown = rows if everything else rows[-_LATEST:]
    if rows or always:
        _section(console, title)
    if len(shown) < len(rows):
        console.print(f"  {len(rows) - len(shown)} earlier ones: --all or --json shows them")
    if rows:
        print_rows(console, [(label, quoted(text)) for label, text in shown])


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))
