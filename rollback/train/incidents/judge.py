"""What happens at a step's end: the beat is read, judged and answered, the same way on every rank.

    beat -> landing of the snapshot in flight -> verdict -> probation -> plan, if the verdict demands action

All of it depends only on the reduced beat and on state that is the same on all ranks. So all ranks decide alike.
"""

import copy
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

from torch import Tensor

from rollback.data_stream import DataStream
from rollback.errors import CheckpointUnusable
from rollback.facts.training import Incident, Noticed, PhaseAnnounced, ScalerSkipped, Window
from rollback.policy import PolicyCheckpoint
from rollback.rundir.evidence import MOST_WITNESSES, witnesses
from rollback.rundir.metrics.metric_lines import metric_line
from rollback.rundir.requests import Request
from rollback.sentinel import Hint, Kind, Sentinel, Verdict
from rollback.sentinel.scaler import ScaleWatch
from rollback.suspects import MOST
from rollback.train.advice.advisor import Advisor
from rollback.train.comm.beat import NO_GAUGES, Beat, Gauges, beat_of
from rollback.train.comm.pulse import Pulse
from rollback.train.data.skips import SkipList
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.incidents.cases import Cases
from rollback.train.incidents.decisions import Decision, Halt, Rewind, ServeRequests, StepSpan, Undo
from rollback.train.incidents.evidence import IncidentEvidence
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.last_snapshot.writers import JudgedAhead
from rollback.train.run import AttachedRun
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.state.nonfinite import FiniteCheck, union

_ACTED_ON = (Kind.SPIKE, Kind.NONFINITE)
_USUAL = 9  # the last updates, by which a whole one is told from one that an epoch's end made shorter or longer
_SPANS = 4096  # steps whose batches are remembered; an onset further back is reckoned from the batches per step


