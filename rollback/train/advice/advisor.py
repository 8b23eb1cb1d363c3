"""Advice about likely mistakes in the script. An advice is given once in each run, and is never an incident.

No advice is better than a wrong one. So each of them waits until several updates show the same, and is not given where
another reason is possible.
"""

import statistics
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from typing import TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from rollback.errors import EARLY
from rollback.sentinel import Kind, Verdict
from rollback.train.advice.carried_gradients import CarriedGradients
from rollback.train.advice.habits import Habit, Habits
from rollback.train.advice.layers import EVERY, Layers
from rollback.train.advice.resumed_updates import ResumedUpdates
from rollback.train.advice.script_rates import ScriptRates
from rollback.train.advice.unkept_state import UnkeptState
from rollback.train.comm.beat import Beat
from rollback.train.state.state import TrainingState
from rollback.train.state.stateful import trained_by
from rollback.train.updates.backward import choose_telltale
from rollback.train.updates.optimizer import Updates
from rollback.wording import AdviceText, first_few

CLIPPED_WHILE_SCALED = AdviceText(
    "clipped-while-scaled",
    "gradients are clipped while GradScaler's factor of {scale:,.0f} is still in them: a limit of {limit:.3g} acts as "
    "{acts:.3g}, and nearly every update is clipped to it. {effect}. Call scaler.unscale_(optimizer) before "
    "clip_grad_norm_",
)
_SMALLER_UPDATES = "With {optimizer} an update is up to {scale:,.0f} times smaller than meant"
_ALIKE = (
    "{optimizer} divides the size of gradients out again, so updates keep theirs; but batches with large and with "
    "small gradients count alike, each change of the factor makes updates too large or too small until its averages "
    "have followed, and gradients this small may come near its eps, which makes updates smaller"
)
_NOT_KNOWN = (
    "What that does depends on how {optimizer} goes about the size of gradients: where it counts, an update is up to "
    "{scale:,.0f} times smaller than meant; where it is divided out, large and small gradients count alike"
)
CLIPPED_AFTER_STEP = AdviceText(
    "clipped-after-step",
    "gradients are clipped after optimizer.step(), where it has no effect. Clip between backward() and step()",
)
GRADIENTS_CARRIED = AdviceText(
    "gradients-carried",
    "an update of {names} uses gradients that were there when an earlier step ended: nothing sets them to zero in "
    "between that torch counts (which grad.data.zero_() is not). Checkpoints have none, so a run that goes on or goes "
    "back trains on without them. Call zero_grad() in front of an update's first backward. Where one of several "
    "optimizers gathers them over more batches than the others do, hand that one over as optimizer=. What is to be "
    "carried on purpose belongs into the optimizer, as its momentum",
)
LOSS_NOT_DIVIDED = AdviceText(
    "loss-not-divided",
    "gradients of {batches} batches are added up and no batch's loss is divided by {batches}: the update's gradient is "
    "{batches} times their mean. Use (loss / {batches}).backward()",
)
NO_NO_SYNC = AdviceText(
    "no-no-sync",
    "gradients are accumulated over {batches} batches, and DDP averages them over the ranks after each one. Run "
    "forward and backward of all but the last batch inside `with model.no_sync():`; one exchange an update is enough",
)
OFTEN_CLIPPED = AdviceText(
    "often-clipped",
    "{share:.0%} of the last {count} updates were clipped, to a norm of {limit:.3g} from {norm:.3g} in the median: "
    "large and small gradients count alike then.{layer} Raise max_norm so that it catches exceptions only",
)
NEVER_CLIPPED = AdviceText(
    "never-clipped",
    "the loss of this transformer has spiked {spikes} times and its gradients are not clipped. "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step() is what most use",
)
NEVER_OBSERVED = AdviceText(
    "never-observed",
    "no loss was told in {updates} updates, so that only NaN and Inf in the gradients and jumps of their norm are "
    "noticed. Call guard.observe(loss) in the loop's body",
)
NO_PROGRESS = AdviceText(
    "no-progress",
    "step {step}: {text}. Only what is far beyond all seen is called, as for adversarial and reinforcement learning",
)
WITHOUT_UPDATE = 1000  # batches; an accumulation over so many would be a strange one
NEVER_UPDATED = AdviceText(
    "never-updated",
    f"{WITHOUT_UPDATE} batches were handed out and the optimizer that the guard has made no step: nothing counts as "
    "done, and nothing is kept. Hand the guard the very optimizer that the script steps",
)
OTHER_UPDATES = AdviceText(
    "never-updated",
    "the optimizer that the guard has makes no step, and an optimizer of the kind {kind} trains its parameters: "
    "nothing counts as done, and nothing is kept. Hand the guard that one as optimizer=; where it is inside of "
    "another, that other one too, by a name of its own",
)
UPDATES_BY_ANOTHER = AdviceText(
    "updates-by-another",
    "the optimizer that the guard has made its newest step {batches} batches ago, and an optimizer of the kind {kind} "
    "trains its parameters since: these updates do not count, are not judged, and are lost behind a resume or a "
    "rollback. Where another optimizer goes on in mid-run, let it do so in a run of its own, which begins with these "
    "weights: rollback ring export, then rollback launch --init",
)
EVALUATED = AdviceText(
    "evaluated-over-guard",
    "batches are taken from the guard where gradients are off, as for an evaluation: each `for batch in guard` is an "
    "epoch of the training, and what it takes counts as trained on. Evaluate over a loader; loop over the guard to "
    "train",
)

