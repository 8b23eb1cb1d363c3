"""Which exceptions without a batch in hand come again and again, with the ends of attempts as they are on record."""

import pytest

from rollback.facts.training import AttemptEnded, JournalEntry, Window
from rollback.rundir.failures import FailureRecord
from rollback.supervisor.diagnosis.blamed_data import comes_again
from rollback.supervisor.diagnosis.first_cause import FirstCause


def ended(*ends: tuple[int, str]) -> list[JournalEntry]:
    """Attempts that ended at these steps by these exceptions."""
    facts = [AttemptEnded(status=1, cause="", step=step, seconds=1.0, fingerprint=which) for step, which in ends]
    return [JournalEntry(seq=place, at="", attempt=place, fact=fact) for place, fact in enumerate(facts, 1)]


def raised(*, in_hand: bool = False) -> FirstCause:
    record = FailureRecord(
        rank=1, pid=1, host="h", attempt=1, at="", seconds=0.0, step=9, batch=9, whole_step=Window(first=9, last=9),
        doing="training", error="ValueError", message="bad", traceback="", frames=[], fingerprint="f", in_hand=in_hand,
    )  # fmt: skip
    return FirstCause("exception", "", 1, record)


@pytest.mark.parametrize(
    ("ends", "again"),
    [
        ([(9, "f")], False),
        ([(9, "f"), (9, "f")], True),
        ([(9, "g"), (9, "f")], False),
        ([(9, "f"), (18, "f")], False),
        ([(9, "f"), (9, "f"), (18, "f")], False),
        ([(9, "g"), (18, "f"), (18, "f")], True),
    ],
)
def test_an_exception_that_comes_at_one_step_comes_again(ends: list[tuple[int, str]], again: bool) -> None:
    assert comes_again(raised(), len(ends), ended(*ends)) is again
    assert not comes_again(raised(in_hand=True), len(ends), ended(*ends))
