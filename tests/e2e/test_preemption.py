"""Stop signals at random moments, to one process, to all of a job, and from a terminal that goes away."""

import os
import pty
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from attempts import Forker
from job_results import Scenarios
from launching import WITHOUT_TORCHRUN, Launch, launching
from selection import soak
from toy import SETTINGS, Toy, facts, require_same, supervisor_facts
from waiting import LIMIT, wait_for
from warm_server import WarmPopen

from rollback.facts.training import Attached, Committed, Restored, RunEnded, Signalled, Stopped
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SEED = 7
TINY = Path(__file__).parent / "jobs" / "tiny.py"


SHORT = Toy(
    samples=160, epochs=2, loop="epochs", between=True, workers=1, augment=True, patient=False,
    settings={"snapshot_every": 3},
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return forker.finish(SHORT, folder / "run", log=folder / "log")


def test_a_signal_at_any_moment_costs_nothing(tmp_path: Path, forker: Forker, undisturbed: dict[str, str]) -> None:
    """Each stop signal, in training, in evaluation between two epochs and while a checkpoint is written."""
    moments = random.Random(SEED)
    run, log, stops = tmp_path / "run", tmp_path / "log", []
    for number, batch in zip(SIGNALS, sorted(moments.sample(range(5, 75), len(SIGNALS))), strict=True):
        stops.append((number.name, batch, delay := moments.choice([0.0, moments.uniform(0.0005, 0.01)])))
        status = forker.status(SHORT, run, log=str(log), signal=[batch, number, delay])
        assert status == 75, f"seed {SEED}, {stops}: {Path(f'{run}.txt').read_text()}"
    ended = forker.finish(SHORT, run, log=log)
    require_same(ended, undisturbed, f"seed {SEED}, stopped {stops}")
    assert len(facts(run, Stopped)) == len(SIGNALS)
    for stopped, attached in zip(facts(run, Stopped), facts(run, Attached)[1:], strict=True):
        assert stopped.checkpoint.endswith(f"{stopped.step:08d}")
        assert attached.step == stopped.step


def test_a_signal_in_an_evaluation_and_in_a_save_costs_nothing(
    tmp_path: Path, forker: Forker, undisturbed: dict[str, str]
) -> None:
    """The same, for certain in the midst of them, with loader workers."""
    run, log = tmp_path / "run", tmp_path / "log"
    for moment in (["save", 2, signal.SIGTERM], ["evaluation", 1, signal.SIGUSR1]):
        # A disk that is slow might else have the second save behind the evaluation.
        status = forker.status(SHORT.but(patient=True), run, log=str(log), told_in=moment)
        assert status == 75, f"{moment}: {Path(f'{run}.txt').read_text()}"
    ended = forker.finish(SHORT, run, log=log)
    require_same(ended, undisturbed, "stopped in a save and in an evaluation")
    in_save, in_evaluation = facts(run, Stopped)
    assert 0 < in_save.step < 40 <= in_evaluation.step, "it was told at another moment"
    assert [fact.step for fact in facts(run, Attached)] == [0, in_save.step, in_evaluation.step]


def test_a_stop_does_not_send_the_answer_to_a_later_trouble_further_back(tmp_path: Path, forker: Forker) -> None:
    """A checkpoint's probation of 20 steps goes on over the stop in step 16, and has passed when the NaN comes."""
    toy = Toy(samples=240, nan=(33,), settings={**SETTINGS, "probation": 20})
    ended = {}
    for name, told in (("undisturbed", {}), ("stopped", {"signal": [15, signal.SIGTERM, 0.0]})):
        run, log = tmp_path / name, tmp_path / f"{name}-log"
        if told:
            assert forker.status(toy, run, log=str(log), **told) == 75, Path(f"{run}.txt").read_text()
        ended[name] = forker.finish(toy, run, log=log)
        assert [fact.step for fact in facts(run, Restored)] == [10], name
    require_same(ended["stopped"], ended["undisturbed"], "stopped before the trouble")


LONG = Toy(samples=320, sampler="distributed", workers=1, augment=True, patient=False)
HELD = 24  # the batch at which its ranks wait for a test that has something to do to them


@pytest.mark.parametrize("number", [signal.SIGTERM, *soak(signal.SIGUSR1)])
def test_a_scheduler_that_signals_every_process_of_the_job(tmp_path: Path, number: signal.Signals) -> None:
    """Supervisor, torchrun, both ranks and their loader workers at once."""
    scenarios, told = Scenarios(tmp_path), tmp_path / "they-are-told"
    scenarios.add("told", LONG, holds=[HELD, str(told)])
    run = scenarios.run("told")
    job = scenarios.start_launch(run)
    wait_for(lambda: is_training(run))
    supervisor = psutil.Process(job.pid)
    everybody = [supervisor, *supervisor.children(recursive=True)]
    assert len(everybody) >= 6
    for process in everybody:
        process.send_signal(number)
    told.touch()
    output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 75, output
    (stopped,) = facts(run, Stopped)
    assert RunPaths(run).checkpoint(stopped.checkpoint).name.endswith(f"-s{stopped.step:08d}"), "it was not saved there"
    if number == signal.SIGUSR1:
        return
    assert scenarios.start_launch(run).wait(timeout=LIMIT) == 0
    assert facts(run, Attached)[-1].step == stopped.step
    undisturbed = Scenarios(tmp_path / "undisturbed")
    undisturbed.folder.mkdir()
    undisturbed.add("told", LONG)
    undisturbed.torchrun(2)
    for rank in range(2):
        require_same(scenarios.portrait("told", rank), undisturbed.portrait("told", rank), f"rank {rank}")


def test_rollback_stop_stops_a_supervised_job_resumably(tmp_path: Path) -> None:
    scenarios, asked = Scenarios(tmp_path), tmp_path / "they-are-asked"
    scenarios.add("told", LONG.but(samples=2000), holds=[HELD, str(asked)])
    run = scenarios.run("told")
    job = scenarios.start_launch(run)
    wait_for(lambda: is_training(run))
    command = [sys.executable, "-m", "rollback", "stop", str(run), "--why", "maintenance", "--who", "ann@site"]
    stop = WarmPopen[str](command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: any(RunPaths(run).requests.glob("*.json")))
    asked.touch()
    _, said = stop.communicate(timeout=LIMIT)
    assert stop.returncode == 0, said
    assert "; the same command goes on from there" in said
    output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 75, output
    (stopped,) = facts(run, Stopped)
    assert f"stopped at step {stopped.step}" in said
    assert RunPaths(run).checkpoint(stopped.checkpoint).name.endswith(f"-s{stopped.step:08d}")
    told = supervisor_facts(run, Signalled)
    assert [fact.signal for fact in told] in ([], ["rollback stop by ann@site"])  # the ranks may have been faster


def is_training(run: Path) -> bool:
    beats = read_heartbeats(RunPaths(run).ranks).values()
    return len(beats) == 2 and min(beat.step for beat in beats) > 20


def test_an_evaluation_that_is_longer_than_the_grace_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    with launching(tmp_path, with_torchrun=False, script=TINY) as job:
        supervisor = job.start("--evaluate --samples 2000", "--grace", "0.5")
        wait_for((job.folder / "evaluating").exists)
        supervisor.send_signal(signal.SIGTERM)
        output, _ = supervisor.communicate(timeout=LIMIT)
        assert supervisor.returncode == 75, output
        assert not facts(job.run, Stopped)
        newest = facts(job.run, Committed)[-1].step
        assert newest > 0
        code, output = job.finish("--evaluate --samples 2000")
        assert code == 0, output
        assert facts(job.run, Attached)[-1].step >= newest


# --- the terminal -----------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path, with_torchrun=False) as launch:
        yield launch


def in_a_terminal(job: Launch, behaviour: str, *flags: str) -> tuple[int, int]:
    """Start `rollback launch` as the foreground of a new terminal: its pid, and our end of the terminal."""
    arguments = [sys.executable, "-c", WITHOUT_TORCHRUN, "launch", *flags, str(job.script), behaviour]
    environment = {**os.environ, "NOTES": str(job.folder), "RANK": "0", "WORLD_SIZE": "1"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(job.folder)
        os.execve(sys.executable, arguments, environment)
    return pid, terminal


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_terminal_that_goes_away_stops_the_job_resumably(job: Launch) -> None:
    pid, terminal = in_a_terminal(job, "stop_when_told")
    job.wait_for_heartbeats(1)
    os.close(terminal)
    assert exit_code(pid) == 75
    assert [fact.signal for fact in supervisor_facts(job.run, Signalled)] == ["SIGHUP"]


def test_a_job_that_is_to_go_on_without_its_terminal_does(job: Launch) -> None:
    pid, terminal = in_a_terminal(job, "talk_until_there_is_a_file", "--no-hangup")
    job.wait_for_heartbeats(1)
    os.close(terminal)
    (job.folder / "go-on").touch()
    assert exit_code(pid) == 0
    assert not supervisor_facts(job.run, Signalled)
    assert [fact.exit_code for fact in supervisor_facts(job.run, RunEnded)] == [0]
