"""What the page says of each incident. Pure."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rollback.inspect.audit.reading import Material
from rollback.inspect.audit.report import AuditReport, IncidentEntry
from rollback.inspect.audit.text import OUTCOMES, VERDICTS, answer_in_words, indices_in_words
from rollback.rundir.evidence import RankEvidence
from rollback.terminal.quantities import duration, number
from rollback.wording import first_few

_TENSORS = 24
_BATCHES = 16
_RANKS = 8
_TONES = {"green": "good", "yellow": "warn", "red": "bad", "cyan": "calm"}
_KINDS = {"nonfinite": "not finite", "overflow": "its norm overflows", "large": "large", None: ""}
MOST = 200  # incidents
_WIDTH, _HEIGHT, _EDGE = 300, 80, 6


def cards(ledger: AuditReport, material: Material) -> list[dict[str, Any]]:
    """A card for each incident; of very many, for the last ones."""
    return [_card(entry, ledger, material.evidence.get(entry.incident, {})) for entry in ledger.incidents[-MOST:]]


def _card(entry: IncidentEntry, ledger: AuditReport, seen: dict[int, RankEvidence]) -> dict[str, Any]:
    words, style = OUTCOMES[entry.outcome]
    skipped = ledger.skipped_by(entry.incident)
    ranks = sorted({rank for batch in skipped[:_BATCHES] for rank in batch.indices})[:_RANKS]
    teller = seen.get(entry.evidence.ranks[0] if entry.evidence and entry.evidence.ranks else min(seen, default=0))
    norms = teller.gradients if teller else None
    kinds = {name: kind for kind, names in norms.exploding.items() for name in names} if norms else {}
    each = norms.each if norms else []
    largest = sorted(each, key=lambda item: math.inf if math.isnan(item.norm) else item.norm, reverse=True)
    return {
        "number": entry.incident,
        "title": f"{entry.cause} {VERDICTS[entry.verdict]}",
        "tone": _TONES[style],
        "outcome": words + (f" as incident {entry.repeated_by}" if entry.repeated_by is not None else ""),
        "explanation": entry.explanation,
        "rows": list(_rows(entry)),
        "onset": entry.onset.step,
        "detection": entry.detection.step,
        "window": _window([*entry.recent, *([] if entry.value is None else [entry.value])], entry.threshold),
        "norms": [(item.name, number(item.norm), _KINDS[kinds.get(item.name)]) for item in largest[:_TENSORS]],
        "norms_caption": teller and f"Of step {teller.gradients_step}, as rank {teller.rank} saw them; largest first",
        "tensors": norms.tensors if norms else 0,
        "ranks": ranks,
        "skipped": [
            [batch.batch, batch.epoch, batch.offset]
            + [indices_in_words(batch.indices.get(rank), everything=False) for rank in ranks]
            for batch in skipped[:_BATCHES]
        ],
        "skipped_total": len(skipped),
    }


def _rows(entry: IncidentEntry) -> Iterator[tuple[str, str]]:
    yield "onset", f"step {entry.onset.step:,}, batch {entry.onset.batch:,}"
    late = entry.detection.step - entry.onset.step
    yield (
        "detected",
        f"step {entry.detection.step:,}, batch {entry.detection.batch:,}" + (f" ({late} steps on)" if late else ""),
    )
    if entry.verdict != "requested":
        threshold = "" if entry.threshold is None else f", threshold {number(entry.threshold)}"
        yield "rule", f"{entry.rule}: value {number(entry.value)}{threshold}"
    if entry.ranks:
        yield "ranks", ", ".join(map(str, entry.ranks[:16])) + (" …" if len(entry.ranks) > 16 else "")
    if entry.evidence:
        yield "where", entry.evidence.began
    yield "answer", answer_in_words(entry)
    if entry.reason:
        yield "reason", entry.reason
    if entry.restored:
        lost = "unknown" if entry.steps_lost is None else f"{entry.steps_lost:,}"
        yield "cost", f"{lost} steps, {duration(entry.seconds_lost)}"
    if entry.evidence and (files := [batch.file for batch in entry.evidence.batches if batch.file]):
        yield "batch kept", first_few(files, 2)


def _window(values: Sequence[float], threshold: float | None) -> dict[str, Any] | None:
    """The values before an incident and the one that it was called for, as a path; crosses for those not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(values) < 2 or not finite:
        return None
    limits = [*finite, *([threshold] if threshold is not None and math.isfinite(threshold) else [])]
    low, high = min(limits), max(limits)
    logarithmic = low > 0 and high / low > 20

    def y(value: float) -> float:
        low_, high_, value_ = (math.log(v) for v in (low, high, value)) if logarithmic else (low, high, value)
        share = (value_ - low_) / (high_ - low_) if high_ > low_ else 0.5
        return round(_HEIGHT - _EDGE - share * (_HEIGHT - 2 * _EDGE), 1)

    path, cross, pen = "", "", "M"
    for place, value in enumerate(values):
        x = round(_EDGE + place * (_WIDTH - 2 * _EDGE) / (len(values) - 1), 1)
        if math.isfinite(value):
            path, pen = f"{path}{pen}{x} {y(value)}", "L"
        else:
            cross, pen = f"{cross}M{x - 4} 4l8 8m0-8l-8 8", "M"
    before = f"the {len(values) - 1} values before it, from {number(values[0])}"
    label = f"{before}, and the one it was called for, {number(values[-1])}{'; logarithmic' if logarithmic else ''}"
    shown = None if threshold is None or not math.isfinite(threshold) else y(threshold)
    return {"path": path, "cross": cross, "threshold": shown, "label": label}
