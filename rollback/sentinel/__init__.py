"""The sentinel: it judges each optimizer step as healthy, on watch, spiking or not finite.

Theory
======

**The target** is damage: the loss has left its level and will not return soon, so going back to a checkpoint is worth
more than waiting. The sentinel must leave alone what looks similar: a handful of bad batches (*blip*), harder data
(*shift*), a warm restart of the learning rate or a resume (*bump*), noise with a heavy tail, and a solved task whose
tiny loss triples.

**Measure.** Every observation is measured against a `baseline` of accepted observations. The level is the median of the
last 16. The noise comes from the last 128 residuals (value minus the level before it), so the steep descent at the
start does not count as noise. Noise is the larger of the interquartile range and the upper 98 % quantile, both scaled
to a standard deviation, so bimodal and heavy-tailed losses widen it. `height` is (loss - level) / noise. Two more
numbers stand beside it. `norm_height` is the height of the logarithm of the gradient norm in units of its own noise.
`lost` is the share of all progress since the first losses that the observation would undo. All three are ratios:
multiplying the loss by a constant changes no verdict. Noise is at least 0.3 % of the progress made and at least 0.1 %
of the level. Without this minimum, the noise of a solved task tends to zero and every ripple would look high. Where
nearly all losses are zero without progress, the others do not show in the residuals. There the largest loss that was
seen and came back counts as the 98 % quantile, and until 16 losses other than zero were seen, no loss stands out.

**The baseline learns nothing from rejected values.** An observation that stands out opens an *excursion*. Until the
excursion is over, nothing high enters the baseline. It is over when two observations in a row are low again (a blip:
recovered), or after 80 observations without a call (accepted: the new level is learned). So nothing can blind the
sentinel for long, and nothing can make it call for ever.

**Patience** separates blips from damage. The sentinel judges an excursion only when `patience` consecutive steps are
high. The first of these rules that holds decides (`excursion.judge`); the numbers are those of the preset `normal`:

===========================  =====================================================================================
rule                         holds when the mean over the last 5 observations of an excursion is
===========================  =====================================================================================
``loss-high``                6 noise units high; 10.5 where the norm is quiet and little progress is lost
``loss-and-grad-norm-high``  2.8 high, and the gradient norm began 4.5 high: two witnesses need less each
``loss-back-at-start``       2.8 high, and four fifths of all progress are lost
===========================  =====================================================================================

A loss may be on its way back, with less than four fifths of the progress lost: an exponential through these heights is
low again before 14 steps have passed since the excursion began (a blip's four, and ten in which momentum carries them
on). Then the excursion is not called. If a rule held meanwhile, and the loss stalls 2.8 high with three tenths of the
progress lost, it is called then (``loss-stays-high``).

A known and quiet norm, with less than a fifth of the progress lost, speaks for harder data, so the loss alone must be
higher. A norm that clipping holds at a bound says nothing by being quiet.

A shift raises the loss about as much as damage does. But the gradient norm follows a shift less, and the loss stays far
below that of an untrained model. The second and the third rule use this difference. Where the level has fallen below
5 % of the first losses, ratios to the level mean nothing (new data on a solved task multiplies the loss a hundredfold).
There, only a loss of 90 % of the progress counts. Patience is in steps: a log with a line every few steps needs one
observation less, since no handful of bad batches covers so many steps.

**Damage that no single step shows** has three rules of its own, with references that do not follow the change (`slow`):

``loss-drift``
    Three medians of 16 accepted losses in a row are above the lowest such median so far by 2.5 noise units and a
    fifth of the progress, and still rise. A shift steps up and then decays, so it does not rise.
``loss-stays-high``
    Four such medians in a row are above the lowest by 1.5 noise units and three tenths of what the loss had come down,
    and do not fall; or an excursion of 64 observations is 2.8 noise units high, as much of the progress is lost, and
    four fifths are left of what it was in the first 16. A shift decays in that time; labels that are wrong from some
    point on stay wrong. The loss must have come down by 2.5 noise units, or there is no progress to lose.
``grad-norm-collapse``
    Over 10 observations the gradient norm is below half of what it was over the 32 before, while the loss is up by 1.5
    times its spread at that time: a dead plateau, without a gradient that could lower the loss. What dies slowly takes
    those 32 along. So the rule also holds where three medians of 16 in a row are, against the mean of any four in a row
    of the 29 before, up by 1.5 noise units in the loss and down by a third in the norm (``faded``).

**Rises that no rule calls** are asked about (`probe`): an excursion of 24 observations that does not fall, or three
medians of 16 that are 1.5 noise units above the lowest. The model answers by the loss of a batch that it knew. If
that is up by more than half of the rise and by 1.5 noise units, it is damaged; below half, the rise is accepted.

**Non-finite** values are called in their step, in every state (``nonfinite-loss``, ``nonfinite-grad-norm``). They enter
no window. Their onset is that of the rise which has overflowed; one step that was raised a little before them is no
rise. An infinite norm in a step that GradScaler skipped is routine.

**Losses that measure no progress** (`objective`): adversarial objectives and reinforcement learning. Rules that rest on
a level give advice there. Only non-finite values, losses far beyond all seen (``loss-beyond-seen``) and norms far
beyond all seen (``grad-norm-beyond-seen``) are called. Such a loss is recognised by climbs that are large compared to
the progress: one that was not called, or three that were and came down by themselves. Or it is told.

**Hints** explain a rise that begins with them (`machine.COMES_WITH_HINT`): only a loss that undoes three quarters of
the progress is called then (``loss-beyond-start``), and a new level is accepted after 16 observations. A rise that
begins later, while the excuse lasts (`machine.EXCUSED_FOR`), meets a bar half as high again. An announced phase may
have any level, so the sentinel learns everything anew but the least noise. A learning rate above all earlier ones is
no excuse (`learning_rate_hint`), nor is the end of an epoch of less than 100 observations.

**Onset** is the first observation of the excursion, or of the raised observations (2 noise units) directly before it;
for the slow rules, the onset is where the change began. A bad update may show before that, in a *forerunner*: a blip,
or a gradient norm that stands out alone (12 noise units). Momentum carries it on while the loss is back, and the loss
goes some steps later. So an excursion that begins at most 10 steps after a forerunner has the forerunner's onset.

**Presets** (`presets.PRESETS`) set the thresholds. All others come from the data.

Cost: a few microseconds and a few kilobytes, whatever the length of the run. State is JSON. No clock, no randomness, no
input or output: verdicts are a pure function of state and observation, so all ranks agree.
"""

from rollback.sentinel.machine import Sentinel
from rollback.sentinel.presets import PRESETS
from rollback.sentinel.verdict import NORM_COLLAPSE, Blip, Hint, Kind, Observation, Verdict, learning_rate_hint

__all__ = [
    "NORM_COLLAPSE",
    "PRESETS",
    "Blip",
    "Hint",
    "Kind",
    "Observation",
    "Sentinel",
    "Verdict",
    "learning_rate_hint",
]
