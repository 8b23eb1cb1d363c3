"""A start in mid run that has lost what was in memory, while the ring at the URL does not answer."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from rollback.config import Settings
from rollback.errors import CheckpointOutOfReach, ExitCode, NoUsableCheckpoint, RingUnavailable
from rollback.facts.history import History
from rollback.facts.training import Committed, Drained
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.train.catalogue import draining
from rollback.train.catalogue.draining import only_at_url
from rollback.train.comm.ranks import Ranks
from rollback.train.start.attach import _restore_newest
from rollback.train.start.found_run import FoundRun

NAME, URL = "c000001-s00000010", "file:///bucket/run"  # nothing is read there


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run whose supervisor has seen its one checkpoint reach the URL, and which has nothing here."""
    paths = RunPaths(tmp_path)
    with contextlib.closing(Journal(paths.supervisor_journal, 1)) as journal:
        journal.append(Drained(checkpoint=NAME, step=10, place=URL, bytes=1, seconds=0.1))
    return paths


@pytest.mark.parametrize("answers", [True, False])
def test_where_the_url_may_have_the_checkpoint_and_does_not_answer_the_run_is_resumable_and_not_without_one(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """With no checkpoint there, people are told to start anew."""

    def read(*_: Any) -> None:
        if not answers:
            raise RingUnavailable("nobody answers")

    monkeypatch.setattr(draining, "read_manifest_at", read)
    at_url, unknown = only_at_url(paths, Settings(ring=URL), ())
    assert (at_url, unknown) == ([], None if answers else "nobody answers")
    committed = Committed(checkpoint=NAME, step=10, batch=10, timeline=0, bytes=1, seconds=0.1, tier="fast")
    found = FoundRun(
        attempt=1, history=History(committed={NAME: committed}), manifests=[], slots={}, in_ring=[], damaged={},
        strays=[], ahead=frozenset(), at_url=at_url, unknown_at_url=unknown, blamed=[], identity=None, accepted=[],
    )  # fmt: skip
    state: Any = None  # nothing is restored
    with pytest.raises(NoUsableCheckpoint if answers else CheckpointOutOfReach) as refused:
        _restore_newest(paths, found, state, Ranks(), URL)
    assert refused.value.exit_code == (ExitCode.NO_CHECKPOINT if answers else ExitCode.RESUMABLE)
    assert ("the same command goes on" in str(refused.value)) is not answers
