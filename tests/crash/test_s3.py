"""A ring in S3, as a real server speaks it: a run goes on from the URL alone, through 503s and a lost object."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from asking import asking, hand_in
from s3_server import S3Server, serving_s3
from toy import Toy, facts, require_same, train

from rollback.checkpoints.format.hashing import hash_of
from rollback.errors import ExitCode, RingUnavailable, UsageError
from rollback.facts.training import Attached, Committed, DrainFailed, Fetched, Restored
from rollback.inspect.ring.at_url import ReadableRun, readable
from rollback.inspect.ring.verify import verify
from rollback.ring.url import store as storing
from rollback.ring.url.store import Source, Store
from rollback.train.catalogue import draining

BUCKET = "checkpoints"
URL = f"s3://{BUCKET}/runs/one"
TOY = Toy(samples=64, max_steps=14, settings={"snapshot_every": 4, "probation": 7, "ring": URL})


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(storing, "_LONGEST_WAIT", 0.05)
    with serving_s3(monkeypatch, BUCKET) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return train(TOY.but(settings={**TOY.settings, "ring": None}), tmp_path_factory.mktemp("undisturbed") / "run")


def test_a_run_goes_on_from_s3_alone_through_503s_and_a_lost_object(
    s3: S3Server, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    log = tmp_path / "log"
    s3.refuses = lambda request: len(s3.requests) % 7 == 0
    train(TOY.but(max_steps=9), tmp_path / "lost", log=log)
    assert not facts(tmp_path / "lost", DrainFailed)
    bucket = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    last = facts(tmp_path / "lost", Committed)[-1]
    newest = f"{BUCKET}/runs/one/ring/{last.checkpoint}"
    s3.refuses = lambda request: False
    assert bucket.exists(f"{newest}/manifest.json")
    bucket.rm_file(f"{newest}/rank-00000.safetensors")
    s3.refuses = lambda request: len(s3.requests) % 7 == 0

    portrait = train(TOY, tmp_path / "fresh", log=log)
    require_same(portrait, undisturbed, "the run that went on from S3")
    assert s3.refused > 5
    assert facts(tmp_path / "fresh", Attached)[-1].step < last.step, "the newest one had lost a shard"
    assert verify(ReadableRun.at(tmp_path / "fresh")).exit_code == ExitCode.DONE


@pytest.mark.soak
def test_a_run_goes_back_to_a_checkpoint_that_is_only_in_s3_through_503s(s3: S3Server, tmp_path: Path) -> None:
    run, log, older = tmp_path / "run", tmp_path / "log", "c000004-s00000020"
    settings = {"snapshot_every": 5, "keep": 3, "checkpoint_every": "1", "keep_durable": 20, "ring": URL}
    toy = Toy(samples=240, settings=settings)
    train(toy.but(max_steps=30), run, log=log)  # its end brings the newest good one there
    s3.refuses = lambda request: len(s3.requests) % 7 == 0
    portrait = train(toy, run, log=log, hook=asking(50, lambda: hand_in(run, "rewind", to=24)))
    assert [fact.checkpoint for fact in facts(run, Fetched)] == [older]
    assert [fact.checkpoint for fact in facts(run, Restored)] == [older]
    require_same(portrait, train(toy.with_settings(ring=None), tmp_path / "undisturbed"), "the run that went back")


def test_a_large_shard_goes_up_and_comes_down_in_parts(s3: S3Server, tmp_path: Path) -> None:
    import os

    from rollback.checkpoints.format.shard import Written

    data = os.urandom((20 << 20) + 5)
    (tmp_path / "large").write_bytes(data)
    written = Written(len(data), hash_of(memoryview(data)))
    store = Store(URL)
    s3.refuses = lambda request: len(s3.requests) % 2 == 0
    store.put_files("large", [(0, Source(tmp_path / "large", written))])
    store.get_file("large", tmp_path / "back", written)
    assert (tmp_path / "back").read_bytes() == data
    assert len([request for request in s3.requests if request.startswith("PUT")]) > 2


def test_what_is_wrong_with_s3_is_said_before_anything_is_touched(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_PATIENCE_AT_START", 0.5)
    with pytest.raises(RingUnavailable, match="bucket does not exist"):
        train(TOY.with_settings(ring="s3://nowhere/run"), tmp_path / "run")
    with pytest.raises(RingUnavailable, match="bucket does not exist"), readable("s3://nowhere/run"):
        pass
    with pytest.raises(UsageError, match="there is no ring"), readable(URL):
        pass
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(RingUnavailable, match="credentials"):
        train(TOY, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_credentials_that_have_run_out_are_read_anew(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary ones live for hours, and something renews the file in which they are."""
    credentials = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))

    def renew(key: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    renew("first")
    store = Store(URL)
    store.put("one", b"1")
    s3.expired.add("first")
    for _ in range(2):  # it stays refused, and is not tried again at once
        with pytest.raises(RingUnavailable, match="token has expired"):
            store.put("two", b"2")
    assert s3.refused == 2
    renew("second")
    store.put("two", b"2")
    assert (store.get("one", 9), store.get("two", 9), s3.refused) == (b"1", b"2", 2)
