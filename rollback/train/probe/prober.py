"""The probe: where the curve cannot tell what a rise means, a batch of the healthy time is handed out once more.

    question of the sentinel -> the state is held -> the batches of an update that was kept -> their loss, agreed
        -> all is put back -> the judge weighs it

The script takes an ordinary step with them, and nothing of it counts: parameters, optimizer, buffers, random states,
gradients and kept values are put back, and the position in the data has not moved. To run the model here instead was
rejected: only the script knows what its loss is. To refuse its optimizer's step was rejected for the screen already.

A probe that could not be exact is left out, with the reason on record.
"""

import math
from typing import Any

from rollback.facts.probes import NotProbed, Probed
from rollback.sentinel.probe import OpenQuestion, ProbeAnswer, ProbeFinding, damaged
from rollback.train.comm.beat import Signs
from rollback.train.comm.pulse import Pulse
from rollback.train.incidents.decisions import Decision
from rollback.train.incidents.judge import Judge
from rollback.train.incidents.rewinder import Rewinder
from rollback.train.probe.batches import ProbeUpdate, ProbeUpdates
from rollback.train.run import AttachedRun
from rollback.train.sharded import is_sharded
from rollback.train.state.module_buffers import versions_of_unstored
from rollback.train.state.state import TrainingState
from rollback.train.state.state_copy import GradientCopy, StateCopy
from rollback.train.step import StepInProgress

NO_BATCH = object()


class _UnderWay:
    """A probe whose batches the script is being given."""

    def __init__(self, question: OpenQuestion, kept: ProbeUpdate, state: TrainingState, held: StateCopy) -> None:
        self.question, self.kept, self.state = question, kept, held
        self.gradients = GradientCopy({*state.trained, *state.parameters}, state.fsdp)
        self.left = list(kept.batches)


