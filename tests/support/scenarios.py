"""Scenarios one after another, as a training script: what job.py and trainer_job.py have in common."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

BACKEND = "TESTS_BACKEND"


def perform_all(perform: Callable[[dict[str, Any], int, Path], dict[str, Any]]) -> None:
    """Perform the scenarios of the file that the command line names; each rank writes what `perform` returns.

    perform: given a scenario, the rank, and the folder of the file.
    """
    scenarios = Path(sys.argv[1])
    rank = int(os.environ.get("RANK", "0"))
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(os.environ.get(BACKEND, "gloo"))
    for scenario in json.loads(scenarios.read_text()):
        result = perform(scenario, rank, scenarios.parent)
        (scenarios.parent / f"{scenario['name']}-{rank}.json").write_text(json.dumps(result))
        if dist.is_initialized():
            dist.barrier()  # the next one may read what rank 0 has written
    if dist.is_initialized():
        dist.destroy_process_group()
