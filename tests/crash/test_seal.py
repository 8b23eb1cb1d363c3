"""`--seal`: what somebody without the key can do who writes the run directory or the bucket: nothing that counts."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from faulty import Bucket, new_bucket

from checkpoints import write_checkpoint
from recorded_run import RecordedRun
from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import check_of, read_manifest
from rollback.errors import CheckpointDamaged, JournalDamaged, RingUnavailable, RunDoesNotFit, UsageError
from rollback.facts.training import Advice
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.audit.verify import check_integrity, in_words
from rollback.inspect.ring.checkpoints import read_listing
from rollback.inspect.status.status import read_status
from rollback.ring.url.fetch import fetch
from rollback.ring.url.ring import RingAtUrl
from rollback.ring.url.store import Store
from rollback.rundir import seal
from rollback.rundir.identity import read_identity, require_key
from rollback.rundir.journal.journal import Journal, read_journal
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.supervisor.claim import read_past

URL = "faulty://sealed/runs/one"


def new_key(folder: Path, name: str = "key") -> Path:
    path = folder / name
    path.write_bytes(hashlib.sha256(name.encode()).digest())
    path.chmod(0o600)
    return path


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key that is in use."""
    path = new_key(tmp_path)
    monkeypatch.setenv(seal.ENV_SEAL, str(path))
    return path


