"""A stretch of observations that stand out, and the rules that call it."""

import math
from collections import deque
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from rollback.sentinel.baseline import TAIL_TO_SIGMA, Baseline
from rollback.sentinel.objective import LossHistory
from rollback.sentinel.presets import Preset
from rollback.sentinel.slow import HAS_COME_DOWN, LITTLE_LOST, STAYS_LOST

OPENS = 3.5
"""Height (noise units above the level) at which the loss alone begins an excursion."""
OPENS_SUPPORTED = 1.8
"""Height at which the loss begins an excursion when the gradient norm stands out in the same step."""
STANDS_OUT = 5.0
"""Height at which the loss of a single observation stands out by itself, in a screen: there is no second look, and a
good batch that is thrown away is lost. What `normal` calls has a mean of 6."""
LOW = 1.75
"""An observation of at most this height is not part of an excursion."""
BLIP_LASTS = 14
"""Steps within which a blip is over: four bad ones, and ten in which momentum carries them on."""
RELEARN_FROM = 32
"""Number of readings that an excursion keeps; an accepted new level is learned from them."""

_NOT_KNOWN = 1e300  # no loss stands out from this noise; it is finite, so that the state is JSON
_LEAST_NOISE_OF_PROGRESS = 0.003  # on a solved task the noise tends to zero and every ripple would stand out
_LEAST_NOISE_OF_LEVEL = 0.001
_LEAST_PROGRESS_IN_NOISE = 5.0  # less than this, and the share of it that is lost is itself noise
_SOLVED = 0.05  # share of the first losses below which ratios to the level no longer measure damage

_FEWEST = 4  # two outliers in a row are common in noisy logs, four are not
_LASTS = 64  # readings; before an excursion becomes the new level
_LASTING = 16
_HEIGHT_KEPT = 1e6  # sums must stay finite
_HEIGHT_COUNTED = 50.0  # one monstrous value must not outweigh the others
_STAYS_UP = 0.8  # of the height that it began with; harder data are learned meanwhile
_NORM_COUNTED = 12.0
_LOST_IS_SUPPORT = 0.8
_LOST_IF_SOLVED = 0.9
_LOST_BEYOND_EXCUSE = 0.75  # no restart and no resume brings a model back to where it was untrained
_BAR_WHILE_EXCUSED = 1.5
_BAR_IF_HARMLESS = 1.75  # little progress is lost and the norm is quiet: harder data look so


class MeasuredObservation(NamedTuple):
    """One observation measured against the baseline."""

    step: int
    loss: float
    log_norm: float | None
    height: float
    """Loss above its level, in noise units."""
    lost: float
    """Share of the progress since the first losses that this loss would undo; 0 while there is little to lose."""
    norm_height: float | None
    """Log gradient norm above its level, in its noise units; None where unknown."""

    def stands_out(self, preset: Preset) -> bool:
        """Whether an excursion begins here: by the loss alone, or by loss and gradient norm together."""
        supported = self.norm_height is not None and self.norm_height > preset.support
        return self.height > (OPENS_SUPPORTED if supported else OPENS)

    @property
    def norm_stands_out(self) -> bool:
        """Whether the gradient norm stands out by itself, whatever the loss is."""
        return self.norm_height is not None and self.norm_height >= _NORM_COUNTED


