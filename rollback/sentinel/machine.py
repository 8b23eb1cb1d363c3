"""The sentinel's update, which chooses the row of the table of transitions, and its state."""

import math
from statistics import median_high
from typing import Any

from rollback.config import Objective, Sensitivity
from rollback.errors import RunDoesNotFit, UsageError
from rollback.sentinel import explain
from rollback.sentinel.baseline import Baseline
from rollback.sentinel.excursion import (
    LOW,
    STANDS_OUT,
    Excursion,
    ExcursionEvidence,
    Excuse,
    MeasuredObservation,
    Rule,
    Scale,
    judge_lasting,
    stands_out_alone,
)
from rollback.sentinel.objective import OBJECTIVES, LossHistory
from rollback.sentinel.presets import PRESETS
from rollback.sentinel.probe import ASKED_EVERY, LASTS, OpenQuestion, about_excursion
from rollback.sentinel.slow import Collapse, Drift, Fading
from rollback.sentinel.states import TRANSITIONS, Event, State
from rollback.sentinel.verdict import Hint, Kind, Observation, Verdict

LOWS_THAT_END = {State.WATCHING: 2, State.CALLED: 5}
"""Number of low observations in a row after which an excursion has recovered."""
PERSISTS_AFTER = {State.WATCHING: 80, State.CALLED: 150}
"""Number of observations after which the level of an excursion is the new normal. A called one gets more: some
divergences decay slowly."""
PERSISTS_WHEN_EXCUSED = 16
EXCUSED_FOR = {Hint.LR_CHANGED: 100, Hint.RESUMED: 50, Hint.EPOCH: 10, Hint.ANNOUNCED: 150}
"""Number of observations during which a hint raises the bar."""
COMES_WITH_HINT = 10
"""A rise that begins at most this many observations after a hint is explained by it."""
COMES_BEFORE_HINT = 2
"""A log may note the cause a line later than its effect."""
SHORTEST_EPOCH = 100
"""Shorter epochs excuse nothing: otherwise a large share of the run would be excused."""
BEYOND_SEEN = ("loss-beyond-seen", "grad-norm-beyond-seen")
"""The rules that call where the loss measures no progress."""
NEW_REFERENCE = Hint.LR_CHANGED | Hint.RESUMED | Hint.ANNOUNCED
"""Hints after which the slow rules need a new reference. The end of an epoch is not one of them."""

FORGETS_AFTER = 10
"""Steps. A trouble that begins at most so long after a forerunner began with it: a bad update shows, momentum (0.9)
carries it on for about 10 steps, and meanwhile the loss may be back."""

_FIRST_LOSSES = 8
_RISING = 2.0  # noise units; an excursion reaches back over the steps just before it that were at least this high
_NORM_IS_LOW = -1.0
_LEAST_NORM_NOISE = 0.03  # in the logarithm: 3 %
_SCHEMA = 8
_READ = range(1, _SCHEMA + 1)
"""What is read: 1 knows less of the noise, and not with what an excursion began; 2 does not know what was seen; 3 does
not know of gradients that fade; 4 does not know of forerunners; 5 does not know what held on the way back; 6
does not know how large a mostly zero loss was; 7 does not know which calls came back by themselves."""


