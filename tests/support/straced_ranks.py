"""Attempts of a toy job on two ranks, cheaply: imports torch once and forks for each. Requests as JSON lines on stdin.

Request: `toy`, `run`; optional `trace` (`[rank, batch]`: at that batch, before it is used, the rank tells on stdout the
thread that writes its snapshots and waits for strace), `trace_training` (the same for the thread that trains; batch
null: before the guard is made), `end_at` (a batch at which all ranks end without a word). When a rank dies the other is
killed, as torchrun would. Answer: `statuses`, by rank. Portraits go to RUN-portrait-<rank>.json, consumed samples of
all attempts to RUN-log-<rank>.
"""

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forker import warm_up
from straced import hold_back, wait_for_strace
from toy import Toy, train

RANKS = 2
ENDED = 99


def main() -> None:
    hold_back()
    warm_up()
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        store = Path(f"{request['run']}-store-{number}")
        ranks = {}
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                os._exit(attempt(request, rank, store))
            ranks[child] = rank
        statuses: dict[int, int] = {}
        while len(statuses) < RANKS:
            pid, status = os.wait()
            statuses[ranks[pid]] = os.waitstatus_to_exitcode(status)
            if status:
                for other in ranks.keys() - {pid}:
                    if ranks[other] not in statuses:
                        os.kill(other, signal.SIGKILL)
        print(json.dumps({"statuses": [statuses[rank] for rank in range(RANKS)]}), flush=True)


def attempt(request: dict[str, Any], rank: int, store: Path) -> int:
    told = os.dup(1)
    output = os.open(f"{request['run']}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        run = request["run"]
        if request.get("trace_training") == [rank, None]:
            wait_for_strace(told)
        portrait = train(
            Toy.from_json(request["toy"]), Path(run), hook=hook(request, rank, told), log=Path(f"{run}-log-{rank}")
        )
        Path(f"{run}-portrait-{rank}.json").write_text(json.dumps(portrait))
    except Exception:  # noqa: BLE001 - the forked child must not run on in its parent's loop
        traceback.print_exc()
        return 1
    return 0


def hook(request: dict[str, Any], rank: int, told: int) -> Any:
    def at_batch(guard: Any, position: int) -> None:
        if request.get("trace") == [rank, position]:
            wait_for_strace(told, guard._loop.checkpoints.snapshots.thread.submit(threading.get_native_id).result())
        if request.get("trace_training") == [rank, position]:
            wait_for_strace(told)
        if request.get("end_at") == position:
            dist.barrier()  # the first one that ends has the other one killed: not before both are here
            os._exit(ENDED)

    return at_batch


if __name__ == "__main__":
    main()
