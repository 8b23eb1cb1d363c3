"""A Slurm cluster of one node on this machine, for as long as a test takes: munged, slurmctld and slurmd of its own.

Needs root and Debian's slurm-wlm and munge. Nothing outside its folder is written, and no other cluster is touched.
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from waiting import free_port

_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "srun")
_LIMIT = 60.0

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=60
KillWait=30
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 Gres=gpu:8 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes={host} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_path()) is None]
    return f"{', '.join(missing)} not found (Debian: slurm-wlm, munge)" if missing else None


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Slurm:
    """Use as a context manager. `run` calls one of Slurm's commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Slurm":
        host = socket.gethostname().partition(".")[0]
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        for folder in (self.folder, self.folder.parent):  # of pytest: closed to others, which munged dislikes
            folder.chmod(0o755)
        text = _CONFIGURATION.format(host=host, folder=self.folder, controller=free_port(), daemon=free_port())
        (self.folder / "slurm.conf").write_text(text)
        for number in range(8):  # the recipes ask for GPUs, and Slurm believes in any file
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        key, socket_path = self.folder / "munge.key", self.folder / "munge.socket"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], env=self.environment, check=True)
        try:
            self._start(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}",
                f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
                f"--seed-file={self.folder}/munged.seed",
            )  # fmt: skip
            self._wait_for(socket_path.exists)
            self._start("slurmctld", "-D", "-i")
            self._start("slurmd", "-D", "-N", host)
            self._wait_for(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or done.stderr.strip()

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def _start(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out.log", "ab") as output:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=output, stderr=output))

    def _wait_for(self, condition: object) -> None:
        deadline = time.monotonic() + _LIMIT
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)
