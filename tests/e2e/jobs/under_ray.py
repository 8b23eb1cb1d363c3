"""The toy job under the recipe for Ray: `under_ray.py FOLDER`. Rank 1 is killed at batch 60, the first time."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
import train_with_ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig
from toy import Toy, train

import rollback


def loop(config: dict[str, Any]) -> None:
    folder, rank = Path(config["folder"]), dist.get_rank()

    def at_batch(guard: rollback.Guard | None, position: int) -> None:
        if rank == 1 and position == 60 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    portrait = train(Toy.from_json(config["toy"]), Path(config["run"]), hook=at_batch, log=folder / f"job-{rank}.log")
    (folder / f"job-{rank}.json").write_text(json.dumps({"portrait": portrait}))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=sys.argv[2])
    config = {"run": str(folder / "job"), "folder": str(folder), "toy": (folder / "toy.json").read_text()}
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    sys.exit(train_with_ray.fit(loop, config, torch_config=TorchConfig(backend="gloo"), scaling_config=scaling))
