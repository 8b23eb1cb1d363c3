"""How training ended, from the ranks' point of view: stopped on the way, complete, or left by the script."""

from typing import Literal

from rollback.facts.fact import Count, Fact

GivingUp = Literal["structural", "no_checkpoint"]
"""Why an incident stops the run: more skipping would not cure it, or would cost too much; or no good checkpoint from
before its onset is left."""
EndedAs = Literal["complete", "left"] | GivingUp
"""How training ended, but for ranks that were told to stop; `left`: see `ScriptLeft`."""


class Stopped(Fact):
    """The ranks stopped together before the end of the data."""

    kind: Literal["stopped"] = "stopped"
    reason: Literal["preempted"] | GivingUp
    """`preempted`: they were told to stop. `structural`: more skipping would not help, or would cost too much.
    `no_checkpoint`: no good one is left."""
    step: Count
    batch: Count
    checkpoint: str | None
    account: str


class LastSaveFailed(Fact):
    """The ranks were told to stop, and the last save failed. A `stopped` fact follows."""

    kind: Literal["last_save_failed"] = "last_save_failed"
    step: Count
    batch: Count
    checkpoint: str | None
    """The newest checkpoint that exists; null: there is none."""
    steps: Count
    """Updates after that checkpoint, which no checkpoint has."""
    reason: str

    def in_words(self) -> str:
        if self.checkpoint is None:
            return (
                f"there is no checkpoint to go on from: the last save failed because {self.reason}; all {self.steps} "
                "updates are lost"
            )
        return (
            f"goes on at step {self.step - self.steps} of {self.step}: the last save failed because {self.reason}; "
            f"{self.steps} updates will be done again"
        )


class Finished(Fact):
    """Training is complete. The run is no longer complete when it goes on after this fact."""

    kind: Literal["finished"] = "finished"
    step: Count
    batch: Count
    checkpoint: str | None = None
    """The state at the end of training; null: the run takes no checkpoints."""
    by: str = ""
    """What ended training, in the script's words."""
    calm: bool = True
    """Whether the last step was judged healthy."""
    left_over: Count = 0
    """Batches after the last update; their gradients are in no update."""


class FinalStateLost(Fact):
    """Training is complete, but the final state could not be saved."""

    kind: Literal["final_state_lost"] = "final_state_lost"
    step: Count
    batch: Count
    checkpoint: str | None
    """The newest checkpoint; null: there is none."""
    steps: Count
    """Updates after that checkpoint, which no checkpoint has."""
    reason: str

    @property
    def account(self) -> str:
        return f"the training loop ended, but its last {self.steps} updates are in no checkpoint"


SCRIPT_LEFT = "the script left its loop over the guard before that had ended"
"""Where no rank came to write `script_left` (`os._exit`), the supervisor says so by the class `left`."""


class ScriptLeft(Fact):
    """The script ended without an exception before its loop over the guard ended."""

    kind: Literal["script_left"] = "script_left"
    step: Count
    batch: Count
    unjudged: Count
    """Updates without a verdict."""
    checkpoint: str | None
    """The newest checkpoint; null: there is none."""

    @property
    def account(self) -> str:
        return SCRIPT_LEFT


EndedTogether = Finished | FinalStateLost | ScriptLeft | Stopped
"""By which all ranks have ended together."""
