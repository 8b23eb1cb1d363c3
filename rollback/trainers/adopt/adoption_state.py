"""Where a watched script stands towards the guard, on one rank, and what moves it."""

from enum import Enum


class AdoptionState(Enum):
    """Of the script."""

    WATCHED = "nothing is trained yet, and there is no guard"
    UNGUARDED = "gradients were computed, and there is no guard"
    BETWEEN = "under guard; no gradients were computed since the last pass over the guard came to its end"
    IN_PASS = "in a pass over the guard, or the script has broken it off"
    ASTRAY = "under guard; gradients were computed behind a pass"
    ELSEWHERE = "this rank has begun another training, of which the other ranks may not know yet"
    LEFT = "the script goes on without us"

    @property
    def guarded(self) -> bool:
        return self in (AdoptionState.BETWEEN, AdoptionState.IN_PASS, AdoptionState.ASTRAY)


class ScriptEvent(Enum):
    """What the script, or the adoption, does."""

    GUARD_MADE = "the guard was made, of what the script trains"
    PASS_BEGAN = "a pass over the guard has begun"
    PASS_ENDED = "it has come to its end"
    BACKWARD = "gradients are computed"
    OTHER_TRAINING = "the script trains something else, and the guard keeps nothing of that"
    LEAVES = "the guard ends, or the script has one of its own"


_MOVES: dict[tuple[AdoptionState, ScriptEvent], AdoptionState] = {
    (AdoptionState.WATCHED, ScriptEvent.BACKWARD): AdoptionState.UNGUARDED,
    (AdoptionState.WATCHED, ScriptEvent.GUARD_MADE): AdoptionState.BETWEEN,
    (AdoptionState.UNGUARDED, ScriptEvent.GUARD_MADE): AdoptionState.BETWEEN,
    (AdoptionState.BETWEEN, ScriptEvent.PASS_BEGAN): AdoptionState.IN_PASS,
    (AdoptionState.BETWEEN, ScriptEvent.BACKWARD): AdoptionState.ASTRAY,
    (AdoptionState.BETWEEN, ScriptEvent.OTHER_TRAINING): AdoptionState.ELSEWHERE,
    (AdoptionState.IN_PASS, ScriptEvent.PASS_ENDED): AdoptionState.BETWEEN,
    (AdoptionState.IN_PASS, ScriptEvent.OTHER_TRAINING): AdoptionState.ELSEWHERE,
    (AdoptionState.ASTRAY, ScriptEvent.PASS_BEGAN): AdoptionState.IN_PASS,
    (AdoptionState.ASTRAY, ScriptEvent.OTHER_TRAINING): AdoptionState.ELSEWHERE,
}
"""What is not here moves nothing: gradients in a pass are those of the guard's batches."""


def moved(state: AdoptionState, event: ScriptEvent) -> AdoptionState:
    """Where the script stands behind an event."""
    return AdoptionState.LEFT if event is ScriptEvent.LEAVES else _MOVES.get((state, event), state)
