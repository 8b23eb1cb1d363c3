"""Likely mistakes in the script, seen from inside. An advice is said once for each run and is never an incident.

No advice is better than a wrong one: each of these waits until the same thing has been seen in several updates, and
keeps silent where it could have an innocent reason.
"""

from __future__ import annotations

import statistics
from collections import deque

from torch import nn

from rollback.sentinel import Kind, Verdict
from rollback.train.habits import Habit
from rollback.train.pulse import Beat

PLAIN_EPOCH_LOOP = (
    "plain-epoch-loop",
    "the script counts its epochs itself: when the run resumes in epoch 3, the loop body runs with no batches for "
    "epochs 0 to 2 first. `for epoch in guard.epochs(n):` begins where the run stands",
)
CLIPPED_WHILE_SCALED = (
    "clipped-while-scaled",
    "gradients are clipped while GradScaler's factor is still in them, so each update is thousands of times smaller "
    "than meant. Call scaler.unscale_(optimizer) before clip_grad_norm_",
)
CLIPPED_AFTER_STEP = (
    "clipped-after-step",
    "gradients are clipped after optimizer.step(), where it has no effect. Clip between backward() and step()",
)
LOSS_NOT_DIVIDED = (
    "loss-not-divided",
    "gradients of {batches} batches are added up and no batch's loss is divided by {batches}: the update is {batches} "
    "times that of their mean. Use (loss / {batches}).backward()",
)
NO_NO_SYNC = (
    "no-no-sync",
    "gradients are accumulated over {batches} batches, and DDP averages them over the ranks after each one. Run "
    "forward and backward of all but the last batch inside `with model.no_sync():`; one exchange an update is enough",
)
ALWAYS_CLIPPED = (
    "always-clipped",
    "each of the last {count} updates was clipped, to a norm of {limit:.3g} from {norm:.3g} in the median: clipping "
    "does the work of a learning rate then. Raise max_norm so that it catches exceptions, or lower the learning rate",
)
NEVER_CLIPPED = (
    "never-clipped",
    "the loss of this transformer has spiked {spikes} times and its gradients are not clipped. "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step() is what most use",
)
NEVER_OBSERVED = (
    "never-observed",
    "no loss was told in {updates} updates, so that only NaN and Inf in the gradients and jumps of their norm are "
    "noticed. Call guard.observe(loss) in the loop's body",
)
WITHOUT_UPDATE = 1000  # batches; an accumulation over so many would be a strange one
NEVER_UPDATED = (
    "never-updated",
    f"{WITHOUT_UPDATE} batches were handed out and the optimizer that the guard has made no step: nothing counts as "
    "done, and nothing is kept. Hand the guard the very optimizer that the script steps",
)
REPLICAS_DIFFER = (
    "replicas-differ",
    "the ranks no longer train the same model, and no checkpoint is taken of that. Stop the job and run the same "
    "command again: all ranks then go on from the last checkpoint, where they agreed. If the same rank is named again, "
    "suspect its machine; if the script changes parameters outside of DDP, it must do so alike on all ranks",
)

_UNOBSERVED = 20
_UPDATES = 3  # that must agree
_CLIPPED = 300  # updates in a row; at the start of a training even sound settings clip for a while
_SCALED = 5
_SPIKES = 3
_UNCLIPPED = 100  # updates without a write to any gradient
_SAME = 0.01  # clipping gives the same norm every time; this is its tolerance


