"""`rollback launch` with a real torchrun, and ranks that keep the guard's side of the contract without torch."""

import fcntl
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cgroups import IN_CGROUP, memory_cgroup
from launching import RANK, Launch, is_gone, launching, tree
from selection import soak
from waiting import LIMIT, wait_for
from warm import environment_of

from rollback.facts.training import (
    Attached,
    AttemptEnded,
    AttemptStarted,
    Finished,
    RestartScheduled,
    RunEnded,
    Signalled,
    Stopped,
)
from rollback.rundir.journal.journal import read_journal

TINY = Path(__file__).parent / "jobs" / "tiny.py"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path, with_torchrun=True) as launch:
        yield launch


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Launch]:
    """Its processes are started as users do."""
    with launching(tmp_path, with_torchrun=True, cold=True) as launch:
        yield launch


def test_a_job_that_ends_by_itself_is_done_and_got_its_arguments(job: Launch) -> None:
    code, output = job.finish("finish -x", "--rewind", "7", "--skip=3:5", "--observe_only", "--", ranks=2)
    assert code == 0
    logs = job.paths.attempt_logs(1)
    for rank in (0, 1):
        assert f"rank {rank} arguments ['-x'] settings" in (logs / f"rank-{rank:05d}.out").read_text()
    assert "rank 0 arguments" in output
    assert "rank 1 arguments" not in output
    settings = json.loads(output.partition("settings ")[2].splitlines()[0])
    assert settings == {"rewind": 7, "observe_only": True, "skip": [{"first": 3, "last": 5}]}
    started, ended, over = job.facts(AttemptStarted, AttemptEnded, RunEnded)
    assert "--standalone" in started.command
    assert ended.status == 0
    assert over.exit_code == 0
    assert "rollback audit runs/rank" in output.splitlines()[-1]
    assert not job.paths.holder.exists()


def test_a_killed_rank_is_named_and_the_next_attempt_starts_at_once(job: Launch) -> None:
    code, output = job.finish("die_once", ranks=2)
    assert code == 0, output
    first, second = job.facts(AttemptEnded)
    assert first.cause.startswith("rank 1 (pid ")
    assert first.cause.endswith("was killed by signal 9 (SIGKILL), last seen step at step 7, batch 7")
    assert first.step == 7
    assert second.status == 0
    (restart,) = job.facts(RestartScheduled)
    assert restart.delay == 0.0
    assert "Traceback" not in output


def test_where_tmp_is_emptied_it_is_told_who_died_and_the_next_attempt_is_as_any_other(job: Launch) -> None:
    code, output = job.finish("empty_tmp_and_die", ranks=2)
    assert code == 0, output
    first, _ = job.facts(AttemptEnded)
    assert (first.why, first.rank) == ("signal", 1), output
    assert "Traceback" not in output
    assert "rank 1 goes on" not in output
    for rank in (0, 1):
        assert f"rank {rank} goes on" in (job.paths.attempt_logs(2) / f"rank-{rank:05d}.out").read_text()


