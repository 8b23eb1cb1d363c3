"""A start in mid run that has lost what was in memory, while the ring at the URL does not answer."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from checkpoints import manifest_of
from recorded_run import incident, rollback_plan
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.resume import candidates
from rollback.config import Settings
from rollback.errors import CheckpointOutOfReach, ExitCode, NoUsableCheckpoint, RingUnavailable
from rollback.facts.history import History, fold
from rollback.facts.training import BecameGood, Committed, Drained, Fact, JournalEntry
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.train.catalogue import draining
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.catalogue.draining import only_at_url
from rollback.train.comm.ranks import Ranks
from rollback.train.restore.restore import RestoreOutcome
from rollback.train.start import attach
from rollback.train.start.attach import _restore_newest
from rollback.train.start.found_run import FoundRun

NAME, URL = "c000001-s00000010", "file:///bucket/run"  # nothing is read there
STATE: Any = None  # nothing is restored


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run whose supervisor has seen its one checkpoint reach the URL, and which has nothing here."""
    paths = RunPaths(tmp_path)
    with contextlib.closing(Journal(paths.supervisor_journal, 1)) as journal:
        journal.append(Drained(checkpoint=NAME, step=10, place=URL, bytes=1, seconds=0.1))
    return paths


def committed(seq: int, step: int) -> Committed:
    name = CheckpointName.of(seq, step)
    return Committed(checkpoint=name, step=step, batch=step, timeline=0, bytes=1, seconds=0.1, tier="fast")


def history_of(*facts: Fact) -> History:
    return fold(JournalEntry(seq=seq, at="", attempt=1, fact=fact) for seq, fact in enumerate(facts))


def found_run(history: History, manifests: list[Manifest], unknown: str | None) -> FoundRun:
    return FoundRun(
        attempt=1, history=history, manifests=manifests, slots={}, in_ring=[], damaged={}, strays=[],
        ahead=frozenset(), at_url=[], unknown_at_url=unknown, blamed=[], identity=None, accepted=[],
    )  # fmt: skip


def silent(*_: Any) -> None:
    raise RingUnavailable("nobody answers")


