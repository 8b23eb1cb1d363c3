"""FSDP2 over a device: a bad batch is left out as if it had never been there, and a killed rank costs nothing."""

import signal
from pathlib import Path

import pytest
from on_devices import GROUPS, Group, Supervised
from toy import Toy, told_from_the_start

TOY = Toy(sampler="distributed", sharding="fsdp", nan=(57,), settings={"snapshot_every": 5, "horizon": 20})


# gloo adds up what FSDP2 shares on a GPU in half a second for each step, and then ends with a fault of its own.
SOUND = [group for group in GROUPS if "two ranks on one GPU" not in str(group.id)]


@pytest.mark.parametrize("group", SOUND)
@pytest.mark.parametrize("sharding", ["fsdp", "fsdp, mixed"])
def test_as_if_the_bad_batch_had_never_been_there(tmp_path: Path, group: Group, sharding: str) -> None:
    toy = TOY.but(sharding=sharding)
    bad = Supervised(tmp_path / "bad", toy, group)
    bad.launch()
    told = Supervised(tmp_path / "told", told_from_the_start(toy, bad.run), group)
    told.launch()
    bad.require(told)
    killed = Supervised(
        tmp_path / "killed", told_from_the_start(toy, bad.run), group, signal=[group.ranks - 1, 75, signal.SIGKILL, 1]
    )
    killed.launch()
    killed.require(told)
