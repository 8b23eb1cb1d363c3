"""A gradient scaler whose dropped updates do not stop. One now and then is how it works; this is about the others."""

from __future__ import annotations

from collections import deque

from rollback.sentinel import Kind, Verdict

DROPPED = 20
"""Dropped updates among the last `WINDOW` that are too many. Each halves the scale: from 65536, its usual start, 16 in
a row lead down to 1, below which gradients that float16 cannot hold would have to be larger than itself can."""
WINDOW = 100
FLOOR = 1.0
"""Scale from which on it counts; while it is higher the scaler may still be finding its level."""


class ScaleWatch:
    """Counts dropped updates. A function of reduced values, so that all ranks say the same. Forgotten on a restore."""

    def __init__(self) -> None:
        self._dropped: deque[int] = deque()
        self._scales: deque[float] = deque(maxlen=DROPPED)

    def update(self, step: int, dropped: bool, scale: float | None) -> Verdict | None:
        """A verdict if the scale has collapsed, once for each collapse. scale: after the update; None: not known."""
        while self._dropped and self._dropped[0] <= step - WINDOW:
            self._dropped.popleft()
        if scale is not None:
            self._scales.append(scale)
        if not dropped:
            return None
        self._dropped.append(step)
        count, onset = len(self._dropped), self._dropped[0]
        if count < DROPPED or (scale is not None and scale >= FLOOR):
            return None
        window = tuple(self._scales)
        self.restart()
        known = "" if scale is None else f" and brought its scale down to {scale:.4g}, below {FLOOR:g}"
        text = (
            f"the gradient scaler has dropped {count} of the last {min(WINDOW, step - onset + 1)} updates{known}: "
            f"since step {onset} the gradient has something in it that is not finite at any scale"
        )
        value, threshold = (float(count), float(DROPPED)) if scale is None else (scale, FLOOR)
        return Verdict(Kind.NONFINITE, step, onset, "scaler-collapse", "grad_norm", value, threshold, text, window)

    def restart(self) -> None:
        """Count anew."""
        self._dropped.clear()
        self._scales.clear()
