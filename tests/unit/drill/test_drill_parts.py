"""The parts of a drill: what strikes, and what is concluded from what the runs left."""

import errno
import os
import signal
import subprocess
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from waiting import LIMIT, wait_for

from recorded_run import RecordedRun, incident, rollback_plan
from rollback.cli import app
from rollback.cli.options.parameters import as_arguments
from rollback.config import Settings, settings_from
from rollback.drill import drill as drilling
from rollback.drill.faults import FAULTS, PlannedFault
from rollback.drill.judge import compare, differences, judge
from rollback.drill.plan import FEWEST_STEPS, MOST_STEPS, plan, steps_for
from rollback.drill.trials import Trial
from rollback.environment import ENV_SETTINGS
from rollback.errors import ExitCode, UsageError
from rollback.facts.training import AttemptEnded, Dropped, Finished, Restored, ScreenedOut, Window
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.rundir.exercise import ENV_DRILL, EndState, Exercise, Folder, Injected, exercise_of
from rollback.rundir.paths import RunPaths
from rollback.train.comm.ranks import Ranks
from rollback.train.drill import _DrilledRank, _FullDisk, _mapped, _noise

C1 = "c000001-s00000020"
FAULT = {fault.name: fault for fault in FAULTS}
Pair = namedtuple("Pair", "x y")


# --- in the ranks -----------------------------------------------------------------------------------------------------


