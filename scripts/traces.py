"""Labelled loss traces: what a trace is, and reading a directory of them (`labels.json` and `data/NAME.npz`)."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollback.sentinel import Hint

Array = np.ndarray
Label = tuple[int, int, str]

SLOW = {"lr_ramp", "sgd_lm", "ramp", "wrong-labels", "dead-units", "weight-decay", "rising-lr", "routing"}
"""Kinds of traces whose divergences are ramps or flat rises, and not jumps."""


@dataclass
class Trace:
    """A log with what is known about it. Labels are half-open ranges of observation indices with a kind."""

    name: str
    source: str
    kind: str
    step: Array
    loss: Array
    norm: Array | None
    labels: list[Label] = field(default_factory=list)
    onset_seen: bool = False
    """The onset was read off the curve, not injected: calls a little before it count."""
    hints: dict[int, Hint] = field(default_factory=dict)
    """What a guard would have known, by index."""
    family: str = ""
    """The field that it comes from."""

    @property
    def slow(self) -> bool:
        """Whether its divergences are slow."""
        return self.kind in SLOW


def load_traces(directory: Path) -> list[Trace]:
    """Recorded or made traces. Hints are those given, else what labels and kinds imply."""
    labels = json.loads((directory / "labels.json").read_text())["traces"]
    traces = []
    for name, entry in labels.items():
        with np.load(directory / "data" / f"{name}.npz", allow_pickle=False) as data:
            step, loss, norm = (
                data["step"],
                data["loss"].astype(float),
                data["gn"].astype(float) if "gn" in data else None,
            )
        marks = [(first, end, kind) for first, end, kind in entry["labels"]]
        family = entry.get("family") or entry.get("config", {}).get("task") or entry["kind"]
        trace = Trace(
            name, entry["source"], entry["kind"], step, loss, norm, marks, entry["onset"] == "seen", family=family
        )
        if "hints" in entry:
            trace.hints = {int(at): Hint[hint] for at, hint in entry["hints"].items()}
        else:
            trace.hints = _implied(entry["kind"], marks)
        traces.append(trace)
    return traces


def _implied(kind: str, marks: list[Label]) -> dict[int, Hint]:
    hints: dict[int, Hint] = {}
    for first, end, label in marks:
        if label == "shift":
            hints[first] = Hint.ANNOUNCED
        elif label == "bump":
            hints[first] = Hint.RESUMED if "resume" in kind else Hint.LR_CHANGED
        elif label == "amp":
            hints.update(dict.fromkeys(range(first, end), Hint.SCALER_SKIPPED))
    return hints
