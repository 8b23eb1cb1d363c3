"""What to do about an incident: a pure function from evidence and record to a plan.

The rules, in order:

1. *Observe only*: plan what would be done, and mark the plan `observe`.
2. *The batch in hand*: the evidence may show that one batch alone is the cause (its loss was not finite, and all losses
   before it were). Then the plan skips that batch and nothing else. A later batch of this kind is a new occasion,
   however soon it comes. So is an incident that a suspected sample explains. Only the batch directly after the window
   belongs to a stretch of bad data: that plan skips from the beginning of the stretch to `skip_after` batches after the
   detection step.
3. *Repeat*: the incident begins at most `horizon` steps after the window that the last plan skipped (or replayed).
   A repeat of a retry shows that the trouble comes from data or state: roll back. A repeat of a rollback escalates.
   Where it begins right behind the window, the stretch of bad data is longer: the next window begins where the last one
   ended. Else the trouble is another one than was thought: an older good checkpoint and a window twice as long.
4. *Retry first*, where the setting is on: restore and replay without skipping.
5. Otherwise roll back: restore the newest good checkpoint at least `rewind` steps before the onset; skip through the
   detection step and `skip_after` more batches. The policy `screen` judges the updates of these batches one by one
   instead, and skips what stands out. What it let through and came back is skipped whole.
6. *Budgets*: where incidents would cost more than `max_skipped` of the batches with a window, its updates are screened
   too. What a screen has let through, or is so early that nobody knows what is good, gets a window that is cut down to
   half of what is left, from the onset on. If the way to the detection costs too much too, or if the answers to this
   trouble would undo more than `max_undone` updates together, the run stops: BigScience's 104B run skipped 750, 1,849
   and 2,850 iterations in turn and diverged all the same. So it does behind `MOST_ANSWERS`. Where `lr_after` is set, a
   repeat is replayed with a lower learning rate before that, and nothing more is skipped. Each further repeat lowers it
   again, down to `LEAST_RATE`.

A window covers whole optimizer steps, so gradient accumulation keeps its phase. Where an epoch is not a whole number of
updates, scripts make a shorter update of the rest, and most find the end of the epoch by counting batches. A window
changes that count. So the window also takes the remainder: the part of the epoch after the window is whole updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollback.config import PRESETS, Reach, Settings
from rollback.data_stream import SINGLE_BATCHES, DataStream
from rollback.facts.ending import GivingUp
from rollback.facts.incidents import Action, Incident, Planned
from rollback.facts.training import Window
from rollback.wording import counted

LEVEL_KNOWN = 48
"""A screen stands in for a window from this step on: the sentinel learns from the first 24 observations what is good,
and what it learns in the middle of a bad stretch makes good batches stand out."""

LEAST_RATE = 0.01
"""No answer lowers the learning rate to less than this share of the script's: what a hundredth of it does not cure, a
lower one does not either. It bounds these answers, which `max_skipped` and `max_undone` do not. `lr_after` takes no
lower factor."""

MOST_ANSWERS = 20
"""Harder answers to one trouble. Each has a window half as long again as what was skipped before it. Where each undoes
hardly an update, and `max_skipped` allows all, a script whose loss is NaN in each batch would skip its data for ever.
"""

AT_ONCE = 5
"""Updates behind a window within which a trouble is the same stretch of bad data. An onset may be some steps late."""


@dataclass(frozen=True)
class PolicyCheckpoint:
    """A committed checkpoint of the present timeline."""

    name: str
    step: int
    batch: int
    good: bool


def plan(
    incident: Incident,
    previous: Planned | None,
    held: Sequence[PolicyCheckpoint],
    settings: Settings,
    stream: DataStream = SINGLE_BATCHES,
    *,
    suspected: bool = False,
) -> Planned:
    """Plan the answer to an incident.

    previous: the last plan of the run that was carried out, or None. held: checkpoints of the present timeline, oldest
    first. suspected: a sample that this incident shares with an earlier one explains it. The result's `timeline` begins
    when the plan is carried out. Same arguments, same plan: every rank may compute it.
    """
    trouble = _Trouble.of(incident, previous, settings, stream, suspected)
    back = trouble.back
    answer = trouble.answer(held)
    target = answer.target if answer.action != "stop" else None
    last_kept = target.step if target is not None else incident.onset_step
    discards = [] if answer.action == "observe" else [point.name for point in held if point.step > last_kept]
    return Planned(
        incident=incident.incident,
        repeats=back.incident if back else None,
        action=answer.action,
        escalation=trouble.escalation,
        checkpoint=target.name if target else None,
        step=target.step if target else None,
        batch=target.batch if target else None,
        skip=answer.window,
        discards=tuple(discards),
        through=incident.detection_batch,
        timeline=incident.timeline + (answer.action in ("rollback", "retry")),
        reason=answer.reason,
        in_hand=trouble.in_hand and answer.window is not None,
        screen=answer.screen,
        undone=trouble.undone_by(answer.target),
        lower_rate=answer.lower_rate,
        giving_up=answer.giving_up,
    )


def plan_request(
    incident: Incident, target: PolicyCheckpoint, skip: Window | None, held: Sequence[PolicyCheckpoint]
) -> Planned:
    """Plan an operator's request: restore `target`, and skip the batches of `skip` from there.

    incident: the operator's. held: checkpoints of the present timeline, oldest first. Batches before the restored
    checkpoint remain part of the run: the window loses what lies before the checkpoint.
    """
    if skip is not None:
        skip = Window(first=max(skip.first, target.batch), last=skip.last) if skip.last >= target.batch else None
    return Planned(
        incident=incident.incident,
        action="rollback",
        escalation=0,
        checkpoint=target.name,
        step=target.step,
        batch=target.batch,
        skip=skip,
        discards=tuple(point.name for point in held if point.step > target.step),
        through=incident.detection_batch,
        timeline=incident.timeline + 1,
        reason=f"asked for; {'a good checkpoint' if target.good else 'only a candidate: probation is not over'}",
    )


def repeats(incident: Incident, previous: Planned, settings: Settings, batches_per_step: int) -> bool:
    """Whether an incident is the same trouble that `previous` answered."""
    if not previous.goes_back or previous.batch is None:
        return False
    return previous.batch <= incident.onset_batch <= horizon_end(previous, settings, batches_per_step)


def comes_back(incident: Incident, previous: Planned, settings: Settings, stream: DataStream, suspected: bool) -> bool:
    """Whether an incident is the same trouble again and needs a harder answer than `previous`.

    Where the batch in hand is the cause, of this incident or the previous one, or a sample explains this incident,
    another batch is a new occasion, however soon it comes. But the batch directly after the window belongs to the same
    stretch of bad data. And a sample is believed only within `max_undone`: batches share innocent ones by chance.
    """
    if not repeats(incident, previous, settings, stream.batches_per_step):
        return False
    suspected = suspected and previous.undone <= settings.max_undone
    skips = previous.skip is not None or previous.screen is not None
    beyond = skips and incident.onset_batch > previous.last + stream.batches_per_step
    return not (beyond and (incident.in_hand or previous.in_hand or suspected))


def horizon_end(plan: Planned, settings: Settings, batches_per_step: int) -> int:
    """The last batch at which an incident would be a repeat. After that batch the rollback has succeeded."""
    return plan.last + settings.horizon * batches_per_step


@dataclass(frozen=True)
class _Answer:
    """What is done about a trouble."""

    action: Action
    reason: str
    target: PolicyCheckpoint | None = None
    """The checkpoint to restore, or that a stop would have restored; None: there is none."""
    window: Window | None = None
    screen: Window | None = None
    lower_rate: tuple[float, int] | None = None
    giving_up: GivingUp | None = None


@dataclass(frozen=True)
class _Trouble:
    """An incident, and the plan that it shows to have failed, if there is one."""

    incident: Incident
    back: Planned | None
    stream: DataStream
    settings: Settings
    in_hand: bool
    """Whether the batch in hand is the cause, and is skipped alone."""
    escalation: int
    """The number of harder answers that this trouble has had, and now gets."""
    undone: int
    """Updates that the earlier answers undid, also those to what a suspected sample explained."""

    @classmethod
    def of(
        cls, incident: Incident, previous: Planned | None, settings: Settings, stream: DataStream, suspected: bool
    ) -> "_Trouble":
        back = previous if previous and comes_back(incident, previous, settings, stream, suspected) else None
        escalation = 0
        if back is not None:  # what begins behind a screen has not been answered yet
            behind_screen = back.screen is not None and incident.onset_batch > back.screen.last
            escalation = back.escalation + (back.action == "rollback" and not back.in_hand and not behind_screen)
        trusted = incident.in_hand and settings.trusts_the_batch_in_hand
        in_hand = trusted and not (back and back.action == "rollback")
        same = back or (suspected and previous and repeats(incident, previous, settings, stream.batches_per_step))
        undone = previous.undone if previous and same else 0
        return cls(incident, back, stream, settings, in_hand, escalation, undone)

    @property
    def goes_on(self) -> bool:
        """Whether it is back right behind the window: the stretch of bad data is longer than that."""
        if self.back is None or self.back.skip is None:
            return False
        return 0 < self.incident.onset_batch - self.back.skip.last <= AT_ONCE * self.stream.batches_per_step

    @property
    def action(self) -> Action:
        if self.settings.observe_only:
            return "observe"
        return "retry" if self.settings.retry_first and self.back is None else "rollback"

    @property
    def reach(self) -> Reach:
        if self.in_hand:
            return PRESETS["surgical"]
        if self.back is not None and self.back.in_hand:  # a stretch of such batches, not that one alone: from there on
            return self.settings.reach.model_copy(update={"rewind": 0, "skip_from": "onset"})
        return self.settings.reach

    def answer(self, held: Sequence[PolicyCheckpoint]) -> _Answer:
        """The answer, within all budgets."""
        before = [point for point in held if point.good and point.step <= self.incident.onset_step]
        if not before:
            reason = "no good checkpoint from before the onset is left"
            if self.settings.observe_only:
                return _Answer("observe", reason)
            return _Answer("stop", reason, giving_up="no_checkpoint")
        answer = self._within_budgets(*self._target(before, older=self.escalation > self.goes_on))
        if answer.giving_up is None or (lowered := self._lowered()) is None:
            return answer
        target, why = self._target(before, older=False)  # the data is not to blame, so neither are later checkpoints
        reason = f"with a lower learning rate before it is called structural; {why}; {answer.reason}"
        return _Answer("rollback", reason, target, lower_rate=lowered)

    def undone_by(self, target: PolicyCheckpoint | None) -> int:
        """Updates that going back to `target` undoes, with those of earlier answers."""
        return self.undone + (self.incident.step - target.step if target else 0)

    def _target(self, before: Sequence[PolicyCheckpoint], *, older: bool) -> tuple[PolicyCheckpoint, str]:
        """The checkpoint to restore, and the reason in words.

        before: the good ones from before the onset, oldest first. older: than the last answer's.
        """
        if older:
            last = self.back.step if self.back is not None else None
            earlier = [point for point in before if last is not None and point.step < last]
            return (earlier[-1], "an older good checkpoint than last time") if earlier else (before[0], _OLDEST)
        rewind = self.reach.rewind
        enough = [point for point in before if point.step <= self.incident.onset_step - rewind]
        if enough:
            at_least = f"at least {counted(rewind, 'step')} " if rewind else ""
            return enough[-1], f"the newest good checkpoint {at_least}before the onset"
        return before[0], f"{_OLDEST}; none is {counted(rewind, 'step')} before the onset"

    def _within_budgets(self, target: PolicyCheckpoint, why: str) -> _Answer:
        """The answer that goes back to `target`."""
        back, undone = self.back, self.undone_by(target)
        reason = f"{'the trouble came back' if back else 'first answer to this trouble'}; {why}"
        if self.in_hand:
            reason += "; its batch alone did it: the loss was finite until then"
        if self.action == "retry":
            return _Answer("retry", reason, target)
        answer = self._skip(target, reason)
        if answer.action == "rollback" and back is not None:
            limit = ""
            if undone > (most := self.settings.max_undone):
                limit = (
                    f"the answers to this trouble would undo {undone} updates together, and max_undone allows {most}"
                )
            elif self.escalation > MOST_ANSWERS:
                limit = f"this trouble came back behind {self.escalation} windows, though each was longer"
            if limit:
                return _Answer("stop", _structural(back, limit, self.settings), target, giving_up="structural")
        return answer

    def _lowered(self) -> tuple[float, int] | None:
        """The next lower learning rate: a factor, and for how many steps. None: there is none."""
        if self.back is None or self.settings.lower_rate is None:
            return None
        factor, steps = self.settings.lower_rate
        if self.back.lower_rate is not None:
            factor *= self.back.lower_rate[0]
        return (factor, steps) if factor >= LEAST_RATE else None

    def _skip(self, target: PolicyCheckpoint, reason: str) -> _Answer:
        """Skip what did it: a window, or what a screen finds in it. A stop, where the least would cost too much."""
        bounded = self.action == "rollback"
        wide, least = self._window(target), self._narrowest(target)
        dear = bounded and self.stream.excess_of(wide, self.settings) is not None
        if self._screens(target, dear=dear):
            if dear:
                reason += "; updates are screened, since a window would exceed max_skipped"
            screen = Window(first=target.batch, last=max(wide.last, target.batch))
            least = Window(first=least.first, last=self.stream.end_of_update(least.first, least.first))
            answer = _Answer(self.action, reason, target, screen=screen)
        elif dear:
            reason += "; no wider window, since that would exceed max_skipped"
            answer = _Answer(self.action, reason, target, self.stream.cut_down(wide, least, self.settings))
        else:
            answer = _Answer(self.action, reason, target, wide)
        excess = self.stream.excess_of(least, self.settings) if bounded else None
        return _Answer("stop", excess, target, giving_up="structural") if excess else answer

    def _screens(self, target: PolicyCheckpoint, *, dear: bool) -> bool:
        """Whether updates are judged one by one. dear: a window would cost too much."""
        if self.in_hand:
            return False
        stands_in = dear and target.step >= LEVEL_KNOWN and (self.back is None or self.back.screen is None)
        return stands_in or (self.settings.policy == "screen" and not self.escalation)

    def _window(self, target: PolicyCheckpoint) -> Window:
        reach, detection = self.reach, self.incident.detection_batch
        first, length = target.batch if reach.skip_from == "checkpoint" else self.incident.onset_batch, reach.skip_min
        skipped = self.back.skip if self.back is not None else None
        if skipped is not None:
            # Not from before the restored checkpoint: those batches are part of the run and stay so.
            if self.goes_on:
                # Half as much again as was skipped so far: a long stretch takes few answers.
                so_far = next((each for each in self.stream.skipped if skipped.last in each), skipped)
                first, length = max(target.batch, skipped.last + 1), len(so_far) // 2
            else:
                first, length = max(target.batch, min(first, skipped.first)), 2 * len(skipped)
        last = max(detection + reach.skip_after, first + length - 1)
        return Window(first=first, last=self.stream.end_of_update(first, last))

    def _narrowest(self, target: PolicyCheckpoint) -> Window:
        """From the onset, or where the last window ended, through the detection."""
        first = self.incident.onset_batch
        if self.goes_on and self.back is not None and self.back.skip is not None:
            first = self.back.skip.last + 1
        first = max(target.batch, first)
        return Window(first=first, last=self.stream.end_of_update(first, self.incident.detection_batch))


_OLDEST = "the oldest good checkpoint"


def _structural(back: Planned, limit: str, settings: Settings) -> str:
    # Answers that a suspected sample excused are not among the harder ones.
    without_progress = "; if the loss need not go down, as in reinforcement learning, say so: --objective rl"
    again = f"{back.escalation + 1} rollbacks" if back.escalation else "going back"
    return (
        f"{limit}; {again} did not cure it, so the cause is not in the skipped data: look at the "
        f"learning rate, the precision, the model or the code{without_progress if settings.objective == 'auto' else ''}"
    )