def test_what_is_old_below_tmp_is_removed_and_not_what_a_supervisor_uses(job: Launch) -> None:
    """systemd-tmpfiles passes over a directory that it cannot lock."""
    process = job.start("stop_when_told")
    job.wait_for_heartbeats(1)
    private = Path(json.loads(environment_of(job.torchrun())["ROLLBACK_TORCHRUN"])["refusal"]).parent
    fd = os.open(private, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(fd)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, output
    assert not private.exists()


def test_what_rank_0_raises_because_its_peer_died_is_told_in_a_line_after_who_died_first(job: Launch) -> None:
    code, output = job.finish("lose_the_peer", ranks=2)
    assert code == 0, output
    (first, _) = job.facts(AttemptEnded)
    assert (first.why, first.rank, first.followed) == ("signal", 1, (0,))
    assert "Traceback (most recent call last)" not in output, output
    account = output.index("attempt 1 failed: rank 1 ")
    in_a_line = r"rank 0 raised, too: RuntimeError: Connection closed by peer.* \(all of it: (.+)\)$"
    told = re.search(in_a_line, output[account:], re.MULTILINE)
    assert told is not None, output
    assert "Traceback (most recent call last)" in (job.folder / told[1]).read_text()


def test_a_killed_torchrun_leaves_nothing_behind_when_the_next_attempt_starts(job: Launch) -> None:
    supervisor = job.start("ignore_everything")
    (rank,) = job.wait_for_heartbeats(1)
    worker = psutil.Process(int((job.folder / "worker-0").read_text()))
    job.torchrun().kill()
    output, _ = supervisor.communicate(timeout=LIMIT)
    assert supervisor.returncode == 0, output
    assert is_gone(rank)
    assert is_gone(worker)
    assert job.facts(AttemptEnded)[0].cause == "torchrun was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize("signum", [signal.SIGUSR1, *soak(signal.SIGTERM)])
def test_a_stop_signal_reaches_the_ranks_and_the_run_is_resumable(job: Launch, signum: signal.Signals) -> None:
    supervisor = job.start("stop_when_told", ranks=2)
    job.wait_for_heartbeats(2)
    supervisor.send_signal(signum)
    output, _ = supervisor.communicate(timeout=LIMIT)
    assert supervisor.returncode == 75, output
    assert [fact.signal for fact in job.facts(Signalled)] == [signum.name]
    assert job.facts(RunEnded)[0].reason == "saved at step 4"
    assert "go on with `rollback launch --nproc 2" in output.splitlines()[-1]


def test_a_refused_job_leaves_no_run_directory(job: Launch) -> None:
    code, output = job.finish("refuse", ranks=2)
    assert code == 78
    assert output.count("rollback: error: another model\n  hint: another run directory\n") == 1
    assert tree(job.folder) == {}


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--monitor-interval=soon", "invalid float value: 'soon'"),
        ("--redirects=foo", "foo does not match"),
        ("--rdzv-backend=nix", "The rendezvous backend 'nix' is not registered"),
    ],
)
def test_flags_that_torchrun_does_not_accept_are_one_message(job: Launch, flag: str, told: str) -> None:
    code, output = job.finish("finish", flag)
    assert code == 2, output
    assert output.count("rollback: error: torchrun does not take its flags:") == 1
    assert told in output
    assert "Traceback" not in output
    assert "attempt" not in output
    assert tree(job.folder) == {}


@pytest.mark.soak
def test_a_killed_supervisor_takes_its_job_along_and_the_same_command_goes_on(cold: Launch) -> None:
    supervisor = cold.start("ignore_everything")
    (rank,) = cold.wait_for_heartbeats(1)
    torchrun = cold.torchrun()
    worker = psutil.Process(int((cold.folder / "worker-0").read_text()))
    wait_for(lambda: cold.facts(AttemptStarted))
    supervisor.kill()
    supervisor.wait(timeout=LIMIT)
    # This rank has no guard that would end it, and torchrun cannot: the next supervisor must.
    code, output = cold.finish("ignore_everything")
    assert code == 0, output
    assert "an earlier supervisor left behind" in output
    assert is_gone(rank)
    assert is_gone(torchrun)
    assert is_gone(worker)
    assert [record.attempt for record in read_journal(cold.paths.train_journal).records] == [1, 2, 2]


def test_a_killed_supervisor_ends_ranks_that_hold_no_guard(job: Launch) -> None:
    supervisor = job.start("sleep")
    wait_for((job.folder / "rank-0").exists)
    rank = psutil.Process(int((job.folder / "rank-0").read_text()))
    supervisor.kill()
    supervisor.communicate(timeout=LIMIT)
    wait_for(lambda: is_gone(rank))


def test_a_guarded_job_stops_on_request_and_the_same_command_goes_on_from_there(tmp_path: Path) -> None:
    with launching(tmp_path, with_torchrun=True, script=TINY) as job:
        supervisor = job.start("--hold", ranks=2)
        job.wait_for_heartbeats(2)
        supervisor.send_signal(signal.SIGTERM)
        output, _ = supervisor.communicate(timeout=LIMIT)
        assert supervisor.returncode == 75, output
        code, output = job.finish("--hold", ranks=2)
        assert code == 0, output
        facts = [record.fact for record in read_journal(job.paths.train_journal).records]
        (stopped,) = (fact for fact in facts if isinstance(fact, Stopped))
        first, second = (fact for fact in facts if isinstance(fact, Attached))
        assert (first.step, second.step) == (0, stopped.step)
        assert second.checkpoint == stopped.checkpoint
        assert isinstance(facts[-1], Finished)


