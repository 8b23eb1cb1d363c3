"""What to do about an incident: a pure function from evidence and record to a plan.

The rules, in order:

1. *Observe only*: plan what would be done, mark it `observe`.
2. *Repeat*: the incident begins at most `horizon` steps after the window that the last plan skipped (or replayed).
   A repeat of a retry shows that the trouble comes from data or state: roll back. A repeat of a rollback escalates:
   an older good checkpoint and a window twice as long. After `max_rollbacks` rollbacks for one trouble the cause is
   structural and the run stops: BigScience's 104B run skipped 750, 1,849 and 2,850 iterations in turn and diverged
   all the same.
3. *Retry first*, where asked for: restore and replay without skipping.
4. Otherwise roll back: restore the newest good checkpoint at least `rewind` steps before the onset, skip through the
   detection step and `skip_after` batches more.

A window covers whole optimizer steps, so that gradient accumulation keeps its phase. Where an epoch is no whole number
of updates, scripts make a shorter one of what is left at its end, and most know that end by counting batches: a count
that a window puts out. So the window takes that remainder along: what is left of the epoch behind it is whole updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollback.config import Settings
from rollback.events import Action, Incident, Planned, Window


@dataclass(frozen=True)
class Held:
    """A committed checkpoint of the present timeline."""

    name: str
    step: int
    batch: int
    good: bool


@dataclass(frozen=True)
class Stream:
    """How the script cuts the data into updates.

    batches_per_step: of a whole update. epoch_end: the batch behind the last one of an epoch, and epoch_batches how
    many each has; None where epochs have no length, or updates take no notice of them.
    """

    batches_per_step: int = 1
    epoch_end: int | None = None
    epoch_batches: int | None = None

    def end_of_update(self, first: int, last: int) -> int:
        """The last batch of the shortest window from `first` through `last` that leaves whole updates behind it."""
        per_step = self.batches_per_step
        if self.epoch_end is None or not self.epoch_batches:
            return first + -(-(last + 1 - first) // per_step) * per_step - 1
        epochs = -(-(last + 1 - self.epoch_end) // self.epoch_batches)
        left = self.epoch_end + epochs * self.epoch_batches - (last + 1)  # of the epoch in which the window ends
        return last + left % per_step


def plan(
    incident: Incident,
    previous: Planned | None,
    held: Sequence[Held],
    settings: Settings,
    stream: Stream = Stream(),
) -> Planned:
    """Plan the answer to an incident.

    previous: the last plan of the run that was carried out, or None. held: checkpoints of the present timeline, oldest
    first. The result's `timeline` is the one that begins when it is carried out. Same arguments, same plan: every rank
    may compute it.
    """
    repeated = previous is not None and repeats(incident, previous, settings, stream.batches_per_step)
    escalation = previous.escalation + (previous.action == "rollback") if previous and repeated else 0
    action = _action(repeated, escalation, settings)
    target, why = _target(incident, previous if repeated and escalation else None, held, settings)
    window = None
    if target is None:
        action, reason = "observe" if settings.observe_only else "stop", why
    elif action == "stop":
        target, reason = None, _structural(escalation)
    else:
        if action != "retry":
            window = _window(incident, target, previous if repeated else None, settings, stream)
        reason = f"{'the trouble came back' if repeated else 'first answer to this trouble'}; {why}"
    last_kept = target.step if target is not None else incident.onset_step
    discards = [] if action == "observe" else [point.name for point in held if point.step > last_kept]
    return Planned(
        incident=incident.incident,
        repeats=previous.incident if previous is not None and repeated else None,
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
    )


def plan_request(incident: Incident, target: Held, skip: Window | None, held: Sequence[Held]) -> Planned:
    """Plan what an operator asked for: back to `target`, and past the batches of `skip` from there.

    incident: the operator's. held: checkpoints of the present timeline, oldest first. Batches before the restored
    checkpoint are part of the run and stay so: a window is cut to what lies behind it.
    """
    if skip is not None and skip.first < target.batch:
        skip = Window(first=target.batch, last=skip.last) if skip.last >= target.batch else None
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


def repeats(incident: Incident, previous: Planned, settings: Settings, batches_per_step: int = 1) -> bool:
    """Whether an incident is the trouble that `previous` answered, come back."""
    if previous.action not in ("rollback", "retry") or previous.batch is None:
        return False
    return previous.batch <= incident.onset_batch <= horizon_end(previous, settings, batches_per_step)


def horizon_end(plan: Planned, settings: Settings, batches_per_step: int = 1) -> int:
    """The batch up to which an incident would be a repeat; beyond it the planned rollback has proved itself."""
    end = plan.skip.last if plan.skip else plan.through
    return end + settings.horizon * batches_per_step


def _action(repeated: bool, escalation: int, settings: Settings) -> Action:
    if settings.observe_only:
        return "observe"
    if escalation >= settings.max_rollbacks:
        return "stop"
    if settings.retry_first and not repeated:
        return "retry"
    return "rollback"


def _target(
    incident: Incident, escalated_from: Planned | None, held: Sequence[Held], settings: Settings
) -> tuple[Held | None, str]:
    """The checkpoint to restore, and in words why this one."""
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
    rewind = settings.reach.rewind
    enough = [point for point in before if point.step <= incident.onset_step - rewind]
    if enough:
        return enough[-1], f"the newest good checkpoint at least {rewind} steps before the onset"
    return before[0], f"the oldest good checkpoint; none is {rewind} steps before the onset"


def _window(incident: Incident, target: Held, previous: Planned | None, settings: Settings, stream: Stream) -> Window:
    reach = settings.reach
    first = target.batch if reach.skip_from == "checkpoint" else incident.onset_batch
    length = max(incident.detection_batch + reach.skip_after - first + 1, reach.skip_min, 1)
    if previous is not None and previous.skip is not None:
        # Not from before the restored checkpoint: those batches are part of the run and stay so.
        first = max(target.batch, min(first, previous.skip.first))
        length = max(incident.detection_batch + reach.skip_after - first + 1, 2 * len(previous.skip))
    return Window(first=first, last=stream.end_of_update(first, first + length - 1))


def _structural(escalation: int) -> str:
    return (
        f"{escalation} rollbacks with wider and wider windows did not cure it, so the cause is not in the skipped "
        "data: look at the learning rate, the precision, the model or the code"
    )
