"""What the model was asked by a probe batch, and what it answered."""

from typing import Literal

from rollback.facts.fact import Count, Fact

ProbeOutcome = Literal["model", "data", "unclear"]


class Probed(Fact):
    """The loss was up, and the curve could not tell why: the model was asked by a batch that it had been trained on.
    The step that this took was undone."""

    kind: Literal["probed"] = "probed"
    step: Count
    """The step that came next."""
    onset_step: Count
    """Where the rise began."""
    level: float
    """The loss before it."""
    now: float
    """The loss that the question was about."""
    kept_step: Count
    """The step in which the probe batch was trained on."""
    loss_then: float
    """Its loss then, the mean over the ranks, as is the next."""
    loss_now: float | None
    """Its loss now; null: it was not finite."""
    finding: ProbeOutcome
    """`model`: the model has lost what it knew; an `incident` follows. `data`: the data are harder, and the rise is the
    new level. `unclear`: nothing follows."""
    explanation: str


class NotProbed(Fact):
    """The model should have been asked by a probe batch, and could not be. Each reason is journalled once in an
    attempt."""

    kind: Literal["not_probed"] = "not_probed"
    step: Count
    onset_step: Count
    """Where the rise began that the question was about."""
    reason: str
