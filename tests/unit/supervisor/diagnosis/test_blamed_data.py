"""Which crashes are blamed on a batch, with records as attempts leave them."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollback.facts.supervisor import Why
from rollback.facts.training import AttemptEnded, Blamed, Fact, JournalEntry, Window
from rollback.rundir.failures import FailureRecord
from rollback.supervisor.diagnosis.blamed_data import SKIPS_THAT_DID_NOT_HELP, blame, comes_again
from rollback.supervisor.diagnosis.first_cause import FirstCause


def crash(
    batch: int,
    *,
    step: int | None = None,
    fingerprint: str = "f",
    whole: tuple[int, int] | None = None,
    why: Why = "exception",
    samples: tuple[int, ...] = (),
    unreadable: tuple[int, ...] = (),
    doing: str = "reading",
) -> FirstCause:
    first, last = whole or (batch, batch)
    record = FailureRecord(
        rank=1, pid=1, host="h", attempt=1, at="", seconds=0.0, step=batch if step is None else step, batch=batch,
        whole_step=Window(first=first, last=last), doing=doing, error="ValueError", message="bad", traceback="",
        frames=[], fingerprint=fingerprint, samples=list(samples), unreadable=list(unreadable),
    )  # fmt: skip
    return FirstCause(why, "rank 1 raised ValueError: bad", 1, record)


class Supervisor:
    """Keeps the record that blame() reads."""

    def __init__(self) -> None:
        self.records: list[JournalEntry] = []
        self.attempt = 0

    def fails(self, first: FirstCause) -> Blamed | None:
        self.attempt += 1
        record = first.record
        assert record is not None
        self._note(
            AttemptEnded(
                status=1, cause="", step=record.step, seconds=1.0, why=first.why, rank=1, batch=record.batch,
                fingerprint=record.fingerprint, samples=tuple(record.unreadable or record.samples),
            )
        )  # fmt: skip
        found = blame(first, self.attempt, self.records)
        if found is not None:
            self._note(found)
        return found

    def _note(self, fact: Fact) -> None:
        self.records.append(JournalEntry(seq=len(self.records), at="", attempt=self.attempt, fact=fact))  # type: ignore[arg-type]


def test_the_same_exception_twice_at_the_same_batch_blames_the_whole_update() -> None:
    supervisor = Supervisor()
    assert supervisor.fails(crash(30, whole=(28, 31))) is None
    found = supervisor.fails(crash(30, whole=(28, 31)))
    assert found is not None
    assert (found.window, found.batch, found.attempts) == (Window(first=28, last=31), 30, (1, 2))


@pytest.mark.parametrize(
    ("step", "doing", "unreadable", "mistake"),
    [
        (0, "training", (), True),
        (0, "training", (7,), False),
        (0, "reading", (), False),
        (1, "training", (), False),
    ],
)
def test_in_the_first_update_of_a_run_the_script_is_at_fault_and_not_a_batch(
    step: int, doing: str, unreadable: tuple[int, ...], mistake: bool
) -> None:
    """Skipping it would leave data out of the run that is to follow when the script is mended."""
    supervisor = Supervisor()
    first = crash(0, step=step, doing=doing, unreadable=unreadable)
    assert first.mistake == "in the first update of the run" * mistake
    supervisor.fails(first)
    assert (supervisor.fails(first) is None) is mistake


def test_the_two_need_not_follow_one_another() -> None:
    supervisor = Supervisor()
    for batch in (30, 12, 47):
        assert supervisor.fails(crash(batch)) is None
    found = supervisor.fails(crash(30))
    assert found is not None
    assert found.attempts == (1, 4)


@pytest.mark.parametrize(
    "second",
    [
        crash(31),
        crash(30, fingerprint="g"),
        crash(30, why="out_of_memory"),
        crash(30, why="hang"),
        crash(30, why="disk"),
    ],
)
def test_anything_else_blames_nothing(second: FirstCause) -> None:
    supervisor = Supervisor()
    supervisor.fails(crash(30))
    assert supervisor.fails(second) is None


@pytest.mark.parametrize(
    ("crashes", "blamed"),
    [
        # A sample that cannot be read is known at once, and left out at the second crash, wherever that is.
        ([crash(30, samples=(5, 6), unreadable=(6,)), crash(30, samples=(5, 6), unreadable=(6,))], (6,)),
        ([crash(30, samples=(5, 6), unreadable=(6,)), crash(140, samples=(6, 9), unreadable=(6,))], (6,)),
        ([crash(30, samples=(5, 6), unreadable=(6,)), crash(31, samples=(7, 8), unreadable=(8,))], None),
        # Where it is not known, two batches tell by what they have in common; one batch twice is skipped.
        ([crash(30, samples=(5, 6)), crash(140, samples=(6, 9))], (6,)),
        ([crash(30, samples=(5, 6)), crash(30, samples=(5, 6))], ()),
        ([crash(30, samples=(5, 6)), crash(140, samples=(7, 9))], None),
        ([crash(30, samples=(5, 6)), crash(140, samples=(6, 9), fingerprint="g")], None),
    ],
)
def test_which_samples_are_blamed(crashes: list[FirstCause], blamed: tuple[int, ...] | None) -> None:
    supervisor = Supervisor()
    *_, last = [supervisor.fails(one) for one in crashes]
    assert (last.samples if last else None) == blamed


def test_of_several_attempts_with_a_sample_in_common_the_last_one_tells() -> None:
    supervisor = Supervisor()
    assert supervisor.fails(crash(30, samples=(5, 6))) is None
    assert supervisor.fails(crash(40, samples=(7, 8))) is None
    found = supervisor.fails(crash(50, samples=(6, 7)))
    assert found is not None
    assert (found.attempts, found.samples) == ((2, 3), (7,))


def test_a_batch_from_which_a_sample_was_left_out_may_still_be_skipped() -> None:
    supervisor = Supervisor()
    found = [supervisor.fails(crash(30, samples=(5, 6), unreadable=(6,))) for _ in range(2)]
    found += [supervisor.fails(crash(30, samples=(5, 7))) for _ in range(2)]
    assert [item.samples if item else None for item in found] == [None, (6,), (), None]


def test_a_batch_is_blamed_once() -> None:
    supervisor = Supervisor()
    found = [supervisor.fails(crash(30)) for _ in range(5)]
    assert [item is not None for item in found] == [False, True, False, False, False]


def test_an_exception_that_skipping_does_not_cure_is_the_step_s_fault() -> None:
    supervisor = Supervisor()
    skipped = [batch for batch in range(100, 120) for _ in range(2) if supervisor.fails(crash(batch, step=100))]
    assert skipped == [100, 101, 102][:SKIPS_THAT_DID_NOT_HELP]
    assert supervisor.fails(crash(500, step=480)) is None
    assert supervisor.fails(crash(500, step=480)) is not None, "elsewhere it may be the data again"


@given(st.integers(0, 2**32))
def test_a_crash_at_random_is_blamed_only_where_it_hits_the_same_batch_twice(seed: int) -> None:
    dice, supervisor, hit = random.Random(seed), Supervisor(), set()
    for _ in range(10):
        batch = dice.randrange(10**6)
        assert (supervisor.fails(crash(batch)) is not None) == (batch in hit)
        hit.add(batch)


@pytest.mark.parametrize("changed", [{"in_hand": False}, {"ours": True}, {"error": "rollback.errors.UsageError"}])
def test_no_batch_is_blamed_where_none_was_in_hand_or_rollback_itself_raised(changed: dict[str, Any]) -> None:
    supervisor, first = Supervisor(), crash(30, samples=(5, 6))
    assert first.record is not None
    again = replace(first, record=first.record.model_copy(update=changed))
    assert [supervisor.fails(again) for _ in range(4)] == [None] * 4


# --- exceptions without a batch in hand, which come again and again ---------------------------------------------------


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
