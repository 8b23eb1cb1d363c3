"""The report as one HTML file, from a run directory; and where the time of a run went.

Nothing in a run directory is trusted. Every text passes through `printable` (no control, bidirectional or ANSI
characters) and is escaped by the template; what the script reads is JSON in which no character can end its element;
the policy in the page's head allows this page's own style and script, by their hashes, and nothing else.
"""

import base64
import hashlib
import json
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rollback import __version__
from rollback.facts.training import Incident
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import RunContents, read_run_contents
from rollback.inspect.audit.report import AuditReport
from rollback.inspect.record.reading import readable, require_run_directory
from rollback.report.cards import cards
from rollback.report.chart import DrawnCurves, chart, curves_of
from rollback.report.tables import blocks
from rollback.rundir.journal.journal import of_kind
from rollback.rundir.metrics.metric_columns import joined, last_steps, metric_pieces
from rollback.rundir.paths import RunPaths
from rollback.terminal.messages import printable
from rollback.terminal.quantities import at_least, duration

_ENDINGS = {
    "finished": "good", "preempted": "warn", "structural": "bad", "no_checkpoint": "bad", "gave_up": "bad",
}  # fmt: skip
_NO_ENDING = {"tone": "calm", "badge": "no end on record", "text": "It is running, or died without a word."}


def make_page(root: Path) -> str:
    """The report of a run. Raises as `read_run_contents`."""
    contents, curves = _read(root)
    return render(compile_audit(contents), contents, curves)


def _read(root: Path) -> tuple[RunContents, DrawnCurves | None]:
    """What is on record, and the curves. The metrics, of which a long run has as much as of facts, are let go."""
    notices: list[str] = []
    columns = joined(readable(require_run_directory(root).metrics, metric_pieces, notices))
    contents = read_run_contents(root, last_steps([columns]))
    contents.notices.extend(notices)
    return contents, curves_of(columns, (fact for _, fact in of_kind(contents.records, Incident)))


def render(audit: AuditReport, contents: RunContents, curves: DrawnCurves | None) -> str:
    """The page of an audit, what it was made from, and the curves."""
    drawn, around = chart(audit, contents.records, curves) if curves is not None else (None, None)
    tables = list(blocks(audit, contents.records, RunPaths(Path(contents.directory))))
    spent, shown = _account(audit), cards(audit, contents)
    style, script = _asset("report.css"), _asset("report.js")
    sections = [("curve", "Curve"), *([("account", "Time")] if spent else []), ("incidents", "Incidents")]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    return environment.from_string(_asset("report.html")).render(
        policy=Markup(_policy(style, script)),
        style=Markup(style),
        script=Markup(script),
        data=Markup(_embedded(drawn)),
        name=Path(audit.run.directory).resolve().name,
        directory=audit.run.directory,
        ending=_ending(audit),
        facts=_facts(audit),
        sections=[*sections, *((block.anchor, block.title) for block in tables)],
        notices=audit.notices,
        chart=around,
        account=spent,
        incidents=shown,
        incidents_total=len(audit.incidents),
        rewinds=audit.totals.incidents_asked > 0,
        tables=tables,
        version=__version__,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    )


