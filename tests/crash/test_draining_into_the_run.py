"""From the fast tier into the run directory's ring: whole or not at all, wherever the process dies."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from waiting import wait_for

from checkpoints import manifest_of, whole, write_checkpoint
from mortal import Mortal
from recorded_run import RecordedRun
from rollback.checkpoints import ring, tiers
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.format.manifest import read_manifest
from rollback.config import Settings
from rollback.errors import CheckpointDamaged, RingUnavailable
from rollback.facts.training import Drained, DrainFailed, Fact
from rollback.ring import drainer as draining
from rollback.ring import in_run
from rollback.ring.drainer import DrainPhase, drainer_for
from rollback.ring.in_run import RingInRun
from rollback.rundir.identity import read_identity
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor.draining import Draining
from rollback.supervisor.journal import SupervisorJournal
from rollback.system.durable import open_regular

OLD, NEW = "c000000-s00000010", "c000001-s00000020"


def in_memory(folder: Path, seq: int, step: int) -> tuple[RunPaths, str]:
    """A checkpoint somewhere else, as the fast tier would hold it."""
    other = RunPaths(folder)
    other.root.mkdir()
    return other, write_checkpoint(other, seq, step)


@pytest.mark.parametrize("power", [False, True], ids=["the process dies", "the power fails"])
def test_dying_while_a_checkpoint_is_copied_leaves_the_old_one_or_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, power: bool
) -> None:
    source, name = in_memory(tmp_path / "source", 1, 20)
    manifest, directory = read_manifest(source.checkpoint(name)), source.checkpoint(name)
    mortal = Mortal(monkeypatch)

    def run(number: int) -> RunPaths:
        paths = RunPaths(tmp_path / str(number))
        paths.root.mkdir()
        write_checkpoint(paths, 0, 10)
        return paths

    def copy(paths: RunPaths) -> Callable[[], None]:
        at_run = RingInRun(paths)
        at_run.open()
        return lambda: at_run.put(manifest, directory)

    total = mortal.live(copy(run(0)))
    seen = set()
    for number in range(1, total + 1):
        paths = run(number)
        mortal.die(number, copy(paths))
        if power:
            mortal.lose_power(paths.root)
        RingInRun(paths).open()
        names = ring.names(paths)
        seen.add(len(names))
        assert names in ([OLD], [OLD, NEW])
        assert all(whole(paths, held) for held in names)
        assert not list(paths.ring.glob(".*"))
        if len(names) == 1:
            copy(paths)()
            assert whole(paths, NEW)
    assert seen == {1, 2}


@pytest.mark.parametrize("fault", ["flipped", "cut", "gone"])
def test_a_slot_that_was_taken_meanwhile_is_not_committed(tmp_path: Path, fault: str) -> None:
    source, name = in_memory(tmp_path / "source", 1, 20)
    manifest = read_manifest(source.checkpoint(name))
    shard = source.checkpoint(name) / "rank-00001.safetensors"
    body = shard.read_bytes()
    if fault == "gone":
        shard.unlink()
    else:
        shard.write_bytes(body[:-1] + b"?" if fault == "flipped" else body[:-1])
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    at_run = RingInRun(paths)
    at_run.open()
    with pytest.raises(CheckpointDamaged):
        at_run.put(manifest, source.checkpoint(name))
    assert list(paths.ring.iterdir()) == []


def test_good_checkpoints_go_from_the_slots_to_the_ring_which_keeps_its_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    paths, identity = run.paths, read_identity(run.paths)
    assert identity is not None
    tier = slots.tier_of(tmp_path / "memory", identity.run_id)
    (tmp_path / "memory").mkdir()
    slots.claim(tier, paths.root)
    tiers.point_to_fast_tier(paths, tier)
    run.attach(0, 1, None, 0)
    facts: list[Fact] = []
    settings = Settings(keep=3, checkpoint_every="10")
    drainer = drainer_for(paths, settings, facts.append, print)
    assert drainer is not None
    drainer.start()
    for seq in range(6):
        name = manifest_of(seq, 10 * seq).name
        into_slot(tier, tmp_path / f"source-{seq}", seq, 10 * seq)
        run.commit(10.0 * seq, name, 10 * seq)
        wait_for(lambda name=name: name in [fact.checkpoint for fact in facts if isinstance(fact, Drained)])
    into_slot(tier, tmp_path / "source-6", 6, 60)
    run.commit(100.0, manifest_of(6, 60).name, 60, good=False)
    drainer.finish()
    assert drainer.wait(DrainPhase.FINISHED, 30)
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 30)
    assert ring.names(paths) == [manifest_of(seq, 10 * seq).name for seq in (3, 5, 6)]
    assert all(whole(paths, name) for name in ring.names(paths))


@pytest.mark.parametrize("failures", [1, 2])
def test_a_shard_that_cannot_be_read_for_a_moment_is_copied_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Of two failures one is taken for damage: behind it the next checkpoint has its turn."""
    run = RecordedRun(tmp_path / "run", monkeypatch)
    identity = read_identity(run.paths)
    assert identity is not None
    tier = slots.tier_of(tmp_path / "memory", identity.run_id)
    (tmp_path / "memory").mkdir()
    slots.claim(tier, run.paths.root)
    tiers.point_to_fast_tier(run.paths, tier)
    run.attach(0, 1, None, 0)
    into_slot(tier, tmp_path / "source", 0, 0)
    name = manifest_of(0, 0).name
    run.commit(0.0, name, 0)
    refused: list[Path] = []

    def too_many_files(path: Path) -> BinaryIO:
        if len(refused) < failures:
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_regular(path)

    monkeypatch.setattr(in_run, "open_regular", too_many_files)
    monkeypatch.setattr(draining, "_FIRST_WAIT", 0.0)
    facts: list[Fact] = []
    drainer = drainer_for(run.paths, Settings(keep=3), facts.append, print)
    assert drainer is not None
    drainer.start()
    last = Drained if failures == 1 else DrainFailed
    wait_for(lambda: any(isinstance(fact, last) and fact.checkpoint == name for fact in facts))
    drainer.give_up()
    drainer.close()
    assert drainer.wait(DrainPhase.CLOSED, 30)
    assert [fact.checkpoint for fact in facts if isinstance(fact, DrainFailed)] == [None, name][:failures]
    assert ring.names(run.paths) == ([name] if failures == 1 else [])


