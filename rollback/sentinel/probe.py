"""When the curve alone cannot tell what a rise means, and what the answer of the model says.

A rise that stays below all rules may be harder data, or damage. The model knows: a *probe batch* is one that it was
trained on in a healthy time. A damaged model does worse on it, and a model that meets harder data does not.

The same batch is compared with itself, on the same random numbers. So neither how hard it is nor dropout counts, and a
fraction of what the curve has risen by decides. Between the two looks the model may have improved, so there are two
measures: the batch's loss now and then; and the same with what the level had fallen by in between. Above half of the
curve's rise by the first, and above 1.5 noise units, the model is damaged: so much a healthy model's loss of one batch
hardly ever moves (`scripts/bench_probe.py`). Below half by the second, it is not. Else the answer is left open.
"""

import math
from dataclasses import dataclass
from enum import Enum

from rollback.sentinel.excursion import LOW, Excursion, Scale
from rollback.sentinel.verdict import Kind, Verdict

ASKED_EVERY = 200
"""Steps between two questions, at least."""
LASTS = 24
"""Readings of an excursion, none of them low, behind which the model is asked; from so many a new level can be
learned."""
_HALF = 0.5
_LEAST_DAMAGE = 1.5  # noise units


class ProbeFinding(str, Enum):
    """What the model's answer says."""

    MODEL = "model"
    """The model has lost what it knew."""
    DATA = "data"
    """The model is what it was; the data are harder."""
    UNCLEAR = "unclear"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A rise that the curve does not explain."""

    onset: int
    """The step at which it began."""
    level: float
    """The loss before it."""
    now: float
    noise: float

    @property
    def rise(self) -> float:
        return self.now - self.level

    @property
    def least_damage(self) -> float:
        """By how much the loss of a known batch is up at least, where the model is damaged."""
        return max(_HALF * self.rise, _LEAST_DAMAGE * self.noise)

    def in_words(self) -> str:
        units = f"{self.rise / self.noise:.2g} noise units"
        return f"the loss is up since about step {self.onset}, from {self.level:.6g} to {self.now:.6g} ({units})"


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The losses of one batch: when it was trained on, and now."""

    kept: int
    """The step in which it was trained on."""
    level: float
    """The level at that step."""
    then: float
    now: float

    def finding(self, question: OpenQuestion) -> ProbeFinding:
        """What it says about a rise. A loss that is not finite now is damage."""
        risen = self.now - self.then
        if not math.isfinite(risen) or risen > question.least_damage:
            return ProbeFinding.MODEL
        unharmed = risen + max(0.0, self.level - question.level) < _HALF * question.rise
        return ProbeFinding.DATA if unharmed else ProbeFinding.UNCLEAR

    def in_words(self, question: OpenQuestion) -> str:
        means = {
            ProbeFinding.MODEL: "the model is damaged",
            ProbeFinding.DATA: "the model is what it was, and the data are harder",
            ProbeFinding.UNCLEAR: "that is too little for damage and too much for none",
        }[self.finding(question)]
        return f"the probe batch of step {self.kept} had loss {self.then:.6g}, has {self.now:.6g} now: {means}"


def about_excursion(excursion: Excursion, scale: Scale) -> OpenQuestion | None:
    """The question about an excursion that has lasted, and does not fall."""
    if excursion.count < LASTS or excursion.lows:
        return None
    last = list(excursion.recent)[-LASTS:]
    half = LASTS // 2
    falls = sum(each.loss for each in last[half:]) < sum(each.loss for each in last[:half])
    if falls or any(each.height <= LOW for each in last):
        return None
    return OpenQuestion(excursion.onset, scale.level, sum(each.loss for each in last) / LASTS, scale.noise)


def damaged(step: int, question: OpenQuestion, answer: ProbeAnswer, window: tuple[float, ...]) -> Verdict:
    """The verdict on a model that does worse on what it knew."""
    text = f"{answer.in_words(question)}; {question.in_words()}"
    threshold = answer.then + question.least_damage
    return Verdict(Kind.DAMAGED, step, question.onset, "probe-loss", "loss", answer.now, threshold, text, window)