def _printable(value: Any) -> Any:
    """What every expression of the template passes through before it is escaped."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(map(printable, value.split("\n")))
    return value


def _asset(name: str) -> str:
    return files("rollback.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing is loaded, sent or embedded; the two texts of ours are allowed by what they are."""
    hashes = {text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)}
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[style]}'; script-src 'sha256-{hashes[script]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(drawn: dict[str, Any] | None) -> str:
    """JSON in ASCII, without the characters that mean something to an HTML parser."""
    text = _ascii(drawn)
    if "\\" in text or not text.isprintable():  # else every text in it is printable: most of it is curves in base 64
        text = _ascii(_made_printable(drawn))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _ascii(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _made_printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _made_printable(item) for key, item in value.items()}
    return [_made_printable(item) for item in value] if isinstance(value, list) else value


def _ending(audit: AuditReport) -> dict[str, str]:
    if audit.ending is None:
        return _NO_ENDING
    ending = audit.ending
    at = f" at step {ending.step:,}" if ending.step is not None else ""
    return {
        "tone": "warn" if ending.how == "finished" and not ending.well else _ENDINGS[ending.how],
        "badge": ending.how.replace("_", " ") + at,
        "text": ending.account,
    }


def _facts(audit: AuditReport) -> list[tuple[str, str]]:
    totals = audit.totals
    spread = audit.attempts[-1].sharding if audit.attempts else None
    return [
        ("steps that count", at_least(f"{totals.steps:,}", totals.steps_at_least)),
        ("steps undone", at_least(f"{totals.steps_lost:,}", totals.steps_lost_at_least)),
        ("goodput", "-" if totals.goodput is None else f"{totals.goodput:.1%}"),
        ("incidents", f"{totals.incidents - totals.incidents_asked:,}"),
        *([("rewinds asked for", f"{totals.incidents_asked:,}")] if totals.incidents_asked else []),
        ("batches skipped", f"{totals.skipped_batches:,}"),
        ("attempts", f"{totals.attempts:,}"),
        ("ranks", "-" if audit.run.world_size is None else f"{audit.run.world_size:,}"),
        *([("sharded", f"{spread.sharded:,} of {spread.parameters:,} parameters")] if spread else []),
        ("on record", duration(totals.seconds)),
    ]


class TimePart(NamedTuple):
    """A part of a run's wall-clock time. key: for the style. what: in words. steps: updates done in it, where the
    record tells."""

    key: str
    what: str
    seconds: float
    steps: int | None


def time_parts(audit: AuditReport) -> list[TimePart]:
    """Where the time went, at the prices of `rollback.inspect.record.cost`, in parts that add up to the whole; none
    where there is no time on record."""
    totals = audit.totals
    if totals.seconds is None:
        return []
    rewinds = sum(entry.seconds_lost or 0.0 for entry in audit.incidents)
    restarts = sum(entry.seconds_lost or 0.0 for entry in audit.attempts)
    rest = max(0.0, totals.seconds - rewinds - restarts - totals.seconds_hung - totals.seconds_down)
    undone = sum(entry.steps_lost or 0 for entry in audit.incidents)
    lost = sum(entry.steps_lost or 0 for entry in audit.attempts)
    return [
        TimePart("healthy", "training that counts", rest, totals.steps),
        TimePart("rewinds", "undone by rewinds", rewinds, undone),
        TimePart("restarts", "undone by restarts", restarts, lost),
        TimePart("stalled", "hung: no rank made progress", totals.seconds_hung, None),
        TimePart("down", "down between attempts", totals.seconds_down, None),
    ]


def _account(audit: AuditReport) -> dict[str, Any] | None:
    """The parts with what the bar needs: places from 0 to 1000."""
    if not (spent := time_parts(audit)):
        return None
    seconds = sum(part.seconds for part in spent)
    parts, x = [], 0.0
    for part in spent:
        width = 1000 * part.seconds / seconds if seconds else 0.0
        parts.append(
            {
                "key": part.key,
                "what": part.what,
                "time": duration(part.seconds),
                "share": f"{width / 10:.1f}%",
                "steps": "" if part.steps is None else f"{part.steps:,}",
                "x": round(x, 2),
                "width": round(width, 2),
            }
        )
        x += width
    unknown = sum(entry.restored is not None and entry.seconds_lost is None for entry in audit.incidents)
    unknown += sum(bool(entry.steps_lost) and entry.seconds_lost is None for entry in audit.attempts)
    note = f"The price of {unknown} events is not on record; it stands under what counts."
    return {
        "parts": parts,
        "time": duration(seconds),
        "steps": f"{sum(part.steps or 0 for part in spent):,}",
        "label": "; ".join(f"{part['what']} {part['share']}" for part in parts),
        "note": note if unknown else "",
    }
