"""The script for rented GPUs where there is none; and (soak) that its benchmark runs at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPTS / "gpu", tmp_path / "out"], env={**os.environ, "PYTHON": sys.executable}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip() == f"torch {torch.__version__} sees no CUDA device: nothing to do"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("given", [["--fast"], ["--only", "tests fast"]], ids=["a flag", "a part"])
def test_what_it_does_not_know_gets_its_usage(given: list[str]) -> None:
    done = subprocess.run([SCRIPTS / "gpu", *given], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "scripts/gpu [--wheels FOLDER] [--only" in done.stderr


@pytest.mark.soak
def test_its_benchmark_measures_ours_and_the_peers(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    command = [SCRIPTS / "bench_gpu.py", "--device", "cpu", "--gigabytes", "0.02", "--rounds", "1", "--json", told]
    subprocess.run([sys.executable, *command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (found,) = json.loads(told.read_text()).values()
    assert {"lost: rollback", "lost: DCP async, process", "restore: rollback", "rollback"} <= found["seconds"].keys()
