"""Whether a complete run has anything left, as a node sees it that has the bucket's record alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recorded_run import RecordedRun
from rollback.config import Settings
from rollback.facts.training import AttemptStarted, Drained, Finished, RunEnded
from rollback.ring.url.index import checkpoint_key, first_index, index_key, next_index
from rollback.ring.url.record import upload
from rollback.ring.url.store import Store
from rollback.rundir.identity import read_identity, write_identity
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Request, now, submit
from rollback.supervisor import complete
from rollback.supervisor.claim import read_past
from rollback.supervisor.complete import fingerprint, nothing_left_at
from rollback.supervisor.torchrun.command import LaunchedJob, torchrun_command
from rollback.supervisor.torchrun.redaction import new_salt
from rollback.supervisor.torchrun.start_conditions import conditions_of

FINAL = "c000005-s00000100"
LAST = 3
"""The attempt in which the run was completed."""


class Bucket:
    """With the record of a run that is complete. job: what completed it. leader: its run directory."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        script = folder / "train.py"
        script.write_text("")
        self.job = LaunchedJob({"nnodes": "2"}, str(script), ["--epochs", "2"])
        run = RecordedRun(folder / "leader", monkeypatch)
        self.leader = run.paths
        start = AttemptStarted(
            command=(*torchrun_command(self.job),), host="a", pid=1, job="other files, and another --nproc",
            **conditions_of(self.job, {}, "salt"),
        )  # fmt: skip
        run.tell(0, start, LAST)
        run.attach(1, LAST, None, 0)
        run.commit(2, FINAL, 100, attempt=LAST)
        run.tell(3, Finished(step=100, batch=200, checkpoint=FINAL), LAST)
        run.tell(4, RunEnded(exit_code=0, reason="finished"), LAST)
        self.store = Store(f"file://{folder}/bucket")
        identity = read_identity(self.leader)
        assert identity is not None
        before = first_index(identity.run_id, "writer")
        index = next_index(before, "writer", [FINAL], [], upload(self.store, self.leader, before))
        self.store.put(index_key(index.generation), index.to_json())
        self.store.put(checkpoint_key(FINAL), b"{}")
        self.own = RunPaths(folder / "own")  # of the node that asks
        self.own.root.mkdir()

    def nothing_left(self, begun: int = LAST) -> str | None:
        return nothing_left_at(self.store, self.own, begun, self.job, print)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket(tmp_path, monkeypatch)


def test_a_node_that_meets_nobody_learns_from_the_bucket_that_the_run_is_complete(bucket: Bucket) -> None:
    told = f"the run is complete: trained to step 100, final state {FINAL}"
    assert bucket.nothing_left() == bucket.nothing_left(begun=0) == told


def test_an_attempt_that_the_bucket_does_not_know_is_not_complete(bucket: Bucket) -> None:
    """A leader called its nodes for it and was lost before its record came to the bucket: an order to go back, or a
    command that asks for more, is in its run directory."""
    assert bucket.nothing_left(begun=LAST + 1) is None


def ask_to_go_back(bucket: Bucket) -> None:
    write_identity(bucket.own, _identity_of(bucket.leader))
    submit(bucket.own, Request(order="rewind", to=50, who="test", at=now()))


def be_of_another_run(bucket: Bucket) -> None:
    write_identity(bucket.own, _identity_of(bucket.leader).model_copy(update={"run_id": "0" * 32}))


def ask_for_more(bucket: Bucket) -> None:
    bucket.job = LaunchedJob(bucket.job.flags, bucket.job.script, ["--epochs", "3"])


def lose_the_final_state(bucket: Bucket) -> None:
    """The index names a checkpoint before it is there."""
    bucket.store.delete(checkpoint_key(FINAL))


@pytest.mark.parametrize("change", [ask_to_go_back, ask_for_more, be_of_another_run, lose_the_final_state])
def test_what_else_keeps_a_node_from_taking_the_run_for_complete(
    bucket: Bucket, change: Callable[[Bucket], None]
) -> None:
    change(bucket)
    assert bucket.nothing_left() is None


def test_a_complete_run_whose_final_state_is_not_at_the_url_is_started_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL was away when the run ended. Its ranks find that all is done, and what they left is copied."""
    url, script = f"file://{tmp_path}/bucket/", tmp_path / "train.py"
    script.write_text("")
    job, settings = LaunchedJob({}, str(script), []), Settings(ring=url)
    run, told = RecordedRun(tmp_path / "run", monkeypatch), list[str]()
    salt = new_salt()
    start = AttemptStarted(
        command=(*torchrun_command(job),), host="a", pid=1, job=fingerprint(job, settings, salt),
        **conditions_of(job, {}, salt),
    )  # fmt: skip
    run.tell(0, start, LAST)
    run.attach(1, LAST, None, 0)
    run.commit(2, FINAL, 100, attempt=LAST)
    run.tell(3, Finished(step=100, batch=200, checkpoint=FINAL), LAST)
    monkeypatch.setattr(complete, "_is_there", lambda checkpoint: True)

    def nothing_left() -> str | None:
        return complete.nothing_left(run.paths, read_past(run.paths), job, settings, told.append)

    run.tell(4, RunEnded(exit_code=0, reason="training is complete"), LAST)
    assert nothing_left() is None
    assert told == [f"the run is complete: trained to step 100, final state {FINAL}, which is not at {url} yet: the "
                    "ranks start, and it is copied behind them"]  # fmt: skip
    run.tell(5, Drained(checkpoint=FINAL, step=100, place=url.rstrip("/"), bytes=1, seconds=0.1), LAST + 1)
    run.tell(6, RunEnded(exit_code=0, reason="training is complete"), LAST + 1)
    assert nothing_left() is not None


def _identity_of(paths: RunPaths) -> Any:
    identity = read_identity(paths)
    assert identity is not None
    return identity
