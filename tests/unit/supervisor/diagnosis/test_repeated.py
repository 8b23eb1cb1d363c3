"""Which exceptions without a batch in hand come again and again, with the ends of attempts as they are on record."""

import pytest

from rollback.facts.training import AttemptEnded, JournalEntry, Window
from rollback.rundir.failures import FailureRecord
from rollback.supervisor.diagnosis.first_cause import FirstCause
from rollback.supervisor.diagnosis.repeated import AS_BEFORE, as_mistake, steps_since


def ended(*ends: tuple[int, str]) -> list[JournalEntry]:
    """Attempts that ended at these steps by these exceptions."""
    facts = [AttemptEnded(status=1, cause="", step=step, seconds=1.0, fingerprint=which) for step, which in ends]
    return [JournalEntry(seq=place, at="", attempt=place, fact=fact) for place, fact in enumerate(facts, 1)]


def raised(error: str = "ValueError", *, in_hand: bool = False, ours: bool = False) -> FirstCause:
    record = FailureRecord(
        rank=1, pid=1, host="h", attempt=1, at="", seconds=0.0, step=9, batch=9, whole_step=Window(first=9, last=9),
        doing="training", error=error, message="bad", traceback="", frames=[], fingerprint="f", in_hand=in_hand,
        ours=ours,
    )  # fmt: skip
    return FirstCause("exception", "", 1, record)


@pytest.mark.parametrize(
    ("ends", "since"),
    [
        ([(9, "f")], None),
        ([(9, "f"), (9, "f")], 0),
        ([(9, "g"), (9, "f")], None),
        ([(9, "f"), (18, "f")], None),
        ([(9, "f"), (18, "f"), (27, "f")], 9),  # an evaluation each nine steps, which never works
        ([(9, "f"), (18, "f"), (90, "f")], None),  # one that has worked meanwhile
        ([(9, "g"), (18, "f"), (27, "f")], None),
        ([(9, "f"), (18, "f"), (27, "f"), (40, "f")], None),
    ],
)
def test_an_exception_that_comes_at_one_step_or_each_time_as_far_behind_comes_again(
    ends: list[tuple[int, str]], since: int | None
) -> None:
    assert steps_since(raised(), len(ends), ended(*ends)) == since
    assert steps_since(raised(in_hand=True), len(ends), ended(*ends)) is None


def test_what_the_world_outside_or_rollback_raises_may_pass() -> None:
    assert as_mistake(raised(), 0) == as_mistake(raised("KeyError"), 9) == AS_BEFORE
    for may_pass in (raised("OSError"), raised("requests.exceptions.ConnectionError"), raised(ours=True)):
        assert as_mistake(may_pass, 0) == ""
    assert as_mistake(raised("NameError"), None) == "with NameError"
    assert as_mistake(None, None) == ""
