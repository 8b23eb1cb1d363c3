"""Verdicts in words that a person can check: rule, value, threshold, and the values that they were measured against."""

import math

from rollback.config import Objective
from rollback.sentinel.excursion import Excursion, ExcursionEvidence, MeasuredObservation, Rule, Scale
from rollback.sentinel.slow import Slow
from rollback.sentinel.verdict import NORM_COLLAPSE, Blip, Kind, Verdict

_WITNESS_IN_WORDS = {"loss": "the loss", "grad_norm": "the gradient norm"}


def nonfinite(step: int, onset: int, witness: str, value: float, window: tuple[float, ...]) -> Verdict:
    """A loss or gradient norm that is NaN or infinite."""
    text = f"{_WITNESS_IN_WORDS[witness]} is {value} at step {step}"
    if onset < step:
        text += f"; the loss has stood out since step {onset}"
    rule = f"nonfinite-{witness.replace('_', '-')}"
    return Verdict(Kind.NONFINITE, step, onset, rule, witness, value, None, text, window)


def watch(kind: Kind, reading: MeasuredObservation, excursion: Excursion, scale: Scale) -> Verdict:
    """An excursion that has begun, called or not."""
    text = (
        f"loss {reading.loss:.6g} at step {reading.step}, normally {scale.level:.6g} with noise {scale.noise:.3g}; "
        f"standing out since step {excursion.began}, when it exceeded {excursion.threshold:.6g}"
    )
    return Verdict(kind, reading.step, excursion.onset, excursion.rule, "loss", reading.loss, excursion.threshold, text)


def spike(
    step: int, excursion: Excursion, found: Rule, evidence: ExcursionEvidence, scale: Scale, window: tuple[float, ...]
) -> Verdict:
    """An excursion that is called now. The value is the mean loss over the observations that decided it."""
    above = f"above {found.threshold:.6g}"
    units = f"{(found.threshold - scale.level) / scale.noise:.3g} noise units above the level"
    support = evidence.support if evidence.support is not None else 0.0
    undone = f"which undoes {'all' if evidence.lost >= 1 else f'{evidence.lost:.0%} of'} progress since the first steps"
    because = {
        "loss-high": f"{above}, {units}",
        "loss-and-grad-norm-high": (
            f"{above}, {units}, and the gradient norm (logarithm) began {support:.1f} of its noise units up"
        ),
        "loss-back-at-start": f"{above}, {undone}",
        "loss-stays-high": f"{above}, {units}, and it does not fall",
        "loss-beyond-seen": f"{above}, far beyond all losses seen",
        "loss-beyond-start": f"{above}, {undone}: more than a new learning rate, resume or phase explains",
    }[found.rule]
    led = excursion.onset < excursion.began
    forerunner = f" (a blip or the gradient norm did at step {excursion.onset})" if led else ""
    text = (
        f"the loss has stood out since step {excursion.began}{forerunner}: its mean over the last {evidence.count} "
        f"observations is {evidence.loss:.6g}, {because} (level {scale.level:.6g}, noise {scale.noise:.3g})"
    )
    return Verdict(Kind.SPIKE, step, excursion.onset, found.rule, "loss", evidence.loss, found.threshold, text, window)


def stands_out(
    reading: MeasuredObservation, found: Rule, scale: Scale, norm: float | None, window: tuple[float, ...]
) -> Verdict:
    """An observation that stands out by itself, in a screen."""
    normally = f"normally {scale.level:.6g} with noise {scale.noise:.3g}"
    witness, value = "loss", reading.loss
    text = f"loss {reading.loss:.6g} at step {reading.step}, {normally}; from {found.threshold:.6g} on"
    match found.rule:
        case "stands-out-loss":
            text += " it stands out"
        case "stands-out-loss-and-grad-norm":
            text += f" it stands out together with a gradient norm (logarithm) {reading.norm_height:.1f} noise units up"
        case "stands-out-lost":
            text += " it stands out even here, where a rise is no surprise"
        case "stands-out-low":
            text = (
                f"loss {reading.loss:.6g} at step {reading.step}, {normally}; below {found.threshold:.6g} it stands "
                "out, as the losses did before the trouble: a stretch that is too easy"
            )
        case _:
            witness, value = "grad_norm", norm if norm is not None else 0.0
            text = (
                f"gradient norm {value:.6g} at step {reading.step}: its logarithm is {found.threshold:.3g} noise units "
                "or more above its level"
            )
    return Verdict(Kind.SPIKE, reading.step, reading.step, found.rule, witness, value, found.threshold, text, window)


def norm_beyond(step: int, onset: int, log_norm: float, bound: float, window: tuple[float, ...]) -> Verdict:
    """Gradient norms far beyond all that were seen."""
    value, threshold = _exp(log_norm), _exp(bound)
    text = f"the gradient norm is {value:.3g}, and the last five were above {threshold:.3g}: far beyond all norms seen"
    return Verdict(Kind.SPIKE, step, onset, "grad-norm-beyond-seen", "grad_norm", value, threshold, text, window)


def advice(verdict: Verdict, kind: Kind, objective: Objective) -> Verdict:
    """What a rule says that rests on a level, where the loss has none. objective: as it was told."""
    why = (
        "this loss does not seem to measure progress (if it does, say so: --objective supervised)"
        if objective == "auto"
        else f"objective {objective!r} was told: such a loss measures no progress"
    )
    text = f"{verdict.explanation}; not called, since {why}"
    return Verdict(kind, verdict.step, verdict.onset, verdict.rule, advice=text)


def drift(step: int, found: Slow) -> Verdict:
    """A slow rise that is called now."""
    rule, how = ("loss-stays-high", "stays up") if found.stays else ("loss-drift", "still rises")
    text = (
        f"the loss has risen since about step {found.onset} and {how}: the median of the last 16 accepted losses is "
        f"{found.value:.6g}, the lowest such median was {found.reference:.6g}, and from {found.threshold:.6g} on a "
        "rise is called"
    )
    return Verdict(Kind.SPIKE, step, found.onset, rule, "loss", found.value, found.threshold, text, found.window)


def collapse(step: int, found: Slow) -> Verdict:
    """A dead plateau that is called now."""
    text = (
        f"since about step {found.onset} the gradient norm has collapsed to {found.value:.3g} (called below "
        f"{found.threshold:.3g}), while the loss is up by {found.reference:.3g}: training seems stuck"
    )
    return Verdict(
        Kind.SPIKE,
        step,
        found.onset,
        NORM_COLLAPSE,
        "grad_norm",
        found.value,
        found.threshold,
        text,
        found.window,
    )


def _exp(logarithm: float) -> float:
    return math.exp(min(logarithm, 700.0))


def ended(excursion: Excursion, persisted: bool) -> Blip:
    """An excursion that ended without a call."""
    fate = "accepted" if persisted else "recovered"
    return Blip(excursion.began, excursion.last_high, excursion.peak, excursion.threshold, excursion.rule, fate)
