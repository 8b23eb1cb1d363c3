"""The sentinel: says of each optimizer step whether training is healthy, on watch, spiking or not finite.

Theory
======

**What is looked for** is damage: the loss has left its level and will not be back soon, so that going back to a
checkpoint is worth more than waiting. What looks alike and must be left alone: a handful of bad batches (*blip*),
harder data (*shift*), a warm restart of the learning rate or a resume (*bump*), noise with a heavy tail, a solved task
whose tiny loss triples.

**Measure.** Everything is measured against a `baseline` of accepted observations: the level is the median of the last
16, the noise is read off the last 128 residuals (value minus the level before it), so that the steep descent at the
start is not taken for noise. Noise is the larger of the interquartile range and the upper 98 % quantile, both scaled to
a standard deviation, so bimodal and heavy-tailed losses widen it. `height` is (loss - level) / noise. Two more numbers
stand beside it: how high the logarithm of the gradient norm is in its own noise (`norm_height`), and what share of all
progress since the first losses the observation would undo (`lost`). All three are ratios: multiplying the loss by a
constant changes no verdict. Noise counts as at least 0.3 % of the progress made and 0.1 % of the level, since on a
solved task it tends to zero and every ripple would tower.

**Never fed what it rejected.** An observation that stands out opens an *excursion*; nothing high enters the baseline
until it is over. It is over when two observations in a row are low again (a blip: recovered), or after 80 observations
without a call: then the new level is learned afresh (accepted). Nothing can blind the sentinel for long, and nothing
can make it call for ever.

**Patience** separates blips from damage: only when `patience` consecutive steps are high is an excursion judged, and
then by the first of these rules that holds (`excursion.judge`), for the preset `normal`:

===========================  =====================================================================================
rule                         holds when the mean over the last 5 observations of an excursion is
===========================  =====================================================================================
``loss-high``                7 noise units high, or 6 where no gradient norm is known
``loss-and-grad-norm-high``  2.8 high, and the gradient norm began 4.5 high: two witnesses need less each
``loss-back-at-start``       2.8 high, and four fifths of all progress are lost
===========================  =====================================================================================

An excursion that has lost three fifths of its height and still falls fast is given time: it is judged when it is back
or has stalled.

A shift raises the loss about as much as damage does, but the gradient norm follows it less and its loss stays far
below that of an untrained model; this is what the second and third rule tell apart. Where the level has fallen below
5 % of the first losses, ratios to it mean nothing (new data on a solved task multiplies the loss a hundredfold): there
only losing 90 % of the progress counts. Patience is in steps: a log with a line every few steps needs one observation
less, since no handful of bad batches covers so many steps.

**What no single step shows** has two rules of its own, with references that do not follow the change (`slow`):

``loss-drift``
    Three medians of 16 accepted losses in a row stand above the lowest such median so far by 2.5 noise units and a
    fifth of the progress, and still rise. A shift steps up and then decays, so it does not rise.
``grad-norm-collapse``
    Over 10 observations the gradient norm is below half of what it was over the 32 before, while the loss is up by 1.5
    times its spread then: a dead plateau, on which no gradient is left to bring the loss down.

**Non-finite** values are called in their step, always (``nonfinite-loss``, ``nonfinite-grad-norm``), whatever the
state; they enter no window. An infinite norm in a step that GradScaler skipped is routine.

**Hints** excuse a rise for a while (`machine.EXCUSED_FOR`): within it only a loss above the first ones is called
(``loss-beyond-start``), and a new level is accepted after 16 observations. An announced phase may have any level, so
everything is learned afresh. A learning rate above all earlier ones is no excuse (`learning_rate_hint`), nor is the
end of an epoch of less than 100 observations.

**Onset** is the first observation of the excursion, or of the run of raised ones (2 noise units) that led into it; for
the slow rules, where the change began.

**Presets** (`presets.PRESETS`) are the one knob. Everything else is derived from the data.

Cost: a few microseconds and a few kilobytes, whatever the length of the run. State is JSON. No clock, no randomness, no
input or output: a pure function of state and observation, so that all ranks agree.
"""

from __future__ import annotations

from rollback.sentinel.machine import Sentinel
from rollback.sentinel.presets import PRESETS, Sensitivity
from rollback.sentinel.verdict import Blip, Hint, Kind, Observation, Verdict, learning_rate_hint

__all__ = [
    "PRESETS",
    "Blip",
    "Hint",
    "Kind",
    "Observation",
    "Sensitivity",
    "Sentinel",
    "Verdict",
    "learning_rate_hint",
]
