"""What the page says of each incident. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from rollback.inspect.audit.contents import RunContents
from rollback.inspect.audit.report import AuditReport, IncidentEntry
from rollback.inspect.audit.text import OUTCOMES, VERDICTS, incident_rows, indices_in_words, outcome_in_words
from rollback.rundir.evidence import RankEvidence
from rollback.terminal.quantities import number

_TENSORS = 24
_BATCHES = 16
_RANKS = 8
_TONES = {"green": "good", "yellow": "warn", "red": "bad", "cyan": "calm"}
_KINDS = {"nonfinite": "not finite", "overflow": "its norm overflows", "large": "large", None: ""}
MOST = 200  # incidents
_SHOWN_OTHERWISE = {"because", "before it", "gradients"}  # above the rows, as a curve, as a table
_WIDTH, _HEIGHT, _EDGE = 300, 80, 6


def cards(audit: AuditReport, contents: RunContents) -> list[dict[str, Any]]:
    """A card for each incident; of very many, for the last ones."""
    return [_card(entry, audit, contents.evidence.get(entry.incident, {})) for entry in audit.incidents[-MOST:]]


def _card(entry: IncidentEntry, audit: AuditReport, seen: dict[int, RankEvidence]) -> dict[str, Any]:
    skipped = audit.skipped_by(entry.incident)
    ranks = sorted({rank for batch in skipped[:_BATCHES] for rank in batch.indices})[:_RANKS]
    teller = seen.get(entry.evidence.ranks[0] if entry.evidence and entry.evidence.ranks else min(seen, default=0))
    norms = teller.gradients if teller else None
    kinds = {name: kind for kind, names in norms.exploding.items() for name in names} if norms else {}
    each = norms.each if norms else []
    largest = sorted(each, key=lambda item: math.inf if math.isnan(item.norm) else item.norm, reverse=True)
    return {
        "number": entry.incident,
        "title": f"{entry.cause} {VERDICTS[entry.verdict]}",
        "tone": _TONES[OUTCOMES[entry.outcome][1]],
        "outcome": outcome_in_words(entry),
        "explanation": entry.explanation,
        "rows": [(label, words) for label, words in incident_rows(entry) if label not in _SHOWN_OTHERWISE],
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
