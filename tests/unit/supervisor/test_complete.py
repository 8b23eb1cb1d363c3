"""Whether a complete run has anything left, as a node sees it that has the bucket's record alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import launched

from recorded_run import RecordedRun
from rollback.facts.training import AttemptStarted, Finished, RunEnded
from rollback.ring.url.index import checkpoint_key, first_index, index_key, next_index
from rollback.ring.url.record import upload
from rollback.ring.url.store import Store
from rollback.rundir.identity import read_identity, write_identity
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Request, now, submit
from rollback.supervisor.complete import nothing_left_at
from rollback.supervisor.torchrun.command import LaunchedJob, torchrun_command
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
        return nothing_left_at(self.store, launched(self.own, self.job), begun, print)


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


def _identity_of(paths: RunPaths) -> Any:
    identity = read_identity(paths)
    assert identity is not None
    return identity