class Scale(NamedTuple):
    """The units in which losses are measured at present."""

    level: float
    noise: float
    """Never zero, and never below what matters on this loss curve."""
    progress: float
    """First losses minus level; 0 if the loss has not come down by much more than its noise."""
    solved: bool
    """The level is so near zero that ratios to it mean nothing: only a return to the first losses is damage."""

    @classmethod
    def of(cls, baseline: Baseline, start: float, seen: LossHistory) -> "Scale":
        """The scale from a baseline, the typical first loss, and what was seen."""
        level = baseline.level
        progress = max(0.0, start - level)
        least = max(_LEAST_NOISE_OF_PROGRESS * progress, _LEAST_NOISE_OF_LEVEL * abs(level), math.ulp(0.0))
        noise = max(baseline.noise(), least)
        measurable = progress > _LEAST_PROGRESS_IN_NOISE * noise
        if not measurable and baseline.mostly_zero:  # the few others are not in the noise, or soon no longer
            noise = min(max(noise, seen.largest / TAIL_TO_SIGMA), _NOT_KNOWN)
        return cls(level, noise, progress if measurable else 0.0, measurable and 0 <= level < _SOLVED * start)

    def read(self, step: int, loss: float, log_norm: float | None, norm_height: float | None) -> MeasuredObservation:
        """Measure an observation. Heights are limited to the range that counts."""
        above = loss - self.level
        return MeasuredObservation(
            step,
            loss,
            log_norm,
            max(-_HEIGHT_KEPT, min(above / self.noise, _HEIGHT_KEPT)),
            max(-_HEIGHT_KEPT, min(above / self.progress, _HEIGHT_KEPT)) if self.progress else 0.0,
            None if norm_height is None else max(-_NORM_COUNTED, min(norm_height, _NORM_COUNTED)),
        )

    @property
    def known(self) -> bool:
        """Whether anything says what is large: not where the loss has hardly ever been other than zero."""
        return self.noise < _NOT_KNOWN

    def loss_at(self, height: float) -> float:
        """The loss that is `height` noise units above the level."""
        return self.level + height * self.noise


@dataclass(frozen=True, slots=True)
class ExcursionEvidence:
    """Means over the last `count` observations of an excursion, all of them high."""

    count: int
    loss: float
    least: float
    """The lowest of the losses."""
    height: float
    lost: float
    support: float | None
    """Mean height of the log gradient norm in the first observations; None where no norm is known."""
    returning: bool
    """It falls, and will be low again while it may still be a blip."""