NOT_SWITCHED_AGAIN = AdviceText(
    "requires-grad-not-again",
    "the script had changed requires_grad of {names} on its way to where this process goes on, and has not done so "
    "here. Unless it changes that back at this very place, this process trains other layers than the run did. A start "
    "leaves requires_grad as the script sets it, so let the script set it wherever the run is behind that point: "
    "if {guard.step} >= 1000, not if {guard.step} == 1000",
)

_UNOBSERVED = 20
_EVALUATED = 3  # batches in a row
_OTHER_UPDATES = 10  # batches; with more than so many of its own an accumulation may have other updates in it
_BY_SIZE = {"SGD", "ASGD"}  # an update is as large as the gradients
_SIZE_DIVIDED_OUT = {"Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adafactor"}
_UPDATES = 3  # that must agree
_CLIPPED = 300  # updates that are judged together; not the first ones: there even sound settings clip for a while
_CLIPPED_SHARE = 0.5  # of these updates
_SCALED = 5
_SPIKES = 3
_UNCLIPPED = 100  # updates without a write to any gradient
_SELDOM = 16  # updates between two looks at what is not kept, behind the first ones
_NAMES = 3
_SAME = 0.01  # clipping gives the same norm every time; this is its tolerance


class Advisor:
    """Finds advice for a run from its updates. It gets every judged step, on every rank. Nothing here is collective.

    model: as the script calls it.
    """

    def __init__(self, state: TrainingState, updates: Updates, model: nn.Module, unkept: UnkeptState) -> None:
        self._updates, self._switches = updates, state.switches
        self._not_again = set[str]()
        """Parameters of which the script has not changed `requires_grad` again, in none of the first updates."""
        self.unkept, self._without_grad = unkept, 0
        self._layers, self.rates = Layers(state.model), ScriptRates(state.objects.values())
        self.resumed = ResumedUpdates(state.counters.batches_per_step if state.counters.step else None)
        self._habits = Habits(updates, state.optimizer, state.objects.get("scaler"), model)
        self._carried = {"optimizer": CarriedGradients(state.optimizer, updates.telltale, model)}
        for name, item in state.objects.items():
            if _takes_hooks(item):
                self._carried[name] = CarriedGradients(item, choose_telltale(trained_by(item)))
        self._looking = list(self._carried.values())
        self.habit = Habit(0)
        """That of the newest update whose step has ended."""
        self._optimizer = type(state.optimizer)
        # Others clip by themselves, or need no clipping.
        plain = self._optimizer.__name__ in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop")
        self._may_want_clipping = plain and any(_is_attention(module) for module in state.model.modules())
        self._state = state
        self._most_batches = 0
        """Of an update."""
        self._count = 0
        """Of updates whose step has ended."""
        self._late = self._undivided = self._averaged = 0
        self._clipped: list[tuple[float, float] | None] = []
        self._early = True
        self._scaled: deque[tuple[float, float]] = deque(maxlen=_SCALED)
        self._unwritten = self._spikes = self._unobserved = 0

    def end_step(self, batches: int) -> None:
        """The step of the newest update has ended, and its beat is about to be sent. batches: its number of batches."""
        self._count += 1
        self._most_batches = max(self._most_batches, batches)
        if not self._count % EVERY:
            self._layers.look(self._updates.gradients)
        if self._count <= _UPDATES:
            found = self._switches.not_again()
            self._not_again = found if self._count == 1 else self._not_again & found
        self.habit = self._habits.end_step(batches)
        self._looking = [each for each in self._looking if each.end_step()]

    def judge(self, beat: Beat, verdict: Verdict) -> list[AdviceText]:
        """The advice now, on the step that has ended last. The caller gives each advice only once."""
        habit = self.habit
        self._unobserved = self._unobserved + 1 if beat.loss is None else 0
        self._late += bool(habit.late)
        return [
            *([NEVER_OBSERVED.of(updates=_UNOBSERVED)] if self._unobserved >= _UNOBSERVED else ()),
            *([NO_PROGRESS.of(step=verdict.step, text=verdict.advice)] if verdict.advice else ()),
            *self.rates.found,
            *self.resumed.found,
            *(self._of_switches() if self._not_again and self._count >= _UPDATES else ()),
            *(self.unkept.advice() if self._count <= EARLY or not self._count % _SELDOM else ()),
            *([CLIPPED_AFTER_STEP] if self._late >= _UPDATES else ()),
            *([GRADIENTS_CARRIED.of(names=names)] if (names := self._carrying()) else ()),
            *(self._of_accumulation(habit, beat) if habit.batches > 1 else ()),
            *self._of_clipping(habit, beat),
            *(self._of_spikes(habit, verdict) if self._may_want_clipping else ()),
            *self._layers.found.values(),
        ]

    def without_update(self, batches: int) -> Iterator[AdviceText]:
        """The advice where so many batches were handed out since the last update. Ask it at the end of each."""
        self._without_grad = self._without_grad + 1 if batches and not torch.is_grad_enabled() else 0
        if self._without_grad >= _EVALUATED:
            yield EVALUATED
        if batches == WITHOUT_UPDATE:
            yield NEVER_UPDATED
        seldom = batches > max(_OTHER_UPDATES, self._most_batches)
        if seldom and (kind := self.unkept.in_its_place(batches)) is not None:
            goes_on = self._state.counters.step > 0
            yield UPDATES_BY_ANOTHER.of(kind=kind, batches=batches) if goes_on else OTHER_UPDATES.of(kind=kind)

    def _carrying(self) -> str:
        """The optimizers whose updates use gradients of an earlier step."""
        return " and ".join(name for name, each in self._carried.items() if each.updates >= _UPDATES)

    def _of_switches(self) -> Iterator[AdviceText]:
        yield NOT_SWITCHED_AGAIN.of(names=first_few(sorted(self._not_again), _NAMES))

    def _of_accumulation(self, habit: Habit, beat: Beat) -> list[AdviceText]:
        divided_later = beat.clip_factor is not None and abs(beat.clip_factor * habit.batches - 1) < 2 * _SAME
        if habit.undivided is not None:
            self._undivided = self._undivided + 1 if habit.undivided and not divided_later else 0
        if habit.always_averaged is not None:
            self._averaged = self._averaged + 1 if habit.always_averaged else 0
        said = []
        if self._undivided >= _UPDATES:
            said.append(LOSS_NOT_DIVIDED.of(batches=habit.batches))
        if self._averaged >= _UPDATES:
            said.append(NO_NO_SYNC.of(batches=habit.batches))
        return said

    def _of_clipping(self, habit: Habit, beat: Beat) -> list[AdviceText]:
        if beat.clip_factor is None or beat.measured is None or beat.scaler_skipped:
            return []
        pair = (beat.measured, beat.clip_factor * beat.measured)
        clipped = habit.written is not False and beat.clip_factor < 1 - _SAME
        if clipped and habit.while_scaled:
            # What is clipped while scaled has the same norm with the scale in it.
            self._scaled.append((pair[0], pair[1] * (beat.scale or 1.0)))
            if len(self._scaled) == _SCALED and _is_one_limit(self._scaled):
                return [self._clipped_while_scaled(limit=self._scaled[-1][1], scale=beat.scale or 1.0)]
            return []
        self._scaled.clear()
        self._clipped.append(pair if clipped else None)
        if len(self._clipped) < _CLIPPED:
            return []
        pairs, early = [pair for pair in self._clipped if pair is not None], self._early
        self._clipped, self._early = [], False
        if early or len(pairs) <= _CLIPPED_SHARE * _CLIPPED or not _is_one_limit(pairs):
            return []
        heaviest = f" The largest gradient is that of {self._layers.heaviest}." if self._layers.heaviest else ""
        norm, limit = (statistics.median(values) for values in zip(*pairs, strict=True))
        share = len(pairs) / _CLIPPED
        return [OFTEN_CLIPPED.of(share=share, count=_CLIPPED, limit=limit, norm=norm, layer=heaviest)]

    def _clipped_while_scaled(self, limit: float, scale: float) -> AdviceText:
        kinds = {kind.__name__ for kind in self._optimizer.__mro__}
        effect = _SMALLER_UPDATES if kinds & _BY_SIZE else _ALIKE if kinds & _SIZE_DIVIDED_OUT else _NOT_KNOWN
        effect = effect.format(optimizer=self._optimizer.__name__, scale=scale)
        return CLIPPED_WHILE_SCALED.of(scale=scale, limit=limit, acts=limit / scale, effect=effect)

    def _of_spikes(self, habit: Habit, verdict: Verdict) -> list[AdviceText]:
        self._spikes += verdict.kind is Kind.SPIKE or verdict.ended is not None
        self._unwritten = self._unwritten + 1 if habit.written is False else 0
        lacks_it = self._spikes >= _SPIKES and self._unwritten >= _UNCLIPPED
        return [NEVER_CLIPPED.of(spikes=self._spikes)] if lacks_it else []


def _takes_hooks(item: object) -> TypeGuard[Optimizer]:
    """Whether it is an optimizer. A wrapper of one may have no hooks, or plain dicts in the place of torch's."""
    return isinstance(item, Optimizer) and isinstance(vars(item).get("_optimizer_step_pre_hooks"), OrderedDict)


def _is_one_limit(seen: Collection[tuple[float, float]]) -> bool:
    """Whether the norms varied and the optimizer's did not: that is clipping, not a factor."""
    norms, given = [norm for norm, _ in seen], [kept for _, kept in seen]
    return max(given) <= min(given) * (1 + _SAME) and max(norms) > min(norms) * (1 + 2 * _SAME)


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or "attention" in type(module).__name__.lower()
