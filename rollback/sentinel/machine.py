"""A first sentinel: a robust z-score of the loss with patience, never fed what it rejected."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, Literal

from rollback.sentinel.verdict import Blip, Hint, Kind, Observation, Verdict

Sensitivity = Literal["low", "normal", "high"]

_Z = {"low": 9.0, "normal": 6.5, "high": 5.0}
_PATIENCE = {"low": 8, "normal": 5, "high": 4}
_WINDOW = 64
_WARMUP = 16
_ACCEPT = 100
_MAD_TO_SIGMA = 1.4826


class Sentinel:
    """Judges one observation a step; a deterministic pure function of its state and the observation."""

    def __init__(self, sensitivity: Sensitivity = "normal") -> None:
        self.sensitivity = sensitivity
        self._z = _Z[sensitivity]
        self.patience = _PATIENCE[sensitivity]
        self._accepted: deque[float] = deque(maxlen=_WINDOW)
        self._residuals: deque[float] = deque(maxlen=2 * _WINDOW)
        self._rejected: list[tuple[int, float]] = []
        self._called = False
        self._nonfinite_since: int | None = None

    def update(self, observation: Observation) -> Verdict:
        """The verdict on `observation`; must be called once per step, on every rank with the same numbers."""
        step = observation.step
        witnesses = (("loss", observation.loss), ("grad_norm", observation.grad_norm))
        for witness, value in witnesses:
            if value is None or math.isfinite(value):
                continue
            if witness == "grad_norm" and Hint.SCALER_SKIPPED in observation.hints:
                continue
            if self._nonfinite_since is None:
                self._nonfinite_since = step
            rule = f"nonfinite-{witness.replace('_', '-')}"
            text = f"{witness} is {value} at step {step}"
            return Verdict(
                Kind.NONFINITE, step, step, rule, witness, value, None, text, tuple(self._accepted)
            )
        self._nonfinite_since = None
        if observation.loss is None:
            return Verdict(Kind.HEALTHY, step)
        return self._judge_loss(step, observation.loss)

    def _judge_loss(self, step: int, loss: float) -> Verdict:
        if len(self._accepted) < _WARMUP:
            self._accept(loss)
            return Verdict(Kind.HEALTHY, step)
        level = median(list(self._accepted)[-_WARMUP:])
        spread = _MAD_TO_SIGMA * median(abs(r) for r in self._residuals)
        threshold = level + self._z * max(spread, 1e-3 * abs(level))
        if loss <= threshold:
            ended = self._end("recovered", threshold)
            self._accept(loss)
            return Verdict(Kind.HEALTHY, step, ended=ended)
        self._rejected.append((step, loss))
        onset = self._rejected[0][0]
        if len(self._rejected) >= _ACCEPT:
            ended = self._end("accepted", threshold)
            return Verdict(Kind.HEALTHY, step, ended=ended)
        text = (
            f"loss {loss:.6g} above {threshold:.6g} ({len(self._rejected)} of the last steps, onset {onset})"
        )
        if len(self._rejected) >= self.patience and not self._called:
            self._called = True
            return Verdict(
                Kind.SPIKE,
                step,
                onset,
                "loss-spike",
                "loss",
                loss,
                threshold,
                text,
                tuple(self._accepted),
            )
        return Verdict(Kind.WATCH, step, onset, "loss-spike", "loss", loss, threshold, text)

    def _accept(self, loss: float) -> None:
        if self._accepted:
            self._residuals.append(loss - median(list(self._accepted)[-_WARMUP:]))
        self._accepted.append(loss)

    def _end(self, fate: str, threshold: float) -> Blip | None:
        if not self._rejected:
            return None
        steps, values = zip(*self._rejected, strict=True)
        blip = Blip(steps[0], steps[-1], max(values), threshold, "loss-spike", fate)
        if fate == "accepted":
            self._accepted.clear()
            self._accepted.extend(values[-_WINDOW:])
        ended = None if self._called and fate == "recovered" else blip
        self._rejected.clear()
        self._called = False
        return ended

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next verdict depends on, as JSON types."""
        return {
            "accepted": list(self._accepted),
            "residuals": list(self._residuals),
            "rejected": [list(pair) for pair in self._rejected],
            "called": self._called,
            "nonfinite_since": self._nonfinite_since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, as `state_dict` gave it."""
        self._accepted = deque(state["accepted"], maxlen=_WINDOW)
        self._residuals = deque(state["residuals"], maxlen=2 * _WINDOW)
        self._rejected = [(step, loss) for step, loss in state["rejected"]]
        self._called = state["called"]
        self._nonfinite_since = state["nonfinite_since"]
