"""Checkpoints that are only in the ring at a URL: gone back to in mid-run, fetched first; and what where that fails."""

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asking import answers, asking, hand_in
from faulty import Bucket, Died
from job_results import Scenarios
from selection import soak
from toy import Hook, Toy, facts, history, require_same, told_from_the_start, train, weights

from rollback.checkpoints import ring, tiers
from rollback.checkpoints.format.manifest import read_manifest
from rollback.errors import CheckpointDamaged, CheckpointOutOfReach
from rollback.facts.training import Drained, Fetched, Planned, Quarantined, Restored, Saving, Trouble
from rollback.ring import drainer
from rollback.ring.url import store as storing
from rollback.rundir.paths import RunPaths
from rollback.system.processes import name_process
from rollback.train import run as attached
from rollback.train.catalogue import remote
from rollback.train.catalogue.remote import HostCopies

URL = "faulty://bucket/run"
SETTINGS = {"snapshot_every": 5, "keep": 3, "rewind": 25, "checkpoint_every": "1", "keep_durable": 20}
BAD = Toy(samples=240, nan=(50,), settings={**SETTINGS, "ring": URL})
"""Goes back to step 25, which three places in the run directory do not reach."""
PLANNED, OLDER = "c000005-s00000025", "c000004-s00000020"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "PATIENCE", 0.05)
    monkeypatch.setattr(storing, "_LONGEST_WAIT", 0.001)
    monkeypatch.setattr(drainer, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(drainer, "_POLL", 0.01)
    monkeypatch.setattr(remote, "_PATIENCE", 0.05)
    monkeypatch.setattr(remote, "MEET_EVERY", 0.02)


def following(run: Path, then: Hook = lambda guard, position: None) -> Hook:
    """Wait until the drainer has the newest good one, so that the URL misses none; then do `then`."""

    def follow(guard: Any, position: int) -> None:
        if position % 5 == 4 and guard.step < 50 and not facts(run, Planned):
            until, newest = time.monotonic() + 60, max(history(run).good, default=None)
            while newest not in (None, *(fact.checkpoint for fact in facts(run, Drained))):
                assert time.monotonic() < until, "the drainer does not follow"
                time.sleep(0.02)
        then(guard, position)

    return follow


def at(batch: int, act: Any) -> Hook:
    """Do it once, when that batch comes by first."""
    done: list[bool] = []

    def hook(guard: Any, position: int) -> None:
        if position == batch and not done:
            done.append(True)
            act()

    return hook


def require_the_same(ended: dict[str, str], toy: Toy, run: Path, what: str) -> None:
    require_same(ended, trained(told_from_the_start(toy.with_settings(ring=None), run).to_json()), what)


@functools.cache
def trained(toy: str) -> dict[str, str]:
    """Several tests end alike."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a last sign of life may come meanwhile
        return train(Toy.from_json(toy), Path(folder, "fresh"))


def fast(toy: Toy, folder: Path) -> Toy:
    (folder / "memory").mkdir()
    return toy.with_settings(fast_tier=str(folder / "memory"))


@pytest.mark.parametrize("in_memory", [True, *soak(False)], ids=["slots", "ring in the run directory"])
def test_a_rollback_reaches_a_checkpoint_that_is_only_at_the_url(
    tmp_path: Path, bucket: Bucket, in_memory: bool
) -> None:
    run, here = tmp_path / "run", []
    toy = fast(BAD, tmp_path) if in_memory else BAD
    look = at(50, lambda: here.extend(place.name for place in tiers.locate(RunPaths(run))))
    ended = train(toy, run, hook=following(run, look))
    (planned,) = facts(run, Planned)
    assert planned.checkpoint not in here
    assert 20 <= planned.step <= 25
    assert [fact.checkpoint for fact in facts(run, Fetched)] == [planned.checkpoint]
    assert [(fact.checkpoint, fact.route) for fact in facts(run, Restored)] == [(planned.checkpoint, "in_process")]
    assert not facts(run, Quarantined, Trouble)
    assert len(ring.names(RunPaths(run))) <= 3
    require_the_same(ended, BAD, run, "gone back to the URL")


def test_where_the_bucket_is_gone_the_oldest_that_is_here_is_used(tmp_path: Path, bucket: Bucket) -> None:
    run = tmp_path / "run"
    ended = train(BAD, run, hook=following(run, at(50, lambda: bucket.fail(1, "for ever"))))
    first, second = facts(run, Planned)
    assert first.checkpoint == PLANNED
    assert second.step > 25
    (trouble,) = facts(run, Trouble)
    assert trouble.doing == f"fetching checkpoint {PLANNED} from {URL}"
    assert [fact.checkpoint for fact in facts(run, Restored)] == [second.checkpoint]
    assert not facts(run, Fetched, Quarantined)
    bucket.heal()
    require_the_same(ended, BAD, run, "the bucket was gone")


def test_a_bucket_from_which_nothing_comes_is_given_up(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(remote, "_STANDSTILL", 0.2)

    def tarry(guard: Any, position: int) -> None:
        bucket.delay = 0.0 if facts(run, Restored) else 1.0 if position == 50 else bucket.delay

    train(BAD, run, hook=following(run, tarry))
    (trouble,) = facts(run, Trouble)
    assert trouble.error.startswith("nothing came for")
    assert len(facts(run, Planned)) == 2
    assert len(facts(run, Restored)) == 1


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_where_one_object_is_lost_or_damaged_the_next_older_one_at_the_url_is_used(
    tmp_path: Path, bucket: Bucket, how: str
) -> None:
    run = tmp_path / "run"

    def harm() -> None:
        (key,) = (key for key in bucket.objects if PLANNED in key and key.endswith(".safetensors"))
        body = bytearray(bucket.objects.pop(key))
        body[len(body) // 2] ^= 1
        if how == "damaged":
            bucket.objects[key] = bytes(body)

    ended = train(BAD, run, hook=following(run, at(50, harm)))
    assert [fact.checkpoint for fact in facts(run, Planned)] == [PLANNED, OLDER]
    assert [fact.checkpoint for fact in facts(run, Fetched)] == [OLDER]
    require_the_same(ended, BAD, run, how)


def test_what_is_damaged_in_the_run_directory_is_sound_at_the_url(tmp_path: Path, bucket: Bucket) -> None:
    run, toy = tmp_path / "run", BAD.with_settings(keep=20)

    def harm() -> None:
        shard = RunPaths(run).checkpoint(PLANNED) / "rank-00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    ended = train(toy, run, hook=following(run, at(50, harm)))
    assert [fact.checkpoint for fact in facts(run, Planned)] == [PLANNED, PLANNED]
    assert [fact.checkpoint for fact in facts(run, Quarantined)] == [PLANNED]
    assert [fact.checkpoint for fact in facts(run, Restored)] == [PLANNED]
    assert PLANNED in history(run).good
    require_the_same(ended, toy, run, "damaged here, sound there")


def test_an_operator_goes_back_to_a_checkpoint_that_is_only_at_the_url(tmp_path: Path, bucket: Bucket) -> None:
    run, toy = tmp_path / "run", BAD.but(nan=())
    ended = train(toy, run, hook=following(run, asking(50, lambda: hand_in(run, "rewind", to=29))))
    assert [fact.checkpoint for fact in facts(run, Fetched)] == [PLANNED]
    assert [carried_out for carried_out, _ in answers(run).values()] == [True]
    require_the_same(ended, toy, run, "an operator's rewind")


def test_two_ranks_fetch_and_go_back_together(tmp_path: Path) -> None:
    toy = Toy(samples=480, sampler="distributed", settings={**SETTINGS, "ring": f"file://{tmp_path}/ring"})
    scenarios = Scenarios(tmp_path)
    run = scenarios.run("begun")
    scenarios.add("begun", toy.but(max_steps=30))  # its end brings the newest good one to the URL
    scenarios.add("ended", toy, run=str(run), ask=[50, {"order": "rewind", "to": 24}])
    scenarios.add("undisturbed", toy.with_settings(ring=None))
    scenarios.torchrun(2)
    assert [fact.checkpoint for fact in facts(run, Fetched)] == [OLDER]
    assert [(fact.checkpoint, fact.route) for fact in facts(run, Restored)] == [(OLDER, "in_process")]
    for rank in range(2):
        ended, undisturbed = scenarios.portrait("ended", rank), scenarios.portrait("undisturbed", rank)
        require_same(weights(ended), weights(undisturbed), f"rank {rank}")


def test_a_fast_tier_that_fails_leaves_a_ring_that_keeps_its_capacity(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drainer fills the URL, so nobody but the ranks can see to the ring in the run directory."""
    run, toy = tmp_path / "run", fast(BAD.but(nan=()), tmp_path)
    most: list[int] = []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fill(_guard: object, position: int) -> None:
        most.append(len(ring.names(RunPaths(run))))
        if position == 15:
            monkeypatch.setattr("rollback.checkpoints.fast_tier.slots.uncommit", full)

    train(toy, run, hook=fill)
    assert facts(run, Saving)[-1].slots == 0
    assert 0 < max(most) <= 4, "three, and one that has just come"


@pytest.mark.parametrize("supervised", [False, True], ids=["unsupervised", "supervised"])
def test_a_crash_in_mid_fetch_ends_with_the_same_rollback(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    """A supervisor fetches before its first attempt only: a later one has to see to it itself."""
    run, log = tmp_path / "run", tmp_path / "log"
    get = storing.Store.get_files

    def die(self: storing.Store, key: str, path: Path, expected: Any) -> None:
        get(self, key, path, expected)
        raise Died

    def begin_to_die() -> None:
        monkeypatch.setattr(storing.Store, "get_files", die)

    with pytest.raises(Died):
        train(BAD, run, log=log, hook=following(run, at(50, begin_to_die)))
    monkeypatch.setattr(storing.Store, "get_files", get)
    assert not RunPaths(run).checkpoint(PLANNED).exists()
    for name in ring.names(RunPaths(run)):
        shutil.rmtree(RunPaths(run).checkpoint(name))  # with none of them there is no older one to go back to
    if supervised:
        monkeypatch.setenv("ROLLBACK_SUPERVISOR", name_process(os.getppid()))
        monkeypatch.setenv("ROLLBACK_SETTINGS", '{"ring": "faulty://bucket/run"}')
        monkeypatch.setattr(attached, "_attached", set())  # the next attempt has processes of its own
    ended = train(BAD, run, log=log)
    assert [(fact.checkpoint, fact.route) for fact in facts(run, Restored)] == [(PLANNED, "relaunch")]
    monkeypatch.undo()
    require_the_same(ended, BAD, run, "a crash in mid-fetch")


class SecondHost:
    """The ranks as one sees them on a host with a run directory of its own. content: which checkpoint rank 0 has."""

    first_in_directory, is_rank_0 = True, False

    def __init__(self, content: str) -> None:
        self._content = content

    def from_first(self, value: Any) -> Any:
        return self._content

    def agreed(self, act: Callable[[], object]) -> object:
        return act()

    def all_of(self, condition: bool) -> bool:
        return condition


def test_a_host_that_has_another_runs_checkpoint_by_that_name_gets_the_one_that_rank_0_has(
    tmp_path: Path, bucket: Bucket
) -> None:
    """As a spare leaves it that was killed; its run was then wiped on the other hosts, and another one begun."""
    toy = Toy(samples=60, settings={**SETTINGS, "ring": URL})
    first, before = RunPaths(tmp_path / "first"), RunPaths(tmp_path / "before")
    train(toy, first.root)
    train(toy.but(augment=True).with_settings(ring=None), before.root)
    name = ring.names(first)[-1]
    wanted, stale = (read_manifest(paths.checkpoint(name)).content for paths in (first, before))
    assert wanted != stale
    second = RunPaths(tmp_path / "second")
    shutil.copytree(before.checkpoint(name), second.checkpoint(name))
    ranks: Any = SecondHost(wanted)
    HostCopies(second, ranks, URL).bring(name)
    assert read_manifest(second.checkpoint(name)).content == wanted
    HostCopies(second, ranks, None).bring(name)  # it needs no copy any more


def test_a_checkpoint_that_a_host_cannot_reach_is_not_taken_for_a_damaged_one(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = RunPaths(tmp_path / "first"), RunPaths(tmp_path / "second")
    train(Toy(samples=60, settings={**SETTINGS, "ring": URL}), first.root)
    name = ring.names(first)[-1]
    ranks: Any = SecondHost(read_manifest(first.checkpoint(name)).content)
    bucket.fail(0, "for ever")
    with pytest.raises(CheckpointOutOfReach):
        HostCopies(second, ranks, URL).bring(name)
    bucket.heal()
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1, used=1, free=0))
        with pytest.raises(CheckpointOutOfReach):
            HostCopies(second, ranks, URL).bring(name)
    bucket.objects.clear()
    with pytest.raises(CheckpointDamaged, match="any more"):
        HostCopies(second, ranks, URL).bring(name)