@pytest.fixture
def run(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """A sealed run with two good checkpoints."""
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    for seq in (1, 2):
        run.commit(seq, write_checkpoint(run.paths, seq, 10 * seq), 10 * seq)
    return run


def forge(path: Path) -> None:
    """Rewrite a journal as somebody can who knows the format: the chain is right, the seals are what they were."""
    chain, lines = "0" * 32, []
    for line in path.read_text().splitlines():
        body = json.loads(line)
        body.pop("chain")
        mark = body.pop("seal", None)
        body["at"] = "1999-01-01T00:00:00.000+00:00"
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        chain = hashlib.sha256((chain + text).encode()).hexdigest()[:32]
        lines.append(json.dumps({**body, "chain": chain, **({"seal": mark} if mark else {})}))
    path.write_text("".join(f"{line}\n" for line in lines))


def forged(manifest: bytes, **changes: Any) -> bytes:
    body = {**json.loads(manifest), **changes}
    body.pop("check")
    return json.dumps({**body, "check": check_of(body)}).encode()


def test_what_is_sealed_is_read_with_its_key(run: RecordedRun) -> None:
    assert read_past(run.paths).train.reading.lines == 5
    assert read_manifest(run.paths.checkpoint("c000001-s00000010")).step == 10
    for journal in check_integrity(run.paths.root).journals[:1]:
        assert (journal.seal, journal.broken) == ("verified", None)
    assert "5 lines sound, seal verified; chain" in in_words(check_integrity(run.paths.root))


def test_a_journal_that_was_rewritten_with_a_right_chain_is_broken(run: RecordedRun) -> None:
    forge(run.paths.train_journal)
    with pytest.raises(JournalDamaged, match=r"line 1 .*seal"):
        read_journal(run.paths.train_journal)
    assert check_integrity(run.paths.root).exit_code == 74


def test_a_journal_of_which_the_seals_were_taken_off_is_broken(run: RecordedRun) -> None:
    lines = [json.loads(line) for line in run.paths.train_journal.read_text().splitlines()]
    stripped = [json.dumps({name: value for name, value in line.items() if name != "seal"}) for line in lines]
    run.paths.train_journal.write_text("".join(f"{line}\n" for line in stripped))
    with pytest.raises(JournalDamaged, match="seal"):
        read_journal(run.paths.train_journal)


def test_one_journal_does_not_pass_for_the_other(run: RecordedRun) -> None:
    run.paths.supervisor_journal.write_bytes(run.paths.train_journal.read_bytes())
    with pytest.raises(JournalDamaged, match="seal"):
        read_journal(run.paths.supervisor_journal)


@pytest.mark.parametrize("mark", ["0" * 64, None, 5, ["x"]])
def test_a_manifest_with_another_seal_or_none_is_damaged(run: RecordedRun, mark: object) -> None:
    path = run.paths.checkpoint("c000002-s00000020") / MANIFEST
    path.write_bytes(forged(path.read_bytes(), seal=mark))
    with pytest.raises(CheckpointDamaged, match="seal"):
        read_manifest(path.parent)
    assert [manifest.step for manifest in ring.manifests(run.paths)[0]] == [10]


def test_a_manifest_whose_content_was_changed_is_damaged(run: RecordedRun) -> None:
    path = run.paths.checkpoint("c000002-s00000020") / MANIFEST
    shards = json.loads(path.read_bytes())["shards"]
    path.write_bytes(forged(path.read_bytes(), shards=[{**shards[0], "hash": "0" * 32}, *shards[1:]]))
    with pytest.raises(CheckpointDamaged, match="seal"):
        read_manifest(path.parent)


def test_without_the_key_it_is_read_and_nothing_is_started(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(seal.ENV_SEAL)
    with pytest.raises(RunDoesNotFit, match="is sealed"):
        read_past(run.paths)
    with pytest.raises(RunDoesNotFit, match="is sealed"):
        require_key(run.paths)
    root = run.paths.root
    for notices in (read_status(root).notices, read_run_contents(root).notices, read_listing(root).notices):
        assert any("is sealed; without its key" in notice for notice in notices)
    found = check_integrity(root)
    assert found.journals[0].seal == "sealed"
    assert "5 lines sound, with a seal that is not verified without its key" in in_words(found)


def test_with_the_key_it_is_said_that_it_is_verified(run: RecordedRun) -> None:
    root = run.paths.root
    for notices in (read_status(root).notices, read_run_contents(root).notices, read_listing(root).notices):
        assert any("its seal is verified" in notice for notice in notices)


def test_another_key_and_an_unsealed_run_are_refused(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(seal.ENV_SEAL, str(new_key(tmp_path, "another")))
    with pytest.raises(RunDoesNotFit, match="not with this key"):
        read_past(run.paths)
    monkeypatch.delenv(seal.ENV_SEAL)
    plain = RecordedRun(tmp_path / "plain", monkeypatch)
    assert read_past(plain.paths).train.reading.records == []
    monkeypatch.setenv(seal.ENV_SEAL, str(new_key(tmp_path)))
    with pytest.raises(RunDoesNotFit, match="is not sealed"):
        read_past(plain.paths)


def test_a_run_without_a_key_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RecordedRun(tmp_path / "plain", monkeypatch)
    plain.tell(0, Advice(code="a", text="b"))
    write_checkpoint(plain.paths, 1, 10)
    assert not any(b"seal" in path.read_bytes() for path in plain.paths.root.rglob("*.json*"))
    assert (identity := read_identity(plain.paths)) is not None
    assert identity.seal is None


@pytest.fixture
def bucket(run: RecordedRun) -> Bucket:
    """A sealed run's ring at a URL."""
    bucket = new_bucket("sealed")
    at_url = RingAtUrl(run.paths, Store(URL), print)
    at_url.open()
    for name in ring.names(run.paths):
        manifest = read_manifest(run.paths.checkpoint(name))
        at_url.put(manifest, run.paths.checkpoint(name))
    at_url.close()
    return bucket


def fetched(root: Path) -> RunPaths:
    paths = RunPaths(root)
    fetch(Store(URL, patience=0.1), paths, lambda text: None)
    return paths


def test_a_checkpoint_that_somebody_puts_into_the_bucket_is_not_restored(bucket: Bucket, tmp_path: Path) -> None:
    key = "runs/one/ring/c000002-s00000020/manifest.json"
    bucket.objects[key] = forged(bucket.objects[key], created="1999-01-01T00:00:00+00:00")
    assert ring.names(fetched(tmp_path / "new")) == ["c000001-s00000010"]


def test_without_the_key_or_with_another_nothing_comes_from_the_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(seal.ENV_SEAL)
    with pytest.raises(RunDoesNotFit, match="is sealed"):
        fetched(tmp_path / "new")
    monkeypatch.setenv(seal.ENV_SEAL, str(new_key(tmp_path, "another")))
    with pytest.raises(RunDoesNotFit, match="not with this key"):
        fetched(tmp_path / "new")
    assert not list(tmp_path.glob("new/*"))


def test_a_record_that_was_made_anew_in_the_bucket_is_refused_before_anything_is_written(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody without the key fills a bucket of their own making with a journal of theirs."""
    monkeypatch.delenv(seal.ENV_SEAL)
    forge(run.paths.train_journal)
    monkeypatch.setattr(seal, "present", lambda: None)
    bucket.objects.clear()
    at_url = RingAtUrl(run.paths, Store(URL), print)
    at_url.open()
    name = "c000001-s00000010"
    at_url.put(read_manifest(run.paths.checkpoint(name)), run.paths.checkpoint(name))
    monkeypatch.undo()
    monkeypatch.setenv(seal.ENV_SEAL, str(tmp_path / "key"))
    with pytest.raises(RingUnavailable, match="sealed"):
        fetched(tmp_path / "new")
    assert not list(tmp_path.glob("new/journal/*"))


@pytest.mark.parametrize(
    ("mode", "size", "said"), [(0o644, 32, "private"), (0o640, 32, "private"), (0o600, 8, "bytes")]
)
def test_a_key_that_is_not_private_or_too_short_is_refused(tmp_path: Path, mode: int, size: int, said: str) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * size)
    key.chmod(mode)
    with pytest.raises(UsageError, match=said):
        seal.use(key)


def test_a_key_in_the_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="lies in the run directory"):
        seal.use(new_key(tmp_path / "run"), tmp_path / "run")


def test_a_line_that_is_appended_without_the_key_does_not_count(
    run: RecordedRun, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(seal.ENV_SEAL)
    journal = Journal(run.paths.train_journal, 1)
    journal.append(Advice(code="theirs", text=""))
    journal.close()
    monkeypatch.setenv(seal.ENV_SEAL, str(key))
    reading = read_journal(run.paths.train_journal)
    assert len(reading.records) == 5
    assert reading.torn_bytes
