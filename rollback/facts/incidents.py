"""What went wrong with the training, what was planned about it, and what came of it."""

from typing import Literal

from rollback.facts.checkpoints import Tier
from rollback.facts.ending import GivingUp
from rollback.facts.fact import Count, Fact, Window

Outcome = Literal["recovered", "repeated", "not_reproduced", "observed", "carried_out"] | GivingUp
Action = Literal["rollback", "retry", "stop", "observe"]
IncidentVerdict = Literal["spike", "nonfinite", "damaged", "requested"]
Route = Literal["in_process", "relaunch"]


class Incident(Fact):
    """A verdict that demands action, with its evidence."""

    kind: Literal["incident"] = "incident"
    incident: Count
    verdict: IncidentVerdict
    """`spike` or `nonfinite`: what the sentinel said; `damaged`: the model did worse on a probe batch; `requested`: an
    operator asked for a rewind."""
    cause: str
    """The witness: `loss` or `grad_norm`; of a request, the operator."""
    rule: str
    value: float | None
    threshold: float | None
    explanation: str
    """The verdict in words; of a request, the operator's reason."""
    window: tuple[float, ...]
    ranks: tuple[int, ...]
    onset_step: Count
    onset_batch: Count
    detection_step: Count
    detection_batch: Count
    step: Count
    timeline: Count
    request: str | None = None
    """The name of the request file, where there is a request."""
    in_hand: bool = False
    """The loss of the detection step was not finite and all losses before were: its batch is the cause."""
    samples: tuple[int, ...] = ()
    """Data set indices of the batches that may be the cause, on the ranks that may have them; empty where they are
    unknown or too many."""


class Planned(Fact):
    """What will be done about an incident (for `observe`: would have been done). Journalled before anything is done."""

    kind: Literal["plan"] = "plan"
    incident: Count
    repeats: Count | None = None
    """The earlier incident that had the same trouble."""
    action: Action
    escalation: int
    checkpoint: str | None
    step: Count | None
    batch: Count | None
    skip: Window | None
    discards: tuple[str, ...]
    through: Count
    """The last batch of the detection step."""
    timeline: Count
    """The timeline that begins when the plan is carried out."""
    reason: str
    in_hand: bool = False
    """The plan skips the detection step's batch alone."""
    screen: Window | None = None
    """The batches whose updates are judged one by one before they count; then there is no `skip`. Each `screened_out`
    may move its end."""
    undone: Count = 0
    """Updates that this answer and the earlier ones to the same trouble undo together."""
    giving_up: GivingUp | None = None
    """Why the action is `stop`."""
    lower_rate: tuple[float, int] | None = None
    """A factor of the learning rate, and for how many steps from `step` on; it comes back over as many more."""

    @property
    def goes_back(self) -> bool:
        """Whether a checkpoint is restored."""
        return self.action in ("rollback", "retry")

    @property
    def last(self) -> int:
        """The last batch that the answer is about: that it skips, screens or, where it does neither, replays."""
        window = self.skip or self.screen
        return window.last if window else self.through

    def rate_at(self, step: int) -> float:
        """The factor of the learning rate at a step."""
        if self.lower_rate is None or self.step is None:
            return 1.0
        (factor, steps), since = self.lower_rate, step - self.step
        if not 0 <= since < 2 * steps:
            return 1.0
        return factor + (1 - factor) * max(0, since - steps + 1) / (steps + 1)

    def skips_in_words(self) -> str:
        """What becomes of the batches, to be added to a sentence; empty: nothing."""
        if self.skip is not None:
            return f", skip {self.skip.in_words()}"
        if self.lower_rate is not None:
            return f", learning rate times {self.lower_rate[0]:g} for {self.lower_rate[1]} steps"
        return f", screen {self.screen.in_words()}" if self.screen is not None else ""

    def screened_through(self, batch: int) -> "Planned":
        """The plan with a screen that lasts through this batch."""
        assert self.screen is not None
        return self.model_copy(update={"screen": Window(first=self.screen.first, last=max(self.screen.last, batch))})


class ScreenedOut(Fact):
    """In a screen, this update stood out: it is undone, and its batches are skipped. Journalled before it is undone."""

    kind: Literal["screened_out"] = "screened_out"
    incident: Count
    window: Window
    """The batches of the update, and what else must be skipped so that the rest of the epoch is whole updates."""
    verdict: Literal["spike", "nonfinite"]
    cause: str
    """As in `incident`, as are `rule`, `value`, `threshold` and `explanation`."""
    rule: str
    value: float | None
    threshold: float | None
    explanation: str
    step: Count
    timeline: Count
    through: Count
    """The last batch of the screen from now on."""


class Restored(Fact):
    """Every rank carried out the plan."""

    kind: Literal["restored"] = "restored"
    incident: Count
    checkpoint: str
    step: Count
    batch: Count
    steps_lost: Count
    """Updates that do not count any more."""
    seconds: float
    route: Route
    """`relaunch`: by the next attempt, which found the plan; else `in_process`."""
    tier: Tier | None = None
    """As in `attached`."""


class Concluded(Fact):
    """How an incident ended."""

    kind: Literal["outcome"] = "outcome"
    incident: Count
    outcome: Outcome
    """`recovered`: no incident within the horizon; after a replay without a skip `not_reproduced`. `repeated`: the same
    trouble came back. `observed`: nothing was done. `carried_out`: a request. Else a `reason` of `stopped`."""
    step: Count