class Judge:
    """Judges every step. Methods are collective unless they say otherwise.

    judged: told of each step that was judged, with its loss and the sentinel, for what the model may be asked.
    """

    def __init__(
        self,
        run: AttachedRun,
        pulse: Pulse,
        sentinel: Sentinel,
        finite: FiniteCheck,
        checkpoints: CheckpointManager,
        evidence: IncidentEvidence,
        advisor: Advisor,
        skips: SkipList,
        judged: Callable[[StepSpan, float | None, Sentinel], object],
        batch: int = 0,
        max_steps: int | None = None,
    ) -> None:
        self._ranks = run.ranks
        self._pulse = pulse
        self._sentinel = sentinel
        self._checkpoints = checkpoints
        self._record = run.record
        self._evidence = evidence
        self._spans: deque[StepSpan] = deque(maxlen=_SPANS)
        self._cases = Cases(run.record, run.settings, run.history, skips)
        self.screens = self._cases.screens
        self._scale = ScaleWatch()
        self._advisor = advisor
        self._finite = finite
        self._judged = judged
        self._phases = set(run.history.phases)
        self._next_batch = batch
        self._max_steps = max_steps
        self.timeline = run.history.timeline
        self._observed = False  # in a trouble that was reported and is left alone: each step of it would be another
        self._verdict = Kind.HEALTHY  # on the step that was judged last
        self._attempt = run.attempt
        self._turn = 0  # odd while a step is being judged
        self.before_next_batch = False  # whether each step is judged before the next one begins
        self.beat: Beat | None = None  # the last one that was read

    def end_step(
        self,
        span: StepSpan,
        loss: Tensor | float | None,
        grad_norm: Tensor | float | None,
        *,
        stop: bool,
        scaler_skipped: bool,
        requests_open: bool = False,
        gauges: Gauges = NO_GAUGES,
        seconds: float = 0.0,
        screened: bool = False,
    ) -> Decision | None:
        """Judge the step before this one and send this one's beat, unless there is something to do.

        requests_open: operators' ones, as this rank sees it. seconds: what a step takes on this rank. screened: judge
        this step too, at once and by itself; it can still be undone.
        """
        decision = self.judge_pending()
        if isinstance(decision, Rewind) or (isinstance(decision, Halt) and decision.giving_up):
            return decision
        signs = self._checkpoints.snapshots.signs()
        signs.stop, signs.scaler_skipped, signs.announced = stop, scaler_skipped, span.phase is not None
        signs.asked = requests_open
        signs.step_seconds, signs.missed = seconds, self._checkpoints.misses_a_candidate()
        self._spans.append(span)
        self._advisor.end_step(span.batches)
        self._pulse.send(loss, grad_norm, signs, gauges)
        if screened and (answer := self.judge_pending(screened=True)) is not None:
            return answer
        # Before stopping or turning to an operator, this step is judged too: then there is nothing under way.
        match self.judge_pending() if decision is not None else None:
            case Rewind() as later if isinstance(decision, Halt):
                # Planned and journalled; there is no time to carry it out.
                account = f"told to stop; the next start carries out the planned return to step {later.plan.step}"
                return Halt(account, save=False)
            case Rewind() | Halt() as later:
                return later
        return decision

    def judge_pending(self, *, screened: bool = False) -> Decision | None:
        """Judge the step whose beat is under way, if any. screened: by itself, since it can still be undone."""
        if not self._pulse.under_way:
            return None
        beat, judge = self._pulse.read(), self._screen if screened else self._judge
        self._turn += 1
        try:
            return judge(beat, self._spans[-1])
        finally:
            self._turn += 1

    def judge_ahead(self, sent: Sequence[bytes]) -> JudgedAhead:
        """The sentinel as it will be when the last step is judged, where training goes on then. Any thread; nothing
        changes.

        sent: what all ranks have put into the beat of that step. The beat itself may not arrive any more.

        Raises NotProved: it is not known, there is a trouble that the last snapshot would carry on, or it would be all
        that the run can go back to.
        """
        turn = self._turn
        try:
            spans, (sentinel, scale) = list(self._spans), copy.deepcopy((self._sentinel, self._scale))
            has_beginning = bool(self._checkpoints.catalogue.as_held())
        except RuntimeError:  # changed while it was gone through: the turn tells
            turn = -1
        if turn % 2 or turn != self._turn:
            raise NotProved("the last step was being judged")
        if self.screens(self._next_batch):
            raise NotProved("each update is screened, and may still be undone")
        verdict, metric = None, None
        if self._pulse.under_way:
            if not all(sent) or (beat := beat_of(sent)) is None:
                raise NotProved("it is not known what the ranks have told each other of the last step")
            span = spans[-1]
            verdict = sentinel.update(span.observation(beat, announced=beat.announced or self._has_phase(span)))
            if scale.update(span.step, beat.scaler_skipped, beat.scale) is not None:
                raise NotProved("the last step was not healthy")
            metric = metric_line(
                step=span.step, batch=span.last_batch, loss=beat.loss, grad_norm=beat.grad_norm,
                verdict=verdict.kind.value, attempt=self._attempt, timeline=self.timeline,
            )  # fmt: skip
        if turn != self._turn:
            raise NotProved("the last step was being judged")
        if (verdict.kind if verdict is not None else self._verdict) in _ACTED_ON:
            raise NotProved("the last step was not healthy")
        # What is kept behind an update is not good yet. As the only checkpoint it would leave an incident none.
        if spans and not has_beginning:
            raise NotProved("the checkpoint of the run's beginning was not there yet, so the run begins anew")
        return JudgedAhead(sentinel.state_dict(), metric)

    @property
    def calm(self) -> bool:
        """Whether nothing stood out in the step that was judged last."""
        return self._verdict is Kind.HEALTHY

    @property
    def awaits_verdict(self) -> bool:
        """Whether a step's beat is under way."""
        return self._pulse.under_way

    def rollback_applied(self, event: RollbackApplied) -> None:
        """Forget the verdicts on the steps behind it. If a plan was carried out, its incident stays open."""
        if event.case is not None and event.case.plan is not None:
            self._cases.carried_out(event.case, event.step)
            self.timeline = event.case.plan.timeline
        if event.cause is RollbackCause.PROBE:
            return
        if event.cause is not RollbackCause.SCREEN:
            self._verdict = Kind.HEALTHY
            self._scale.restart()
        self._next_batch = event.batch
        while self._spans and self._spans[-1].step >= event.step:
            self._spans.pop()

    def plan_without(self, name: str, fault: CheckpointUnusable, failed: Rewind) -> Decision | None:
        """Remove the planned checkpoint, which failed its check, from the ring, and plan again."""
        self._checkpoints.put_aside(name, fault)
        if failed.incident.request is not None:
            account = f"checkpoint {name}, which was asked for, cannot be used any more: {fault.message}"
            return Halt(account, save=False)
        return self._plan(failed.incident, failed.stream)

    def plan_request(self, name: str, request: Request, target: PolicyCheckpoint, *, step: int, batch: int) -> Rewind:
        """An operator wants to go back to `target`: an incident of theirs, planned and carried out like any other."""
        incident, plan = self._cases.plan_request(
            name, request, target, self._checkpoints.as_held(), step=step, batch=batch, timeline=self.timeline
        )
        return Rewind(incident, plan, DataStream())

    def call(self, verdict: Verdict) -> Decision | None:
        """An incident by what the model was asked. All steps are judged."""
        return self._answer(verdict, self._spans[-1], (), lost=False)

    def leaves_whole_updates(self, batches: int) -> bool:
        """Whether a script that counts its batches is where it was, by its updates, when it has had so many more. Not
        collective, and alike on all ranks."""
        span, stream = self._spans[-1], self._stream(self._spans[-1])
        return span.batches_per_step == batches and (stream.epoch_batches or 0) % batches == 0

    def close(self) -> None:
        """Say how the last incident ended, if enough steps have gone well since. Not collective."""
        self._cases.close(self._spans[-1].step if self._spans else 0)
        self._record.close()

    def _screen(self, beat: Beat, span: StepSpan) -> Decision | None:
        """Judge an update that can still be undone. What does not stand out is judged like any other."""
        observation = span.observation(beat, announced=beat.announced)
        verdict = self._sentinel.screen(observation, fell_to=self._cases.fell_to)
        if verdict is None:
            return self._judge(beat, span)
        self._checkpoints.advance(beat)
        stream, batches = self._stream(span), Window(first=span.first_batch, last=span.last_batch)
        fact = self._cases.screen_out(verdict, batches, stream, self.timeline)
        return Undo(fact.window) if fact is not None else self._answer(verdict, span, beat.nonfinite_ranks, lost=False)

    def _judge(self, beat: Beat, span: StepSpan) -> Decision | None:
        self.beat = beat
        self._checkpoints.advance(beat)
        begins = bool(beat.announced or self._phases) and self._phase_begins(beat, span)
        self._next_batch = span.last_batch + 1
        verdict = self._sentinel.update(span.observation(beat, announced=begins))
        collapse = self._scale.update(span.step, beat.scaler_skipped, beat.scale)
        if collapse is not None and verdict.kind not in _ACTED_ON:
            verdict = collapse
        self._record.metric(span.step, span.last_batch, beat.loss, beat.grad_norm, verdict.kind, timeline=self.timeline)
        if beat.scaler_skipped:
            self._record.note(ScalerSkipped(step=span.step, batch=span.last_batch))
        if (blip := verdict.ended) is not None:
            self._record.note(Noticed(**asdict(blip)))
        if advice := self._advisor.judge(beat, verdict):
            self._record.advise(*advice)
        self._verdict = verdict.kind
        self._evidence.suspect(verdict.onset)
        self._judged(span, beat.loss, self._sentinel)
        self._cases.judge(self.calm, span.step, span.last_batch, span.batches_per_step)
        self._checkpoints.judge(self.calm, verdict.onset)
        if self.calm:
            self._observed = False
        decision = None
        if verdict.kind in _ACTED_ON and not self._observed:
            lost = beat.loss is not None and not math.isfinite(beat.loss)
            decision = self._answer(verdict, span, beat.nonfinite_ranks, lost=lost)
        if decision is None and self._checkpoints.unanswered is not None:
            decision = self.answer_state()
        if decision is not None:
            return decision
        if beat.stop:
            return Halt("told to stop", save=True)
        return ServeRequests() if beat.asked else None

    def _phase_begins(self, beat: Beat, span: StepSpan) -> bool:
        """Whether an announced phase begins with this step, now or when it was announced before a rollback."""
        if beat.announced and span.first_batch not in self._phases:
            self._phases.add(span.first_batch)
            self._record.note(PhaseAnnounced(step=span.step, batch=span.first_batch, phase=span.phase))
        return self._has_phase(span)

    def _has_phase(self, span: StepSpan) -> bool:
        """Whether a phase is known to begin with one of its batches, or with one that was skipped in front of them."""
        return not self._phases.isdisjoint(range(self._next_batch, span.last_batch + 1))

    def answer_state(self) -> Decision | None:
        """Plan the answer to `CheckpointManager.unanswered`: the last snapshot was dropped because something in it is
        not finite.

        It may have been so from the newest checkpoint on: those have been looked at.
        """
        landing, self._checkpoints.unanswered = self._checkpoints.unanswered, None
        assert landing is not None
        found = union(self._ranks.from_each(landing.nonfinite))
        self._finite.accept(found)  # a restore takes that back; who only observes is told once
        if not self._spans or self._observed:
            return None  # the script did it before its first update, or it is of a trouble that is left alone
        manifest, newest = landing.manifest, self._checkpoints.catalogue.newest()
        since = newest.step if newest else 0
        what = self._finite.in_words(min(found))
        text = self._finite.account(found, landing.nonfinite_ranks, manifest.step, since)
        step = max(since, manifest.step - 1)
        verdict = Verdict(Kind.NONFINITE, step, since, "nonfinite-state", what, explanation=text)
        return self._answer(verdict, self._span_of(step, self._spans[-1]), landing.nonfinite_ranks, lost=False)

    def _answer(
        self, verdict: Verdict, span: StepSpan, nonfinite_ranks: tuple[int, ...], *, lost: bool
    ) -> Decision | None:
        # Whatever is in flight lands first, so that the plan knows all checkpoints there are.
        self._checkpoints.await_landing()
        onset = self._span_of(verdict.onset if verdict.onset is not None else span.step, span)
        samples = self._samples({onset.step, span.step}, nonfinite_ranks)
        incident = Incident(
            incident=self._cases.next_number(),
            verdict=verdict.kind.value,
            cause=verdict.witness,
            rule=verdict.rule,
            value=verdict.value,
            threshold=verdict.threshold,
            explanation=verdict.explanation,
            window=verdict.window,
            ranks=nonfinite_ranks,
            onset_step=onset.step,
            onset_batch=onset.first_batch,
            detection_step=span.step,
            detection_batch=span.last_batch,
            step=self._spans[-1].step + 1,
            timeline=self.timeline,
            # What was not finite before this step would have been called there.
            in_hand=verdict.kind is Kind.NONFINITE and lost and onset.step == span.step,
            samples=samples,
        )
        self._record.flush()
        self._record.note(incident, f"incident {incident.incident}: {verdict.explanation}")
        if self._is_witness(incident):
            self._evidence.write(incident)
        self._cases.called(incident, span.batches_per_step)
        return self._plan(incident, self._stream(span))

    def _samples(self, steps: set[int], nonfinite_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Collective: data set indices of what may have done it, in these steps and on the ranks that may have."""
        suspected = not nonfinite_ranks or self._ranks.rank in nonfinite_ranks
        own = self._evidence.samples(steps) if suspected else []
        found = set[int]().union(*self._ranks.from_each(own[: MOST + 1]))
        return tuple(sorted(found)) if len(found) <= MOST else ()

    def _is_witness(self, incident: Incident) -> bool:
        """Collective where there are many ranks: whether this one writes down what it saw."""
        ranks = self._ranks
        if ranks.world_size <= MOST_WITNESSES:
            return True
        ails = ranks.rank in incident.ranks and len(incident.ranks) < ranks.world_size
        return ranks.rank in witnesses(ranks.from_each(math.inf if ails else self._evidence.harm(incident)))

    def _stream(self, span: StepSpan) -> DataStream:
        """How the script divides the data into updates in that epoch, from the updates that are kept.

        Another epoch may have others. And of epochs before it a process that has begun since remembers nothing.
        """
        of_epoch = [each.batches_per_step for each in self._spans if each.epoch_end == span.epoch_end]
        per_step = statistics.mode(of_epoch[-_USUAL:] or [span.batches_per_step])
        total = max(span.epoch_end or 0, (self._max_steps or 0) * per_step)
        if any(each.over_the_end for each in self._spans):
            return DataStream(per_step, total=total)
        return DataStream(per_step, span.epoch_end, span.epoch_batches, total=total)

    def _plan(self, incident: Incident, stream: DataStream) -> Decision | None:
        plan = self._cases.plan(incident, self._checkpoints.as_held(), stream)
        if plan.action == "observe":
            self._observed = True
            return None
        if plan.action == "stop":
            return Halt(f"{incident.explanation}; {plan.reason}", save=False, giving_up=plan.giving_up)
        return Rewind(incident, plan, stream)

    def _span_of(self, step: int, now: StepSpan) -> StepSpan:
        for span in reversed(self._spans):
            if span.step == step:
                return span
        # From before this process: reckoned back from the oldest step that is remembered.
        oldest = self._spans[0] if self._spans else now
        first = max(0, oldest.first_batch - (oldest.step - step) * oldest.batches_per_step)
        return StepSpan(step, first, first + oldest.batches_per_step - 1, oldest.batches_per_step, Hint.NONE)