@dataclass(slots=True)
class Excursion:
    """An excursion begins with a reading that stands out. It keeps no more than is needed to judge it and to learn from
    it."""

    onset: int
    """Where the trouble began: with the excursion, or with its forerunner."""
    began: int
    """The first of its own steps: the one that stood out, or the first of the raised ones directly before it."""
    rule: str
    """The rule that began it: `loss-high` or `loss-and-grad-norm-high`."""
    threshold: float
    """The loss that its first reading exceeded."""
    count: int = 0
    lows: int = 0
    """Number of low readings in a row, up to now."""
    last_high: int = 0
    peak: float = -math.inf
    early: float = 0.0
    """Sum of the first 16 heights."""
    explained: bool = False
    """A hint came with its first readings."""
    held: bool = False
    """A rule held while it seemed to be on its way back."""
    advised: bool = False
    """It would have been called if the loss measured progress."""
    opening: list[float] = field(default_factory=list)
    """Norm heights of the first readings: the gradient norm rises early, and is back while the loss is still high."""
    recent: deque[MeasuredObservation] = field(default_factory=lambda: deque(maxlen=RELEARN_FROM))

    @classmethod
    def begin(cls, onset: int, reading: MeasuredObservation, scale: Scale, patience: int) -> "Excursion":
        """An excursion with this first reading; `onset` may be a few steps earlier."""
        alone = reading.height > OPENS
        excursion = cls(
            onset,
            began=onset,
            rule="loss-high" if alone else "loss-and-grad-norm-high",
            threshold=scale.loss_at(OPENS if alone else OPENS_SUPPORTED),
            last_high=reading.step,
            peak=reading.loss,
        )
        excursion.add(reading, patience)
        return excursion

    def add(self, reading: MeasuredObservation, patience: int) -> None:
        """Add the next reading, high or low."""
        self.count += 1
        if self.count <= _LASTING:
            self.early += min(reading.height, _HEIGHT_COUNTED)
        self.recent.append(reading)
        if len(self.opening) < patience and reading.norm_height is not None:
            self.opening.append(reading.norm_height)
        if reading.height <= LOW:
            self.lows += 1
            return
        self.lows = 0
        self.last_high = reading.step
        self.peak = max(self.peak, reading.loss)

    def evidence(self, patience: int) -> ExcursionEvidence | None:
        """Evidence from the last `patience` readings if all of them are high, else None.

        Patience is in steps: in a log with a line every few steps, one reading less covers as many steps.
        """
        if self.lows:
            return None
        fewest = max(_FEWEST, patience - 1)
        sparse = self.count >= fewest and self.recent[-1].step - self.recent[-fewest].step >= patience
        needed = fewest if sparse and self.count < patience else patience
        last = list(self.recent)[-needed:]
        if self.count < needed or any(reading.height <= LOW for reading in last):
            return None
        lost = [reading.lost for reading in last]
        opening = self.opening[:needed]
        return ExcursionEvidence(
            count=needed,
            loss=sum(reading.loss / needed for reading in last),
            least=min(reading.loss for reading in last),
            height=sum(min(reading.height, _HEIGHT_COUNTED) for reading in last) / needed,
            lost=(min(lost) + sum(lost) / needed) / 2,
            support=sum(opening) / len(opening) if opening else None,
            returning=last[-1].lost < _LOST_IS_SUPPORT and _returns(last, by=self.began + BLIP_LASTS),
        )

    def judged(
        self, evidence: ExcursionEvidence, preset: Preset, scale: Scale, excuse: "Excuse", *, clipped: bool
    ) -> "Rule | None":
        """The rule that calls it now, or None. What was advised is not said again. That a rule holds while the loss
        seems to be on its way back is only remembered: it may be a blip."""
        if self.advised:
            return None
        found = judge(evidence, preset, scale, excuse, held=self.held, clipped=clipped)
        if not evidence.returning:
            return found
        self.held |= found is not None
        return None

    def lasting(self) -> ExcursionEvidence | None:
        """Evidence from the last 16 readings if it has lasted for long and does not fall, else None."""
        if self.count < _LASTS or self.lows:
            return None
        heights = [min(reading.height, _HEIGHT_COUNTED) for reading in self.recent]
        before, now = heights[:_LASTING], heights[-_LASTING:]
        last = list(self.recent)[-_LASTING:]
        if sum(now) < sum(before) or sum(now) < _STAYS_UP * self.early:
            return None
        return ExcursionEvidence(
            count=_LASTING,
            loss=sum(reading.loss / _LASTING for reading in last),
            least=min(reading.loss for reading in last),
            height=sum(now) / _LASTING,
            lost=sum(reading.lost for reading in last) / _LASTING,
            support=None,
            returning=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "recent": [list(reading) for reading in self.recent]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Excursion":
        """The excursion that `state_dict` wrote."""
        recent = deque((MeasuredObservation(*row) for row in state["recent"]), maxlen=RELEARN_FROM)
        known = {name: value for name, value in state.items() if name != "highest"}  # of earlier versions
        return cls(**{"began": state["onset"], **known, "opening": list(state["opening"]), "recent": recent})


class Excuse(Enum):
    """What a hint explains of an excursion."""

    NONE = "none"
    NEAR = "near"
    """A hint came not long before it, but it did not begin with the hint: the bar is raised."""
    EXPLAINED = "explained"
    """It began with the hint, so only what no hint can explain is called."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule that calls an excursion, and the mean loss above which the rule holds."""

    rule: str
    threshold: float


def judge(
    evidence: ExcursionEvidence, preset: Preset, scale: Scale, excuse: Excuse, *, held: bool, clipped: bool
) -> Rule | None:
    """The rule that holds, or None. held: one held before, while the excursion seemed to be on its way back. clipped:
    the gradient norm cannot rise, so that it is quiet says nothing."""
    if excuse is Excuse.EXPLAINED:
        return _found("loss-beyond-start", evidence, scale, LOW, _LOST_BEYOND_EXCUSE)
    if scale.solved:
        return _found("loss-back-at-start", evidence, scale, LOW, _LOST_IF_SOLVED)
    bar = _BAR_WHILE_EXCUSED if excuse is Excuse.NEAR else 1.0
    supported = evidence.support is not None and evidence.support > preset.support
    quiet = evidence.support is not None and not supported and not clipped
    harmless = quiet and scale.progress > 0 and evidence.lost <= LITTLE_LOST
    found = _found("loss-high", evidence, scale, (_BAR_IF_HARMLESS if harmless else bar) * preset.alone)
    if found is None and supported:
        found = _found("loss-and-grad-norm-high", evidence, scale, bar * preset.supported)
    found = found or _found("loss-back-at-start", evidence, scale, bar * preset.supported, _LOST_IS_SUPPORT)
    if found is None and held:
        lost = STAYS_LOST if scale.progress else None
        found = _found("loss-stays-high", evidence, scale, bar * preset.supported, lost)
    return found


def judge_lasting(
    evidence: ExcursionEvidence, preset: Preset, scale: Scale, excuse: Excuse, start: float
) -> Rule | None:
    """The rule by which an excursion is called because it stays. start: the typical first loss."""
    came_down = start - scale.level
    if excuse is Excuse.EXPLAINED or scale.solved or came_down <= HAS_COME_DOWN * scale.noise:
        return None
    bar = _BAR_WHILE_EXCUSED if excuse is Excuse.NEAR else 1.0
    height = max(bar * preset.supported, STAYS_LOST * came_down / scale.noise)
    return _found("loss-stays-high", evidence, scale, height)


def stands_out_alone(
    reading: MeasuredObservation, preset: Preset, scale: Scale, *, excused: bool, fell_to: float | None
) -> Rule | None:
    """The rule by which one observation stands out, or None: a loss that is far up, one that is up together with the
    gradient norm, or a gradient norm that is far up alone. excused, and a solved task: as in `judge`.

    fell_to: the level at which a trouble began. Where that is far below the present one, a stretch that is too easy
    (one document again and again) came before the trouble and did the harm. So a loss that is far down stands out too.
    """
    if excused or scale.solved:
        lost = _LOST_BEYOND_EXCUSE if excused else _LOST_IF_SOLVED
        above = max(scale.loss_at(LOW), scale.level + lost * scale.progress)
        return Rule("stands-out-lost", above) if scale.progress and reading.loss > above else None
    if reading.height > STANDS_OUT:
        return Rule("stands-out-loss", scale.loss_at(STANDS_OUT))
    if reading.norm_height is not None and reading.norm_height > preset.support and reading.height > OPENS_SUPPORTED:
        return Rule("stands-out-loss-and-grad-norm", scale.loss_at(OPENS_SUPPORTED))
    if reading.norm_stands_out:
        return Rule("stands-out-grad-norm", _NORM_COUNTED)
    if fell_to is not None and max(fell_to, reading.loss) < (low := scale.loss_at(-STANDS_OUT)):
        return Rule("stands-out-low", low)
    return None


def _found(
    rule: str, evidence: ExcursionEvidence, scale: Scale, height: float, lost: float | None = None
) -> Rule | None:
    """The rule if the evidence is high enough and, where `lost` is required, enough of the progress is lost."""
    if evidence.height <= height or (lost is not None and evidence.lost <= lost):
        return None
    threshold = scale.loss_at(height)
    return Rule(rule, threshold if lost is None else max(threshold, scale.level + lost * scale.progress))


def _returns(last: list[MeasuredObservation], by: int) -> bool:
    """Whether an exponential through the heights, all of them above zero, is low before the step `by`. Not where all
    are of one step, as lines of a log may be: there is none."""
    steps, logs = [reading.step for reading in last], [math.log(reading.height) for reading in last]
    middle = sum(steps) / len(steps)
    if not (spread := sum((step - middle) ** 2 for step in steps)):
        return False
    slope = sum((step - middle) * log for step, log in zip(steps, logs, strict=True)) / spread
    return steps[-1] < by and sum(logs) / len(logs) + slope * (by - middle) < math.log(LOW)
