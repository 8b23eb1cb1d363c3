"""What fails on one rank alone, as a guard is made or a state is put back: all ranks raise it, and none waits."""

from pathlib import Path

import pytest
from in_ranks import in_two_ranks

PREAMBLE = """
import json, os, sys, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from torch import nn
from rollback.errors import RollbackError
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
first, folder = dist.get_rank() == 0, Path(sys.argv[1])

class Counted:
    loads, refuses = 0, False
    def state_dict(self):
        return {"count": 3}
    def load_state_dict(self, state):
        self.loads += 1
        if self.refuses:
            raise ValueError("not mine")

def told(act):
    try:
        return act()
    except RollbackError as error:
        return [type(error).__name__, error.message.partition(" That")[0]]

model, counted = nn.Linear(4, 1), Counted()
optimizer = torch.optim.AdamW(model.parameters())
"""

RESTORE = """
from unittest import mock
from rollback.checkpoints.fast_tier import slots
from rollback.rundir.paths import RunPaths
from rollback.sentinel import Sentinel
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.comm.ranks import Ranks
from rollback.train.data.cursor import cursor_for
from rollback.train.restore import restore
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.state import TrainingState
from unreadable import unreadable

model(torch.ones(2, 4)).sum().backward()
optimizer.step()
state = TrainingState(model, optimizer, {"counted": counted}, cursor_for([1, 2, 3]), Sentinel("normal"))
ranks, paths = Ranks(), RunPaths(folder / "run")
ranks.meet()
owned = slots.tier_of(folder, "0123456789abcdef")
if first:
    slots.claim(owned, folder)
ranks.barrier()
tier = FastTier(owned, ranks.rank, leads=first, here=[0, 1])
snapshots = Snapshots(paths, ranks, state.finite, 0, 1, tier)
snapshots.fit_memory(state.image())
snapshots.memory.use_slots(1)
snapshots.await_ready(state.image())
flight = snapshots.start_snapshot(state.image(), step=7, batch=7, epoch=0, timeline=0)
name = flight.manifest.name
assert snapshots.await_landing().committed
place = CheckpointPlace(owned.slot(flight.slot), paths, in_slot=True)
ranks.host_count = int(sys.argv[2])

def back():
    return restore.restore(name, [place], ranks, state).place is not None

with unreadable(name, times=0 if first else 1):
    found = [told(back), counted.loads]
counted.refuses = not first
found += [told(back), dist.get_rank()]
snapshots.close()
print(json.dumps(found))
dist.destroy_process_group()
"""

UNDO = """
import rollback
from rollback.facts.training import Window
from rollback.train.incidents.decisions import Undo
from rollback.train.state.state_copy import GradientCopy

guard = rollback.Guard(model=model, optimizer=optimizer, counted=counted, loader=[torch.ones(2, 4)] * 4, run=folder,
                       snapshot_every=100)
next(iter(guard))
rewinder, found = guard._loop.rewinder, []
rewinder.hold(wanted=True)
counted.refuses = not first
found.append(told(lambda: rewinder.undo(Undo(Window(first=0, last=0)))))
held = rewinder.present_state(data=False)
gradients = GradientCopy(model.parameters(), guard._loop.state.fsdp)
found.append(told(lambda: rewinder.put_back_probe(held, gradients)))
guard.close(given_up=True)
print(json.dumps(found))
dist.destroy_process_group()
"""

THREADS = """
import threading, rollback
start, found = threading.Thread.start, {}
for name in ("heartbeat", "snapshot", "slots"):
    def refuse(thread):
        if not first and thread.name.startswith("rollback-" + name):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse
    given = {"model": model, "optimizer": optimizer, "loader": [], "run": folder / "run"}
    found[name] = told(lambda: rollback.Guard(**given, fast_tier=str(folder)))
threading.Thread.start = start
rollback.Guard(**given).close()
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_a_thread_that_one_rank_cannot_start_is_missed_on_all(tmp_path: Path) -> None:
    for found in in_two_ranks(PREAMBLE + THREADS, tmp_path):
        for name, (kind, message) in found.items():
            assert (kind, message.partition(")")[0]) == ("RollbackError", f"starting a thread (rollback-{name}")


@pytest.mark.parametrize("hosts", [1, 2], ids=["all shards", "own shard"])
def test_no_object_loads_a_checkpoint_before_all_ranks_have_read_it_and_what_one_refuses_is_refused_on_all(
    tmp_path: Path, hosts: int
) -> None:
    """An object that adds up what it loads would have had the state twice, where another rank had to read again."""
    for rank, (read, loads, refused, told_by) in enumerate(in_two_ranks(PREAMBLE + RESTORE, tmp_path, hosts)):
        assert (read, loads, told_by) == (True, 1, rank)
        assert refused[0] == "StateRefused"
        assert refused[1].startswith("the Counted 'counted' did not load the state")


def test_an_update_that_one_rank_cannot_undo_ends_all_ranks(tmp_path: Path) -> None:
    for undone in in_two_ranks(PREAMBLE + UNDO, tmp_path / "run"):
        for kind, message in undone:
            assert kind == "StateRefused"
            assert message.startswith("the Counted 'counted' did not load the state")
