"""The step in progress: what the script has got and reported since the last step's end."""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rollback.errors import UsageError
from rollback.rundir.heartbeats import READING
from rollback.sentinel import Hint
from rollback.train.advice.advisor import Advisor
from rollback.train.comm.beat import Gauges
from rollback.train.data.prefetch import PrefetchWatch
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.incidents.decisions import StepSpan
from rollback.train.incidents.evidence import IncidentEvidence
from rollback.train.process.activity import Activity
from rollback.train.process.heartbeat import HeartbeatWriter
from rollback.train.sharded import is_sharded
from rollback.train.state.state import TrainingState
from rollback.train.updates.hooks import weak_hook
from rollback.train.updates.optimizer import Updates


class StepInProgress:
    """One rank's step in progress. Nothing here is collective."""

    def __init__(
        self,
        state: TrainingState,
        updates: Updates,
        evidence: IncidentEvidence,
        advisor: Advisor,
        prefetch: PrefetchWatch,
        heartbeat: HeartbeatWriter,
    ) -> None:
        self._state = state
        self._evidence = evidence
        self._advisor = advisor
        self._prefetch = prefetch
        self.asking = prefetch.asking
        self.updates = updates
        self.heartbeat = heartbeat
        heartbeat.activity.evaluates = weak_hook(self.evaluates)
        self.batch_filters: list[Callable[[Any], Any]] = []
        """Called with each batch on its way to the script. The script gets the result of the last one."""
        self._start(state.kept.phase)

    def _start(self, phase: str | None) -> None:
        """phase: the announced phase that begins with this step."""
        self._losses: list[Tensor | float] = []
        self._grad_norm: Tensor | float | None = None
        self._phase = phase
        self.first_batch: int | None = None
        """Position of its first batch; None: it has no batch yet."""
        self.batches = 0
        """Number of batches so far."""
        self._epoch_began = False
        """Whether an epoch begins with this step."""
        self.probe_batches: int | None = None
        """Number of probe batches so far, in place of the step's own; None: there is no probe."""

    # What the script is given and tells ----------------------------------------------------------------------------

    def show(self, doing: str) -> None:
        """Show at once what this rank is doing."""
        self.heartbeat.show(doing, self._state.counters.step, self.batch)

    def begin_epoch(self) -> None:
        """An epoch has been opened. Its first batch may be read at once, to know whether there is one."""
        self._state.counters.epoch_left, self._epoch_began = False, True
        self.show_batch(READING, self._state.cursor.batch)

    def show_batch(self, doing: str, position: int) -> None:
        """A batch is read or trained on."""
        counters = self._state.counters
        first = position if self.first_batch is None else self.first_batch
        last = max(position, first + counters.batches_per_step - 1)
        self.heartbeat.activity.now = Activity(doing, counters.step, position, first, last, in_hand=True)

    def hand_out(self, batch: Any) -> Any:
        """Hand out the batch that was just read to the script. Raises UsageError where that asked too early."""
        self._prefetch.handed_out()
        position = self._state.cursor.batch - 1
        if self.first_batch is None:
            self.first_batch = position
            self._state.kept.phase = None
            self.updates.forget()  # also one that the script made since: it belongs to no batch and no step
        self.batches += 1
        self.show_batch("training", position)
        self._evidence.keep_batch(position, batch, self._state.cursor.indices())
        self.updates.expect_backward(last=self.batches >= self._state.counters.batches_per_step)
        for change in self.batch_filters:
            batch = change(batch)
        return batch

    def trust_draws(self) -> None:
        """The loop is known to ask for each batch when it trains on it."""
        self._prefetch.end()

    def end_pass(self) -> None:
        """There is no further batch in this pass."""
        self._prefetch.pass_ended()

    @property
    def batch(self) -> int:
        """Position of the batch in hand; of the next batch, if there is none. A probe batch has that of the batch in
        whose place it is."""
        return self._state.cursor.batch - self.behind

    @property
    def behind(self) -> int:
        """How many batches the batch in hand is behind the position in the data."""
        return self._state.batch_in_hand if self.probe_batches is None else 1 - self.probe_batches

    def observe(self, loss: Tensor | float, grad_norm: Tensor | float | None) -> None:
        """The script reports a loss. Raises UsageError where it is not one number."""
        self._losses.append(scalar(loss, "loss"))
        if grad_norm is not None:
            self._grad_norm = scalar(grad_norm, "grad_norm")

    def announce(self, phase: str) -> None:
        """A phase begins with this step; with the next one, if this step's update is done. Raises UsageError."""
        if not isinstance(phase, str):
            raise UsageError(
                f"guard.announce got a {type(phase).__name__}; it takes the phase's name, a text",
                hint='for example guard.announce("second stage"), or f"epoch {epoch}"',
            )
        if not self.updated:
            self._phase = phase
        if self.updated or self.first_batch is None:
            self._state.kept.phase = phase  # what is kept before the next batch has it

    # Its end -------------------------------------------------------------------------------------------------------

    @property
    def updated(self) -> bool:
        """Whether the update was made, or dropped by a gradient scaler."""
        return self.batches > 0 and self.updates.attempted

    def evaluates(self) -> bool:
        """Whether the script seems to evaluate, behind the update: an exception leaves the model's mode as it is, and
        that is another one than the update had."""
        return self.updated and self.updates.in_training_mode and not self._state.model.training

    def finish(self) -> StepSpan:
        """The update is done: count its batches, keep its losses and gradients, and return its span."""
        counters, cursor, epoch_end = self._state.counters, self._state.cursor, self._state.cursor.epoch_end
        last_of_epoch = epoch_end == cursor.batch
        counters.note_update(self.batches, last_of_epoch=last_of_epoch)
        self._advisor.resumed.note(self.batches, within_epoch=not (self._epoch_began or last_of_epoch))
        rate_before = None if self._epoch_began else counters.learning_rate
        hints = self._state.note_learning_rate()
        self._advisor.rates.note(counters.step, cursor.epoch, counters.learning_rate, rate_before, counters.first_rate)
        if self._epoch_began:
            hints |= Hint.EPOCH
        self._evidence.end_step(counters.step, self._losses, self.updates.gradients)
        assert self.first_batch is not None
        return StepSpan(
            counters.step, self.first_batch, cursor.batch - 1, counters.batches_per_step, hints, self._phase,
            self.batches, epoch_end, cursor.epoch_batches,
        )  # fmt: skip

    def mean_loss(self) -> Tensor | float | None:
        """The mean over the batches; None: no loss was reported."""
        if len(self._losses) < 2:
            return self._losses[0] if self._losses else None
        return sum(loss.float() if isinstance(loss, Tensor) else loss for loss in self._losses) / len(self._losses)

    def readings(self) -> tuple[Tensor | float | None, Tensor | float | None, Gauges]:
        """What goes on the pulse: the mean loss; the observed gradient norm, else the measured one; and the gauges."""
        told = self._grad_norm
        grad_norm = self.updates.grad_norm if told is None else told
        return self.mean_loss(), grad_norm, self.updates.gauges(told=told is not None)

    def next(self) -> None:
        """Count the step. The next step is in progress; its first batch has the update forgotten."""
        self._state.counters.step += 1
        self._start(self._state.kept.phase)

    def hold(self) -> Callable[[], None]:
        """What makes it again the step that it is now, behind a batch that does not count."""
        told, phase = {**vars(self), "_losses": [*self._losses]}, self._state.kept.phase

        def put_back() -> None:
            vars(self).update(told)
            self._state.kept.phase = phase

        return put_back

    def rollback_applied(self, event: RollbackApplied) -> None:
        """Forget the step. Without a plan, training is where it was, so an announced phase is kept.

        In a screen this includes a phase that was to begin after an undone update. Of what was put back, the step has
        the phase that was announced for it then.
        """
        if event.cause is RollbackCause.PLAN or self._phase is None:
            self._phase = self._state.kept.phase
        self._state.kept.phase = self._phase  # for what is kept before the next batch
        self._start(self._phase)
        self.updates.forget()


def scalar(value: Tensor | float, what: str) -> Tensor | float:
    """The observed number, without its graph; a tensor where a device has it, for which nobody is to wait. Raises
    UsageError for other values.

    A copy: it is read when the step has ended, and for an incident many steps later. A CUDA graph writes its next loss
    to the same memory, and a script may add losses up in a tensor that it sets to zero behind this.
    """
    if not isinstance(value, Tensor):
        try:
            return float(operator.pos(value))  # of a text, float() would make a number
        except TypeError as error:
            raise UsageError(
                f"guard.observe got a {what} that is a {type(value).__name__}; it takes one number, or a tensor of one",
                hint="models that return several things have the loss in one of them, for example output.loss",
            ) from error
    if value.numel() != 1 or value.is_complex():
        kind = "that is a complex number" if value.is_complex() else f"of shape {list(value.shape)}"
        raise UsageError(
            f"guard.observe got a {what} {kind}; it takes one real number",
            hint=f"reduce it first, for example {what}.mean()",
        )
    whole: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    return float(whole.item()) if whole.is_cpu else whole.detach().reshape(()).clone()