class Sentinel:
    """Judges one observation a step. The package's docstring has the theory.

    The verdict is a deterministic function of state and observation. Every rank computes it from the same reduced
    numbers, so all ranks reach the same verdict.
    """

    def __init__(self, sensitivity: Sensitivity = "normal", objective: Objective = "auto") -> None:
        if sensitivity not in PRESETS:
            raise UsageError(f"no sensitivity is called {sensitivity!r}", hint=f"one of {', '.join(PRESETS)}")
        if objective not in OBJECTIVES:
            raise UsageError(f"no objective is called {objective!r}", hint=f"one of {', '.join(OBJECTIVES)}")
        self._preset = PRESETS[sensitivity]
        self._state = State.LEARNING
        self._loss = Baseline(tail_aware=True)
        self._norm = Baseline(tail_aware=False)
        self._drift = Drift(self._preset.drift)
        self._collapse = Collapse()
        self._fading = Fading(self._preset.faded)
        self._seen = LossHistory(objective)
        self._excursion: Excursion | None = None
        self._first_losses, self._start = list[float](), math.nan  # the first ones, and what is typical of them
        self._rising_since: int | None = None
        self._forerunner: int | None = None
        self._excused = 0
        self._explaining = 0
        self._since_epoch = SHORTEST_EPOCH
        self._asks_from = 0

    @property
    def patience(self) -> int:
        """Number of steps, the first included, that a sudden excursion lasts when it is called."""
        return self._preset.patience

    def update(self, observation: Observation) -> Verdict:
        """The verdict on `observation`. Call once per optimizer step, on every rank with the same numbers."""
        step, loss, norm, hints = observation.step, observation.loss, observation.grad_norm, observation.hints
        self._since_epoch = min(self._since_epoch + 1, SHORTEST_EPOCH)
        self._excused, self._explaining = max(0, self._excused - 1), max(0, self._explaining - 1)
        if hints is not Hint.NONE:
            self._heed(hints)
        if (broken := observation.not_finite) is not None:
            return explain.nonfinite(step, self._onset_of_overflow(step), *broken, self._loss.recent())
        if loss is None or (hints is not Hint.NONE and Hint.SCALER_SKIPPED in hints):
            return Verdict(Kind.HEALTHY, step)
        log_norm = math.log(norm) if norm is not None and norm > 0 else None
        self._seen.teeth.add(loss, self._seen.noise)
        if self._state is State.LEARNING:
            self._accept(loss, log_norm)
            return Verdict(self._move(Event.READY if self._loss.ready else Event.CALM), step)
        return self._judge(step, loss, log_norm)

    def screen(self, observation: Observation, *, fell_to: float | None = None) -> Verdict | None:
        """A verdict on an observation that stands out by itself from the accepted level; None: it does not.

        For a time in which trouble is known to be near, so without patience. Changes nothing: an observation that does
        not stand out goes to `update` afterwards. fell_to: the level at which that trouble began.
        """
        step, loss, norm, hints = observation.step, observation.loss, observation.grad_norm, observation.hints
        if (broken := observation.not_finite) is not None:
            return explain.nonfinite(step, step, *broken, self._loss.recent())
        if loss is None or Hint.SCALER_SKIPPED in hints or not self._loss.ready or hints & NEW_REFERENCE:
            return None
        reading, scale = self._measure(step, loss, math.log(norm) if norm is not None and norm > 0 else None)
        if self._measures_progress():
            found = stands_out_alone(reading, self._preset, scale, excused=self._excused > 0, fell_to=fell_to)
        else:
            bound = self._seen.loss_beyond(scale.noise)
            found = Rule("stands-out-loss", bound) if loss > bound else None
        return explain.stands_out(reading, found, scale, norm, self._loss.recent()) if found is not None else None

    def question(self, step: int) -> OpenQuestion | None:
        """What the model should be asked about behind this step, which was judged last: see `probe`. Changes nothing.

        Nothing where a hint explains a rise, and where the loss measures no progress.
        """
        if step < self._asks_from or self._excused or self._state not in (State.HEALTHY, State.WATCHING):
            return None
        if (excursion := self._excursion) is not None:
            found = about_excursion(excursion, Scale.of(self._loss, self._start, self._seen))
        elif (rise := self._drift.unexplained()) is not None:
            found = OpenQuestion(rise.onset, rise.reference, rise.value, self._drift.noise_at_lowest)
        else:
            return None
        return found if found is not None and self._measures_progress() else None

    def asked(self, step: int) -> None:
        """The model has been asked behind this step, or could not be."""
        self._asks_from = step + ASKED_EVERY

    def accept_rise(self) -> None:
        """The model is unharmed: what the question was about is the new level. An excursion that has begun since is too
        short to learn a level from."""
        excursion = self._excursion
        if excursion is not None and excursion.count >= LASTS and self._state is State.WATCHING:
            self._excursion = self._rising_since = None
            self._relearn(excursion)
            self._move(Event.PERSISTED)
        self._drift.restart()
        self._fading.restart()

    @property
    def settled_level(self) -> float | None:
        """The level, where nothing is up or excused; None: something is, or the level is not known yet."""
        up = self._excursion is not None or self._rising_since is not None or self._excused or self._drift.is_up
        return None if up or self._state is not State.HEALTHY else self._loss.level

    def recent(self) -> tuple[float, ...]:
        """The accepted losses whose median is the level, oldest first."""
        return self._loss.recent()

    def _measure(self, step: int, loss: float, log_norm: float | None) -> tuple[MeasuredObservation, Scale]:
        scale, norm_height = Scale.of(self._loss, self._start, self._seen), None
        if log_norm is not None and self._norm.ready:
            norm_height = (log_norm - self._norm.level) / max(self._norm.noise(), _LEAST_NORM_NOISE)
        return scale.read(step, loss, log_norm, norm_height), scale

    def _judge(self, step: int, loss: float, log_norm: float | None) -> Verdict:
        reading, scale = self._measure(step, loss, log_norm)
        beyond = self._seen.norm_beyond(log_norm) if log_norm is not None else None
        if log_norm is not None:
            norm_is_low = reading.norm_height is not None and reading.norm_height < _NORM_IS_LOW
            fading = self._fading.update(step, loss, log_norm, scale.noise)
            stuck = self._collapse.update(step, loss, log_norm, norm_is_low) or fading
            if beyond is not None and self._state is not State.CALLED and not self._measures_progress():
                found = explain.norm_beyond(step, self._onset(step), log_norm, beyond, self._loss.recent())
                return self._call(found, reading, scale)
            if stuck is not None and self._state is not State.CALLED:
                return self._call(explain.collapse(step, stuck), reading, scale)
        if self._excursion is not None:
            return self._follow(self._excursion, reading, scale)
        if reading.stands_out(self._preset):
            self._excursion = Excursion.begin(self._onset(step), reading, scale, self._preset.patience)
            self._excursion.explained = self._explaining > 0
            self._excursion.onset = self._first_sign(self._excursion.began)
            return explain.watch(self._move(Event.HIGH), reading, self._excursion, scale)
        if reading.norm_stands_out:
            self._forerunner = self._first_sign(step)
        return self._calm(reading, scale)

    def _calm(self, reading: MeasuredObservation, scale: Scale) -> Verdict:
        """Nothing stands out: learn from the observation, and check the slow rules."""
        self._rising_since = self._onset(reading.step) if reading.height > _RISING else None
        self._accept(reading.loss, reading.log_norm)
        if scale.known:
            drift = self._drift.update(reading.step, reading.loss, scale.noise, scale.progress, self._start)
            if drift is not None:
                return self._call(explain.drift(reading.step, drift), reading, scale)
        return Verdict(self._move(Event.CALM), reading.step)

    def _follow(self, excursion: Excursion, reading: MeasuredObservation, scale: Scale) -> Verdict:
        """An excursion has begun earlier: decide whether it has recovered, is called, has become the new level, or goes
        on."""
        excursion.add(reading, self._preset.patience)
        if excursion.lows >= LOWS_THAT_END[self._state]:
            return self._end(Event.RECOVERED, excursion, reading)
        if self._state is State.WATCHING:
            if excursion.lows:
                self._accept(reading.loss, reading.log_norm)
            evidence = excursion.evidence(self._preset.patience)
            if evidence and (found := self._judged(evidence, excursion, scale)):
                verdict = explain.spike(reading.step, excursion, found, evidence, scale, self._loss.recent())
                return self._call(verdict, reading, scale)
            if (lasting := excursion.lasting()) and not excursion.advised:
                found = judge_lasting(lasting, self._preset, scale, self._excuse(excursion), self._start)
                if found is not None:
                    verdict = explain.spike(reading.step, excursion, found, lasting, scale, self._loss.recent())
                    return self._call(verdict, reading, scale)
        if excursion.count >= self._persists_after(excursion):
            return self._end(Event.PERSISTED, excursion, reading)
        return explain.watch(self._move(Event.HIGH), reading, excursion, scale)

    def _judged(self, evidence: ExcursionEvidence, excursion: Excursion, scale: Scale) -> Rule | None:
        """The rule that calls it now."""
        if not self._measures_progress() and evidence.least > (bound := self._seen.loss_beyond(scale.noise)):
            return Rule("loss-beyond-seen", bound)
        excuse = self._excuse(excursion)
        return excursion.judged(evidence, self._preset, scale, excuse, clipped=self._norm.at_ceiling())

    def _call(self, verdict: Verdict, reading: MeasuredObservation, scale: Scale) -> Verdict:
        """Demand action, once: what follows belongs to the same incident.

        Where the loss measures no progress, rules that rest on its level only give advice.
        """
        if verdict.rule not in BEYOND_SEEN and not self._measures_progress():
            if self._excursion is not None:
                self._excursion.advised = True
            kind = self._move(Event.CALM if self._excursion is None else Event.HIGH)
            return explain.advice(verdict, kind, self._seen.objective)
        self._seen.teeth.call()
        self._move(Event.CALL)
        self._fading.restart()
        if self._excursion is None:
            onset = verdict.onset if verdict.onset is not None else reading.step
            self._excursion = Excursion.begin(onset, reading, scale, self._preset.patience)
        return verdict

    def _end(self, event: Event, excursion: Excursion, reading: MeasuredObservation) -> Verdict:
        """The excursion is over. A called one is not reported again; one that was left alone is reported as a blip."""
        ended = explain.ended(excursion, event is Event.PERSISTED) if self._state is State.WATCHING else None
        self._excursion = self._rising_since = None
        self._seen.came_back(*(high.loss for high in excursion.recent))
        if self._state is State.WATCHING and event is Event.RECOVERED:
            for high in excursion.recent:
                if high.height > LOW:
                    self._seen.update(high.loss, high.log_norm, self._loss.noise)
            self._forerunner = excursion.onset
        if event is Event.PERSISTED:
            self._relearn(excursion)
        else:
            self._accept(reading.loss, reading.log_norm)
        return Verdict(self._move(event), reading.step, ended=ended)

    def _relearn(self, excursion: Excursion) -> None:
        """Make the level of the excursion the new baseline."""
        for learned in (self._loss, self._norm, self._drift, self._fading):
            learned.restart()
        for reading in excursion.recent:
            self._accept(reading.loss, reading.log_norm)

    def _persists_after(self, excursion: Excursion) -> int:
        explained = excursion.advised or (excursion.explained and self._excused > 0)
        if self._state is State.WATCHING and explained:
            return PERSISTS_WHEN_EXCUSED
        return PERSISTS_AFTER[self._state]

    def _excuse(self, excursion: Excursion) -> Excuse:
        return (Excuse.EXPLAINED if excursion.explained else Excuse.NEAR) if self._excused else Excuse.NONE

    def _heed(self, hints: Hint) -> None:
        if Hint.EPOCH in hints:
            hints = hints if self._since_epoch >= SHORTEST_EPOCH else hints & ~Hint.EPOCH
            self._since_epoch = 0
        for hint, observations in EXCUSED_FOR.items():
            if hint in hints:
                self._excused = max(self._excused, observations)
                self._explaining = COMES_WITH_HINT
                if self._excursion is not None and self._excursion.count <= COMES_BEFORE_HINT:
                    self._excursion.explained = True
        if Hint.RESUMED in hints:
            self._seen.teeth.cut()
        if hints & NEW_REFERENCE:
            for slow in (self._drift, self._collapse, self._fading):
                slow.restart()
        if Hint.ANNOUNCED in hints:
            self._begin_phase()

    def _begin_phase(self) -> None:
        """Another loss or other data may have any level: learn everything anew, the first losses included."""
        self._seen.begin_phase(measured_progress=self._loss.ready and self._measures_progress())
        self._loss.begin_phase()
        self._norm.begin_phase()
        self._first_losses, self._start = [], math.nan
        self._excursion = self._rising_since = None
        self._state = State.LEARNING

    def _measures_progress(self) -> bool:
        """Only once the loss's level is known."""
        return self._seen.measures_progress(self._start, self._loss.level, self._loss.noise())

    def _move(self, event: Event) -> Kind:
        self._state, kind = TRANSITIONS[self._state, event]
        return kind

    def _onset(self, step: int) -> int:
        """The step at which a trouble seen at `step` began, as far as the observations show."""
        if self._excursion is not None:
            return self._excursion.onset
        return step if self._rising_since is None else self._rising_since

    def _onset_of_overflow(self, step: int) -> int:
        """As `_onset`, for a value that is not finite. A single step before it that was raised a little is chance."""
        onset = self._onset(step)
        last = self._excursion.recent[-1] if self._excursion is not None else None
        lone = onset == step - 1 and (last is None or (last.height <= STANDS_OUT and not last.norm_stands_out))
        return step if lone else onset

    def _first_sign(self, step: int) -> int:
        """The forerunner of what begins at `step`: a blip, or a gradient norm that stood out alone; else `step`."""
        forerunner = self._forerunner
        return forerunner if forerunner is not None and 0 <= step - forerunner <= FORGETS_AFTER else step

    def _accept(self, loss: float, log_norm: float | None) -> None:
        self._loss.accept(loss)
        if log_norm is not None:
            self._norm.accept(log_norm)
        self._seen.update(loss, log_norm, lambda: self._loss.noise() if self._loss.ready else None)
        if len(self._first_losses) < _FIRST_LOSSES:
            self._first_losses.append(loss)
            self._start = median_high(self._first_losses)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later verdicts depend on, as JSON types; its size is bounded."""
        return {
            "schema": _SCHEMA,
            "state": self._state.value,
            "loss": self._loss.state_dict(),
            "norm": self._norm.state_dict(),
            "drift": self._drift.state_dict(),
            "collapse": self._collapse.state_dict(),
            "fading": self._fading.state_dict(),
            "seen": self._seen.state_dict(),
            "excursion": self._excursion.state_dict() if self._excursion else None,
            "first_losses": list(self._first_losses),
            "rising_since": self._rising_since,
            "forerunner": self._forerunner,
            "excused": self._excused,
            "explaining": self._explaining,
            "since_epoch": self._since_epoch,
            "asks_from": self._asks_from,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which `state_dict` returned. The sensitivity is not part of it and may differ.

        Raises RunDoesNotFit if another version wrote `state` with other contents.
        """
        if state.get("schema") not in _READ:
            raise RunDoesNotFit(
                f"the sentinel's state has schema {state.get('schema')!r}, and this version reads 1 to {_SCHEMA}",
                hint="go on with the version of rollback that wrote the checkpoint",
            )
        self._state = State(state["state"])
        self._loss.load_state_dict(state["loss"])
        self._norm.load_state_dict(state["norm"])
        self._drift.load_state_dict(state["drift"])
        self._collapse.load_state_dict(state["collapse"])
        self._fading.load_state_dict(state.get("fading", {"block": [], "blocks": []}))
        self._seen.load_state_dict(state.get("seen"))
        self._excursion = Excursion.from_state(state["excursion"]) if state["excursion"] else None
        self._first_losses = list(state["first_losses"])
        self._start = median_high(self._first_losses or [math.nan])
        self._rising_since, self._forerunner = state["rising_since"], state.get("forerunner")
        self._excused, self._explaining = state["excused"], state.get("explaining", 0)
        self._since_epoch, self._asks_from = state["since_epoch"], state.get("asks_from", 0)
