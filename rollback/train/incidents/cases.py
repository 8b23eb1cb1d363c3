"""The incidents of a run: the number of the next one, the last plan, and the incident that is still open."""

import statistics
from dataclasses import replace

from rollback import policy
from rollback.config import Settings
from rollback.data_stream import DataStream
from rollback.facts.history import Case, History
from rollback.facts.incidents import Outcome
from rollback.facts.training import Concluded, Incident, Planned, SampleQuarantine, ScreenedOut, Window
from rollback.policy import PolicyCheckpoint
from rollback.rundir.requests import Request
from rollback.sentinel import NORM_COLLAPSE, Kind, Verdict
from rollback.sentinel.scaler import SCALE_COLLAPSE
from rollback.suspects import left_out_at, quarantine_after, suspects
from rollback.train.comm.recorder import Recorder
from rollback.train.data.skips import SkipList

_OTHER_WINDOWS = (NORM_COLLAPSE, SCALE_COLLAPSE)  # of gradient norms and of scales, not of losses


class Cases:
    """The same on all ranks. history: as at the start of this attempt.

    last_plan: the last one that answered a trouble; what an operator asked for answers none, so no later trouble is a
    repeat of it.
    """

    def __init__(self, record: Recorder, settings: Settings, history: History, skips: SkipList) -> None:
        self._record = record
        self._skips = skips
        self._incidents = [case.incident for case in history.cases]
        self._skipped = history.skipped_by_incidents
        self._settings = settings
        self._called = len(history.cases)
        self.last_plan = history.last_plan
        self._suspects = suspects(self._incidents)
        self._open = next((case for case in reversed(history.cases) if case.awaits_outcome), None)
        self._healthy = 0

    def screens(self, batch: int) -> bool:
        """Whether an update that begins at this batch is judged by itself, before it counts. Not collective, and alike
        on all ranks."""
        plan = self.last_plan
        return plan is not None and plan.goes_back and plan.screen is not None and batch in plan.screen

    @property
    def fell_to(self) -> float | None:
        """The level of the loss directly before the trouble that the last plan answers, where it is known."""
        plan = self.last_plan
        answered = next((each for each in self._incidents if plan and each.incident == plan.incident), None)
        losses = answered.window if answered and answered.rule not in _OTHER_WINDOWS else ()
        return statistics.median(losses) if losses else None

    def screen_out(self, verdict: Verdict, batches: Window, stream: DataStream, timeline: int) -> ScreenedOut | None:
        """Note that an update stood out in the screen, and skip its batches. On return the journal holds that. None:
        incidents would cost too much, so that it is an incident itself.

        batches: of the update. The screen goes on for `skip_after` batches behind the last update that stood out.
        """
        plan = self.last_plan
        assert plan is not None
        assert plan.screen is not None
        window = Window(first=batches.first, last=stream.end_of_update(batches.first, batches.last))
        stream = replace(stream, skipped=tuple(Window.merged(self._skipped)))
        if stream.excess_of(window, self._settings):
            return None
        through = max(plan.screen.last, window.last + self._settings.reach.skip_after)
        fact = ScreenedOut(
            incident=plan.incident, window=window, verdict="nonfinite" if verdict.kind is Kind.NONFINITE else "spike",
            cause=verdict.witness, rule=verdict.rule, value=verdict.value, threshold=verdict.threshold,
            explanation=verdict.explanation, step=verdict.step, timeline=timeline, through=through,
        )  # fmt: skip
        first = not self._skipped or self._skipped[-1].last + 1 != window.first
        notice = f"{verdict.explanation}; undone and skipped from batch {window.first} on, as long as it stands out"
        self._record.note(fact, notice if first else None)
        self._skipped.append(window)
        self.last_plan = plan.screened_through(through)
        if self._open is not None and self._open.incident.incident == plan.incident:
            self._open.plan = self.last_plan
        return fact

    def next_number(self) -> int:
        number, self._called = self._called, self._called + 1
        return number

    def judge(self, healthy: bool, step: int, last_batch: int, batches_per_step: int) -> None:
        """Count a verdict. Enough healthy ones beyond the horizon end an open incident well."""
        self._healthy = self._healthy + 1 if healthy else 0
        case = self._open
        if not healthy or case is None or case.plan is None:
            return
        if last_batch > policy.horizon_end(case.plan, self._settings, batches_per_step):
            self._conclude(case, _good_end(case), step)

    def called(self, incident: Incident, batches_per_step: int) -> None:
        """Note that another incident was recorded. It may be a repeat of the open one."""
        previous, stream = self.last_plan, DataStream(batches_per_step)
        self._incidents.append(incident)
        self._suspects = suspects(self._incidents)
        if self._open and previous and policy.repeats(incident, previous, self._settings, batches_per_step):
            back = policy.comes_back(incident, previous, self._settings, stream, self._is_suspected(incident))
            self._conclude(self._open, "repeated" if back else _good_end(self._open), incident.detection_step)

    def plan(self, incident: Incident, held: list[PolicyCheckpoint], stream: DataStream) -> Planned:
        """Plan the answer to an incident. On return the journal holds the left out samples, then the plan."""
        stream = replace(stream, skipped=tuple(Window.merged(self._skipped)))
        suspected = self._is_suspected(incident)
        plan = policy.plan(incident, self.last_plan, held, self._settings, stream, suspected=suspected)
        if plan.goes_back:
            self._leave_out(incident, max(plan.last, incident.detection_batch) + 1)
        self._record.note(plan, _in_words(plan))
        if plan.action == "observe":
            self._note_outcome(incident, "observed", incident.detection_step)
        elif plan.giving_up is not None:
            self._note_outcome(incident, plan.giving_up, incident.detection_step)
        return plan

    def plan_request(
        self,
        name: str,
        request: Request,
        target: PolicyCheckpoint,
        held: list[PolicyCheckpoint],
        *,
        step: int,
        batch: int,
        timeline: int,
    ) -> tuple[Incident, Planned]:
        """Plan the rollback to `target` that an operator asked for. On return the journal holds incident and plan."""
        incident = Incident(
            incident=self.next_number(),
            verdict="requested",
            cause=request.who,
            rule="request",
            value=None,
            threshold=None,
            explanation=request.why or "no reason was given",
            window=(),
            ranks=(),
            onset_step=target.step,
            onset_batch=target.batch,
            detection_step=max(0, step - 1),
            detection_batch=max(0, batch - 1),
            step=step,
            timeline=timeline,
            request=name,
        )
        self._record.note(incident)
        plan = policy.plan_request(incident, target, request.skip, held)
        self._record.note(plan, _in_words(plan))
        return incident, plan

    def carried_out(self, case: Case, step: int) -> None:
        """Note that a plan was carried out. Training is at `step` now."""
        assert case.plan is not None
        self._healthy = 0
        if case.incident.request is None:
            self._open, self.last_plan = case, case.plan
            self._skipped += [case.plan.skip] if case.plan.skip else []
        else:
            self._note_outcome(case.incident, "carried_out", step)

    def close(self, step: int) -> None:
        """Say how the open incident ended, if enough steps have gone well since."""
        if self._open is not None and self._healthy >= self._settings.probation:
            self._conclude(self._open, _good_end(self._open), step)

    def _note_outcome(self, incident: Incident, outcome: Outcome, step: int) -> None:
        self._record.note(Concluded(incident=incident.incident, outcome=outcome, step=step))

    def _is_suspected(self, incident: Incident) -> bool:
        return any(incident.incident in explained for explained in self._suspects.values())

    def _leave_out(self, incident: Incident, batch: int) -> None:
        """Leave the suspect samples out from `batch` on. No rank has been handed that batch in this timeline yet."""
        if self._settings.quarantine == "off":
            return
        # What earlier facts say of later batches, orders or suspicion from before a rewind, is looked at as well.
        later = {fact.batch for fact in self._skips.quarantine if fact.batch > batch}
        for begins in (batch, *sorted(later)):
            before = left_out_at(self._skips.quarantine, begins)
            samples = quarantine_after(self._skips.quarantine, self._suspects, begins)
            added, released = (tuple(sorted(set(a) - set(b))) for a, b in ((samples, before), (before, samples)))
            if added or released:
                fact = SampleQuarantine(
                    batch=begins, samples=samples, added=added, released=released, who="suspicion",
                    why="; ".join(self._why(sample) for sample in added + released), incident=incident.incident,
                )  # fmt: skip
                self._skips.leave_out(fact)

    def _why(self, sample: int) -> str:
        """Why a sample is left out now, or is no longer."""
        if sample in self._suspects:
            return f"sample {sample} is in incidents {', '.join(map(str, self._suspects[sample]))}"
        orders = (fact for fact in self._skips.quarantine if fact.incident is None)
        ordered = any(sample in (*fact.added, *fact.released) for fact in orders)
        return f"sample {sample} as it was ordered" if ordered else f"sample {sample} is suspected no longer"

    def _conclude(self, case: Case, outcome: Outcome, step: int) -> None:
        self._open = None
        self._note_outcome(case.incident, outcome, step)


def _good_end(case: Case) -> Outcome:
    return "not_reproduced" if case.plan is not None and case.plan.action == "retry" else "recovered"


def _in_words(plan: Planned) -> str:
    if plan.action == "stop":
        return f"stopping: {plan.reason}"
    skip = plan.skips_in_words().removeprefix(", ") or "skip nothing"
    would = {"observe": "would restore", "retry": "retry: restore", "rollback": "restore"}[plan.action]
    return f"{would} step {plan.step} ({plan.checkpoint}), {skip}: {plan.reason}"
