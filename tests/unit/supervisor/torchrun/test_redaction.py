"""Credentials in URLs and arguments: refused or hidden; and who may read what a run writes."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

from rollback.config import Settings
from rollback.errors import UsageError
from rollback.facts.training import AttemptStarted
from rollback.ring.url.urls import require_no_credentials, require_url
from rollback.supervisor.torchrun.command import LaunchedJob
from rollback.supervisor.torchrun.redaction import new_salt, redacted
from rollback.supervisor.torchrun.start_conditions import conditions_of, differences, job_digest


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SESAME@bucket/run",
        "s3://SESAME@bucket/run",
        "simplecache::s3://KEY:SESAME@bucket/run",
        "simplecache::filecache::s3://KEY:SESAME@bucket/run",
        "simplecache://x::s3://KEY:SESAME@bucket",
        "s3:///KEY:SESAME@bucket/run",
        "sftp://me:SESAME@host/run",
        "sftp://me%3ASESAME@host/run",
        "s3://bucket/run?token=SESAME",
        "s3://bucket/run?X-Amz-Signature=SESAME",
        "s3://bucket/run#SESAME",
        "s3://bucket/run%3Ftoken=SESAME",
        "memory://run?token=SESAME",
    ],
)
def test_a_url_that_hides_credentials_is_refused_and_they_are_not_shown(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        require_url(url)
    assert "SESAME" not in str(refused.value)
    assert "run's record" in str(refused.value)


@pytest.mark.parametrize("url", ["bucket", "s3:bucket", "s3://[bucket/run", "s3://bucket\uff0frun"])
def test_what_is_no_url_is_refused_in_words(url: str) -> None:
    with pytest.raises(UsageError, match="is not a URL"):
        require_url(url)


@pytest.mark.parametrize("kind", ["TypeError", "ValueError"])
def test_a_url_whose_package_cannot_be_imported_is_refused_in_words(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gcsfs beside another version of protobuf, which raises a TypeError, or a package made for another NumPy."""
    (tmp_path / f"made_for_{kind}.py").write_text(f"raise {kind}('Descriptors cannot be created directly')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(known_implementations, "another", {"class": f"made_for_{kind}.Files"})
    with pytest.raises(UsageError, match="a package that cannot be imported: Descriptors cannot be"):
        require_url("another://bucket/run")


@pytest.mark.parametrize("url", ["memory://runs/one", "file:///data/a@b/run", "file:///a@b/run", "sftp://me@host/run"])
def test_a_url_without_credentials_is_taken(url: str) -> None:
    require_no_credentials(url)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--token", "SESAME"], ["--api-key=SESAME"], ["--data", "simplecache::s3://KEY:SESAME@bucket/x"],
        ["--data=https://host/x?token=SESAME"], ["--data", "https://host/x?a=1&api_key=SESAME#b"],
        ["--header", "Authorization: Bearer SESAME"], ["--db", "me:SESAME@host"], ["AKIASESAMESESAME"],
        ["--note", "the key is hf_SESAMESESAME"], ["--house-number", "SESAME"], ["--house_number=SESAME"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_secret_is_not_in_a_start_on_record(tmp_path: Path, arguments: list[str]) -> None:
    job = LaunchedJob({}, str(tmp_path / "train.py"), arguments, secret_args=["house-number"])
    started = AttemptStarted(
        command=redacted(["torchrun", *arguments], job.secret_args), host="h", pid=1,
        job=job_digest(job, Settings(), new_salt()), **conditions_of(job, {}, new_salt()),
    )  # fmt: skip
    assert "SESAME" not in started.model_dump_json()


def test_another_secret_than_at_the_last_start_is_told_without_being_told(tmp_path: Path) -> None:
    salt = new_salt()

    def start(token: str, salt: str | None = salt) -> AttemptStarted:
        job = LaunchedJob({}, str(tmp_path / "train.py"), ["--token", token, "--lr", "1"])
        return AttemptStarted(command=(), host="h", pid=1, **conditions_of(job, {}, salt))

    assert differences(start("one"), start("one")) == ()
    (told,) = differences(start("one"), start("two"))
    assert told.startswith("argument --token: ***")
    assert "one" not in told
    assert "two" not in told
    assert differences(start("one", None), start("two")) == ()  # an older record: cannot be compared


def test_the_same_secret_is_the_same_job_and_another_one_is_another(tmp_path: Path) -> None:
    salt, jobs = new_salt(), [LaunchedJob({}, "train.py", ["--token", token]) for token in ("one", "one", "two")]
    first, again, other = (job_digest(job, Settings(), salt) for job in jobs)
    assert first == again != other
    assert first != job_digest(jobs[0], Settings(), new_salt())


WRITES = """
import os, sys
from pathlib import Path
from rollback.facts.training import Finished
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.system.lines import LineWriter
from rollback.supervisor.claim import Claim
from rollback.supervisor.torchrun.output import Output
for umask in sys.argv[2:]:
    os.umask(int(umask, 8))
    paths = RunPaths(Path(sys.argv[1], umask))
    claim = Claim(paths)
    Journal(paths.train_journal, 1).append(Finished(step=1, batch=1))
    LineWriter(paths.metrics).close()
    output = Output(paths.root / "private", paths.attempt_logs, None)
    output._attempt = 1
    output.keep()
    os.write(output._file("rank-00000.out"), b"hello")
"""


def test_a_run_directory_is_closed_to_others_unless_the_umask_lets_them_write(tmp_path: Path) -> None:
    closed, of_group, of_all = (0o700, 0o600), (0o770, 0o660), (0o777, 0o666)
    umasks = {"022": closed, "077": closed, "027": closed, "002": of_group, "007": of_group, "000": of_all}
    subprocess.run([sys.executable, "-c", WRITES, str(tmp_path), *umasks], check=True)
    for umask, (folder, file) in umasks.items():
        made = [tmp_path / umask, *(tmp_path / umask).rglob("*")]
        assert {"lock", "train.jsonl", "rank-00000.out"} <= {path.name for path in made}
        modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in made}
        assert modes == {(True, folder), (False, file)}, umask