def test_a_variable_left_in_the_environment_does_nothing_to_another_run(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    environment = {ENV_DRILL: str(tmp_path)}
    folder.write(folder.exercise, Exercise(run=str(tmp_path / "scratch"), steps=60))
    assert exercise_of(tmp_path / "scratch", environment)
    assert exercise_of(tmp_path / "real", environment) is None
    assert exercise_of(tmp_path / "scratch", {}) is None
    folder.exercise.unlink()
    assert exercise_of(tmp_path / "scratch", environment) is None


def test_a_full_disk_refuses_what_is_below_the_run_directory_and_nothing_else(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "running"
    for folder in (run, other):
        folder.mkdir()
    (run / "there").write_text("before")
    disk = _FullDisk(str(run))
    disk.fill()
    try:
        for act in (
            (run / "new").touch,
            (run / "folder").mkdir,
            lambda: os.open(run / "there", os.O_WRONLY | os.O_APPEND),
        ):
            with pytest.raises(OSError, match="No space left") as caught:
                act()
            assert caught.value.errno == errno.ENOSPC
        assert (run / "there").read_text() == "before"
        (other / "new").touch()
    finally:
        disk.full = False
    (run / "new").touch()


def test_a_corrupted_batch_keeps_its_form_and_draws_from_no_stream_of_the_job() -> None:
    tokens, weights, flag = torch.randint(0, 50, (4, 3)), torch.ones(4, dtype=torch.float16), torch.tensor([True])
    batch = {"pair": Pair(tokens, "text"), "list": [weights, flag], "nested": OrderedDict(a=(tokens,))}
    before = torch.get_rng_state()
    changed, count = _mapped(batch, lambda value: _noise(value, torch.Generator().manual_seed(3)), lambda value: True)
    assert torch.equal(before, torch.get_rng_state())
    assert count == 4
    assert isinstance(changed["pair"], Pair)
    assert isinstance(changed["nested"], OrderedDict)
    assert changed["pair"].y == "text"
    assert not torch.equal(changed["pair"].x, tokens)
    assert changed["pair"].x.min() >= tokens.min()  # an index out of range would crash the script, not corrupt a batch
    assert changed["pair"].x.max() <= tokens.max()
    assert (changed["list"][0].dtype, changed["list"][0].shape) == (weights.dtype, weights.shape)
    assert torch.equal(weights, torch.ones(4, dtype=torch.float16)), "the data set's own memory was written to"


def test_a_batch_with_a_field_that_its_class_sets_itself_keeps_its_form() -> None:
    @dataclass
    class Padded:
        x: torch.Tensor
        longest: int = field(init=False)

        def __post_init__(self) -> None:
            self.longest = len(self.x)

    changed, count = _mapped(Padded(torch.ones(3)), lambda value: value + 1, lambda value: True)
    assert (changed.x.tolist(), changed.longest, count) == ([2.0] * 3, 3, 1)


def test_a_bit_is_flipped_of_a_weight_in_whatever_order_its_elements_lie(tmp_path: Path) -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = model.weight.detach().clone()
    loop: Any = SimpleNamespace(
        run=SimpleNamespace(ranks=Ranks(), paths=RunPaths(tmp_path)), model=model,
        state=SimpleNamespace(counters=SimpleNamespace(step=0)), step_in_progress=SimpleNamespace(batch=0),
    )  # fmt: skip
    exercise = Exercise(run=str(tmp_path), steps=60, fault="weight-bit", seed=7)
    _DrilledRank(loop, exercise, Folder(tmp_path))._flip_bit(None)
    assert (model.weight != before).flatten().nonzero().tolist() == [[7]]


# --- what is concluded ------------------------------------------------------------------------------------------------


def trial(run: RecordedRun | None, fault: str | None = "nan-loss", **changed: Any) -> Trial:
    name = fault or "undisturbed"
    struck = Injected(rank=1, step=40, at=datetime(2030, 1, 1, tzinfo=timezone.utc), batches=(80,), what="struck")
    fields: dict[str, Any] = {
        "name": name,
        "exercise": Exercise(run="run", steps=60, step=40, rank=1),
        "folder": Path(name),
        "codes": (0,),
        "seconds": 5.0,
        "overdue": False,
        "audit": compile_audit(read_run_contents(run.paths.root)) if run else None,
        "injected": [struck] if fault else [],
        "ends": [end(0), end(1)],
        "losses": dict.fromkeys(range(60), 2.5),
    }
    return Trial(**{**fields, **changed})


def end(rank: int, **parts: str) -> EndState:
    return EndState(rank=rank, step=60, batch=120, parts={"model": "m", "random/python": "r", **parts})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    run.commit(20, C1, 20)
    return run


def rewound(run: RecordedRun) -> None:
    run.tell(42, incident(0, 40, 41))
    run.tell(42, rollback_plan(0, C1, 20, (40, 90)))
    run.tell(43, Restored(incident=0, checkpoint=C1, step=20, batch=40, steps_lost=22, seconds=1, route="in_process"))


def test_an_undisturbed_run_that_failed_by_itself_is_told_of(run: RecordedRun) -> None:
    assert drilling.notices_of(trial(run, None), None) == []
    run.tell(50, AttemptEnded(status=1, cause="rank 0 raised ValueError", step=30, seconds=9.0, why="exception"))
    run.attach(51, 2, C1, 20)
    (notice,) = drilling.notices_of(trial(run, None), None)
    assert "failed by itself, and had 2 attempts (rank 0 raised ValueError)" in notice


def test_an_incident_and_a_rewind_pass(run: RecordedRun) -> None:
    rewound(run)
    row = judge(FAULT["nan-loss"], trial(run), trial(None, None), compare(set(), set()))
    assert (row.passed, row.bitwise, row.caught_after_steps, row.caught_after_seconds) == (True, "yes", 1, 42.0)
    assert row.recovered == "back at step 20 in 1.00 s"


def test_a_run_is_compared_with_one_that_skips_what_it_passed_over_also_where_that_was_screened(
    run: RecordedRun,
) -> None:
    run.tell(42, incident(0, 40, 41))
    run.tell(42, rollback_plan(0, C1, 20, None, screen=Window(first=40, last=90)))
    for first in (78, 80):
        out = Window(first=first, last=first + 1)
        run.tell(43, ScreenedOut(
            incident=0, window=out, verdict="spike", cause="loss", rule="stands-out-loss", value=6.5, threshold=3.25,
            explanation="loss 6.5", step=40, timeline=1, through=90,
        ))  # fmt: skip
        run.pass_over(44, first, first + 1)
    assert trial(run).skips == (Window(first=78, last=81),)


@pytest.mark.parametrize(
    ("fault", "changed", "words"),
    [
        ("nan-loss", {}, "not noticed"),
        ("nan-loss", {"losses": dict.fromkeys(range(60))}, "never told a loss"),
        ("nan-loss", {"injected": []}, "could not be made to happen"),
        ("gradient-x1e4", {"losses": {step: 2.5 if step < 40 else 3.5 for step in range(60)}}, "not noticed"),
        ("gradient-x1e4", {"ends": [], "codes": (1,)}, "not noticed (exit code 1"),
        ("killed-rank", {}, "no second attempt"),
        ("hung-rank", {"overdue": True, "codes": (-1,), "ends": []}, "not noticed for 5 s"),
        ("sigterm", {}, "exited with 0 and not with 75"),
        ("sigterm", {"audit": None, "codes": (75, 0)}, "its record cannot be read"),
        ("nan-loss", {"audit": None, "ends": [], "codes": (74,)}, "its record cannot be read (exit code 74"),
        ("full-disk", {}, "no checkpoint fell into"),
        ("weight-bit", {}, "says nothing"),
    ],
)
def test_what_did_not_happen_fails_with_the_reason(
    run: RecordedRun, fault: str, changed: dict[str, Any], words: str
) -> None:
    run.tell(60, Finished(step=60, batch=120))
    row = judge(FAULT[fault], trial(run, fault, **changed), trial(None, None), None)  # type: ignore[index]
    assert not row.passed
    assert words in (row.why or "")


def test_a_difference_between_ranks_passes_if_it_is_found_though_such_a_run_cannot_be_complete(
    run: RecordedRun,
) -> None:
    run.tell(41, Dropped(checkpoint="c000002-s00000040", step=40, reason="the parameters of ranks 0, 1 differ"))
    row = judge(FAULT["weight-bit"], trial(run, "weight-bit", codes=(74,)), trial(None, None), None)
    assert (row.passed, row.caught_after_steps) == (True, 0)
    overdue = trial(run, "weight-bit", codes=(-1,), overdue=True)
    assert not judge(FAULT["weight-bit"], overdue, trial(None, None), None).passed


def test_a_fault_that_the_loss_shrugs_off_is_harmless_where_that_is_allowed(run: RecordedRun) -> None:
    undisturbed = trial(None, None)
    assert judge(FAULT["gradient-x10"], trial(run, "gradient-x10"), undisturbed, None).passed
    assert not judge(FAULT["nan-loss"], trial(run, "nan-loss"), undisturbed, None).passed


def test_a_full_disk_passes_only_if_a_checkpoint_follows(run: RecordedRun) -> None:
    run.tell(41, Dropped(checkpoint="c000002-s00000040", step=40, reason="No space left on device"))
    fault: PlannedFault = FAULT["full-disk"]
    assert judge(fault, trial(run, "full-disk"), trial(None, None), None).why == (
        "no checkpoint was written once there was room again"
    )
    run.commit(50, "c000003-s00000050", 50)
    assert judge(fault, trial(run, "full-disk"), trial(None, None), None).passed


def test_another_end_state_fails_unless_two_undisturbed_runs_differ_there_too(run: RecordedRun) -> None:
    rewound(run)
    plain = trial(None, None)

    def judged(ours: list[EndState], again: list[EndState]) -> Any:
        anyway = differences(trial(None, None, ends=again), plain)
        row_trial = trial(run, ends=ours)
        return judge(FAULT["nan-loss"], row_trial, plain, compare(differences(row_trial, plain), anyway))

    same = [end(0), end(1)]
    other_model, other_stream = [end(0), end(1, model="x")], [end(0), end(1, **{"random/python": "x"})]
    assert judged(same, same).bitwise == "yes"
    bad = judged(other_model, same)
    assert (bad.passed, bad.bitwise, bad.differs) == (False, "no", ["rank 1: model"])
    assert judged(other_model, other_stream).bitwise == "no"
    assert judged(other_stream, other_stream).bitwise == "yes"
    told = judged(other_model, other_model)
    assert (told.passed, told.bitwise) == (True, "cannot be told")


@given(steps=st.integers(FEWEST_STEPS, 1000), every=st.none() | st.integers(1, 200))
def test_a_plan_strikes_inside_the_run_with_checkpoints_before_it(steps: int, every: int | None) -> None:
    made = plan(steps, {"snapshot_every": every})
    assert 0 <= made.strike < steps - 1
    assert made.settings.get("snapshot_every", every) == (every or steps // 6)
    if every is None:
        before = made.strike // made.settings["snapshot_every"] * made.settings["snapshot_every"]
        assert before + made.settings["probation"] <= made.strike


def test_checkpoints_by_their_cost_are_checkpoints_by_the_drill_s_plan() -> None:
    assert plan(60, {"snapshot_every": "auto"}) == plan(60, {})
    assert plan(60, {"snapshot_every": "0"}).strike == 39


def test_the_real_run_s_ring_is_not_written_to_whoever_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[drilling.Drill] = []

    def note(drill: drilling.Drill) -> Any:
        asked.append(drill)
        raise UsageError("enough")

    monkeypatch.setattr(drilling.Drill, "run", note)
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    runner = CliRunner()
    own = ["--nproc", "2", "--keep", "4", "--secret-args", "sid", "--no-preload"]
    runner.invoke(app, ["drill", *own, "x.py", "--ring", "the script's own"])
    handed_on = ["--secret-args=sid", "--no-preload", "--keep=4", "--nproc-per-node=2", "--ring="]
    assert asked[0].stage._flags == handed_on
    assert asked[0].stage._job == ["x.py", "--ring", "the script's own"]
    environment = {ENV_SETTINGS: Settings(ring="").model_dump_json(exclude_unset=True)}
    assert settings_from({"ring": "s3://bucket/runs"}, environment).ring is None
    for name in ("--ring", "--run", "--tensorboard", "--skips-of"):
        refused = runner.invoke(app, ["drill", name, "x", "x.py"])
        assert refused.exit_code == ExitCode.USAGE
        assert f"No such option: {name}" in refused.output
    assert len(asked) == 1


def test_a_disk_that_is_full_before_a_run_begins_ends_the_drill_in_words(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1)); from rollback import cli; cli.main()"
    command = [sys.executable, "-c", before, "drill", "--scratch", str(tmp_path / "scratch"), str(tmp_path / "job.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == ExitCode.IO, done.stderr
    assert f"preparing a run of the drill in {tmp_path}/scratch/rehearsal: File too large" in done.stderr
    assert "--scratch DIR" in done.stderr
    assert "Traceback" not in done.stderr


LAUNCH = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
(run / "ring").mkdir(parents=True)
time.sleep(300)
"""
DRILL = f"""
import sys
from pathlib import Path
from rollback import cli
from rollback.drill.trials import DrillStage
from rollback.rundir.exercise import Exercise

stage = DrillStage(Path(sys.argv[1]), [], [], ["-c", {LAUNCH!r}])
cli.app = lambda: stage.perform("one", Exercise(run="", steps=9), limit=300.0)
cli.main()
"""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_drill_that_is_told_to_end_takes_its_run_and_the_checkpoints_along(
    tmp_path: Path, told: signal.Signals
) -> None:
    drill = subprocess.Popen([sys.executable, "-c", DRILL, str(tmp_path)], stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "one" / "run" / "ring").is_dir)
    (launch,) = psutil.Process(drill.pid).children()
    drill.send_signal(told)
    assert drill.wait(LIMIT) == (-told if told == signal.SIGINT else 128 + told)
    launch.wait(LIMIT)
    assert not (tmp_path / "one" / "run" / "ring").exists()


@given(st.floats(0, 1e6))
def test_the_number_of_steps_is_bounded(seconds: float) -> None:
    assert FEWEST_STEPS <= steps_for(seconds) <= MOST_STEPS


def test_flags_are_handed_on_as_they_were_given() -> None:
    given_flags = {
        "nproc_per_node": "2",
        "standalone": False,
        "retry_first": None,
        "observe_only": False,
        "skip": ["1:2", "5:6"],
    }
    assert as_arguments(given_flags) == ["--nproc-per-node=2", "--no-observe-only", "--skip=1:2", "--skip=5:6"]
    assert os.sep not in "".join(as_arguments({"module": True}))
