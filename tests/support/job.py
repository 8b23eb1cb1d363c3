"""A toy job as a training script: `job.py TOY PORTRAIT [RUN]`, under python, torchrun or rollback launch.

Writes each rank's portrait to PORTRAIT-<rank>.json, and logs consumed samples to PORTRAIT-<rank>.log over all attempts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from toy import Toy, train

if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = os.environ.get("RANK", "0")
run = Path(sys.argv[3] if len(sys.argv) > 3 else os.environ["ROLLBACK_RUN"])
portrait = train(Toy.from_json(sys.argv[1]), run, log=Path(f"{sys.argv[2]}-{rank}.log"))
Path(f"{sys.argv[2]}-{rank}.json").write_text(json.dumps(portrait))
if dist.is_initialized():
    dist.destroy_process_group()
