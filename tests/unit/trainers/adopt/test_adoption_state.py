"""Where a watched script stands towards the guard."""

from functools import reduce

import pytest

from rollback.trainers.adopt.adoption_state import AdoptionState, ScriptEvent, moved

MADE, BEGAN, ENDED = ScriptEvent.GUARD_MADE, ScriptEvent.PASS_BEGAN, ScriptEvent.PASS_ENDED
BACKWARD = ScriptEvent.BACKWARD


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], AdoptionState.WATCHED),
        ([BACKWARD], AdoptionState.UNGUARDED),
        ([BACKWARD, MADE], AdoptionState.BETWEEN),  # what was trained before is not astray
        ([MADE, BEGAN, BACKWARD], AdoptionState.IN_PASS),
        ([MADE, BEGAN, BACKWARD, ENDED], AdoptionState.BETWEEN),
        ([MADE, BEGAN, ENDED, BACKWARD], AdoptionState.ASTRAY),
        ([MADE, BEGAN, ENDED, BACKWARD, BEGAN], AdoptionState.IN_PASS),
        ([MADE, BEGAN, BEGAN], AdoptionState.IN_PASS),  # one was broken off
        ([MADE, BEGAN, ScriptEvent.OTHER_TRAINING, BACKWARD], AdoptionState.ELSEWHERE),  # it was left by an error
        ([MADE, BEGAN, ENDED, ScriptEvent.OTHER_TRAINING, BACKWARD, BEGAN], AdoptionState.ELSEWHERE),
        ([MADE, BEGAN, ScriptEvent.LEAVES, ENDED, BACKWARD, BEGAN], AdoptionState.LEFT),
    ],
)
def test_a_script_stands_where_its_events_have_put_it(events: list[ScriptEvent], state: AdoptionState) -> None:
    assert reduce(moved, events, AdoptionState.WATCHED) is state


def test_nobody_comes_under_guard_again_who_has_left() -> None:
    assert {moved(AdoptionState.LEFT, event) for event in ScriptEvent} == {AdoptionState.LEFT}
    assert not any(moved(AdoptionState.ELSEWHERE, event).guarded for event in ScriptEvent)
