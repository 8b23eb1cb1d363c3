"""Training with a ring at a URL: it never stops or changes because of it, and goes on elsewhere from the URL alone."""

import shutil
from pathlib import Path

import pytest
from faulty import BUCKETS, Bucket, FaultyFileSystem, Manner, new_bucket, patience
from toy import Toy, facts, require_same, train

from counted import Tell
from rollback.checkpoints import tiers
from rollback.errors import ExitCode, RingUnavailable
from rollback.facts.training import Attached, Committed, Drained, DrainFailed, Finished
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.ring import drainer
from rollback.ring.url import store as storing
from rollback.ring.url.fetch import fetch
from rollback.ring.url.store import Store
from rollback.rundir.paths import RunPaths
from rollback.train.catalogue import draining

URL = "faulty://bucket/run"
TOY = Toy(samples=64, max_steps=14, settings={"snapshot_every": 4, "probation": 7, "ring": URL})


@pytest.fixture(autouse=True)
def hurried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "PATIENCE", patience(request))
    monkeypatch.setattr(storing, "_LONGEST_WAIT", 0.001)
    monkeypatch.setattr(drainer, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(draining, "_PATIENCE_AT_START", patience(request))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return train(TOY.but(settings={**TOY.settings, "ring": None}), tmp_path_factory.mktemp("undisturbed") / "run")


def test_a_run_goes_on_from_the_url_alone_bit_for_bit(
    bucket: Bucket, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    log = tmp_path / "log"
    train(TOY.but(max_steps=9), tmp_path / "lost", log=log)
    portrait = train(TOY, tmp_path / "fresh", log=log)
    require_same(portrait, undisturbed, "the run that went on elsewhere")
    (attached,) = facts(tmp_path / "fresh", Attached)[1:]
    newest = facts(tmp_path / "lost", Committed)[-1].checkpoint
    assert attached.checkpoint == newest, "the newest of all, which the end of the run had brought there"
    assert verify(ReadableRun.at(tmp_path / "fresh")).exit_code == ExitCode.DONE


@pytest.mark.parametrize("at_url", [False, True], ids=["in the run directory", "at a URL"])
def test_a_reboot_that_takes_the_fast_tier_along_leaves_the_durable_ring(
    bucket: Bucket, tmp_path: Path, undisturbed: dict[str, str], at_url: bool
) -> None:
    memory, log = tmp_path / "memory", tmp_path / "log"
    memory.mkdir()
    toy = TOY.with_settings(fast_tier=str(memory), ring=URL if at_url else None)
    train(toy.but(max_steps=9), tmp_path / "run", log=log)
    newest = facts(tmp_path / "run", Committed)[-1].checkpoint
    shutil.rmtree(memory)
    memory.mkdir()
    portrait = train(toy, tmp_path / "run", log=log)
    require_same(portrait, undisturbed, "the run whose machine was booted in between")
    assert facts(tmp_path / "run", Attached)[-1].checkpoint == newest


def fail_at_each(toy: Toy, every: int, tmp_path: Path, undisturbed: dict[str, str], manner: Manner) -> str:
    """How it went."""
    train(toy, tmp_path / "counted")
    operations = BUCKETS["bucket"].operations
    start = next(place for place, name in enumerate(operations) if name.startswith("put") and "probe" not in name)
    numbers = range(start, len(operations) + 1, every)
    for number in numbers:
        bucket = new_bucket("bucket")
        bucket.fail(number, manner)
        run = tmp_path / str(number)
        portrait = train(toy, run)
        require_same(portrait, undisturbed, f"operation {number} fails {manner}")
        assert facts(run, Finished)
        reached = len(bucket.operations) >= number  # how many there are depends on which steps the thread sees
        assert bool(facts(run, DrainFailed)) == (reached and manner == "for ever")
        heal_and_fetch(tmp_path / f"{number}-fetched")
    return f"{len(numbers)} passed of {len(numbers)}"


@pytest.mark.parametrize("manner", ["once", "for ever"])
def test_an_operation_that_fails_does_not_touch_training(
    bucket: Bucket, tmp_path: Path, undisturbed: dict[str, str], tell: Tell, manner: Manner
) -> None:
    tell(fail_at_each(TOY, 10, tmp_path, undisturbed, manner))


@pytest.mark.soak
@pytest.mark.parametrize("fast_tier", [False, True], ids=["no slots", "slots"])
@pytest.mark.parametrize("manner", ["once", "for ever"])
def test_no_operation_that_fails_touches_training(
    bucket: Bucket, tmp_path: Path, undisturbed: dict[str, str], tell: Tell, manner: Manner, fast_tier: bool
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    toy = TOY.with_settings(fast_tier=str(memory) if fast_tier else "off")
    tell(fail_at_each(toy, 1, tmp_path, undisturbed, manner))
    assert {fact.tier for fact in facts(tmp_path / "counted", Committed)} == {"fast" if fast_tier else "durable"}


def heal_and_fetch(root: Path) -> None:
    """What is there is whole: an empty machine gets it, or nothing where nothing was committed."""
    bucket = BUCKETS["bucket"]
    bucket.heal()
    paths = RunPaths(root)
    root.mkdir()
    fetch(Store(URL), paths, lambda text: None)
    if [key for key in bucket.objects if key.endswith("manifest.json")]:
        assert verify(ReadableRun.at(root)).exit_code == ExitCode.DONE


def test_a_bucket_that_goes_away_is_said_once_and_used_again_when_it_is_back(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outage(guard: object, position: int) -> None:
        if position == 5:
            bucket.fail(1, "for ever")
        if position == 40:
            bucket.heal()

    toy = Toy(samples=400, max_steps=60, settings={"snapshot_every": 4, "probation": 7, "ring": URL})
    train(toy, tmp_path / "run", hook=outage)
    said = capsys.readouterr().err
    assert said.count("the durable ring: ") <= 1
    newest = facts(tmp_path / "run", Committed)[-1].checkpoint
    assert newest in [fact.checkpoint for fact in facts(tmp_path / "run", Drained)]
    assert len(facts(tmp_path / "run", DrainFailed)) <= 1


def test_where_nothing_may_be_deleted_the_memory_of_a_complete_run_is_given_back(
    bucket: Bucket, tmp_path: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = FaultyFileSystem.rm_file

    def forbidden(bucket: FaultyFileSystem, path: str) -> None:
        if "rollback-probe" not in path:
            raise PermissionError("403 Forbidden")
        delete(bucket, path)

    monkeypatch.setattr(FaultyFileSystem, "rm_file", forbidden)
    run = RunPaths(tmp_path / "run")
    toy = TOY.with_settings(snapshot_every=1, checkpoint_every=1, keep_durable=3, fast_tier=str(tmp_path))
    require_same(train(toy, run.root, log=tmp_path / "log"), undisturbed, "the run")
    (finished,) = facts(run.root, Finished)
    assert finished.checkpoint is not None
    assert run.checkpoint(finished.checkpoint).exists()
    assert tiers.fast_tier_of(run) is None


def test_a_ring_that_cannot_be_reached_is_refused_before_anything_is_touched(tmp_path: Path, bucket: Bucket) -> None:
    bucket.fail(1, "for ever")
    with pytest.raises(RingUnavailable, match="writing faulty://bucket/run/rollback-probe-"):
        train(TOY, tmp_path / "run")
    assert not (tmp_path / "run").exists()
