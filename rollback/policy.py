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
   and 2,850 iterations in turn and diverged all the same. Where `lr_after` is set, a repeat is first replayed once with
   a lower learning rate, and nothing more is skipped.

A window covers whole optimizer steps, so gradient accumulation keeps its phase. Where an epoch is not a whole number of
updates, scripts make a shorter update of the rest, and most find the end of the epoch by counting batches. A window
changes that count. So the window also takes the remainder: the part of the epoch after the window is whole updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollback.config import PRESETS, Reach, Settings
from rollback.facts.training import Action, Incident, Planned, Window

FIRST_ANSWER = 60
"""Updates that a first answer may always cost, besides `rewind` and `skip_after`: checkpoints are 50 apart in a run
that has just begun, and a trouble is a few steps old when it is called."""

LEVEL_KNOWN = 48
"""A screen stands in for a window from this step on: the sentinel learns from the first 24 observations what is good,
and what it learns in the middle of a bad stretch makes good batches stand out."""

AT_ONCE = 5
"""Updates behind a window within which a trouble is the same stretch of bad data. An onset may be some steps late."""


@dataclass(frozen=True)
class PolicyCheckpoint:
    """A committed checkpoint of the present timeline."""

    name: str
    step: int
    batch: int
    good: bool


@dataclass(frozen=True)
class DataStream:
    """The data in the units of the script."""

    batches_per_step: int = 1
    """Batches of a whole update."""
    epoch_end: int | None = None
    """The batch after the last one of an epoch; None where epochs have no length, or updates ignore the end of an
    epoch."""
    epoch_batches: int | None = None
    """Batches of each epoch; None as above."""
    skipped: tuple[Window, ...] = ()
    """Windows that incidents have cost so far; they do not overlap."""
    total: int = 0
    """Number of batches that the run will have at least, as far as known."""

    def end_of_update(self, first: int, last: int) -> int:
        """The last batch of the shortest window from `first` through `last` that leaves whole updates after it."""
        per_step = self.batches_per_step
        if self.epoch_end is None or not self.epoch_batches:
            return first + -(-(last + 1 - first) // per_step) * per_step - 1
        epochs = -(-(last + 1 - self.epoch_end) // self.epoch_batches)
        left = self.epoch_end + epochs * self.epoch_batches - (last + 1)  # of the epoch in which the window ends
        return last + left % per_step


def plan(
    incident: Incident,
    previous: Planned | None,
    held: Sequence[PolicyCheckpoint],
    settings: Settings,
    stream: DataStream = DataStream(),
    *,
    suspected: bool = False,
) -> Planned:
    """Plan the answer to an incident.

    previous: the last plan of the run that was carried out, or None. held: checkpoints of the present timeline, oldest
    first. suspected: a sample that this incident shares with an earlier one explains it. The result's `timeline` begins
    when the plan is carried out. Same arguments, same plan: every rank may compute it.
    """
    back = previous if previous and comes_back(incident, previous, settings, stream, suspected) else None
    escalation = _escalation(incident, back)
    in_hand = incident.in_hand and settings.trusts_the_batch_in_hand and not (back and back.action == "rollback")
    reach = _reach(in_hand, back, settings)
    goes_on = back is not None and _goes_on(incident, back, stream)
    target, why = _target(incident, back if escalation > goes_on else None, held, reach)
    action = _action(back is not None, settings)
    undone = (back.undone if back else 0) + (incident.step - target.step if target else 0)
    window = screen = lower_rate = None
    found = target is not None
    if target is None:
        action, reason = "observe" if settings.observe_only else "stop", why
    else:
        reason = f"{'the trouble came back' if back else 'first answer to this trouble'}; {why}"
        if in_hand:
            reason += "; its batch alone did it: the loss was finite until then, and is not"
        if action != "retry":
            wide = _window(incident, target, back, reach, stream, goes_on=goes_on)
            least = _narrowest(incident, target, back, stream, goes_on=goes_on)
            dear = action == "rollback" and excess_of(wide, stream, settings) is not None
            instead = dear and target.step >= LEVEL_KNOWN and (back is None or back.screen is None)
            if not in_hand and (instead or (settings.policy == "screen" and not escalation)):
                screen = Window(first=target.batch, last=max(wide.last, target.batch))
                least = Window(first=least.first, last=stream.end_of_update(least.first, least.first))
                if dear:
                    reason += "; updates are screened, since a window would exceed max_skipped"
            elif dear:
                window = _cut_down(wide, least, stream, settings)
                reason += "; no wider window, since that would exceed max_skipped"
            else:
                window = wide
            if action == "rollback" and (excess := excess_of(least, stream, settings)):
                action, reason = "stop", excess
        if action == "rollback" and back is not None and undone > settings.max_undone:
            action, reason = "stop", _structural(back, undone, settings)
        if action == "stop" and back is not None and back.lower_rate is None and settings.lower_rate is not None:
            action, window, screen, lower_rate = "rollback", None, None, settings.lower_rate
            reason = f"with a lower learning rate, once, before it is called structural: {reason}"
    if action == "stop":
        target = window = screen = None
    last_kept = target.step if target is not None else incident.onset_step
    discards = [] if action == "observe" else [point.name for point in held if point.step > last_kept]
    return Planned(
        incident=incident.incident,
        repeats=back.incident if back else None,
        action=action,
        escalation=escalation,
        checkpoint=target.name if target else None,
        step=target.step if target else None,
        batch=target.batch if target else None,
        skip=window,
        discards=tuple(discards),
        through=incident.detection_batch,
        timeline=incident.timeline + (action in ("rollback", "retry")),
        reason=reason,
        in_hand=in_hand and window is not None,
        screen=screen,
        undone=undone,
        lower_rate=lower_rate,
        giving_up=None if action != "stop" else "structural" if found else "no_checkpoint",
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
    stretch of bad data.
    """
    if not repeats(incident, previous, settings, stream.batches_per_step):
        return False
    skips = previous.skip is not None or previous.screen is not None
    beyond = skips and incident.onset_batch > previous.last + stream.batches_per_step
    return not (beyond and (incident.in_hand or previous.in_hand or suspected))


def horizon_end(plan: Planned, settings: Settings, batches_per_step: int) -> int:
    """The last batch at which an incident would be a repeat. After that batch the rollback has succeeded."""
    return plan.last + settings.horizon * batches_per_step


def _escalation(incident: Incident, back: Planned | None) -> int:
    """The number of harder answers that this trouble has had, and now gets. What begins behind a screen has not been
    answered yet."""
    if back is None:
        return 0
    behind_screen = back.screen is not None and incident.onset_batch > back.screen.last
    return back.escalation + (back.action == "rollback" and not back.in_hand and not behind_screen)


def _goes_on(incident: Incident, back: Planned, stream: DataStream) -> bool:
    """Whether the trouble is back right behind the window: the stretch of bad data is longer than that."""
    return back.skip is not None and 0 < incident.onset_batch - back.skip.last <= AT_ONCE * stream.batches_per_step


def _action(repeated: bool, settings: Settings) -> Action:
    if settings.observe_only:
        return "observe"
    if settings.retry_first and not repeated:
        return "retry"
    return "rollback"


def _reach(in_hand: bool, back: Planned | None, settings: Settings) -> Reach:
    if in_hand:
        return PRESETS["surgical"]
    if back is not None and back.in_hand:  # a stretch of such batches, not that one alone: from there on
        return settings.reach.model_copy(update={"rewind": 0, "skip_from": "onset"})
    return settings.reach


def _target(
    incident: Incident, escalated_from: Planned | None, held: Sequence[PolicyCheckpoint], reach: Reach
) -> tuple[PolicyCheckpoint | None, str]:
    """The checkpoint to restore, and the reason in words."""
    before = [point for point in held if point.good and point.step <= incident.onset_step]
    if not before:
        return None, "no good checkpoint from before the onset is left"
    if escalated_from is not None:
        older = [point for point in before if escalated_from.step is not None and point.step < escalated_from.step]
        return (
            (older[-1], "an older good checkpoint than last time")
            if older
            else (before[0], "the oldest good checkpoint")
        )
    rewind = reach.rewind
    enough = [point for point in before if point.step <= incident.onset_step - rewind]
    if enough:
        at_least = f"at least {rewind} steps " if rewind else ""
        return enough[-1], f"the newest good checkpoint {at_least}before the onset"
    return before[0], f"the oldest good checkpoint; none is {rewind} steps before the onset"


def _window(
    incident: Incident,
    target: PolicyCheckpoint,
    previous: Planned | None,
    reach: Reach,
    stream: DataStream,
    *,
    goes_on: bool,
) -> Window:
    first = target.batch if reach.skip_from == "checkpoint" else incident.onset_batch
    last = max(incident.detection_batch + reach.skip_after, first + reach.skip_min - 1)
    if previous is not None and previous.skip is not None:
        # Not from before the restored checkpoint: those batches are part of the run and stay so.
        if goes_on:
            # Half as much again as was skipped so far: a long stretch takes few answers.
            so_far = next((each for each in stream.skipped if previous.skip.last in each), previous.skip)
            first, length = max(target.batch, previous.skip.last + 1), len(so_far) // 2
        else:
            first, length = max(target.batch, min(first, previous.skip.first)), 2 * len(previous.skip)
        last = max(incident.detection_batch + reach.skip_after, first + length - 1)
    return Window(first=first, last=stream.end_of_update(first, last))


def _narrowest(
    incident: Incident, target: PolicyCheckpoint, previous: Planned | None, stream: DataStream, *, goes_on: bool
) -> Window:
    """From the onset, or where the last window ended, through the detection."""
    behind = previous.skip.last + 1 if previous is not None and previous.skip is not None and goes_on else None
    first = max(target.batch, incident.onset_batch if behind is None else behind)
    return Window(first=first, last=stream.end_of_update(first, incident.detection_batch))


def excess_of(window: Window, stream: DataStream, settings: Settings) -> str | None:
    """The reason in words, where incidents would cost more batches than allowed with this window; else None."""
    skipped, of, allowed = _cost(window, stream, settings)
    if skipped <= allowed:
        return None
    return (
        f"skipping batches {window} would make it {skipped} of {of} batches that incidents have cost, and max_skipped "
        f"({settings.max_skipped}) allows {allowed}: too much of the data is bad, or the windows are too coarse for so "
        "short a run, or the cause is not in the data"
    )


def _cost(window: Window, stream: DataStream, settings: Settings) -> tuple[int, int, int]:
    """The batches that incidents cost with this window, the batches of the run, and how many incidents may cost.

    The limit is `max_skipped` of the batches that the run has, as far as known, and at least of those through the
    window. One first answer is always allowed.
    """
    known = sum(max(0, min(w.last, window.last) - max(w.first, window.first) + 1) for w in stream.skipped)
    skipped = sum(map(len, stream.skipped)) + len(window) - known
    of = max(stream.total, window.last + 1)
    reach = settings.reach
    least = max((reach.rewind + FIRST_ANSWER) * stream.batches_per_step + reach.skip_after, reach.skip_min)
    return skipped, of, max(int(settings.max_skipped_share * of), least) if settings.max_skipped_share < 1 else skipped


def _cut_down(wide: Window, narrow: Window, stream: DataStream, settings: Settings) -> Window:
    """A window within `max_skipped`, given that `narrow` is: from there on, with half of what is left."""
    skipped, _, allowed = _cost(narrow, stream, settings)
    last = stream.end_of_update(narrow.first, narrow.last + (allowed - skipped) // 2)
    cut = Window(first=narrow.first, last=max(narrow.last, min(wide.last, last)))
    return narrow if excess_of(cut, stream, settings) else cut


def _structural(back: Planned, undone: int, settings: Settings) -> str:
    return (
        f"the answers to this trouble would undo {undone} updates together, and max_undone allows "
        f"{settings.max_undone}; {back.escalation + 1} rollbacks did not cure it, so the cause is not in the skipped "
        "data: look at the learning rate, the precision, the model or the code"
    )