@pytest.mark.parametrize("answers", [True, False])
def test_where_the_url_may_have_the_checkpoint_and_does_not_answer_the_run_is_resumable_and_not_without_one(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """With no checkpoint there, people are told to start anew."""
    monkeypatch.setattr(draining, "read_manifest_at", (lambda *_: None) if answers else silent)
    history = history_of(committed(1, 10))
    at_url, unknown = only_at_url(paths, Settings(ring=URL), history, ())
    assert (at_url, unknown) == ([], None if answers else "nobody answers")
    with pytest.raises(NoUsableCheckpoint if answers else CheckpointOutOfReach) as refused:
        _restore_newest(paths, found_run(history, [], unknown), STATE, Ranks(), URL)
    assert refused.value.exit_code == (ExitCode.NO_CHECKPOINT if answers else ExitCode.RESUMABLE)
    assert ("the same command goes on" in str(refused.value)) is not answers


def test_an_older_checkpoint_in_the_run_directory_is_not_gone_on_from_where_the_url_has_a_newer_one(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "read_manifest_at", silent)
    history = history_of(committed(0, 5), committed(1, 10))
    here = [manifest_of(0, 5)]
    _, unknown = only_at_url(paths, Settings(ring=URL), history, here)
    with pytest.raises(CheckpointOutOfReach, match="the newest checkpoint is in the ring"):
        _restore_newest(paths, found_run(history, here, unknown), STATE, Ranks(), URL)


def unreached(name: str, *_: Any) -> RestoreOutcome:
    """The one checkpoint that is only at the URL does not come, and others are here."""
    place = CheckpointPlace(Path(name), RunPaths(Path()))
    if name == NAME:
        return RestoreOutcome(faults=[(place, CheckpointOutOfReach("nothing came for 120 s"))])
    return RestoreOutcome(place)


def test_a_download_that_breaks_off_condemns_no_checkpoint_and_an_older_one_does_not_stand_in_for_it(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "restore", unreached)
    found = found_run(history_of(committed(0, 5), committed(1, 10)), [manifest_of(0, 5)], None)
    found.at_url.append(manifest_of(1, 10))
    with pytest.raises(CheckpointOutOfReach, match="nothing came") as refused:
        _restore_newest(paths, found, STATE, Ranks(), URL)
    assert refused.value.exit_code == ExitCode.RESUMABLE
    assert found.damaged == {}


@pytest.mark.parametrize("is_there", [True, False])
def test_where_the_planned_checkpoint_does_not_come_an_older_good_one_serves_and_it_stays_in_the_ring(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(attach, "restore", unreached)
    good = [BecameGood(checkpoint=CheckpointName.of(0, 5), step=5), BecameGood(checkpoint=NAME, step=10)]
    back = rollback_plan(1, NAME, 10, (11, 20))
    here = [manifest_of(0, 5)] if is_there else []
    found = found_run(history_of(committed(0, 5), committed(1, 10), *good, incident(1, 11, 11), back), here, None)
    found.at_url.append(manifest_of(1, 10))
    if is_there:
        restored = _restore_newest(paths, found, STATE, Ranks(), URL)
        assert restored is not None
        assert restored[0] == here[0]
    else:
        with pytest.raises(CheckpointOutOfReach, match="nothing came"):
            _restore_newest(paths, found, STATE, Ranks(), URL)
    assert found.damaged == {}, "what is in here is journalled as quarantined"


def test_nor_is_one_condemned_that_is_here_in_part_where_the_copy_of_it_does_not_come(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once anything has to be fetched, what is not whole here is fetched too."""

    def restore(name: str, *_: Any) -> RestoreOutcome:
        place = CheckpointPlace(Path(name), RunPaths(Path()))
        if name == CheckpointName.of(0, 5):
            return RestoreOutcome(place)
        return RestoreOutcome(faults=[(place, CheckpointOutOfReach("nothing came for 120 s"))])

    monkeypatch.setattr(attach, "restore", restore)
    manifests = [manifest_of(seq, step) for seq, step in enumerate((5, 8, 10))]
    names = [manifest.name for manifest in manifests]
    good = [BecameGood(checkpoint=manifest.name, step=manifest.step) for manifest in manifests]
    facts = [*(committed(m.seq, m.step) for m in manifests), *good]
    back = rollback_plan(1, names[2], 10, (11, 20))
    found = found_run(history_of(*facts, incident(1, 11, 11), back), manifests[:2], None)
    found.at_url.append(manifests[2])
    restored = _restore_newest(paths, found, STATE, Ranks(), URL)
    assert restored is not None
    assert restored[0] == manifests[0]
    assert found.damaged == {}


def test_what_a_rollback_has_cut_off_is_not_asked_for_at_the_url(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "read_manifest_at", silent)
    back = rollback_plan(1, CheckpointName.of(0, 5), 5, (6, 12), discards=(NAME,))
    history = history_of(committed(0, 5), committed(1, 10), incident(1, 6, 6), back)
    assert only_at_url(paths, Settings(ring=URL), history, [manifest_of(0, 5)]) == ([], None)


def test_older_checkpoints_at_the_url_serve_where_the_run_directory_has_only_what_a_rollback_has_cut_off(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was going back to one that was in the memory of a lost host alone; or that ranks had copied, who had no
    supervisor then."""
    older, planned = manifest_of(1, 10), manifest_of(2, 20)
    there = {older.name: older}
    monkeypatch.setattr(draining, "read_manifest_at", lambda _, name: there.get(name))
    back = rollback_plan(1, CheckpointName.of(2, 20), 20, (21, 30), discards=(CheckpointName.of(3, 30),))
    good = BecameGood(checkpoint=NAME, step=10)
    history = history_of(committed(1, 10), good, committed(2, 20), committed(3, 30), incident(1, 21, 21), back)
    here = [manifest_of(3, 30)]
    at_url, unknown = only_at_url(paths, Settings(ring=URL), history, here)
    assert (at_url, unknown) == ([older], None)
    assert candidates(history, [*here, *at_url]) == [older]
    there[planned.name] = planned
    at_url, unknown = only_at_url(paths, Settings(ring=URL), history, here)
    assert candidates(history, [*here, *at_url]) == [planned, older]
