"""A script that has loaded a snapshot of its own, and what it takes of the guard then."""

import pytest

from rollback.errors import UsageError
from rollback.trainers.adopt.enumeration import HandedOut
from rollback.trainers.adopt.own_resume import OwnResume
from rollback.trainers.adopt.signs import ScriptSigns


@pytest.mark.parametrize(
    ("loaded", "trains", "refused"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_the_first_batch_of_a_pass_is_passed_over_where_the_next_one_is_asked_for(
    loaded: bool, trains: bool, refused: bool
) -> None:
    handed = HandedOut(batches=5)
    resume = OwnResume(handed, ScriptSigns(strict=False))
    resume.loaded = loaded
    resume.pass_begins()
    resume.require_trained()
    resume.require_trained()  # reading has raised, and the script asks again
    handed.batches += 1
    if trains:
        resume.trained()
    if refused:
        with pytest.raises(UsageError, match="does not train on the first batch"):
            resume.require_trained()
    else:
        resume.require_trained()
