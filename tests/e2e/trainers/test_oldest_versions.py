"""The tests of this folder once more, with the oldest versions of the libraries that `rollback.protect` supports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollback.trainers.protect import SUPPORTED

HERE = Path(__file__).parent
OLDEST = {library: f"{first}.0" for library, (first, _) in SUPPORTED.items() if library != "torchtitan"}
BESIDE = ["huggingface-hub<2", "tokenizers<=0.23.0"]
"""What these need in other versions than the newest ones do. All else, torch among it, is what is installed."""
LIMIT = 3600.0


@pytest.mark.soak
def test_the_oldest_supported_versions_pass_the_same_tests(tmp_path: Path) -> None:
    """They are installed into a folder that stands in front of what is installed, which stays as it is."""
    folder = tmp_path / "oldest"
    wanted = [*(f"{library}=={version}" for library, version in OLDEST.items()), *BESIDE]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *wanted]
    installed = subprocess.run(install, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if installed.returncode != 0:
        pytest.skip(f"they cannot be had here: {installed.stdout[-400:]}")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ask = "import accelerate, transformers; print(accelerate.__version__, transformers.__version__)"
    told = subprocess.run([sys.executable, "-c", ask], env=environment, text=True, check=True, stdout=subprocess.PIPE)
    assert told.stdout.split() == [OLDEST["accelerate"], OLDEST["transformers"]]
    # Two processes, since such a test waits for others half of the time; warm servers of their own.
    tests = [sys.executable, "-m", "pytest", "-n2", "--dist", "loadfile", "-q", "-m", "not soak", str(HERE)]
    tests += ["-o", f"cache_dir={tmp_path / 'cache'}"]
    environment.pop("TESTS_REGISTER", None)
    for again in ([], ["--last-failed"]):  # a version that does not fit fails twice; a machine that was busy does not
        done = subprocess.run(
            [*tests, *again], env=environment, text=True, timeout=LIMIT, check=False, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode == 0:
            return
    pytest.fail(done.stdout[-8000:])