class Prober:
    """Asks the model. Methods are collective, unless they say otherwise."""

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        pulse: Pulse,
        kept: ProbeUpdates,
        judge: Judge,
        rewinder: Rewinder,
        step: StepInProgress,
    ) -> None:
        self._ranks, self._record, self._state = run.ranks, run.record, state
        self._pulse, self.kept, self._judge, self._rewinder, self._step = pulse, kept, judge, rewinder, step
        self.probe: _UnderWay | None = None
        """The probe that is under way."""
        self._hidden: list[tuple[str, int, int]] | None = None
        self._refused: str | None = None
        self._said = set[str]()

    @property
    def due(self) -> bool:
        """Between two steps: whether there is a question, and a training batch comes before and behind a probe.
        Not collective, and alike on all ranks."""
        cursor = self._state.cursor
        return (
            self.kept.question is not None
            and cursor.opened
            and cursor.offset > 0
            and (cursor.reads_ahead or not cursor.at_end)
        )

    def refuse(self, why: str) -> None:
        """No probe in this process. Not collective."""
        self._refused = why

    def keep(self, step: int, batch: Any) -> None:
        """A batch of the run is handed out. Not collective."""
        if self._refused is not None or not self.kept.wanted:
            return
        if self._hidden is None and self.kept.held:
            self._hidden = self._marks_of_hidden()
        self.kept.keep(step, batch, self._state.kept)

    def begin(self) -> Any:
        """The first batch of a probe; `NO_BATCH`: there is none, and the journal has the reason.

        All steps are judged.
        """
        question, self.kept.question = self.kept.question, None
        assert question is not None
        self._state.sentinel.asked(self._state.counters.step)
        prepared, why = self._prepare(question)
        if (why := self._ranks.first_fault(why)) is not None:
            self._note_none(question, why)
            return NO_BATCH
        self.probe = prepared
        self._step.updates.forget()
        return self.next_batch()

    def next_batch(self) -> Any:
        """The next batch of the probe that is under way; `NO_BATCH`: it has no more, or the script has made its update.
        Not collective."""
        assert self.probe is not None
        if not self.probe.left or self._step.updates.attempted:
            return NO_BATCH
        self._step.probe_batches = (self._step.probe_batches or 0) + 1
        self._step.updates.expect_backward(last=False)
        kept = self.probe.left.pop(0)
        self._state.kept.put_generators(kept.generators)
        return kept.again()

    def end(self) -> Decision | None:
        """The probe that is under way is over: put everything back, and judge what the model has answered."""
        assert self.probe is not None
        question, kept, loss = self.probe.question, self.probe.kept, self._step.mean_loss()
        fault = "the script has told no loss for its batch" if loss is None else None
        if self.probe.left or not self._step.updates.attempted:
            fault = "the script's update was not made of the batches that it had been made of"
        fault = self._ranks.first_fault(fault)
        self.drop()
        if fault is not None:
            self._note_none(question, fault)
            return None
        self._pulse.send(loss, None, Signs())
        now = self._pulse.read().loss
        assert now is not None
        assert kept.loss is not None
        return self._judge_answer(question, ProbeAnswer(kept.step, kept.level, kept.loss, now))

    def _judge_answer(self, question: OpenQuestion, answer: ProbeAnswer) -> Decision | None:
        finding = answer.finding(question)
        fact = Probed(
            step=self._state.counters.step, onset_step=question.onset, level=question.level, now=question.now,
            kept_step=answer.kept, loss_then=answer.then, loss_now=answer.now if math.isfinite(answer.now) else None,
            finding=finding.value, explanation=f"{question.in_words()}; {answer.in_words(question)}",
        )  # fmt: skip
        self._record.note(
            fact, fact.explanation if finding is not ProbeFinding.MODEL else None
        )  # else the incident says it
        if finding is ProbeFinding.DATA:
            self._state.sentinel.accept_rise()
        if finding is not ProbeFinding.MODEL:
            return None
        last, sentinel = self._state.counters.step - 1, self._state.sentinel
        return self._judge.call(damaged(last, question, answer, sentinel.recent()))

    def _note_none(self, question: OpenQuestion, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            fact = NotProbed(step=self._state.counters.step, onset_step=question.onset, reason=why)
            self._record.note(fact, f"{question.in_words()}; the model cannot be asked about it: {why}")

    def drop(self) -> None:
        """Put everything back, if a probe is under way."""
        if self.probe is not None:
            probe, self.probe = self.probe, None
            self._rewinder.put_back_probe(probe.state, probe.gradients)

    def abandon(self) -> None:
        """As `drop`, where the script has left its loop for good. Not collective."""
        if self.probe is not None:
            probe, self.probe = self.probe, None
            probe.gradients.put_back(lambda: probe.state.put_back(self._state))

    def _prepare(self, question: OpenQuestion) -> tuple[_UnderWay | None, str | None]:
        """The probe, or why this rank cannot take part. Not collective."""
        if self._refused is not None:
            return None, self._refused
        kept = self.kept.before(question.onset)
        if kept is None:
            return None, "this process has kept no batch from before the rise"
        if (why := kept.unfit or self._why_inexact(len(kept.batches))) is not None:
            return None, why
        try:
            return _UnderWay(question, kept, self._state, self._rewinder.present_state(data=False)), None
        except (RuntimeError, MemoryError) as error:
            return None, f"the state cannot be held: {error}"

    def _why_inexact(self, batches: int) -> str | None:
        if any(map(is_sharded, self._state.model.parameters())):
            return "the model is sharded"
        if any(getattr(ddp, "_comm_hooks", None) for ddp in self._state.broadcasts.wrappers):
            return "DistributedDataParallel has a communication hook, which may have a state of its own"
        if self._judge.screens(self._state.cursor.batch):
            return "updates are being screened"
        if not self._judge.leaves_whole_updates(batches):
            return "an epoch is not a whole number of updates, so the script may count its batches to know the end"
        before, self._hidden = self._hidden, self._marks_of_hidden()
        if before is not None and before != self._hidden:
            return "the model has tensors that change and are no parameters or buffers, so they could not be put back"
        return None

    def _marks_of_hidden(self) -> list[tuple[str, int, int]]:
        return [one for module in self._state.modules.values() for one in versions_of_unstored(module)]