_LEAVES = """
import os, signal
import torch
from torch.utils.data import DataLoader
import rollback

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=DataLoader(torch.ones(9, 2)))
try:
    for batch in guard:
        os.kill(os.getpid(), signal.SIGTERM)
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
finally:
    os.kill(os.getpid(), signal.SIGTERM)  # as the supervisor's, which finds the rank on its way out
    print("left by itself", flush=True)
"""


def test_a_rank_that_leaves_as_it_was_told_to_is_not_struck_down_on_its_way_out(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(_LEAVES)
    with launching(tmp_path, with_torchrun=True, script=script) as job:
        code, output = job.finish("")
        assert (code, "left by itself" in output) == (75, True), output


def test_a_rank_that_the_kernel_kills_for_memory_is_told_apart(job: Launch) -> None:
    with memory_cgroup(3 << 28) as members:
        job.program = ["-c", IN_CGROUP.format(members=str(members))]
        code, output = job.finish("eat_memory")
    assert code == 0, output
    ended = job.facts(AttemptEnded)[0]
    assert (ended.why, ended.rank) == ("oom_kill", 0)
    assert "killed by signal 9 (SIGKILL): the kernel was out of memory" in ended.cause
    shown, told = job.why(), job.account()
    assert shown.startswith(f"why        {ended.cause}")
    assert f"\nrank       0, on host {socket.gethostname()}" in shown
    assert (told["why"], told["rank"], told["blamed"]) == ("oom_kill", 0, None)


# Where no memory cgroup can be made: only the files in which the kernel counts are ours.
WITH_COUNTER = """
import functools, sys
from pathlib import Path
from rollback import cli
from rollback.supervisor.torchrun import host
from rollback.supervisor.diagnosis import memory

here = Path("here").absolute()
host.OomCounters = functools.partial(memory.OomCounters, here / "cgroup", here / "proc")
cli.main()
"""


def test_a_rank_with_whose_death_the_kernel_s_count_grows_died_for_want_of_memory(job: Launch) -> None:
    counter, membership = job.folder / "here/cgroup/job/memory.events", job.folder / "here/proc/self/cgroup"
    for path, text in ((counter, "oom 0\noom_kill 0\n"), (membership, "0::/job\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    job.program = ["-c", WITH_COUNTER]
    code, output = job.finish("be_killed_for_memory", ranks=2)
    assert code == 0, output
    shown, told = job.why(), job.account()
    assert (told["why"], told["rank"], told["step"], told["blamed"]) == ("oom_kill", 1, 7, None)
    assert shown.startswith("why        rank 1 (pid ")
    assert "the kernel was out of memory, last seen step at step 7, batch 7" in shown.splitlines()[0]
    assert "class      killed: the kernel was out of memory" in shown


def test_what_differs_from_the_last_start_is_told_journalled_and_in_the_audit(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.read_text())
    with launching(tmp_path, with_torchrun=False, script=script) as job:
        _, output = job.finish("finish --lr 3e-4 --hf-token first")
        assert "than at the last start" not in output
        script.write_text(RANK.read_text() + "# other\n")
        _, output = job.finish("finish --lr 1e-3 --hf-token sesame")
        told = (
            r"other than at the last start: (argument --hf-token: \*{3}\w{4} -> \*{3}\w{4}); "
            r"argument --lr: 3e-4 -> 1e-3; the script has other content"
        )
        (token,) = re.findall(f"attempt 2: {told}", output)
        _, started = job.facts(AttemptStarted)
        assert started.changed == (token, "argument --lr: 3e-4 -> 1e-3", "the script has other content")
        assert "sesame" not in job.paths.supervisor_journal.read_text()
        assert re.search(told, job.audit())
