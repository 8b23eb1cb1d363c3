"""Finds a gradient scaler that drops too many updates. A few dropped updates are normal."""

from collections import deque

from rollback.sentinel.verdict import Kind, Verdict

DROPPED = 20
"""This many dropped updates among the last `WINDOW` are too many. Each halves the scale: from 65536, the usual first
value, 16 in a row lead to 1. Below 1 a gradient would have to be larger than float16 allows."""
WINDOW = 100
FLOOR = 1.0
"""The scale below which it counts. A larger scale may still be adjusting."""

SCALE_COLLAPSE = "scaler-collapse"
"""The rule. What an incident by it was compared with are scales, and no losses."""


class ScaleWatch:
    """Counts dropped updates. It uses reduced values only, so all ranks get the same. A restore resets it."""

    def __init__(self) -> None:
        self._dropped: deque[int] = deque()
        self._scales: deque[float] = deque(maxlen=DROPPED)

    def update(self, step: int, dropped: bool, scale: float | None) -> Verdict | None:
        """A verdict, once for each collapse of the scale. scale: after the update; None: not known."""
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
        return Verdict(Kind.NONFINITE, step, onset, SCALE_COLLAPSE, "grad_norm", value, threshold, text, window)

    def restart(self) -> None:
        """Reset the count."""
        self._dropped.clear()
        self._scales.clear()
