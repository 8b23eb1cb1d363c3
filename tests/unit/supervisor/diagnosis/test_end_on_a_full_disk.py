"""What is known of an attempt's end where the run directory's disk took nothing of it."""

from pathlib import Path

import pytest

from rollback.facts.ending import EndedAs
from rollback.facts.training import Fact, FinalStateLost, Finished
from rollback.rundir.heartbeats import Heartbeat, UnrecordedEnd
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.evidence import TrainJournal, gather, unrecorded_by
from rollback.supervisor.diagnosis.outcome import EXIT_CODES, HostOutcome, ending, reason_of

FULL = UnrecordedEnd(how="complete", why="No space left on device", step=9, batch=9)
FINISHED = Finished(step=9, batch=9, checkpoint="c000001-s00000009")
LOST = FinalStateLost(step=9, batch=9, checkpoint=None, steps=9, reason="no room")


def beat(unrecorded: UnrecordedEnd | None = None) -> Heartbeat:
    return Heartbeat(
        pid=1, host="h", attempt=1, step=9, batch=9, doing="leaving", monotonic=1.0, unrecorded_end=unrecorded
    )


def test_the_board_tells_what_the_journal_could_not_take() -> None:
    assert unrecorded_by({0: beat(FULL), 1: beat()}) == FULL
    assert unrecorded_by({0: beat(), 1: beat()}) is None


@pytest.mark.parametrize(
    ("on_record", "expected"),
    [
        ([], "unkept"),
        ([FINISHED.model_copy(update={"step": 5})], "unkept"),  # the end of an earlier pass
        ([FINISHED], "done"),  # the disk had room again before the rank had ended
        ([LOST], "unkept"),
    ],
)
def test_training_is_complete_also_where_the_journal_lacks_it(
    tmp_path: Path, on_record: list[Fact], expected: str
) -> None:
    paths = RunPaths(tmp_path)
    journal = Journal(paths.train_journal, 1)
    for fact in on_record:
        journal.append(fact)
    journal.close()
    given = HostOutcome(status=0, unrecorded=FULL)
    evidence = gather(paths, TrainJournal(paths.train_journal), 1, left=given, told_to_stop=False)
    assert (ending(evidence), evidence.step) == (expected, 9)
    told = f"but the run directory could not take that ({paths.train_journal}: {FULL.why})"
    assert (told in reason_of("unkept", evidence, None, "")) == (on_record not in ([FINISHED], [LOST]))


@pytest.mark.parametrize(("how", "expected"), [("no_checkpoint", 65), ("structural", 76), ("left", 1)])
def test_how_training_ended_is_known_though_the_journal_could_not_take_it(
    tmp_path: Path, how: EndedAs, expected: int
) -> None:
    """The disk was full when the ranks attached, too, so the journal has nothing of this attempt."""
    paths = RunPaths(tmp_path)
    given = HostOutcome(status=0, unrecorded=FULL.model_copy(update={"how": how}))
    evidence = gather(paths, TrainJournal(paths.train_journal), 1, left=given, told_to_stop=False)
    end = ending(evidence)
    assert EXIT_CODES[end] == expected
    gave_up = f"the run directory could not take that ({paths.train_journal}: {FULL.why})"
    assert (gave_up in reason_of(end, evidence, None, "")) == (how != "left")
