"""The fork server as torchrun's process uses it, where one of the two has been killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_server import run_warm

from rollback.agent import fork_server

PRELOADED = """
import json, os, signal
from dataclasses import asdict
from pathlib import Path
from rollback.agent import entry
from rollback.environment import ENV_PRELOAD, ENV_TORCHRUN
from rollback.instructions import Instructions

given = Instructions(
    supervisor=os.getppid(), refusal="refusal", failures="failures", guard="guard", run_id="run", restarts=0, grace=1.0
)
os.environ |= {ENV_TORCHRUN: json.dumps(asdict(given)), ENV_PRELOAD: "1"}
"""
TORCHRUN = """
class Killed(entry.ForkServer):
    def __init__(self):
        before = children()
        super().__init__()
        (server,) = children() - before
        os.kill(server, signal.SIGKILL)

def children():
    return {int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}

entry.ForkServer = Killed
entry.main()
"""


def test_a_fork_server_that_was_killed_is_told_in_the_report_and_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = run_warm(
        [sys.executable, "-c", PRELOADED + TORCHRUN, "--standalone", "--nproc-per-node=1", "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout
    told = json.loads((tmp_path / "failures").read_text())
    assert "a process that was forking a rank was killed" in told["error"]


REFUSED = """
import errno, itertools
def refused(counted=itertools.count(1), fork=os.fork):
    if next(counted) == {number}:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = refused  # each process goes on counting from where it was forked
entry.main()
"""


@pytest.mark.parametrize("number", [1, 2, 3], ids=["the server", "between", "the rank"])
def test_a_fork_that_the_system_refuses_is_told_with_its_reason_and_without_a_traceback(
    tmp_path: Path, number: int
) -> None:
    """As under `ulimit -u`, which does not bind root."""
    (tmp_path / "train.py").write_text("")
    done = run_warm(
        [sys.executable, "-c", PRELOADED + REFUSED.format(number=number), "--standalone", "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout
    told = json.loads((tmp_path / "failures").read_text())
    assert "forking a rank: Resource temporarily unavailable; raise the limit of processes (ulimit -u" in told["error"]


KILLED = """
import os, signal, socket
from pathlib import Path
from rollback.agent.fork_server import ForkServer

def children():
    return {int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}

made = ForkServer()
(server,) = children()
os.kill(server, signal.SIGSTOP)
sheet = os.memfd_create("rank")
os.write(sheet, b'{"arguments": ["train.py"], "environment": {}}')
socket.send_fds(made._socket, [b"fork"], [1, 2, os.open(".", os.O_RDONLY), sheet])
made._socket.close()  # as the kernel does where torchrun's process is killed
os.kill(server, signal.SIGCONT)
print("ended with", os.waitpid(server, 0)[1], flush=True)
print("its rank with", os.wait()[1])
"""


def test_a_fork_server_whose_torchrun_was_killed_while_it_forked_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = run_warm([sys.executable, "-c", KILLED], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.stdout == "ended with 0\nits rank with 0\n"


SPOILED = """
import os, sys, torch
from rollback.agent.fork_server import ForkServer

torch.cuda._is_in_bad_fork = lambda: True
made = ForkServer()
print("ended with", made.start(["train.py", "7"], {**os.environ, "RANK": "3"}, 1, 2).wait())
"""


def test_a_rank_that_could_not_use_a_gpu_any_more_is_started_from_nothing(tmp_path: Path) -> None:
    """As where an import has asked the driver for GPUs: torch would refuse them in every process that is forked."""
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(*sys.argv, os.environ['RANK'], 'torch' in sys.modules, flush=True)\nsys.exit(4)\n"
    )
    done = run_warm(
        [sys.executable, "-c", SPOILED], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    assert done.stdout == "train.py 7 3 False\nended with 4\n"


def test_what_is_broken_is_left_for_the_rank_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that does not fit another one raises what it likes when it is imported."""
    (tmp_path / "does_not_fit.py").write_text("import math\nmath.mpq")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_server, "AHEAD", ("does_not_fit",))
    before = {**os.environ}
    fork_server.import_ahead()
    assert {**os.environ} == before


BESIDE = """
import os
from rollback.agent.fork_server import ForkServer, import_ahead

import_ahead()
print("ended with", ForkServer().start(["folder/train.py"], os.environ, 1, 2).wait())
"""


def test_a_module_beside_the_script_is_found_before_one_that_was_imported_ahead(tmp_path: Path) -> None:
    """As in a rank that is started from nothing: neither Python nor torch has imported `profile` there by then."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "profile.py").write_text("SPEED = 7")
    (folder / "rollback.py").write_text("")  # the guard comes from the package all the same
    (folder / "pstats").mkdir()  # without an __init__.py it stands behind the library's
    (folder / "train.py").write_text(
        "import cProfile, os, profile, pstats, sys, rollback\n"
        "print(profile.SPEED, pstats.Stats.__name__, rollback.Guard.__name__, cProfile._pyprofile is profile)\n"
        "print(sys.path.count(os.path.dirname(os.path.abspath(__file__))), flush=True)\n"
    )
    done = run_warm(
        [sys.executable, "-c", BESIDE], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    assert done.stdout == "7 Stats Guard False\n1\nended with 0\n"


def test_a_script_that_goes_to_another_folder_finds_what_lies_beside_it_and_its_own_source(tmp_path: Path) -> None:
    """Python names a script by its whole path, also where it was given another; its `__builtins__` are the module."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import inspect, os, sys\n"
        "def train(): ...\n"
        "os.chdir('/')\n"
        "__builtins__.print(sys.argv[0], __file__, __loader__.path, inspect.getsource(train), sep='\\n', flush=True)\n"
    )
    done = run_warm(
        [sys.executable, "-c", BESIDE], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    whole = folder / "train.py"
    assert done.stdout == f"folder/train.py\n{whole}\n{whole}\ndef train(): ...\n\nended with 0\n"


@pytest.mark.parametrize(("code", "status"), [("''", 1), ("None", 0), ("False", 0)])
def test_a_script_ends_with_the_status_that_python_makes_of_its_exit(tmp_path: Path, code: str, status: int) -> None:
    (tmp_path / "train.py").write_text(f"import sys\nsys.exit({code})\n")
    run = "from rollback.agent.fork_server import run_script; run_script(['train.py'])"
    assert subprocess.run([sys.executable, "-c", run], check=False, cwd=tmp_path, timeout=60).returncode == status


def test_a_script_that_is_no_python_is_told_as_python_tells_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/train.py").write_text("def f(:\n")
    done = run_warm(
        [sys.executable, "-c", BESIDE], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    python = subprocess.run(
        [sys.executable, str(tmp_path / "folder/train.py")], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.stdout.splitlines() == [*python.stderr.splitlines(), "ended with 1"]
