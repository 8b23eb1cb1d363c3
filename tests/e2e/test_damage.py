"""Checkpoints that cannot be believed, and disks that refuse."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from selection import soak
from toy import Toy, facts, files, require_same, same_skips_from_the_start, stop_at, train, weights

from rollback.checkpoints import ring
from rollback.checkpoints.format import direct
from rollback.errors import NoUsableCheckpoint, RunDirectoryError
from rollback.facts.training import (
    Advice,
    Attached,
    Committed,
    Dropped,
    Incident,
    Planned,
    Quarantined,
    Restored,
)
from rollback.rundir import heartbeats
from rollback.rundir.journal import journal
from rollback.rundir.paths import RunPaths
from rollback.system import durable
from rollback.system.lines import LineWriter

TOY = Toy(epochs=2, samples=120, loop="epochs", between=True)


def flip_a_bit(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    body = bytearray(path.read_bytes())
    body[len(body) * 2 // 3] ^= 4
    path.write_bytes(body)


def lose_the_shard(checkpoint: Path) -> None:
    (checkpoint / "rank-00000.safetensors").unlink()


def truncate_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes()[:-40])


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def make_the_shard_a_link(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.safetensors"
    path.rename(checkpoint.parent.parent / "elsewhere")
    path.symlink_to(checkpoint.parent.parent / "elsewhere")


HARM = [flip_a_bit, lose_the_shard, truncate_the_manifest, lose_the_manifest, make_the_shard_a_link]
Harm = Callable[[Path], None]


def interrupted(toy: Toy, run: Path, batch: int) -> list[Path]:
    """A run that was broken off at a batch; its checkpoints, oldest first."""
    with pytest.raises(KeyboardInterrupt):
        train(toy, run, hook=stop_at(batch))
    return sorted(path for path in (run / "ring").iterdir() if path.name.startswith("c"))


@pytest.mark.parametrize("harm", [HARM[0], *soak(*HARM[1:])], ids=lambda harm: harm.__name__)
def test_a_damaged_newest_checkpoint_is_put_aside_and_the_older_one_used(tmp_path: Path, harm: Harm) -> None:
    run = tmp_path / "run"
    *_, older, newest = interrupted(TOY, run, 45)
    harm(newest)
    ended = train(TOY, run)
    assert facts(run, Attached)[-1].checkpoint == older.name
    (fact,) = facts(run, Quarantined)
    assert fact.checkpoint == newest.name
    assert (run / "quarantine" / newest.name).is_dir()
    assert not newest.exists()
    require_same(weights(ended), weights(train(TOY)), harm.__name__)


def test_a_newest_checkpoint_that_is_gone_is_missed_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    *_, older, newest = interrupted(TOY, run, 45)
    shutil.rmtree(newest)
    train(TOY, run)
    told = capfd.readouterr().err
    assert f"({older.name}); the newest checkpoint on record, {newest.name}, is missing\n" in told
    train(TOY, run)
    assert "is missing" not in capfd.readouterr().err, "it is missed by a later start, too"


def test_where_all_are_damaged_the_run_says_so_and_is_left_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for checkpoint, harm in zip(interrupted(TOY, run, 45), HARM, strict=True):
        harm(checkpoint)
    before = files(run)
    with pytest.raises(NoUsableCheckpoint, match=r"c000000-s00000000: .*hash") as refused:
        train(TOY, run)
    assert refused.value.exit_code == 65
    assert files(run) == before


def test_a_journal_that_is_gone_is_said_where_a_checkpoint_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    interrupted(TOY, run, 45)
    assert not facts(run, Advice)
    RunPaths(run).train_journal.unlink()
    train(TOY, run)
    assert [fact.code for fact in facts(run, Advice)] == ["journal-gone"]


def test_a_journal_that_is_cut_is_said_where_checkpoints_are_left_from_behind_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    interrupted(TOY, run, 45)
    journal = RunPaths(run).train_journal
    lines = journal.read_bytes().splitlines(keepends=True)
    first = next(place for place, line in enumerate(lines) if b'"committed"' in line)
    journal.write_bytes(b"".join(lines[: first + 1]))
    train(TOY, run)
    assert [fact.code for fact in facts(run, Advice)] == ["journal-cut"]


def test_a_run_whose_checkpoints_are_gone_does_not_silently_begin_anew(tmp_path: Path) -> None:
    """A fast tier that a reboot emptied, or somebody's rm: weeks of training must not be started over unasked."""
    run = tmp_path / "run"
    interrupted(TOY, run, 45)
    shutil.rmtree(run / "ring")
    before = files(run)
    with pytest.raises(NoUsableCheckpoint):
        train(TOY, run)
    assert files(run) == before


