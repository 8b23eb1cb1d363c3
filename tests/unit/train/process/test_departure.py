"""A rank that was told to leave, and goes on all the same."""

import os
from typing import NoReturn

import pytest

from rollback.config import ENV_SUPERVISOR
from rollback.train.process.stopping import Departure


def test_who_was_not_told_to_leave_stays() -> None:
    Departure().require_none()


@pytest.mark.parametrize("supervised", [True, False])
def test_a_rank_that_does_not_leave_is_ended_again_and_then_by_force_under_a_supervisor(
    supervised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_force(status: int) -> NoReturn:
        raise ProcessLookupError(status)

    monkeypatch.setenv(ENV_SUPERVISOR, "1" if supervised else "")
    monkeypatch.setattr(os, "_exit", by_force)
    departure = Departure()
    departure.note(SystemExit(75))
    with pytest.raises(SystemExit, match="75"):
        departure.require_none()
    with pytest.raises(ProcessLookupError if supervised else SystemExit, match="75"):
        departure.require_none()
