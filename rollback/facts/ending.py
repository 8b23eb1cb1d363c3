"""How training ended, as the ranks tell it: stopped on the way, at its end, or left by the script."""

from __future__ import annotations

from typing import Literal

from rollback.facts.fact import Fact


class Stopped(Fact):
    """The ranks stopped together before the end of the data."""

    kind: Literal["stopped"] = "stopped"
    reason: Literal["preempted", "structural"]
    step: int
    batch: int
    checkpoint: str | None
    account: str


class LastSaveFailed(Fact):
    """The ranks were told to stop, and the state that they stop with could not be kept: `steps` updates behind
    `checkpoint`, the newest that is there (null: none is), are in none. `stopped` follows."""

    kind: Literal["last_save_failed"] = "last_save_failed"
    step: int
    batch: int
    checkpoint: str | None
    steps: int
    reason: str

    def in_words(self) -> str:
        if self.checkpoint is None:
            return (
                f"there is no checkpoint to go on from: the last save failed because {self.reason}; all {self.steps} "
                "updates are lost"
            )
        return (
            f"resumable at step {self.step - self.steps} of {self.step}: the last save failed because {self.reason}; "
            f"{self.steps} updates will be done again"
        )


class Finished(Fact):
    """Training has come to its end, and `checkpoint` is the state at that end (null: no checkpoints are taken).

    `by`: what ended it, in the script's words. `calm`: whether the last step was judged healthy. `left_over`: batches
    behind the last update, whose gradients are in none. The run is complete until it goes on behind this.
    """

    kind: Literal["finished"] = "finished"
    step: int
    batch: int
    checkpoint: str | None = None
    by: str = ""
    calm: bool = True
    left_over: int = 0


class FinalStateLost(Fact):
    """Training has come to its end, but the state at that end could not be kept: `steps` updates behind `checkpoint`,
    the newest, are in none."""

    kind: Literal["final_state_lost"] = "final_state_lost"
    step: int
    batch: int
    checkpoint: str | None
    steps: int
    reason: str


class ScriptLeft(Fact):
    """The script ended, without an exception, before its loop over the guard did. `unjudged`: updates that no verdict
    was given on; `checkpoint`: the newest."""

    kind: Literal["script_left"] = "script_left"
    step: int
    batch: int
    unjudged: int
    checkpoint: str | None