class Advisor:
    """What is to be said of a run, from what is seen of its updates. Fed with every judged step, on every rank."""

    def __init__(self, model: nn.Module, optimizer: object) -> None:
        self._transformer = any(_is_attention(module) for module in model.modules())
        # Others clip by themselves, or need no clipping.
        self._plain_optimizer = type(optimizer).__name__ in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop")
        self._late = self._undivided = self._averaged = 0
        self._kept: deque[tuple[float, float]] = deque(maxlen=_CLIPPED)
        self._scaled: deque[tuple[float, float]] = deque(maxlen=_SCALED)
        self._unwritten = self._spikes = self._unobserved = 0

    def judge(self, habit: Habit, beat: Beat, verdict: Verdict) -> list[tuple[str, str]]:
        """(code, text) of what is to be said now; saying it once only is the caller's part."""
        return [
            *self._of_losses(beat),
            *self._of_order(habit),
            *self._of_accumulation(habit, beat),
            *self._of_clipping(habit, beat),
            *self._of_spikes(habit, verdict),
        ]

    def _of_losses(self, beat: Beat) -> list[tuple[str, str]]:
        self._unobserved = self._unobserved + 1 if beat.loss is None else 0
        return [_filled(NEVER_OBSERVED, updates=_UNOBSERVED)] if self._unobserved >= _UNOBSERVED else []

    def _of_order(self, habit: Habit) -> list[tuple[str, str]]:
        self._late = self._late + 1 if habit.late else self._late
        return [CLIPPED_AFTER_STEP] if self._late >= _UPDATES else []

    def _of_accumulation(self, habit: Habit, beat: Beat) -> list[tuple[str, str]]:
        if habit.batches < 2:
            return []
        divided_later = beat.kept is not None and abs(beat.kept * habit.batches - 1) < 2 * _SAME
        if habit.undivided is not None:
            self._undivided = self._undivided + 1 if habit.undivided and not divided_later else 0
        if habit.always_averaged is not None:
            self._averaged = self._averaged + 1 if habit.always_averaged else 0
        said = []
        if self._undivided >= _UPDATES:
            said.append(_filled(LOSS_NOT_DIVIDED, batches=habit.batches))
        if self._averaged >= _UPDATES:
            said.append(_filled(NO_NO_SYNC, batches=habit.batches))
        return said

    def _of_clipping(self, habit: Habit, beat: Beat) -> list[tuple[str, str]]:
        if beat.kept is None or beat.measured is None or beat.scaler_skipped:
            return []
        pair = (beat.measured, beat.kept * beat.measured)
        clipped = bool(habit.written) and beat.kept < 1 - _SAME
        if clipped and habit.while_scaled:
            # What is clipped while scaled has the same norm with the scale in it.
            self._scaled.append((pair[0], pair[1] * (beat.scale or 1.0)))
            if len(self._scaled) == _SCALED and _is_one_limit(self._scaled):
                return [CLIPPED_WHILE_SCALED]
            return []
        self._scaled.clear()
        if not clipped:
            self._kept.clear()
            return []
        self._kept.append(pair)
        if len(self._kept) < _CLIPPED or not _is_one_limit(self._kept):
            return []
        norm = statistics.median(norm for norm, _ in self._kept)
        return [_filled(ALWAYS_CLIPPED, count=_CLIPPED, limit=pair[1], norm=norm)]

    def _of_spikes(self, habit: Habit, verdict: Verdict) -> list[tuple[str, str]]:
        self._spikes += verdict.kind is Kind.SPIKE or verdict.ended is not None
        self._unwritten = self._unwritten + 1 if habit.written is False else 0
        if not (self._transformer and self._plain_optimizer) or self._spikes < _SPIKES or self._unwritten < _UNCLIPPED:
            return []
        return [_filled(NEVER_CLIPPED, spikes=self._spikes)]


def _is_one_limit(seen: deque[tuple[float, float]]) -> bool:
    """Whether the norms varied and what the optimizer got of them did not: that is clipping, not a factor."""
    norms, given = [norm for norm, _ in seen], [kept for _, kept in seen]
    return max(given) <= min(given) * (1 + _SAME) and max(norms) > min(norms) * (1 + 2 * _SAME)


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or "attention" in type(module).__name__.lower()


def _filled(advice: tuple[str, str], **values: float) -> tuple[str, str]:
    return advice[0], advice[1].format(**values)