@pytest.mark.parametrize("refused", ["write_direct", "files.make_new_directory", "files.make_directory", "ring.evict"])
def test_what_the_disk_refuses_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The system names no file where a write fails."""

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, name = in_memory(tmp_path / "source", 1, 20)
    manifest, directory = read_manifest(source.checkpoint(name)), source.checkpoint(name)
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write_checkpoint(paths, 0, 10)
    monkeypatch.setattr(f"rollback.ring.in_run.{refused}", full)
    at_run = RingInRun(paths)

    def work() -> None:
        at_run.open()
        at_run.put(manifest, directory)
        at_run.evict(OLD)

    with pytest.raises(RingUnavailable, match=f" {paths.ring}.*: No space left on device$"):
        work()


def test_a_fast_tier_that_is_made_after_the_ranks_have_attached_is_drained_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that looks in between looks again."""
    monkeypatch.setattr("rollback.supervisor.draining._LOOK_EVERY", 0.0)
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    drains = Draining(run.paths, SupervisorJournal(run.paths, print), print)
    drains.follow(fold_journal(run.paths.train_journal).history)
    identity = read_identity(run.paths)
    assert identity is not None
    (tmp_path / "memory").mkdir()
    tier = slots.tier_of(tmp_path / "memory", identity.run_id)
    slots.claim(tier, run.paths.root)
    tiers.point_to_fast_tier(run.paths, tier)
    into_slot(tier, tmp_path / "source", 0, 0)
    run.commit(0.0, manifest_of(0, 0).name, 0)
    drains.look(lambda: fold_journal(run.paths.train_journal).history)
    drains.finish(lambda: False)
    drains.close()
    assert ring.names(run.paths) == [manifest_of(0, 0).name]


def into_slot(tier: slots.SlotPaths, folder: Path, seq: int, step: int) -> None:
    """Commit a checkpoint in one of two slots, which takes the place of what was there."""
    source, name = in_memory(folder, seq, step)
    number = seq % 2
    while not slots.uncommit(tier, number):
        pass
    tier.slot(number).mkdir(mode=0o700, exist_ok=True)
    manifest = read_manifest(source.checkpoint(name))
    for shard in manifest.shards:
        os.replace(source.checkpoint(name) / shard.file, tier.slot(number) / shard.file)
    slots.commit(tier, number, manifest)