@pytest.mark.parametrize(
    "harm", [lose_the_shard, lose_the_manifest, *soak(flip_a_bit, truncate_the_manifest, make_the_shard_a_link)],
    ids=lambda harm: harm.__name__,
)  # fmt: skip
def test_damage_that_a_rollback_finds_makes_it_take_an_older_checkpoint(tmp_path: Path, harm: Harm) -> None:
    toy, run = Toy(nan=(57,)), tmp_path / "run"

    def damage(_guard: object, position: int) -> None:
        if position == 55 and not (run / "quarantine").exists():
            harm(run / "ring" / "c000004-s00000040")

    ended = train(toy, run, hook=damage)
    first, second = facts(run, Planned)
    assert (first.step, second.step) == (40, 30)
    assert first.incident == second.incident
    assert [fact.step for fact in facts(run, Restored)] == [30]
    assert [fact.checkpoint for fact in facts(run, Quarantined)] == ["c000004-s00000040"]
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), harm.__name__)


def test_a_rollback_that_finds_all_checkpoints_damaged_stops_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def damage(_guard: object, position: int) -> None:
        if position == 55:
            for checkpoint in (run / "ring").iterdir():
                flip_a_bit(checkpoint)

    with pytest.raises(SystemExit) as stopped:
        train(Toy(nan=(57,)), run, hook=damage)
    assert stopped.value.code == 65
    assert facts(run, Planned)[-1].action == "stop"
    assert facts(run, Restored) == []


# A disk that refuses ------------------------------------------------------------------------------------------------


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


OPERATIONS = [
    (ring, "begin_writing"),
    (ring, "evict"),
    (ring, "write_file"),
    (ring, "sync_directory"),
    (direct, "write_all"),
    (journal, "append_lines"),
    (heartbeats, "write_file"),
    (LineWriter, "write"),
    (LineWriter, "flush"),
]
KEEPS_SAVING = ("evict", "sync_directory")


@pytest.mark.parametrize(("owner", "name"), OPERATIONS, ids=[f"{o.__name__}.{n}" for o, n in OPERATIONS])
def test_a_full_disk_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    """From batch 25 on, for good. What was committed before stays, nothing is committed by mistake."""
    run = tmp_path / "run"

    def fill(_guard: object, position: int) -> None:
        if position == 25:
            monkeypatch.setattr(owner, name, full_disk)

    ended = train(TOY.with_settings(keep=3), run, hook=fill)
    monkeypatch.undo()
    require_same(ended, train(TOY), f"{name} fails")
    on_disk = [path.name for path in (run / "ring").iterdir() if path.name.startswith("c")]
    told = facts(run)
    if owner is not journal:
        committed = {fact.checkpoint for fact in told if isinstance(fact, Committed)}
        assert set(on_disk) <= committed
        assert not committed & {fact.checkpoint for fact in told if isinstance(fact, Dropped)}
        if owner is direct or (owner is ring and name not in KEEPS_SAVING):
            assert facts(run, Dropped)
            assert {fact.step for fact in told if isinstance(fact, Committed)} == {0, 10, 20}
    again = train(TOY, run)
    require_same(weights(again), weights(ended), "run again")


def test_a_disk_that_stays_full_is_told_once_and_so_is_that_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = direct.write_all

    def fill(_guard: object, position: int) -> None:
        if position in (25, 45):
            monkeypatch.setattr(direct, "write_all", full_disk if position == 25 else write)

    train(TOY, tmp_path / "run", hook=fill)
    told = capsys.readouterr().err
    assert len(facts(tmp_path / "run", Dropped)) > 1
    assert told.count("could not be written") == 1
    assert told.count("could be written again") == 1


def test_a_start_that_cannot_write_the_journal_says_once_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    interrupted(TOY, run, 25)
    before = files(run)
    monkeypatch.setattr(journal, "sync_directory", full_disk)
    with pytest.raises(RunDirectoryError) as refused:
        train(TOY, run)
    assert "opening the journal" in refused.value.message
    assert str(refused.value).count("hint:") == 1
    assert files(run) == before


def test_what_a_full_disk_kept_from_the_journal_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def fill(_guard: object, position: int) -> None:
        if position == 15:
            monkeypatch.setattr(journal, "append_lines", full_disk)
        if position == 65:
            monkeypatch.setattr(journal, "append_lines", durable.append_lines)

    ended = train(Toy(nan=(57,)), run, hook=fill)
    assert len(facts(run, Incident)) == len(facts(run, Planned)) == len(facts(run, Restored)) == 1
    assert {0, 10, 20, 30, 40} <= {fact.step for fact in facts(run, Committed)}
    require_same(ended, same_skips_from_the_start(Toy(nan=(57,)), run, tmp_path / "fresh"), "journal")


def test_a_rollback_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written any more, not even the plan; going back and on is still right."""
    toy, run = Toy(nan=(57,)), tmp_path / "run"

    def fill(_guard: object, position: int) -> None:
        if position == 45:
            for owner, name in OPERATIONS:
                monkeypatch.setattr(owner, name, full_disk)

    ended = train(toy, run, hook=fill)
    monkeypatch.undo()
    windows = [{"first": 40, "last": 60}]
    require_same(ended, train(toy.with_settings(skip=windows), tmp_path / "fresh"), "full disk")
