"""A rank that keeps the guard's side of the contract with the supervisor, without torch: `rank.py BEHAVIOUR`."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from rollback.environment import guard_mark
from rollback.facts.training import Attached, Committed, Fact, Finished, Stopped, Window
from rollback.rundir.failures import FailureRecord, write_failure
from rollback.rundir.heartbeats import LEAVING, Heartbeat, read_heartbeats, write_heartbeat
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor.torchrun.processes import dead_ranks
from rollback.system.processes import start_of

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["ROLLBACK_ATTEMPT"])
PATHS = RunPaths(Path(os.environ["ROLLBACK_RUN"]))
HERE = Path(__file__).parent


def tell(fact: Fact) -> None:
    if RANK == 0:
        journal = Journal(PATHS.train_journal, ATTEMPT)
        journal.append(fact)
        journal.close()


def beat(step: int, doing: str = "step") -> None:
    PATHS.ranks.mkdir(parents=True, exist_ok=True)
    heartbeat = Heartbeat(
        pid=os.getpid(),
        host=socket.gethostname(),
        attempt=ATTEMPT,
        step=step,
        batch=step,
        doing=doing,
        monotonic=time.monotonic(),
        looked=time.monotonic(),
        start=start_of(os.getpid()) or "",
    )
    write_heartbeat(PATHS.heartbeat(RANK), heartbeat)


def attach(step: int = 0) -> None:
    guard_mark(os.environ["ROLLBACK_REFUSAL"]).touch()
    world = int(os.environ["WORLD_SIZE"])
    tell(
        Attached(
            world_size=world,
            host=socket.gethostname(),
            pid=os.getpid(),
            supervised=True,
            checkpoint=None,
            step=step,
            batch=step,
            torch="none",
            settings={},
        )
    )
    beat(step)


def all_attached() -> bool:
    beats = read_heartbeats(PATHS.ranks).values()
    return sum(beat.attempt == ATTEMPT for beat in beats) == int(os.environ["WORLD_SIZE"])


def until_told() -> None:
    """Wait for SIGTERM; a test that never sends it is a failure of the test, which ends it after a minute."""
    signal.sigtimedwait([signal.SIGTERM], 60)


def finish() -> None:
    attach()
    print(f"rank {RANK} arguments {sys.argv[2:]} settings {os.environ['ROLLBACK_SETTINGS']}", flush=True)


def die_once() -> None:
    """Rank 1 dies in the first attempt, after some progress."""
    attach()
    beat(7)
    if ATTEMPT == 1 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if ATTEMPT == 1:
        until_told()


def empty_tmp_and_die() -> None:
    """Rank 1 removes what the supervisor has in /tmp, and dies."""
    attach()
    beat(7)
    if ATTEMPT > 1:
        print(f"rank {RANK} goes on", flush=True)
    elif RANK == 1:
        while not all_attached():
            time.sleep(0.02)
        write_identity(PATHS, new_identity(JobIdentity(world_size=2, model=[], optimizer={}, objects=[], data={})))
        shutil.rmtree(Path(os.environ["ROLLBACK_REFUSAL"]).parent)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        until_told()


def die_if_faulty() -> None:
    """The ranks of a node that is started with FAULTY in its environment die, in every attempt, as soon as the node of
    that name has come and all ranks have attached."""
    attach()
    beat(7)
    if "FAULTY" in os.environ:
        while not PATHS.node(os.environ["FAULTY"]).exists() or not all_attached():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    if ATTEMPT < 3:
        until_told()


def lose_the_peer() -> None:
    """Rank 1 is killed in the first attempt, and rank 0 raises because of it, as a collective does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which may come in the middle of the traceback
    attach()
    beat(7)
    if ATTEMPT > 1:
        return
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while 1 not in dead_ranks(read_heartbeats(PATHS.ranks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    now, error = time.time(), "Connection closed by peer [127.0.0.1]:1"
    failure = FailureRecord(
        rank=0, pid=os.getpid(), host=socket.gethostname(), attempt=1, at="", seconds=now, step=7, batch=7,
        whole_step=Window(first=7, last=7), doing="training", error="builtins.RuntimeError", message=error,
        traceback="", frames=[], fingerprint="f",
    )  # fmt: skip
    write_failure(PATHS.failure(1, 0), failure)
    raise RuntimeError(error)


def train_until_the_next_one_waits() -> None:
    """Do steps until the supervisor has a second process that waits for the next attempt, note its pid, and die."""
    attach()
    if ATTEMPT > 1:
        return
    supervisor = psutil.Process(int(os.environ["ROLLBACK_SUPERVISOR"].partition(":")[0]))
    torchrun = os.getppid()
    for step in range(1, 1500):
        beat(step)
        others = [child.pid for child in supervisor.children() if child.pid != torchrun]
        if others and Path(f"/proc/{others[0]}/comm").read_text() == "standby\n":  # it is through with its imports
            Path(os.environ["NOTES"], "waits").write_text(str(others[0]))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)


def train_behind_the_end_of_the_next_one() -> None:
    """Do steps until the process for the next attempt has ended, and for three seconds more."""
    attach()
    ends = None
    for step in range(1, 1500):
        beat(step)
        if ends is None and Path(os.environ["NOTES"], "standbys").exists():
            ends = step + 30
        if step == ends:
            return
        time.sleep(0.1)


def hang_at_the_start() -> None:
    """No guard and no heartbeat in the first attempt."""
    if ATTEMPT > 1:
        return attach()
    return time.sleep(600)


def eat_memory() -> None:
    """More than the cgroup that the test has put us into allows; in the second attempt all is well."""
    attach()
    if ATTEMPT == 1:
        from eating import eat  # what is not started by the warm server does not find it

        eat()


def be_killed_for_memory() -> None:
    """Rank 1 dies as the OOM killer's victims do, which the counter in the test's folder tells; once."""
    attach()
    beat(7)
    if ATTEMPT == 1 and RANK == 1:
        Path(os.environ["NOTES"], "here/cgroup/job/memory.events").write_text("oom 1\noom_kill 1\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if ATTEMPT == 1:
        until_told()


def die_always() -> None:
    attach()
    beat(3)
    os.kill(os.getpid(), signal.SIGKILL)


def stop_when_told() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    attach()
    until_told()
    tell(Committed(checkpoint="c000001-s00000004", step=4, batch=4, timeline=0, bytes=1, seconds=0.1))
    account = "saved at step 4"
    tell(Stopped(reason="preempted", step=4, batch=4, checkpoint="c000001-s00000004", account=account))


def ignore_everything() -> None:
    """Rank 0 and its worker take no notice of SIGTERM; in the second attempt all is well."""
    if ATTEMPT > 1:
        return attach()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    Path(os.environ["NOTES"], f"worker-{RANK}").write_text(str(worker.pid))
    attach()
    return time.sleep(60)


def structural() -> None:
    attach()
    tell(Stopped(reason="structural", step=9, batch=9, checkpoint=None, account="three rollbacks did not help"))


def leave() -> None:
    """End as if all were well, in the middle of the training."""
    attach()
    beat(4)


def be_stuck_at_exit() -> None:
    """Training is over, and Python left, but the process is still there."""
    attach()
    tell(Finished(step=9, batch=9))
    beat(9, LEAVING)
    time.sleep(60)


def raise_behind_the_training() -> None:
    attach()
    tell(Finished(step=9, batch=9, checkpoint="c000001-s00000009"))
    raise_behind_a_loop("FileNotFoundError")


def raise_behind_an_epoch() -> None:
    """Each attempt keeps more of the epoch than the one before it, and gets no further."""
    attach(ATTEMPT)
    tell(Committed(checkpoint=f"c{ATTEMPT:06}-s{ATTEMPT + 1:08}", step=ATTEMPT + 1, batch=ATTEMPT + 1, timeline=0,
                   bytes=1, seconds=0.1))  # fmt: skip
    raise_behind_a_loop("TypeError")


def raise_behind_a_loop(error: str) -> None:
    beat(9, "ended")
    failure = FailureRecord(
        rank=0, pid=os.getpid(), host=socket.gethostname(), attempt=ATTEMPT, at="", seconds=time.time(), step=9,
        batch=9, whole_step=Window(first=9, last=9), doing="training", error=error, message="plots",
        traceback="", frames=[], fingerprint="f", in_hand=False,
    )  # fmt: skip
    write_failure(PATHS.failure(ATTEMPT, 0), failure)
    raise RuntimeError(error)


def work_on() -> None:
    """Guards are closed; the script goes on, and so do handlers at the exit."""
    attach()
    for number in range(50):
        beat(9, "ended" if number < 25 else LEAVING)
        time.sleep(0.1)
    Path(os.environ["NOTES"], "worked-on").touch()


def refuse() -> None:
    if RANK == 0:
        body = {"exit_code": 78, "message": "another model", "hint": "another run directory"}
        Path(os.environ["ROLLBACK_REFUSAL"]).write_text(json.dumps(body))


def broken() -> None:
    """It has a guard, and fails while that is made."""
    guard_mark(os.environ["ROLLBACK_REFUSAL"]).touch()
    raise ValueError("this script never worked")


def talk_until_there_is_a_file() -> None:
    """Print all the while, also behind the moment at which the test makes the file."""
    attach()
    deadline, lines = time.monotonic() + 60, 0
    while lines < 20 and time.monotonic() < deadline:
        lines += Path(os.environ["NOTES"], "go-on").exists()
        print("still here", flush=True)
        time.sleep(0.01)


def sleep() -> None:
    """No guard, no heartbeat."""
    Path(os.environ["NOTES"], f"rank-{RANK}").write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    if sys.argv[1] not in ("stop_when_told", "structural", "refuse", "leave"):
        tell(Finished(step=9, batch=9))
