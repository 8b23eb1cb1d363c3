"""run.json: the same job is let in, another is refused with the difference."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollback.errors import ExitCode, RunDirectoryError, RunDoesNotFit
from rollback.rundir.identity import JobIdentity, new_identity, read_identity, require_same_job, write_identity
from rollback.rundir.paths import FORMAT, FORMATS, RunPaths

JOB = JobIdentity(
    world_size=2,
    model=[("wte.weight", "F32", [256, 64]), ("head.weight", "F32", [64, 256])],
    optimizer={"class": "AdamW", "groups": [2]},
    objects=["scheduler"],
    data={"kind": "map-style", "length": 5000, "batch_size": 8},
)
PATHS = RunPaths(Path("runs/demo"))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def test_what_was_written_is_read(paths: RunPaths) -> None:
    identity = new_identity(JOB)
    write_identity(paths, identity)
    assert read_identity(paths) == identity
    assert os.listdir(paths.root) == ["run.json"]


def test_two_runs_have_two_ids() -> None:
    assert new_identity(JOB).run_id != new_identity(JOB).run_id


def test_a_new_run_has_no_identity(paths: RunPaths) -> None:
    assert read_identity(paths) is None


def test_the_same_job_is_let_in_whatever_the_order_of_its_parameters() -> None:
    require_same_job(PATHS, JOB, JOB)
    require_same_job(PATHS, JOB, JOB.model_copy(update={"model": JOB.model[::-1]}))
    require_same_job(PATHS, JOB, JobIdentity.model_validate_json(JOB.model_dump_json()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 4}, "the run has 2 ranks, this job 4"),
        ({"model": [JOB.model[0]]}, r"this job has no 'head.weight' F32\[64, 256\]"),
        ({"model": [*JOB.model, ("bias", "F32", [3])]}, r"the run has no 'bias' F32\[3\]"),
        ({"model": [JOB.model[0], ("head.weight", "BF16", [64, 256])]}, r"is F32\[64, 256\] in the run, BF16"),
        ({"model": [JOB.model[0], ("head.weight", "F32", [64, 257])]}, r"F32\[64, 257\] in this job"),
        ({"optimizer": {"class": "SGD", "groups": [2]}}, "optimizer, class: the run has 'AdamW', this job 'SGD'"),
        ({"objects": []}, r"objects: the run has \['scheduler'\], this job \[\]"),
        ({"data": {**JOB.data, "length": 5001}}, "data, length: the run has 5000, this job 5001"),
        ({"data": {"kind": "callable"}}, "data, batch size: the run has 8, this job None"),
    ],
)
def test_another_job_is_refused_with_the_difference(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RunDoesNotFit, match=words) as caught:
        require_same_job(PATHS, JOB, JOB.model_copy(update=change))
    assert "--ring URL" in (caught.value.hint or ""), "a run from there comes back into any new directory"
    assert caught.value.exit_code == ExitCode.UNFIT
    assert "runs/demo" in caught.value.message


def test_of_many_differences_a_few_are_shown_and_the_rest_is_counted() -> None:
    other = JOB.model_copy(update={"model": [(f"layer{n}", "F32", [1]) for n in range(100)]})
    with pytest.raises(RunDoesNotFit, match="and 96 more") as caught:
        require_same_job(PATHS, JOB, other)
    assert len(caught.value.message.splitlines()) == 8


parameters = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.tuples(st.sampled_from(["F32", "BF16"]), st.lists(st.integers(1, 3), max_size=2)),
)
jobs = st.builds(
    JobIdentity,
    world_size=st.integers(1, 3),
    model=parameters.map(lambda named: [(name, dtype, shape) for name, (dtype, shape) in named.items()]),
    optimizer=st.dictionaries(st.sampled_from(["class", "groups"]), st.integers(0, 2)),
    objects=st.lists(st.sampled_from(["scheduler", "ema"]), max_size=2),
    data=st.dictionaries(st.sampled_from(["kind", "length"]), st.integers(0, 2)),
)


def test_objects_that_no_checkpoint_of_the_run_has_may_be_those_that_an_earlier_version_did_not_keep() -> None:
    with pytest.raises(RunDoesNotFit) as refused:
        require_same_job(PATHS, JOB.model_copy(update={"objects": []}), JOB)
    assert refused.value.hint is not None
    assert "the version of rollback that began the run goes on with it" in refused.value.hint


@given(jobs, jobs)
def test_jobs_that_differ_in_anything_are_refused(recorded: JobIdentity, present: JobIdentity) -> None:
    sorted_alike = {"model": sorted(recorded.model)}
    assume(recorded.model_copy(update=sorted_alike) != present.model_copy(update={"model": sorted(present.model)}))
    assume(recorded.optimizer.keys() >= present.optimizer.keys() and recorded.data.keys() >= present.data.keys())
    with pytest.raises(RunDoesNotFit):
        require_same_job(PATHS, recorded, present)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000, json.dumps({"format": FORMAT}), "\x80"])
def test_a_damaged_identity_is_a_clear_error(paths: RunPaths, text: str) -> None:
    paths.identity.write_text(text)
    with pytest.raises(RunDirectoryError, match=r"run\.json"):
        read_identity(paths)


def test_an_identity_that_lacks_something_is_damaged_and_the_reader_hears_what(paths: RunPaths) -> None:
    paths.identity.write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"run\.json: it is damaged \(format: Field required\)"):
        read_identity(paths)


def test_another_format_is_refused(paths: RunPaths) -> None:
    write_identity(paths, new_identity(JOB))
    body = json.loads(paths.identity.read_text())
    paths.identity.write_text(json.dumps({**body, "format": FORMATS[-1] + 1}))
    with pytest.raises(RunDoesNotFit, match=f"format {FORMATS[-1] + 1}"):
        read_identity(paths)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_not_a_regular_file_is_refused_at_once(paths: RunPaths, make: Any) -> None:
    make(paths.identity)
    with pytest.raises(RunDirectoryError, match=r"run\.json"):
        read_identity(paths)
